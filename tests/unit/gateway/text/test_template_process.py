"""Chat templates that misbehave, in the process that renders them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import jinja2
import psutil
import pytest

from services.gateway.text import chat_template
from services.gateway.text.chat_template import MEMORY_BYTES, Renderer, RenderError
from tests.support.waiting import until

ORDINARY = "{% for m in messages %}{{ m.content }}{% endfor %}"
Make = Callable[..., Renderer]


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(chat_template, "PATIENCE", 6000)  # so that processor time alone ends it
    made: list[Renderer] = []

    def make(source: str, timeout_s: float = 5.0) -> Renderer:
        made.append(Renderer(source, timeout_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_slow_template_fails_and_its_process_continues(renderer: Make) -> None:
    busy = "{% for a in range(9999) %}{% if n %}{% for b in range(99999) %}{% endfor %}{% endif %}{% endfor %}ok"
    template = renderer(busy, timeout_s=0.2)
    assert template.render(n=0) == "ok"
    pid = template.pid
    with pytest.raises(RenderError, match=r"longer than 0\.2 s"):
        template.render(n=1)
    assert (template.render(n=0), template.pid) == ("ok", pid)


@pytest.mark.parametrize("source", ["{{ ('a' * (n or 1)) | length }}", "{{ ('a' * 3000000000) | length }}"])
def test_template_that_takes_too_much_memory_fails(renderer: Make, source: str) -> None:
    template = renderer(source)
    with pytest.raises(RenderError, match="memory"):
        template.render(n=3_000_000_000)
    assert template.pid is not None
    if "n or 1" in source:
        assert template.render(n=0) == "1"


def test_rendered_text_has_a_bound(renderer: Make) -> None:
    template = renderer("{% for i in range(n) %}{{ 'a' * 1000000 }}{% endfor %}")
    with pytest.raises(RenderError, match="at most"):
        template.render(n=20)
    assert len(template.render(n=2)) == 2_000_000


def test_template_cannot_reach_attributes_of_values(renderer: Make) -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(jinja2.TemplateError):
            renderer(source).render(messages=[])


def test_template_errors_and_functions_pass_through(renderer: Make) -> None:
    with pytest.raises(jinja2.TemplateError, match=r"^only 🐋$"):
        renderer("{{ raise_exception('only 🐋') }}").render()
    year = renderer("{{ strftime_now('%Y') }}{{ 'a b' | wordwrap(1) }}{{ messages | tojson }}")
    assert year.render(messages=["é"]) == f'{datetime.now():%Y}a\nb["é"]'
    with pytest.raises(RenderError, match="NoneType"):
        renderer("{{ messages + 1 }}").render(messages=None)
    with pytest.raises(jinja2.TemplateSyntaxError):
        renderer("{% for %}")


HELLO = [{"content": "hello"}]


def test_template_process_that_dies_is_replaced(renderer: Make) -> None:
    template = renderer(ORDINARY)
    assert template.render(messages=HELLO) == "hello"
    before = template.pid or 0
    os.kill(before, signal.SIGKILL)
    until("it is gone", lambda: template.pid is None)
    assert template.render(messages=HELLO) == "hello" and template.pid != before


def test_template_process_that_hangs_is_replaced(renderer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "PATIENCE", 1)
    template = renderer(ORDINARY)
    template.jail.start()
    stopped = template.pid or 0
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(RenderError, match="no answer"):
        template.render(messages=HELLO)

    def text() -> str:
        with contextlib.suppress(RenderError):  # a busy machine starts no process in time
            return template.render(messages=HELLO)
        return ""

    assert until("another one renders", text) == "hello" and template.pid != stopped


def test_template_process_is_confined_and_ends_with_its_gateway(renderer: Make) -> None:
    template = renderer(ORDINARY)
    template.render(messages=[])
    process = psutil.Process(template.pid)
    assert not [name for name in process.environ() if name.startswith("ORCINUS") or "KEY" in name]
    limits = Path(f"/proc/{template.pid}/limits").read_text()
    assert re.search(rf"Max data size +{MEMORY_BYTES} ", limits)
    for name in ("open files", "processes", "file size", "core file size"):
        assert re.search(rf"Max {name} +0 +0 ", limits), name
    assert template.jail.connection is not None
    template.jail.connection.close()  # as the kernel does when the gateway is killed
    until("the process has ended", lambda: process.status() == psutil.STATUS_ZOMBIE or not process.is_running())


def test_template_is_not_compiled_in_the_gateway(renderer: Make) -> None:
    template = renderer("{{ 1 | unknown }}")  # compiling it, which also folds constants, finds the filter missing
    assert template.pid is None
    with pytest.raises(jinja2.TemplateError, match="unknown"):
        template.render()
