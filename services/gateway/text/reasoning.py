"""Read the thinking of a model in its text while it comes: what stands between two markers such as `<think>` and
`</think>`, or in the channel `analysis` of gpt-oss.

The output is a function of the text so far and of the state in which the prompt left the model, however the text was
cut into pieces. An answer has one block of thinking, at its beginning: a marker anywhere else is text, so an answer may
explain the markers. White space beside the markers stays where the model wrote it, except before an opening marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from services.gateway.request import CHANNELS, THINKING, UNDECIDED

MARKERS = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
}
"""The opening and the closing one of a family of models: of most, of Magistral, of Seed-OSS."""

CHANNEL, MESSAGE, CALL = "<|channel|>", "<|message|>", "<|call|>"
START, END = "<|start|>", "<|end|>"
ANALYSIS = "analysis"


def markers_of(template: str, vocabulary: Iterable[str]) -> str:
    """Return how a model marks its thinking, by its chat template or else the names of its added tokens: one of
    MARKERS, `channels` or `none`.
    """
    if CHANNEL + ANALYSIS in template:
        return "channels"
    names = frozenset(vocabulary)
    found = [family for family, (_, closing) in MARKERS.items() if closing in template]
    found += [family for family, markers in MARKERS.items() if names.issuperset(markers)]
    return found[0] if found else "none"


def state_behind(text: str, markers: tuple[str, str]) -> str:
    """Return the state that the end of a rendered prompt leaves.

    Only the very end counts: a marker further up is one of the conversation.

    >>> state_behind("<|im_start|>assistant\\n<think>\\n", MARKERS["think"])
    'thinking'
    >>> state_behind("<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n", MARKERS["think"])
    ''
    """
    opening, closing = markers
    end = text.rstrip()
    if end.endswith(closing):
        return ""
    return THINKING if end.endswith(opening) else UNDECIDED


def state_within(content: str, markers: tuple[str, str]) -> str:
    """Return the state behind the beginning of an answer that is to be continued."""
    opening, closing = markers
    answer = content.lstrip()
    if not answer:
        return UNDECIDED
    return THINKING if answer.startswith(opening) and closing not in answer else ""


def budget_grammar(budget: int, state: str, marks: tuple[int, int], blanks: Iterable[int]) -> str:
    """Return the grammar of an answer that has at most `budget` tokens of thinking: behind so many the closing mark is
    the only token. Everything else is free.

    state: where the prompt left the model, UNDECIDED or THINKING. marks: ids of the opening and the closing one.
    blanks: ids of tokens that are white space, which may stand before the opening one.
    """
    opening, closing = marks
    thinking = f"<[^{closing}]>{{0,{budget}}} <[{closing}]> <[*]>*"
    if state == THINKING:
        return f"start: {thinking}\n"
    spaces = ",".join(map(str, sorted(blanks)))
    before = f"<[{spaces}]>* " if spaces else ""
    others = ",".join(filter(None, (str(opening), spaces)))
    return f"start: {before}(<[{opening}]> {thinking} | (<[^{others}]> <[*]>*)?)\n"


@dataclass(frozen=True, slots=True)
class ChannelIds:
    """Ids of the tokens that heads of messages are made of. lookalikes: others that the name of `analysis` may begin
    with behind the mark of a channel.
    """

    channel: int
    message: int
    start: int
    end: int
    analysis: int
    assistant: int
    final: int
    lookalikes: tuple[int, ...]


CHANNEL_WORDS = (CHANNEL, MESSAGE, START, END, ANALYSIS, "assistant", "final")
"""The texts of these tokens, in their order."""


def is_lookalike(text: str) -> bool:
    """Return whether the name of the channel `analysis` may begin with a text, spelled in another way.

    >>> [is_lookalike(text) for text in (" anal", "\\n", "analysis.", "final", "")]
    [True, True, True, False, False]
    """
    begun = text.lstrip()
    return text != "" and (ANALYSIS.startswith(begun) or begun.startswith(ANALYSIS))


def channel_budget_grammar(budget: int, ids: ChannelIds, may_call: bool) -> str:
    """Return the grammar of an answer that has at most `budget` tokens in all its messages of `analysis`: behind so
    many the mark of their end is the only token, then the head of the final message, or of any message that is no
    `analysis` where the answer may call a tool. Everything else is free but a head of `analysis` in another form.
    """
    forced = [ids.end, ids.start]
    if not may_call:
        forced += [ids.assistant, ids.channel, ids.final, ids.message]
    names = ",".join(map(str, (ids.channel, ids.analysis, *ids.lookalikes)))
    fewer = f"(again* token){{0,{budget - 1}}}" if budget > 1 else ""  # {0,0} is refused
    return "\n".join((
        "start: other (head ended | head spent)?",
        f"ended: {fewer} (again* end other)?",
        f"spent: (again* token){{{budget}}} {' '.join(f'<[{id_}]>' for id_ in forced)} other",
        f"token: <[^{ids.end},{ids.start}]>",
        f"end: <[{ids.end},{ids.start}]>",
        "again: end other head",
        f"head: <[{ids.channel}]> <[{ids.analysis}]> <[{ids.message}]>",
        f"other: (<[^{ids.channel}]> | <[{ids.channel}]> <[^{names}]>)*",
        "",
    ))  # fmt: skip


class Reader(Protocol):
    """The text of one choice in; its thinking and the text behind it out.

    is_over: nothing that follows is thinking. has_thought: the tokens so far count as thinking, if not is_over.
    """

    @property
    def is_over(self) -> bool: ...

    @property
    def has_thought(self) -> bool: ...

    def feed(self, text: str) -> tuple[str, str]:
        """Return the thinking and the text that are certain now."""
        ...

    def flush(self) -> tuple[str, str]:
        """Return the rest, at the end of the choice."""
        ...


def reader_of(state: str, markers: tuple[str, str]) -> Reader:
    """Return the reader of an answer that begins in a state. markers: of the model."""
    return ChannelReader() if state == CHANNELS else ReasoningReader(state, markers)


class ReasoningReader:
    """The text of one choice in; its thinking and the text behind it out.

    is_over: nothing that follows is thinking. has_thought: the choice has a block of thinking.
    """

    def __init__(self, state: str, markers: tuple[str, str]) -> None:
        self._state = state
        self._opening, self._closing = markers
        self._has_thought = state == THINKING
        self._held = ""  # may be the beginning of a marker, or white space before one

    @property
    def is_over(self) -> bool:
        return not self._state

    @property
    def has_thought(self) -> bool:
        return self._has_thought

    def feed(self, text: str) -> tuple[str, str]:
        """Return the thinking and the text that are certain now."""
        text = self._held + text
        self._held = ""
        if self._state == UNDECIDED:
            begun = text.lstrip()
            if len(begun) < len(self._opening) and self._opening.startswith(begun):
                self._held = text
                return "", ""
            self._has_thought = begun.startswith(self._opening)
            self._state = THINKING if self._has_thought else ""
            text = begun.removeprefix(self._opening) if self._has_thought else text
        if not self._state:
            return "", text
        thinking, marker, rest = text.partition(self._closing)
        if marker:
            self._state = ""
            return thinking, rest
        keep = _overlap(text, self._closing)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def flush(self) -> tuple[str, str]:
        """Return the rest, at the end of the choice."""
        held, self._held = self._held, ""
        return (held, "") if self._state == THINKING else ("", held)


_ENDS = (END, CALL, "<|return|>", START)
_HEADS = (CHANNEL, MESSAGE, START, "to=", "assistant")
"""What the head of a message begins with; the prompt ends behind its role."""
MOST_HEAD = 256
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]{1,64})")
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class ChannelReader:
    """The messages of one choice of gpt-oss in; what is in `analysis` out as thinking, all else as text.

    A message to a function comes out as `<|channel|>functions.NAME<|message|>...<|call|>`, however its head was
    written, for the reader of calls. The mark behind it may be the token that ended the choice, which is no text. Text
    that has no head is content.
    """

    def __init__(self) -> None:
        self._kind = ""  # of the message that is read: thinking, call or text; empty in its head
        self._held = ""

    @property
    def is_over(self) -> bool:
        return False

    @property
    def has_thought(self) -> bool:
        return self._kind == "thinking"

    def feed(self, text: str) -> tuple[str, str]:
        """Return the thinking and the text that are certain now."""
        self._held += text
        thinking, content = "", ""
        while self._held:
            if not self._kind:
                begun = self._begin()
                if begun is None:
                    break
                content += begun
                continue
            found = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
            size = min(found)[0] if found else len(self._held) - max(_overlap(self._held, mark) for mark in _ENDS)
            piece, self._held = self._held[:size], self._held[size:]
            if self._kind == "thinking":
                thinking += piece
            else:
                content += piece
            if not found:
                break
            content += CALL if self._kind == "call" else ""
            self._held, self._kind = self._held.removeprefix(min(found)[1]), ""
        return thinking, content

    def flush(self) -> tuple[str, str]:
        """Return the rest, at the end of the choice; a head that was cut is nothing."""
        held, self._held = self._held, ""
        if self._kind == "thinking":
            return held, ""
        return "", held + CALL if self._kind == "call" else held if self._kind else ""

    def _begin(self) -> str | None:
        """Read the head of a message; return the text that it becomes, None while it is not whole."""
        head, mark, rest = self._held.partition(MESSAGE)
        begun = self._held.lstrip()
        is_long = len(head) > MOST_HEAD + (0 if mark else len(MESSAGE) - 1)
        if is_long or not any(known.startswith(begun) or begun.startswith(known) for known in _HEADS):
            self._kind = "text"
            return ""
        if not mark:
            return None
        self._held = rest
        if (recipient := _RECIPIENT.search(head)) is not None:
            self._kind = "call"
            return f"{CHANNEL}functions.{recipient[1]}{MESSAGE}"
        name = _NAME.search(head)
        self._kind = "thinking" if name is not None and name[1] == ANALYSIS else "text"
        return ""


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of the text that begins a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if mark.startswith(text[-size:])), 0)
