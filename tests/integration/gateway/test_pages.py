"""The pages of the API port over HTTP: for browsers alone, without a key, under headers that admit nothing foreign."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.gateway.http.pages import PAGE_HEADERS
from services.gateway.web import routes as web
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import PLAIN, RedisServer
from tests.support.waiting import until

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
KEY = "sk-of-the-settings"


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(folder, model, redis_server, ops_names="console.example") as running:
        yield running


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer
) -> Iterator[GatewayProcess]:
    with running_gateway(tmp_path_factory.mktemp("guarded"), model, redis_server, api_key=KEY) as running:
        yield running


def test_files_of_the_pages_are_those_that_are_served() -> None:
    folder = Path(web.__file__).parent
    here = {path.name for path in folder.iterdir() if path.suffix in {".html", ".css", ".js", ".svg"}}
    assert {file.name for file in web.FILES.values()} == here


@pytest.mark.parametrize("path", web.FILES)
def test_page_file_needs_no_key_and_admits_nothing_foreign(
    gateway: GatewayProcess, guarded: GatewayProcess, path: str
) -> None:
    for server in (gateway, guarded):
        for method in ("GET", "HEAD"):
            answer = server.request(method, path, headers=BROWSER, key="")
            assert answer.status_code == 200
            assert bool(answer.content) == (method == "GET")
            assert PAGE_HEADERS.items() <= dict(answer.headers).items()
            assert answer.headers["x-content-type-options"] == "nosniff"


UPLOAD = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
FORM = {"Content-Type": "multipart/form-data; boundary=x"}
SENT = [
    ("POST", "/v1/files", FORM, UPLOAD),
    ("POST", "/v1/batches/batch_1/cancel", {}, b""),
    ("POST", "/v1/messages/batches/batch_1/cancel", {}, b""),
    ("DELETE", "/v1/files/file_1", {}, b""),
    ("POST", "/v1/completions", {"Content-Type": "application/json"}, b"{}"),
]
"""What a page may send to any server without asking it before, and two that it may not."""


def refused(server: GatewayProcess, browser: dict[str, str], ops: bool = False) -> set[bool]:
    """Return whether requests with these headers of a browser are refused for their origin."""
    headers = {name.replace("_", "-"): value for name, value in browser.items()}
    url, found = server.ops_url if ops else server.url, set()
    for method, path, more, body in SENT:
        answer = httpx.request(method, url + path, headers={**headers, **more}, content=body, timeout=60, verify=PLAIN)
        assert 400 <= answer.status_code < 500, (method, path, answer.text)
        found.add(answer.status_code == 403 and "origin not allowed" in answer.text)
    return found


@pytest.mark.parametrize(
    ("browser", "is_refused"),
    [
        ({}, False),
        ({"Origin": "{own}"}, False),
        ({"Origin": "{own}", "Sec_Fetch_Site": "same-origin"}, False),
        ({"Sec_Fetch_Site": "none"}, False),
        ({"Origin": "http://console.example:81", "Sec_Fetch_Site": "cross-site"}, False),
        ({"Origin": "https://evil.example"}, True),
        ({"Origin": "https://evil.example", "Sec_Fetch_Site": "cross-site"}, True),
        ({"Origin": "http://127.0.0.1:1", "Sec_Fetch_Site": "same-site"}, True),
        ({"Origin": "http://localhost:1"}, True),
        ({"Origin": "http://console.example.evil.example"}, True),
        ({"Origin": "null"}, True),
        ({"Origin": "http://[::1"}, True),
        ({"Sec_Fetch_Site": "cross-site"}, True),
    ],
    ids=str,
)
def test_page_of_another_origin_changes_nothing_without_a_key(
    gateway: GatewayProcess, guarded: GatewayProcess, browser: dict[str, str], is_refused: bool
) -> None:
    sent = {name: value.format(own=gateway.url) for name, value in browser.items()}
    assert refused(gateway, sent) == {is_refused}
    own = {name: value.format(own=gateway.ops_url) for name, value in browser.items()}
    assert refused(gateway, own, ops=True) == {is_refused}
    assert refused(guarded, sent) == {False}, "it has no key"
    read = gateway.get("/v1/models", headers={k.replace("_", "-"): v for k, v in sent.items()}, key="")
    assert read.status_code == 200


def test_policy_of_the_pages_admits_files_of_this_server_only() -> None:
    rules = dict(rule.split(" ", 1) for rule in PAGE_HEADERS["content-security-policy"].split("; "))
    assert rules.pop("default-src") == "'none'"
    assert set(rules.values()) == {"'self'", "'none'"}
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"


@pytest.mark.parametrize(
    ("method", "accept"), [("GET", "application/json"), ("GET", ""), ("HEAD", "*/*"), ("POST", "*/*")]
)
def test_root_answers_a_program_as_any_unknown_path(
    gateway: GatewayProcess, guarded: GatewayProcess, method: str, accept: str
) -> None:
    for server, status, code in ((gateway, 404, "unknown_path"), (guarded, 401, "invalid_api_key")):
        answer = server.request(method, "/", headers={"Accept": accept}, key="")
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/json"
        assert method == "HEAD" or answer.json()["error"]["code"] == code
    assert gateway.get("/", headers=BROWSER).headers["vary"] == "Accept"


def test_live_page_is_on_the_api_port_behind_a_key(guarded: GatewayProcess) -> None:
    page = guarded.get("/dashboard", key="")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert PAGE_HEADERS.items() <= dict(page.headers).items()
    assert guarded.get("/dashboard/events", key="").status_code == 401
    assert guarded.get("/v1/models", key=KEY, headers={"Host": "models.example"}).status_code == 200
    with httpx.stream(
        "GET", guarded.url + "/dashboard/events", headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    ) as events:
        assert events.status_code == 200
        assert next(events.iter_lines()).startswith("event: ")


def test_live_page_without_a_key_redirects_to_the_ops_port(gateway: GatewayProcess) -> None:
    for host in ("127.0.0.1", "localhost"):
        answer = gateway.get("/dashboard", headers={"Host": f"{host}:{gateway.port}"})
        assert (answer.status_code, answer.headers["location"]) == (307, f"http://{host}:{gateway.ops_port}/dashboard")
    for path, host in (("/dashboard", "192.0.2.1"), ("/dashboard/events", "127.0.0.1")):
        answer = gateway.get(path, headers={"Host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "ops_port_only")
        assert gateway.ops_url in answer.json()["error"]["message"]


def test_live_page_metrics_and_statistics_need_a_key_with_the_scope_ops(
    guarded: GatewayProcess, redis_server: RedisServer
) -> None:
    where = ["--redis-url", redis_server.url, "--served-model-name", guarded.name, "--json"]

    def new_key(*options: str) -> str:
        done = CliRunner().invoke(app, ["keys", "add", "a key", *options, *where], catch_exceptions=False)
        return str(json.loads(done.stdout)["key"])

    plain, ops = new_key(), new_key("--scope", "ops")
    until("the last key is known", lambda: guarded.get("/v1/models", key=ops).status_code == 200)
    for path in ("/dashboard/events", "/dashboard/history", "/metrics", "/stats"):
        refused = guarded.get(path, key=plain)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "scope_not_allowed"), path
        assert f"{path}: " in (text := refused.json()["error"]["message"])
        assert "orcinus keys add NAME --scope ops" in text
    for path in ("/dashboard/history", "/metrics", "/stats"):
        assert guarded.get(path, key=ops).status_code == 200, path
    with httpx.stream("GET", guarded.url + "/dashboard/events", headers=guarded.headers(ops), timeout=60) as events:
        assert events.status_code == 200
    wrong = CliRunner().invoke(app, ["keys", "add", "a key", "--scope", "all", *where])
    assert "--scope=all: unknown scope; give ops or admin, or none" in str(wrong.exception)
