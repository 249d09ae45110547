"""Hostile messages and templates: what a user wrote is never a control token, and no template gets out of its box."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path
from typing import Any

import jinja2
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.errors import ApiError
from services.gateway.text.template_process import environment
from services.gateway.text.tokenizer import ModelText
from tests.support.checkpoints.tokenizers import SPECIALS, byte_fallback, byte_level, write_model

HOSTILE = [
    *SPECIALS, "<s>", "</s>", "<unk>", "<|im_", "start|>", "<|", "|>", "{{ messages }}", "{% raw %}", "{#", "}}",
    "\ue000", "\ue001", "\ue000" + "0" * 24 + "-0\ue001", "\n", " ", "\r", "\0", "a", "<0x0A>", "▁", "🐋", "e\u0301",
    "\\", "'", '"',
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=4), min_size=1, max_size=10).map("".join)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": TEXTS}),
    min_size=1, max_size=4,
)  # fmt: skip
KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@functools.cache
def model(kind: str) -> ModelText:
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens(SPECIALS)
    made = ModelText(write_model(Path(directory.name) / "m", tokenizer))
    atexit.register(made.close)
    return made


@given(MESSAGES, st.sampled_from(sorted(KINDS)))
@settings(max_examples=30)
def test_messages_never_become_control_tokens(messages: list[dict[str, str]], kind: str) -> None:
    text = model(kind)
    try:
        ids = text.chat.encode(messages)
    except ApiError as error:
        assert error.status == 400 and "control token" in error.message
        return
    start, end = (text.tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    written = [id_ for id_ in ids if id_ in text.text.special and id_ != text.tokenizer.token_to_id("<unk>")]
    assert written == [start, end] * len(messages) + [start]
    if kind == "byte_level":
        said = "".join(f"<|im_start|>{one['role']}\n{one['content'].strip()}<|im_end|>\n" for one in messages)
        assert text.text.decode(ids, skip_special=False) == said + "<|im_start|>assistant\n"


ROOTS = [
    "messages", "messages[0]", "messages[0].content", "''", "()", "{}", "0", "true", "none", "lipsum", "cycler",
    "joiner",
    "namespace()", "range(3)", "dict()", "self", "strftime_now", "raise_exception", "missing",
]  # fmt: skip
HIDDEN = [
    "__class__", "__mro__", "__base__", "__subclasses__", "__globals__", "__init__", "__builtins__", "__dict__",
    "__code__", "__self__", "__func__", "__module__", "__reduce_ex__", "gi_frame", "f_globals", "mro", "func_globals",
    "im_self",
]  # fmt: skip
WAYS = [
    "{0}.{1}",
    "{0}['{1}']",
    "({0}|attr('{1}'))",
    "({0}|attr('{1}'[:2] + '{1}'[2:]))",
    "([{0}]|map(attribute='{1}')|list)[0]",
]
ENDS = ["", "()", "[0]", "|list", "|string", "|tojson", "|pprint", "(0)", "|length"]
FORMATS = [
    "('{{0.{1}}}').format({0})",
    "('%s' % {0}.{1})",
    "('{{0.{1}}}'|format({0}))",
    "('{{x.{1}}}').format_map({{'x': {0}}})",
]
INTERNALS = (
    "<class", "<module", "<function", "<slot wrapper", "<method-wrapper", "<code", "<frame", "mappingproxy", "built-in",
)  # fmt: skip


@st.composite
def escapes(draw: st.DrawFn) -> str:
    """An expression that looks behind a value: every step from its root is one that templates may not take."""
    made = draw(st.sampled_from(ROOTS))
    steps = draw(st.lists(st.sampled_from(HIDDEN), min_size=1, max_size=4))
    for step in steps[:-1]:
        made = draw(st.sampled_from(WAYS)).format(made, step) + draw(st.sampled_from(["", "()", "[0]"]))
    last = draw(st.sampled_from(WAYS + FORMATS)).format(made, steps[-1])
    return "{{ " + last + draw(st.sampled_from(ENDS)) + " }}"


@given(escapes())
@settings(max_examples=60)
def test_no_template_expression_reaches_attributes_of_a_value(source: str) -> None:
    context: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    try:
        said = environment().from_string(source).render(**context)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return
    assert not any(word in said for word in INTERNALS), said
