"""Read the thinking of a model in its text while it comes: what stands between `<think>` and `</think>`.

The output is a function of the text so far and of the state in which the prompt left the model, however the text was
cut into pieces. An answer has one block of thinking, at its beginning: a marker anywhere else is text, so an answer may
explain the markers. White space beside the markers stays where the model wrote it, except before an opening marker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from services.gateway.request import THINKING, UNDECIDED

OPENING, CLOSING = "<think>", "</think>"


def markers_of(template: str, vocabulary: Iterable[str]) -> Literal["none", "think"]:
    """Return how a model marks its thinking, by its chat template or the names of its added tokens."""
    names = frozenset(vocabulary)
    return "think" if CLOSING in template or {OPENING, CLOSING} <= names else "none"


def state_behind(text: str) -> str:
    """Return the state that the end of a rendered prompt leaves.

    Only the very end counts: a marker further up is one of the conversation.

    >>> state_behind("<|im_start|>assistant\\n<think>\\n")
    'thinking'
    >>> state_behind("<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n")
    ''
    """
    end = text.rstrip()
    if end.endswith(CLOSING):
        return ""
    return THINKING if end.endswith(OPENING) else UNDECIDED


def state_within(content: str) -> str:
    """Return the state behind the beginning of an answer that is to be continued."""
    answer = content.lstrip()
    if not answer:
        return UNDECIDED
    return THINKING if answer.startswith(OPENING) and CLOSING not in answer else ""


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


class ReasoningReader:
    """The text of one choice in; its thinking and the text behind it out.

    is_over: nothing that follows is thinking. has_thought: the choice has a block of thinking.
    """

    def __init__(self, state: str) -> None:
        self._state = state
        self.has_thought = state == THINKING
        self._held = ""  # may be the beginning of a marker, or white space before one

    @property
    def is_over(self) -> bool:
        return not self._state

    def feed(self, text: str) -> tuple[str, str]:
        """Return the thinking and the text that are certain now."""
        text = self._held + text
        self._held = ""
        if self._state == UNDECIDED:
            begun = text.lstrip()
            if len(begun) < len(OPENING) and OPENING.startswith(begun):
                self._held = text
                return "", ""
            self.has_thought = begun.startswith(OPENING)
            self._state = THINKING if self.has_thought else ""
            text = begun.removeprefix(OPENING) if self.has_thought else text
        if not self._state:
            return "", text
        thinking, marker, rest = text.partition(CLOSING)
        if marker:
            self._state = ""
            return thinking, rest
        longest = min(len(text), len(CLOSING) - 1)
        keep = next((size for size in range(longest, 0, -1) if CLOSING.startswith(text[-size:])), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def flush(self) -> tuple[str, str]:
        """Return the rest, at the end of the choice."""
        held, self._held = self._held, ""
        return (held, "") if self._state == THINKING else ("", held)
