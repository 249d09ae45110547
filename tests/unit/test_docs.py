"""The documentation says what is: every key, setting, route, statistic and command of the code stands in it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from bench import tables as docs_tables
from services.cli.app import app as command
from services.gateway.app import ops_app, public_app
from services.gateway.gateway import Gateway
from services.gateway.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from services.gateway.text.reasoning import MARKERS
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.formats import OPENINGS
from services.launcher.gpu.checks import HIDDEN_BY
from services.scheduler.core.policy.presets import OPTIONS, PRESETS, WAYS
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.telemetry import Stats
from shared.keys import Keys
from shared.settings import DEMO_MODEL, ROOT, GatewaySettings, RankSettings

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACEHOLDERS = {"class_name": "class", "request_id": "id", "worker_id": "id", "member": "id", "key_id": "key id"}
STATES = {"queued", "claimed", "running", "finished"}
NOT_KEYS = {"model", "prefix", "request_streams"}


def text(name: str) -> str:
    return (ROOT / name).read_text()


def key_patterns() -> dict[str, str]:
    """Name in shared/keys.py -> the key as docs write it, without the prefix."""
    keys = Keys("m")
    patterns = {}
    for name, member in inspect.getmembers(Keys):
        if name.startswith("_") or name in NOT_KEYS:
            continue
        if isinstance(member, property):
            patterns[name] = getattr(keys, name)
        else:
            parameters = list(inspect.signature(member).parameters)[1:]
            patterns[name] = member(keys, *(f"{{{PLACEHOLDERS.get(p, p)}}}" for p in parameters))
    return {name: pattern.removeprefix(keys.prefix) for name, pattern in patterns.items()}


def fields_of_the_request_record() -> set[str]:
    """Names that the scripts write to `req`, read from their HSET calls."""
    written = set()
    for script in ("enqueue", "claim", "publish", "control"):
        source = text(f"shared/lua/{script}.lua")
        for target, arguments in re.findall(
            r"'HSET', (KEYS\[1\]|req|key|record|ARGV\[i\]),((?:[^()]|\([^()]*\))*)\)", source
        ):
            if target == "key" and "'started_ms'" not in arguments and "'finished'" not in arguments:
                continue
            written |= set(re.findall(r"'([a-z_]+):?'(?=,| \.\.)", arguments))
    return written - STATES


def statistics() -> set[str]:
    """Fields of the scheduler's snapshot, those of a class once."""
    fields = set(Stats(0).snapshot(Scheduler("orcinus").stats(), 1, 1, 1, "orcinus", 0))
    for path in (ROOT / "services" / "scheduler").rglob("*.py"):  # what is added to the snapshot
        fields |= set(re.findall(r'"([a-z_]+)": (?:info|max\(info|self\._reports|len)', path.read_text()))
    return {re.sub(r"_(realtime|high|normal|low)$", "_{class}", name) for name in fields}


def fields_of_bodies() -> set[str]:
    return {name for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody) for name in body.model_fields}


def words_of_policies() -> set[str]:
    return {*PRESETS, *WAYS, *(f"+{option}" for option in OPTIONS)}


def test_redis_page_has_each_key_and_script_and_each_setting_has_a_description() -> None:
    page = text("docs/redis.md")
    assert not [name for name, key in key_patterns().items() if f"\n| `{key}` |" not in page]
    assert not [path for path in (ROOT / "shared/lua").glob("*.lua") if f"| `{path.stem}` |" not in page]
    for settings in docs_tables.CLASSES.values():
        fields = docs_tables.own_fields(settings)
        assert not [name for name, field in fields.items() if docs_tables.meaning(name, field) == "None"]


COMPOSED = ("compose.yaml", "deploy/compose.roles.yaml", "deploy/compose.models.yaml")


def names_that_exist() -> set[str]:
    """Words in capitals with an underscore that are no settings of ours: compose's variables, a mark of models."""
    image = text("deploy/Dockerfile")
    return {
        "COMPOSE_PROFILES",  # Compose's own
        "CALL_ID",  # a mark of Mistral's models
        "START_ACTION", "END_ACTION",  # marks of Cohere's, as those of MARKERS
        *(name for file in COMPOSED for name in re.findall(r"\$\{([A-Z_]+):", text(file))),
        *re.findall(r"^ARG ([A-Z_]+)", image, re.M),
        *re.findall(r"\b([A-Z_]+)=", "".join(re.findall(r"^ENV (.*)", image, re.M))),
        *re.findall(r"\b([A-Z]+_[A-Z]+)\b", " ".join([*OPENINGS.values(), *MARKERS["cohere"]])),
        *map(str.upper, RankSettings.model_fields),
        HIDDEN_BY,
        "HF_HOME", "HF_HUB_OFFLINE",  # huggingface_hub's own
        "SSL_CERT_FILE",  # OpenSSL's own
        "OPENAI_API_KEY",  # lm-evaluation-harness's own
        "REDISCLI_AUTH",  # redis-cli's own
        "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL",  # of Anthropic's clients
    }  # fmt: skip


def in_pages(wrong: Callable[[Path, str], Iterable[Any]]) -> list[tuple[str, Any]]:
    """Return what is wrong in each page."""
    return [(page.name, found) for page in DOCUMENTS for found in wrong(page, page.read_text())]


def test_paths_and_links_exist() -> None:
    paths = re.compile(r"`((?:services|shared|kernels|protos|bench|tests|deploy|assets|docs)/[\w./*-]+)`")

    def wrong(page: Path, words: str) -> Iterator[str]:
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", words)
        links += re.findall(r"<img src=\"([^\":]+)\"", words)
        yield from (target for target in links if not (page.parent / target).exists())
        yield from (name for name in paths.findall(words) if not any(ROOT.glob(name.rstrip("/"))))

    assert in_pages(wrong) == []


def test_anchors_that_pages_link_to_exist() -> None:
    def wrong(page: Path, words: str) -> Iterator[str]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", words):
            linked = (page.parent / target) if target else page
            heads = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            if anchor not in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}:
                yield anchor

    assert in_pages(wrong) == []


def test_make_targets_and_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", text("Makefile"), re.MULTILINE))
    commands: Any = typer.main.get_command(command)
    names = {*commands.commands, *(f"bench {name}" for name in commands.commands["bench"].commands)}

    def wrong(page: Path, words: str) -> Iterator[str]:
        code = "\n".join(re.findall(r"`([^`\n]+)`", words) + re.findall(r"^ {4}(.+)$", words, re.MULTILINE))
        yield from set(re.findall(r"\bmake ([a-z][a-z0-9-]+)", code)) - targets
        for first, second in re.findall(r"(?<!-n )\borcinus (bench(?: ([a-z]\w*))?|[a-z]+)", code):
            if (f"bench {second}" if second else first) not in names:
                yield first

    assert in_pages(wrong) == []
    assert {"make run", "make test"} <= set(re.findall(r"^ {4}(make \w+)(?:  |$)", text("README.md"), re.MULTILINE))


def test_pages_hold_no_placeholder_and_no_path_of_a_machine() -> None:
    known = names_that_exist()
    assert {"TORCH_INDEX", "REDIS_IMAGE"} <= known
    settings = {f"ORCINUS_{name.upper()}" for each in docs_tables.CLASSES.values() for name in each.model_fields}

    def wrong(page: Path, words: str) -> set[str]:
        machine = set(re.findall(r"/(?:root|home|work|Users)/", words))
        return machine | set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", words)) - known - settings

    assert in_pages(wrong) == []


def test_api_page_has_each_route_with_its_method() -> None:
    gateway = Gateway(GatewaySettings(model=DEMO_MODEL, redis_url="redis://127.0.0.1:1/0"), ModelText(DEMO_MODEL))
    public, ops = public_app(gateway).openapi()["paths"], ops_app(gateway).openapi()["paths"]
    assert "/v1/completions" in public
    assert "/metrics" in ops
    rows = re.findall(r"^\| `([A-Z]+)` \| (`/.*?) \|", text("docs/api.md"), re.MULTILINE)
    written = {(method.lower(), path) for method, paths in rows for path in re.findall(r"`([^`]+)`", paths)}
    served = {(method, path) for paths in (public, ops) for path, methods in paths.items() for method in methods}
    assert written == served | {("get", "/openapi.json"), ("get", "/"), ("get", "/docs")}


def error_codes() -> set[str]:
    """`code` of every ApiError that the gateway's sources can raise, by their syntax trees."""
    place = {
        "ApiError": 99,
        "invalid": 2,
        "unavailable": 1,
        "refuse_late": 3,
        "JsonError": 0,
    }  # which positional argument is the code
    codes = set()
    sources = [*(ROOT / "services" / "gateway").rglob("*.py"), ROOT / "shared" / "text" / "bounded_json.py"]
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in place):
                continue
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            given += node.args[place[node.func.id] : place[node.func.id] + 1]
            codes |= {value.value for value in given if isinstance(value, ast.Constant) and value.value}
    return codes


@pytest.mark.parametrize(
    ("page", "found", "some"),
    [
        ("redis", fields_of_the_request_record, {"state", "finish", "shard", "cancelled", "bucket", "started_ms"}),
        ("operations", statistics, {"running", "tok_s", "last_step", "max_model_len"}),
        ("policies", words_of_policies, {"orcinus", "sarathi"}),
        ("api", error_codes, {"slo_unreachable", "invalid_json", "redis_unavailable", "context_length_exceeded"}),
        ("api", fields_of_bodies, {"prompt", "messages"}),
    ],
    ids=["fields of the record", "statistics", "policies", "error codes", "fields of bodies"],
)
def test_page_has_each_name(page: str, found: Callable[[], set[str]], some: set[str]) -> None:
    names, words = found(), text(f"docs/{page}.md")
    assert some <= names
    written = {*re.findall(r"`([^`\n]+)`", words)}
    missing = names - written - {name.removesuffix(":{choice}") for name in written}
    assert not {name for name in missing if name.replace("_{class}", "_normal") not in written}
