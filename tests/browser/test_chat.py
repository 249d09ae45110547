"""The chat page in Chromium over a real gateway: keyboard, stopping, keys, errors, phones, and text that stays text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.launcher.up import DEMO_PROMPT
from tests.browser.conftest import Visit
from tests.browser.test_dashboard import contrast
from tests.support.checkpoints.tokenizers import byte_level
from tests.support.gateway.process import GatewayProcess, led_gateway, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import LENGTH, STOP, Claimed, Line, ScriptedScheduler

OpenPage = Callable[..., Visit]
EVIL = '<img src=/evil.png onerror="window.stolen=1"><script>window.stolen=1</script>&amp;'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


class Replies:
    """The scheduler behind the page: takes the next request and answers with text."""

    def __init__(self, scheduler: ScriptedScheduler, tokenizer: Tokenizer) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def answer(self, text: str, finish: int = STOP) -> Claimed:
        claimed = self.scheduler.claim()
        self.scheduler.serve(claimed, self.ids(text), finish, piece=8)
        return claimed

    def begin(self, text: str) -> Claimed:
        """Publish a beginning and leave the answer open."""
        claimed = self.scheduler.claim()
        self.scheduler.publish(Line(claimed.id, 0, self.ids(text)))
        return claimed

    def prompt(self, claimed: Claimed) -> str:
        return self.tokenizer.decode(claimed.prompts[0], skip_special_tokens=False)


@pytest.fixture
def replies(gateway: GatewayProcess, redis_server: RedisServer, tokenizer: Tokenizer) -> Iterator[Replies]:
    redis_server.client.flushall()
    scheduler = ScriptedScheduler(redis_server.client, gateway.keys).lead()
    gateway.wait_ready()
    yield Replies(scheduler, tokenizer)


@pytest.fixture
def chat(open_page: OpenPage, gateway: GatewayProcess, replies: Replies) -> Callable[..., Visit]:
    """Open the chat page and wait for its model."""

    def visit(**options: object) -> Visit:
        visit = open_page(address=gateway.url + "/", **options)
        visit.says("#model", "tiny")
        return visit

    return visit


def write(visit: Visit, text: str) -> None:
    visit.page.locator("#prompt").fill(text)
    visit.page.keyboard.press("Enter")


def complete(visit: Visit) -> None:
    visit.says("#state", "The answer")


def test_answer_appears_while_it_is_computed_and_survives_a_reload(
    chat: Callable[..., Visit], replies: Replies
) -> None:
    visit = chat()
    assert "tiny" in visit.text("#empty")
    write(visit, "Hello there")
    claimed = replies.begin("The quick ")
    visit.says(".answer .text", "The quick")
    assert visit.page.locator(".answer .text").get_attribute("aria-busy") == "true"
    rest = replies.ids("brown fox")
    begun = len(replies.ids("The quick "))
    replies.scheduler.publish(Line(claimed.id, begun, rest, finish=STOP))
    replies.scheduler.end(claimed, [[*replies.ids("The quick "), *rest]], [STOP])
    complete(visit)
    assert visit.text(".answer .text") == "The quick brown fox"
    assert visit.page.locator(".answer .text").get_attribute("aria-busy") == "false"
    assert re.search(rf"^{begun + len(rest)} tokens, first token \d", visit.text(".foot .note"))
    visit.page.reload()
    visit.says(".answer .text", "The quick brown fox")
    write(visit, "And then?")
    assert "The quick brown fox" in replies.prompt(replies.answer("jumps")), "the history is sent"
    visit.page.get_by_role("button", name="New chat").click()
    assert visit.page.locator(".answer").count() == 0
    visit.page.reload()
    visit.says("#empty", "tiny")
    assert visit.complaints == []


def test_demo_model_has_a_prompt_to_choose(
    tmp_path: Path, model: Path, redis_server: RedisServer, tokenizer: Tokenizer, open_page: OpenPage
) -> None:
    with led_gateway(tmp_path, model, redis_server, served_model_name="demo-model") as (gateway, scheduler):
        visit = open_page(address=gateway.url + "/")
        visit.says("#model", "demo-model")
        visit.page.locator("#suggestion").focus()
        visit.page.keyboard.press("Enter")
        replies = Replies(scheduler, tokenizer)
        assert DEMO_PROMPT in replies.prompt(replies.answer("def read(self):"))
        complete(visit)
        assert visit.text(".mine") == DEMO_PROMPT
        assert visit.page.locator("#empty").is_hidden()


def test_page_is_used_by_keyboard_alone(chat: Callable[..., Visit], replies: Replies) -> None:
    visit = chat()
    assert visit.page.evaluate("document.activeElement.id") == "prompt"
    visit.page.keyboard.type("one")
    visit.page.keyboard.press("Shift+Enter")
    visit.page.keyboard.type("two")
    visit.page.keyboard.press("Enter")
    claimed = replies.begin("The lazy dog")
    assert "one\ntwo" in replies.prompt(claimed)
    assert visit.text(".mine") == "one\ntwo"
    visit.says(".answer .text", "The lazy dog")
    visit.page.keyboard.press("Escape")
    assert replies.scheduler.wait_control("cancel", claimed.id)
    visit.says(".foot .note", "stopped by you")
    assert visit.text(".answer .text") == "The lazy dog"
    assert visit.page.evaluate("document.activeElement.id") == "prompt"
    seen = set()
    for _ in range(12):
        visit.page.keyboard.press("Shift+Tab")
        seen.add(visit.page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        outline = visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or visit.page.evaluate("document.activeElement.matches('body, #prompt')")
    assert {"theme", "settings-button", "new", "live", "model", "Copy", "Answer again"} <= seen


def test_thinking_streams_into_a_block_that_is_closed(
    tmp_path: Path, model: Path, redis_server: RedisServer, tokenizer: Tokenizer, open_page: OpenPage
) -> None:
    settings = {"served_model_name": "thinker", "reasoning_parser": "think"}
    with led_gateway(tmp_path, model, redis_server, **settings) as (gateway, scheduler):
        replies = Replies(scheduler, tokenizer)
        visit = open_page(address=gateway.url + "/")
        visit.says("#model", "thinker")
        write(visit, "Hello")
        claimed = replies.begin("<think>\nfoxes are ")
        visit.says(".thinking p", "foxes are")
        visit.says(".thinking summary", "Thinking…")
        assert not visit.page.locator(".thinking p").is_visible(), "closed until it is opened"
        visit.page.locator(".thinking summary").click()
        assert visit.text(".thinking p").strip() == "foxes are"
        assert visit.text(".answer .text") == ""
        begun, rest = replies.ids("<think>\nfoxes are "), replies.ids("quick\n</think>\n\nThe fox")
        replies.scheduler.publish(Line(claimed.id, len(begun), rest, finish=STOP))
        replies.scheduler.end(claimed, [[*begun, *rest]], [STOP])
        complete(visit)
        assert visit.text(".answer .text") == "The fox"
        assert visit.text(".thinking p").strip() == "foxes are quick"
        assert visit.text(".thinking summary") == "Thinking"
        visit.page.reload()
        visit.says(".answer .text", "The fox")
        assert visit.page.locator(".thinking").get_attribute("open") is None
        assert visit.complaints == []


def test_stop_button_cancels_and_an_answer_is_repeated_on_demand(chat: Callable[..., Visit], replies: Replies) -> None:
    visit = chat()
    write(visit, "Hello")
    claimed = replies.begin("fox ")
    visit.says(".answer .text", "fox")
    assert not visit.page.locator("#send").is_visible()
    visit.page.get_by_role("button", name="Stop").click()
    assert replies.scheduler.wait_control("cancel", claimed.id)
    visit.page.get_by_role("button", name="Answer again").click()
    replies.answer("dog", LENGTH)
    complete(visit)
    assert visit.text(".answer .text") == "dog"
    assert "cut at the limit of tokens" in visit.text(".foot .note")
    assert visit.page.locator(".mine").count() == 1


MARKUP = f"""# Title
A **bold** word, *slanted*, `code {EVIL}` and {EVIL}.

- one
- two
  - nested

1. first

> quoted {EVIL}

| a | b |
|---|---|
| 1 | **2** |

[good](https://example.com/x) [bad](javascript:window.stolen=1) ![pic](https://example.com/evil.png) <b>raw</b>

```py {EVIL}
def f():
    return "{EVIL}"
```
"""


def test_markup_is_shown_by_rules_and_all_else_stays_text(
    chat: Callable[..., Visit], replies: Replies, gateway: GatewayProcess
) -> None:
    visit = chat()
    write(visit, EVIL)
    replies.answer(MARKUP)
    complete(visit)
    text = visit.page.locator(".answer .text")
    assert visit.text(".mine") == EVIL
    shown = {
        "h3": ["Title"], "strong": ["bold", "2"], "em": ["slanted"], "ul ul li": ["nested"], "ol > li": ["first"],
        "blockquote": [f"quoted {EVIL}"], "th": ["a", "b"], "pre code": [f'def f():\n    return "{EVIL}"'],
        "p > code": [f"code {EVIL}"],
    }  # fmt: skip
    for selector, texts in shown.items():
        assert text.locator(selector).all_inner_texts() == texts, selector
    assert text.locator(".code-bar span").inner_text() == "py"
    links = text.locator("a").evaluate_all("links => links.map(link => [link.href, link.rel])")
    assert [href for href, _ in links] == ["https://example.com/x", "https://example.com/evil.png"]
    assert all("noopener" in rel for _, rel in links)
    assert "[bad](javascript:window.stolen=1)" in text.inner_text()
    assert "<b>raw</b>" in text.inner_text()
    assert text.locator("img, script, b, iframe").count() == 0
    assert visit.page.evaluate("window.stolen") is None
    assert all(url.startswith(gateway.url + "/") for url in visit.requests)
    assert not [url for url in visit.requests if "evil" in url]
    assert visit.complaints == []


@pytest.mark.parametrize("mark", ["*", "_", "`", "[", "**a ", "- ", "> ", "~~", "|", "](", "1. ", "![", "#"])
def test_long_markup_that_never_closes_is_shown_at_once(chat: Callable[..., Visit], mark: str) -> None:
    visit = chat()
    shown = visit.page.evaluate(
        """async (mark) => {
          const { Markdown } = await import("/web/markdown.js");
          const element = document.createElement("div");
          new Markdown(element).show(mark.repeat(20000));
          return element.childElementCount;
        }""",
        mark,
    )
    assert shown > 0


def test_code_is_copied_whole(chat: Callable[..., Visit], replies: Replies) -> None:
    visit = chat()
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    write(visit, "code")
    replies.answer("Here:\n```python\nfor i in range(3):\n    print(i)\n\n```\nDone.")
    complete(visit)
    visit.page.get_by_role("button", name="Copy code").click()
    visit.says(".code .copy", "Copied")
    assert visit.page.evaluate("navigator.clipboard.readText()") == "for i in range(3):\n    print(i)\n"
    visit.page.get_by_role("button", name="Copy answer").click()
    visit.says(".foot .copy", "Copied")
    assert visit.page.evaluate("navigator.clipboard.readText()").startswith("Here:\n```python\n")


def test_parameters_are_sent_and_empty_ones_are_not(chat: Callable[..., Visit], replies: Replies) -> None:
    visit = chat()
    write(visit, "Hello")
    plain = replies.answer("fox").request
    complete(visit)
    visit.page.get_by_role("button", name="Settings").click()
    assert visit.page.evaluate("document.activeElement.id") == "system"
    values = {
        "System prompt": "Be brief.",
        "Temperature": "0.5",
        "Top p": "0.25",
        "Most tokens of an answer": "7",
        "Seed": "11",
    }
    for label, value in values.items():
        visit.page.get_by_label(label, exact=True).fill(value)
    visit.page.keyboard.press("Escape")
    assert not visit.page.locator("#settings").is_visible()
    visit.page.reload()
    visit.says("#model", "tiny")
    write(visit, "Again")
    claimed = replies.answer("dog dog dog dog")
    sampling = claimed.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, claimed.request.max_tokens) == (0.5, 0.25, 11, 7)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in replies.prompt(claimed)
    assert (plain.sampling.temperature, plain.sampling.top_p) == (1, 1)


def test_refusals_are_shown_in_the_words_of_the_server(chat: Callable[..., Visit], replies: Replies) -> None:
    visit = chat()
    visit.page.get_by_role("button", name="Settings").click()
    visit.page.get_by_label("Temperature").fill("5")
    write(visit, "Hello")
    visit.says(".error", "temperature")
    assert visit.page.locator(".error[role=alert]").is_visible()
    visit.page.get_by_label("Temperature").fill("")
    visit.page.get_by_role("button", name="Try again").click()
    replies.answer("fox")
    complete(visit)
    assert visit.text(".answer .text") == "fox"
    assert not visit.page.locator(".error").is_visible()
    write(visit, "More")
    claimed = replies.begin("and ")
    visit.says(".answer:last-child .text", "and")
    replies.scheduler.publish(Line(claimed.id, len(replies.ids("and ")), finish=5, error="the worker is gone"))
    visit.says(".answer:last-child .error", "the worker is gone")


def test_full_conversation_offers_a_new_chat(chat: Callable[..., Visit], replies: Replies) -> None:
    visit = chat()
    write(visit, "Hello")
    replies.answer("fox")
    complete(visit)
    write(visit, "word " * 5000)
    visit.says(".answer:last-child .error", "maximum context length is")
    assert not visit.page.get_by_role("button", name="Try again").is_visible()
    visit.page.locator(".answer").get_by_role("button", name="New chat").click()
    assert visit.page.locator(".answer").count() == 0


def test_server_that_is_gone_is_said(open_page: OpenPage, tmp_path: Path, model: Path, replies: Replies) -> None:
    redis = RedisServer(tmp_path / "redis")
    with redis, running_gateway(tmp_path, model, redis) as gateway:
        visit = open_page(address=gateway.url + "/")
        visit.says("#model", "tiny")
        gateway.stop()
        write(visit, "Hello")
        visit.says(".error", "No connection to the server")


def test_key_is_asked_for_and_stays_in_the_tab(
    open_page: OpenPage, tmp_path: Path, model: Path, redis_server: RedisServer, tokenizer: Tokenizer
) -> None:
    redis_server.client.flushall()
    with running_gateway(tmp_path, model, redis_server, api_key="sk-right", served_model_name="kept") as guarded:
        replies = Replies(ScriptedScheduler(redis_server.client, type(guarded.keys)("kept")).lead(), tokenizer)
        guarded.wait_ready()
        visit = open_page(address=guarded.url + "/")
        visit.says("#key-title", "needs a key")
        visit.page.get_by_label("API key").fill("sk-wrong")
        visit.page.keyboard.press("Enter")
        visit.says("#key-why", "the API key is not valid")
        visit.page.get_by_label("API key").fill("sk-right")
        visit.page.get_by_role("button", name="Use this key").click()
        visit.says("#model", "kept")
        write(visit, "Hello")
        replies.answer("fox")
        complete(visit)
        held = "Object.entries({...localStorage}).concat(document.cookie).join()"
        assert "sk-right" not in visit.page.evaluate(held) + visit.page.content() + visit.page.url
        assert visit.page.evaluate("Object.values({...sessionStorage})").count("sk-right") == 1
        other = visit.page.context.new_page()
        other.goto(guarded.url + "/")
        other.get_by_role("button", name="Cancel").click()
        other.wait_for_function("() => document.querySelector('#banner').textContent.includes('needs an API key')")
        visit.page.get_by_role("link", name="Live page").click()
        visit.page.wait_for_url(guarded.url + "/dashboard")
        visit.says("#model", "kept")  # of its first frame


def test_live_page_is_one_click_away(chat: Callable[..., Visit], gateway: GatewayProcess) -> None:
    visit = chat()
    visit.page.get_by_role("link", name="Live page").click()
    visit.page.wait_for_url(gateway.ops_url + "/dashboard")


def test_live_page_that_cannot_be_reached_is_said(chat: Callable[..., Visit], gateway: GatewayProcess) -> None:
    visit = chat()
    answer = {"error": {"message": f"without a key this is only on the ops port, {gateway.ops_url}"}}
    visit.page.route("**/dashboard", lambda route: route.fulfill(status=404, json=answer))
    visit.page.get_by_role("link", name="Live page").click()
    visit.says("#banner", f"cannot be reached from here: without a key this is only on the ops port, {gateway.ops_url}")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone_shows_all_of_it_without_scrolling_sideways(
    chat: Callable[..., Visit], replies: Replies, dark: bool
) -> None:
    visit = chat(width=390, dark=dark)
    write(visit, "x" * 300)
    cells = " | ".join(["wide cell"] * 12)
    replies.answer(f"{'y' * 200}\n\n```\n{'z' * 200}\n```\n\n| {cells} |\n|{'---|' * 12}\n| {cells} |\n")
    complete(visit)
    beyond = """[...document.querySelectorAll("body *")].filter(
      (one) => !one.closest(".scroll, pre, .skip, dialog") && one.getBoundingClientRect().right > innerWidth + 1
    ).map((one) => one.outerHTML)"""
    for is_open in (False, True):
        if is_open:
            visit.page.get_by_role("button", name="Settings", exact=True).click()
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert visit.page.evaluate("document.querySelector('#main').scrollWidth") <= 390
        assert visit.page.evaluate(beyond) == []
        sizes = visit.page.evaluate(
            "[...document.querySelectorAll('header button, #send')].map((one) => one.getBoundingClientRect().height)"
        )
        assert min(sizes) >= 36, "large enough for a finger"
    for link in ("Live page", "API reference"):
        assert visit.page.get_by_role("link", name=link).is_visible()


GROUND = "getComputedStyle(document.body).backgroundColor"


def hexadecimal(colour: str) -> str:
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colour)[:3])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_told_from_its_background(chat: Callable[..., Visit], replies: Replies, dark: bool) -> None:
    """WCAG 2.2, 1.4.3: contrast of 4.5 or more."""
    visit = chat(dark=dark)
    write(visit, "Hello")
    replies.answer(MARKUP)
    complete(visit)
    pairs = visit.page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter(
          (one) => one.offsetParent && one.innerText?.trim()
        ).map((one) => {
          let ground = one;
          while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
          return [getComputedStyle(one).color, getComputedStyle(ground).backgroundColor, one.tagName + one.className];
        })"""
    )
    assert len(pairs) > 20
    for colour, ground, name in pairs:
        assert contrast(hexadecimal(colour), hexadecimal(ground)) >= 4.5, (name, colour, ground)


def test_colours_follow_the_system_and_a_switch(chat: Callable[..., Visit]) -> None:
    light, dark = chat(), chat(dark=True)
    grounds = [visit.page.evaluate(GROUND) for visit in (light, dark)]
    assert grounds[0] != grounds[1]
    light.page.locator("#theme").click()
    assert light.page.evaluate(GROUND) == grounds[1]
    light.page.reload()
    assert light.page.evaluate(GROUND) == grounds[1]
    light.page.locator("#theme").click()
    assert light.page.evaluate(GROUND) == grounds[0]


def test_history_that_is_kept_is_bounded(chat: Callable[..., Visit]) -> None:
    visit = chat()
    turn = "{question: 'q' + number, answer: 'a'.repeat(20000), note: '', error: ''}"
    turns = f"JSON.stringify([...Array(150).keys()].map((number) => ({turn})))"
    visit.page.add_init_script(f"""if ((sessionStorage.getItem("orcinus-turns") ?? "[]") === "[]")
        sessionStorage.setItem("orcinus-turns", {turns});""")
    visit.page.reload()
    visit.says("#log", "q0")
    visit.page.reload()
    visit.says("#log", "q149")
    kept = visit.page.evaluate("sessionStorage.getItem('orcinus-turns')")
    assert len(kept) <= 1_000_000
    assert '"q149"' in kept
    assert '"q0"' not in kept


def test_everything_on_the_page_has_an_accessible_name(chat: Callable[..., Visit], replies: Replies) -> None:
    visit = chat()
    write(visit, "Hello")
    replies.answer(MARKUP)
    complete(visit)
    visit.page.get_by_role("button", name="Settings", exact=True).click()
    nameless = visit.page.evaluate(
        """[...document.querySelectorAll("input, select, textarea, button, a, img")].filter((one) =>
          !(one.labels?.length || one.hasAttribute("alt") || one.getAttribute("aria-label") || one.textContent.trim())
        ).map((one) => one.outerHTML)"""
    )
    assert nameless == []
    assert visit.page.locator("h1").count() == 1
    assert visit.page.locator("#log[role=log][aria-live=polite]").count() == 1
    assert visit.page.locator("#state[role=status]").count() == visit.page.locator("#banner[role=alert]").count() == 1
    assert visit.page.locator("html[lang=en]").count() == 1
