"""A headless Chromium, a real gateway, and a stack that is only written into Redis, so that its figures are known."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.checkpoints.tokenizers import write_model
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.written_stack import WrittenStack

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
AHEAD_MS = 600_000
"""By which written statistics are ahead, so that the scheduler is not silent for a page that opens slowly."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, closed at the end of the module: while it is open, asyncio has a running loop in this thread."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        if "CI" not in os.environ:
            pytest.skip("no chromium on PATH: sudo apt-get install chromium")
        raise RuntimeError("no chromium on PATH; .ci/run installs it")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer
) -> Iterator[GatewayProcess]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), model, redis_server) as running:
        yield running


@pytest.fixture
def written(gateway: GatewayProcess, redis_server: RedisServer) -> WrittenStack:
    redis_server.client.flushall()
    stack = WrittenStack(redis_server.client, gateway.keys)
    stack.ahead_ms = AHEAD_MS
    return stack


class Visit:
    """One tab on the page, and what it asked for and complained of."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(60_000)  # the machine may be busy
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(address)

    def says(self, selector: str, words: str) -> None:
        """Waits until the text of an element contains `words`."""
        self.page.wait_for_function(
            "([selector, words]) => document.querySelector(selector)?.textContent.includes(words)",
            arg=[selector, words],
        )

    def says_in_row(self, selector: str, name: str, pattern: str) -> None:
        """Waits until the row that contains `name` matches the regular expression `pattern`."""
        row = self.page.locator(selector, has_text=name)
        expect(row).to_contain_text(re.compile(pattern), use_inner_text=True, timeout=60_000)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements, read at once: in one that a frame has replaced, lines run together."""
        found: list[str] = self.page.evaluate(
            "selector => [...document.querySelectorAll(selector)].map(one => one.innerText)", selector
        )
        return found


@pytest.fixture
def open_page(browser: Browser, gateway: GatewayProcess) -> Iterator[type[Visit]]:
    """`open_page(width=390, dark=True)`: a Visit in a context of its own; the live page without `address`."""
    contexts = []

    def visit(url: str = "", width: int = 1280, dark: bool = False, address: str = "") -> Visit:
        context = browser.new_context(
            viewport={"width": width, "height": 844}, color_scheme="dark" if dark else "light", locale="en-GB"
        )
        contexts.append(context)
        return Visit(context.new_page(), address or (url or gateway.ops_url) + "/dashboard")

    yield visit  # type: ignore[misc]
    for context in contexts:
        context.close()
