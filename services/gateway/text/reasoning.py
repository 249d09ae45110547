"""Read the thinking of a model in its text while it comes: what stands between two markers such as `<think>` and
`</think>`, or in the channel `analysis` of gpt-oss.

The output is a function of the text so far and of the state in which the prompt left the model, however the text was
cut into pieces. An answer has one block of thinking, at its beginning: a marker anywhere else is text, so an answer may
explain the markers. White space beside the markers stays where the model wrote it, except before an opening marker.
Where a family marks the text behind its thinking as well, these marks are no part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.request import CHANNELS, FRAMED, THINKING, UNDECIDED

MARKERS: dict[str, tuple[str, ...]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
}
"""The opening and the closing one of a family of models: of most, of Magistral, of Seed-OSS, of Command A Reasoning.

Command A Reasoning has two more, around the text behind the thinking.
"""
SWITCHES = {"cohere": "reasoning"}
"""The variable of chat templates that turns thinking on and off, where it is not `enable_thinking`."""

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
    families = [family for family, markers in MARKERS.items() if markers[1] in template]
    families += [family for family, markers in MARKERS.items() if names.issuperset(markers)]
    return families[0] if families else "none"


def state_behind(text: str, markers: Sequence[str]) -> str:
    """Return the state that the end of a rendered prompt leaves.

    Only the very end counts: a marker further up is one of the conversation.

    >>> state_behind("<|im_start|>assistant\\n<think>\\n", MARKERS["think"])
    'thinking'
    >>> state_behind("<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n", MARKERS["think"])
    ''
    """
    opening, *behind = markers[:3]
    end = text.rstrip()
    if end.endswith(tuple(behind)):
        return state_over(markers)
    return THINKING if end.endswith(opening) else UNDECIDED


def state_over(markers: Sequence[str]) -> str:
    """Return the state behind the thinking."""
    return FRAMED if len(markers) > 2 else ""


def state_within(content: str, markers: Sequence[str]) -> str:
    """Return the state behind the beginning of an answer that is to be continued."""
    opening, closing = markers[:2]
    answer = content.lstrip()
    if not answer:
        return UNDECIDED
    return THINKING if answer.startswith(opening) and closing not in answer else state_over(markers)


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
    forced_ids = [ids.end, ids.start]
    if not may_call:
        forced_ids += [ids.assistant, ids.channel, ids.final, ids.message]
    names = ",".join(map(str, (ids.channel, ids.analysis, *ids.lookalikes)))
    fewer = f"(again* token){{0,{budget - 1}}}" if budget > 1 else ""  # {0,0} is refused
    return "\n".join((
        "start: other (head ended | head spent)?",
        f"ended: {fewer} (again* end other)?",
        f"spent: (again* token){{{budget}}} {' '.join(f'<[{id_}]>' for id_ in forced_ids)} other",
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


def reader_of(state: str, markers: Sequence[str]) -> Reader:
    """Return the reader of an answer that begins in a state. markers: of the model."""
    if state == CHANNELS:
        return ChannelReader()
    reader = ReasoningReader("" if state == FRAMED else state, markers)
    return FrameReader(reader, markers[2], markers[3]) if len(markers) > 2 else reader


class ReasoningReader:
    """The text of one choice in; its thinking and the text behind it out.

    is_over: nothing that follows is thinking. has_thought: the choice has a block of thinking.
    """

    def __init__(self, state: str, markers: Sequence[str]) -> None:
        self._state = state
        self._opening, self._closing = markers[:2]
        self._has_thought = state == THINKING
        self._blank: list[str] = []  # white space before what may be the opening marker
        self._buffer = ""  # may be the beginning of a marker

    @property
    def is_over(self) -> bool:
        return not self._state

    @property
    def has_thought(self) -> bool:
        return self._has_thought

    def feed(self, text: str) -> tuple[str, str]:
        """Return the thinking and the text that are certain now."""
        text = self._buffer + text
        self._buffer = ""
        if self._state == UNDECIDED:
            head = text.lstrip()
            self._blank.append(text[: len(text) - len(head)])
            if len(head) < len(self._opening) and self._opening.startswith(head):
                self._buffer = head
                return "", ""
            self._has_thought = head.startswith(self._opening)
            self._state = THINKING if self._has_thought else ""
            text = head.removeprefix(self._opening) if self._has_thought else "".join([*self._blank, head])
            self._blank = []
        if not self._state:
            return "", text
        thinking, marker, rest = text.partition(self._closing)
        if marker:
            self._state = ""
            return thinking, rest
        keep = _overlap(text, self._closing)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def flush(self) -> tuple[str, str]:
        """Return the rest, at the end of the choice."""
        held, self._buffer, self._blank = "".join([*self._blank, self._buffer]), "", []
        return (held, "") if self._state == THINKING else ("", held)


MAX_SPACE = 1024
"""White space that may stand beside a mark at the beginning or the end of a text. Beside more, the mark is text."""


class FrameReader:
    """The text of one choice in; its thinking, and the text behind it without the marks around that out.

    The first mark counts at the beginning of this text only, the second one at its end: anywhere else they are text.
    """

    def __init__(self, reader: ReasoningReader, opening: str, closing: str) -> None:
        self._reader = reader
        self._opening, self._closing = opening, closing
        self._has_begun = False  # the text behind the thinking
        self._buffer = ""  # may be a mark or the beginning of one, with the white space beside it
        self._has_thought = False

    @property
    def is_over(self) -> bool:
        return False

    @property
    def has_thought(self) -> bool:
        return self._has_thought

    def feed(self, text: str) -> tuple[str, str]:
        """Return the thinking and the text that are certain now."""
        was_over = self._reader.is_over
        thinking, text = self._reader.feed(text)
        self._has_thought = self._reader.has_thought and not was_over
        return thinking, self._read(text)

    def flush(self) -> tuple[str, str]:
        """Return the rest, at the end of the choice."""
        thinking, text = self._reader.flush()
        text = self._read(text)
        rest, self._buffer = self._buffer, ""
        is_mark = self._has_begun and rest.startswith(self._closing)
        return thinking, text if is_mark else text + rest

    def _read(self, text: str) -> str:
        """Return the text that is certain now, without the marks around it."""
        text = self._buffer + text
        self._buffer = ""
        if not self._has_begun:
            head = text.lstrip()
            if len(text) < MAX_SPACE and len(head) < len(self._opening) and self._opening.startswith(head):
                self._buffer = text
                return ""
            self._has_begun = True
            text = head.removeprefix(self._opening) if head.startswith(self._opening) else text
        before, mark, behind = text.rpartition(self._closing)
        is_last = len(behind) < MAX_SPACE and not behind.strip()
        size = len(before) if mark and is_last else len(text) - _overlap(text, self._closing)
        self._buffer = text[size:]
        return text[:size]


_ENDS = (END, CALL, "<|return|>", START)
_HEADS = (CHANNEL, MESSAGE, START, "to=", "assistant")
"""What the head of a message begins with; the prompt ends behind its role."""
MAX_HEAD = 256
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]{1,64})")
_NAME = re.compile(r"<\|channel\|>[ \t\r\n]*(\w+)")


class ChannelReader:
    """The messages of one choice of gpt-oss in; what is in `analysis` out as thinking, all else as text.

    A message to a function comes out as `<|channel|>functions.NAME<|message|>...<|call|>`, however its head was
    written, for the reader of calls. The mark behind it may be the token that ended the choice, which is no text. Text
    that has no head is content.
    """

    def __init__(self) -> None:
        self._kind = ""  # of the message that is read: thinking, call or text; empty in its head
        self._buffer = ""

    @property
    def is_over(self) -> bool:
        return False

    @property
    def has_thought(self) -> bool:
        return self._kind == "thinking"

    def feed(self, text: str) -> tuple[str, str]:
        """Return the thinking and the text that are certain now."""
        self._buffer += text
        thinking, content = "", ""
        while self._buffer:
            if not self._kind:
                leading_text = self._begin()
                if leading_text is None:
                    break
                content += leading_text
                continue
            ends = [(at, mark) for mark in _ENDS if (at := self._buffer.find(mark)) >= 0]
            size = min(ends)[0] if ends else len(self._buffer) - max(_overlap(self._buffer, mark) for mark in _ENDS)
            piece, self._buffer = self._buffer[:size], self._buffer[size:]
            if self._kind == "thinking":
                thinking += piece
            else:
                content += piece
            if not ends:
                break
            content += CALL if self._kind == "call" else ""
            self._buffer, self._kind = self._buffer.removeprefix(min(ends)[1]), ""
        return thinking, content

    def flush(self) -> tuple[str, str]:
        """Return the rest, at the end of the choice; a head that was cut is nothing."""
        rest, self._buffer = self._buffer, ""
        if self._kind == "thinking":
            return rest, ""
        return "", rest + CALL if self._kind == "call" else rest if self._kind else ""

    def _begin(self) -> str | None:
        """Read the head of a message; return the text that it becomes, None while it is not whole."""
        head, mark, rest = self._buffer.partition(MESSAGE)
        text = self._buffer.lstrip()
        is_long = len(head) > MAX_HEAD + (0 if mark else len(MESSAGE) - 1)
        if is_long or not any(known.startswith(text) or text.startswith(known) for known in _HEADS):
            self._kind = "text"
            return ""
        if not mark:
            return None
        self._buffer = rest
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
