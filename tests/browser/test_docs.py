"""The API reference in Chromium: every path of the document, also behind a key, and on a phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.browser.conftest import Visit
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import RedisServer

OpenPage = Callable[..., Visit]


def test_reference_shows_every_path_with_its_fields(open_page: OpenPage, gateway: GatewayProcess) -> None:
    visit = open_page(address=gateway.url + "/docs")
    visit.says("#about", "Version")
    document = httpx.get(gateway.url + "/openapi.json", timeout=60).json()
    operations = {f"{method.upper()}{path}" for path, methods in document["paths"].items() for method in methods}
    for selector in ("section h2", "#contents a"):
        shown = visit.page.locator(selector).evaluate_all("elements => elements.map(one => one.textContent)")
        assert set(shown) == operations, selector
    chat = visit.page.locator("#post--v1-chat-completions")
    fields = set(chat.locator(":scope > .scroll tbody th code").all_inner_texts())
    assert fields == set(document["components"]["schemas"]["ChatBody"]["properties"])
    assert "0 to 2" in chat.locator("tr", has_text="temperature").first.inner_text()
    assert f"curl {gateway.url}/v1/chat/completions" in chat.locator("pre").inner_text()
    assert all(url.startswith(gateway.url + "/") for url in visit.requests)
    assert visit.complaints == []


def test_reference_asks_for_the_key_of_the_server(
    open_page: OpenPage, tmp_path: Path, model: Path, redis_server: RedisServer
) -> None:
    with running_gateway(tmp_path, model, redis_server, api_key="sk-right") as guarded:
        visit = open_page(address=guarded.url + "/docs")
        visit.page.get_by_label("API key").fill("sk-right")
        visit.page.keyboard.press("Enter")
        visit.says("#about", "Version")
        visit.page.get_by_role("link", name="Chat", exact=True).click()
        visit.says("#model", "tiny")  # the key is that of the tab


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone_shows_the_reference_without_scrolling_sideways(
    open_page: OpenPage, gateway: GatewayProcess, dark: bool
) -> None:
    visit = open_page(address=gateway.url + "/docs", width=390, dark=dark)
    visit.says("#about", "Version")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
