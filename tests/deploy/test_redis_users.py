"""deploy/redis/users.acl allows every command that the code of a service sends, in Python or in a script."""

from __future__ import annotations

import hashlib
import re

import pytest
import redis
import yaml

from shared.settings import ROOT

ROLES = {
    "gateway": [
        "services/gateway/**/*.py",
        "shared/dead_letters.py",
        "shared/redis_client.py",
        "shared/telemetry/stack_view.py",
    ],
    "scheduler": [
        "services/scheduler/**/*.py",
        "shared/dead_letters.py",
        "shared/lease.py",
        "shared/redis_client.py",
        "deploy/healthcheck.py",
    ],
    "placer": ["services/placer/*.py", "shared/dead_letters.py", "shared/lease.py", "shared/redis_client.py"],
    "worker": ["services/worker/**/*.py"],
    "ops": ["services/cli/**/*.py", "services/launcher/redis_server.py", "shared/telemetry/stack_view.py"],
    "viewer": ["deploy/observability/grafana/boards/*.json", "docs/redis.md"],
}
OTHER_NAMES = {
    "delete": "del", "scan_iter": "scan", "script_load": "script|load", "xgroup_create": "xgroup|create",
    "xpending_range": "xpending", "incr": "incrby", "execute": "", "pipeline": "multi", "aclose": "", "close": "",
    "parse_response": "",
}  # fmt: skip
"""Methods of redis-py that are not called like their commands; empty: none."""


VIEWING = {"time", "info", "get", "hget", "hmget", "hlen", "xrange", "zrange"}
"""What a board of one's own may need besides; all of them read."""
CONNECTING = {"ping", "hello", "client|setname", "client|id", "multi", "exec", "discard", "unwatch"}
"""What the client library sends by itself."""


def allowed(role: str) -> set[str]:
    rules = (ROOT / "deploy" / "redis" / "users.acl").read_text().splitlines()
    (line,) = (line for line in rules if line.startswith(f"user {role} "))
    return {word[1:] for word in line.split() if word.startswith("+")}


def test_new_rules_make_a_new_container_and_pod_of_redis() -> None:
    """Redis reads its rules at its start, so that a deployment that is updated in place would keep the old ones."""
    digest = hashlib.sha256((ROOT / "deploy" / "redis" / "users.acl").read_bytes()).hexdigest()[:16]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert compose["services"]["redis"]["labels"] == {"orcinus.users-acl": digest}
    manifests = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "base" / "redis.yaml").read_text())
    (redis_set,) = (each for each in manifests if each["kind"] == "StatefulSet")
    assert redis_set["spec"]["template"]["metadata"]["annotations"] == {"orcinus/users-acl": digest}


def sent(role: str) -> set[str]:
    commands: set[str] = set()
    for pattern in ROLES[role]:
        for path in ROOT.glob(pattern):
            text = path.read_text()
            commands |= set(re.findall(r'"command": "([a-z]+)"', text))
            methods = re.findall(r"\b(?:stack|redis|_redis|pipe|_reader|_client|client|connection)\.([a-z_]+)\(", text)
            commands |= {OTHER_NAMES.get(name, name) for name in methods if hasattr(redis.Redis, name)}
            commands |= {word.lower() for word in re.findall(r"_line\(\"([A-Z]+)\"", text)}
            for script in re.findall(r"scripts\.([a-z_]+)\b", text):
                commands |= {"evalsha", *in_script(script)}
            if "self._lease.write(" in text or "lease.write(" in text:  # words that fenced.lua sends
                commands |= {word.lower() for word in re.findall(r'\["([A-Z]+)"', text)}
    return commands - {""}


def in_script(name: str) -> set[str]:
    own = (ROOT / "shared" / "lua" / f"{name}.lua").read_text()
    shared = (ROOT / "shared" / "lua" / "lib.lua").read_text() if re.search(r"\bcount\(", own) else ""
    counter = {"incr", "set", "time"} if "next_epoch(" in own else set()  # of the library too
    calls = re.findall(r"redis\.p?call\('([A-Z]+)'(?:, '(CREATE)')?", own + shared)
    return counter | {"|".join(filter(None, words)).lower() for words in calls}


@pytest.mark.parametrize("role", ROLES)
def test_user_of_redis_may_send_the_commands_of_its_service(role: str) -> None:
    needed = sent(role) | (VIEWING if role == "viewer" else set())
    assert len(needed) > 5
    assert needed <= allowed(role), sorted(needed - allowed(role))
    assert allowed(role) - CONNECTING <= needed, sorted(allowed(role) - CONNECTING - needed)


@pytest.mark.parametrize("role", ROLES)
def test_user_of_redis_may_send_nothing_dangerous(role: str) -> None:
    dangerous = {
        "flushall", "flushdb", "keys", "config", "debug", "monitor", "shutdown", "acl", "eval", "script", "module",
        "migrate", "restore", "replicaof", "save", "bgsave", "client", "swapdb", "rename",
    }  # fmt: skip
    assert not allowed(role) & dangerous
    assert not [word for word in allowed(role) if word.startswith("@")]


def test_documented_line_is_what_the_compose_test_runs() -> None:
    """deploy/smoke.py runs it in the containers of `make compose-test`."""
    (inner,) = re.findall(
        r"docker compose exec redis sh -c '(.*)'$", (ROOT / "docs" / "redis.md").read_text(), re.MULTILINE
    )
    assert f'"{inner} hget' in (ROOT / "deploy" / "smoke.py").read_text()
