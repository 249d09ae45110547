"""The documentation says what is: every key, setting, route, statistic and command of the code stands in it."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from bench import tables as docs_tables
from services.cli.app import app as command
from services.gateway.app import ops_app, public_app
from services.gateway.gateway import Gateway
from services.gateway.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.formats import OPENINGS
from services.launcher.gpu_checks import HIDDEN_BY
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


@pytest.mark.parametrize(("name", "pattern"), key_patterns().items())
def test_redis_page_has_each_key(name: str, pattern: str) -> None:
    assert re.search(rf"^\| `{re.escape(pattern)}` \|", text("docs/redis.md"), re.MULTILINE), name


@pytest.mark.parametrize("script", sorted((ROOT / "shared" / "lua").glob("*.lua")), ids=lambda path: path.stem)
def test_redis_page_has_each_script(script: Path) -> None:
    assert f"| `{script.stem}` |" in text("docs/redis.md")


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


def test_redis_page_has_each_field_of_the_record() -> None:
    written = fields_of_the_request_record()
    assert {"state", "finish", "shard", "cancelled", "bucket", "started_ms"} <= written
    page = text("docs/redis.md")
    missing = [name for name in sorted(written) if f"`{name}`" not in page and f"`{name}:{{choice}}`" not in page]
    assert not missing


@pytest.mark.parametrize("settings", docs_tables.CLASSES.values(), ids=docs_tables.CLASSES)
def test_each_setting_has_a_description(settings: Any) -> None:
    silent = [n for n, field in docs_tables.own_fields(settings).items() if docs_tables.meaning(n, field) == "None"]
    assert not silent


def test_operations_page_has_each_statistic() -> None:
    fields = set(Stats(0).snapshot(Scheduler("orcinus").stats(), 1, 1, 1, "orcinus", 0))
    for path in (ROOT / "services" / "scheduler").rglob("*.py"):  # what is added to the snapshot
        fields |= set(re.findall(r'"([a-z_]+)": (?:info|max\(info|self\._reports|len)', path.read_text()))
    assert {"running", "tok_s", "last_step", "max_model_len"} <= fields
    page = text("docs/operations.md")
    classes = r"_(realtime|high|normal|low)$"
    missing = [
        name
        for name in sorted(fields)
        if f"`{name}`" not in page and f"`{re.sub(classes, '_{class}', name)}`" not in page
    ]
    assert not missing


def test_policies_page_has_each_word_of_a_policy() -> None:
    page = text("docs/policies.md")
    words = [*PRESETS, *WAYS, *(f"+{option}" for option in OPTIONS)]
    assert not [word for word in words if f"`{word}`" not in page]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_links_of_a_page_exist(page: Path) -> None:
    words = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", words):
        assert (page.parent / target).exists(), target
    named = re.findall(r"`((?:services|shared|kernels|protos|bench|tests|deploy|assets|docs)/[\w./*-]+)`", words)
    assert all(any(ROOT.glob(name.rstrip("/"))) for name in named), [
        n for n in named if not any(ROOT.glob(n.rstrip("/")))
    ]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.name)
def test_anchors_that_pages_link_to_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        linked = (page.parent / target) if target else page
        heads = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_and_commands_of_a_page_exist(page: Path) -> None:
    words = page.read_text()
    code = "\n".join(re.findall(r"`([^`\n]+)`", words) + re.findall(r"^ {4}(.+)$", words, re.MULTILINE))
    targets = set(re.findall(r"^([a-z0-9-]+):", text("Makefile"), re.MULTILINE))
    used = set(re.findall(r"\bmake ([a-z][a-z0-9-]+)", code))
    assert used <= targets, used - targets
    commands: Any = typer.main.get_command(command)
    names = set(commands.commands) | {f"bench {name}" for name in commands.commands["bench"].commands}
    for first, second in re.findall(r"(?<!-n )\borcinus (bench(?: ([a-z]\w*))?|[a-z]+)", code):
        assert (f"bench {second}" if second else first) in names, first


def test_readme_names_the_two_commands() -> None:
    words = text("README.md")
    assert "    make run\n" in words
    assert "    make test\n" in words


def names_that_exist() -> set[str]:
    """Words in capitals with an underscore that are no settings of ours: compose's variables, a mark of models."""
    image = text("deploy/Dockerfile")
    return {
        "COMPOSE_PROFILES",  # Compose's own
        "CALL_ID",  # a mark of Mistral's models
        *re.findall(r"\$\{([A-Z_]+):", text("compose.yaml") + text("deploy/compose.roles.yaml")),
        *re.findall(r"^ARG ([A-Z_]+)", image, re.M),
        *re.findall(r"\b([A-Z_]+)=", "".join(re.findall(r"^ENV (.*)", image, re.M))),
        *re.findall(r"\b([A-Z]+_[A-Z]+)\b", " ".join(OPENINGS.values())),
        *map(str.upper, RankSettings.model_fields),
        HIDDEN_BY,
        "HF_HOME", "HF_HUB_OFFLINE",  # huggingface_hub's own
        "SSL_CERT_FILE",  # OpenSSL's own
        "OPENAI_API_KEY",  # lm-evaluation-harness's own
        "REDISCLI_AUTH",  # redis-cli's own
        "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL",  # of Anthropic's clients
    }  # fmt: skip


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.name)
def test_page_holds_no_placeholder_and_no_path_of_a_machine(page: Path) -> None:
    assert not re.search(r"/(?:root|home|work|Users)/", page.read_text())
    known = names_that_exist()
    assert {"TORCH_INDEX", "REDIS_IMAGE"} <= known
    words = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", page.read_text()))
    settings = {f"ORCINUS_{name.upper()}" for each in docs_tables.CLASSES.values() for name in each.model_fields}
    assert words <= known | settings, words - known - settings


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
    place = {"ApiError": 99, "invalid": 2, "unavailable": 1, "refuse_late": 3}  # which positional argument is the code
    codes = set()
    for path in (ROOT / "services" / "gateway").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in place):
                continue
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            given += node.args[place[node.func.id] : place[node.func.id] + 1]
            codes |= {value.value for value in given if isinstance(value, ast.Constant) and value.value}
    return codes


def test_api_page_has_each_error_code() -> None:
    codes = error_codes()
    assert {"slo_unreachable", "invalid_json", "redis_unavailable", "context_length_exceeded"} <= codes
    page = text("docs/api.md")
    assert not [code for code in sorted(codes) if f"`{code}`" not in page]


def test_api_page_has_each_field_of_a_body() -> None:
    page = text("docs/api.md")
    fields = {name for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody) for name in body.model_fields}
    assert not [name for name in sorted(fields) if f"`{name}`" not in page]
