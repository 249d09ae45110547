"""Tell from the text of a regular expression that it can take exponential time or recurse. Oniguruma's syntax.

Only what no tokenizer needs is found: a group repeated that is itself one repetition, as in `(a+)+`, references and
calls. An expression that passes can still take time in a high power of a text's length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_REGEX_BYTES = 16 * 1024
MAX_REPEATS = 1000
"""n and m of `{n,m}`."""
MAX_GROUPS_DEEP = 32

_QUANTIFIER = re.compile(r"([*+?]|\{(\d*)(,?)(\d*)\})([?+]?)")
_ESCAPE = re.compile(r"\\(?:[pPx]\{[^}]*\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_REFERENCE = re.compile(r"\\(?:[1-9]|[kg][<'])")
_OPENING = re.compile(r"\((?:\?(?P<look><?[=!])|\?(?P<atomic>>)|\?<\w+>|\?[imxadu-]*(?P<alone>\))|\?[imxadu-]*:)?")
_UNUSUAL = re.compile(r"\((?:\*|\?(?:[~({&RP]|[+-]?\d))")
_ZERO_WIDTH = {r"\b", r"\B", r"\A", r"\z", r"\Z", r"\G"}


@dataclass(slots=True)
class _Item:
    may_be_empty: bool = False
    is_repetition: bool = False
    """Of lengths that vary, by itself."""


@dataclass(slots=True)
class _Group:
    is_look: bool = False
    is_atomic: bool = False
    alternatives: list[list[_Item]] = field(default_factory=lambda: [[]])

    def add(self, item: _Item) -> None:
        self.alternatives[-1].append(item)

    def item(self) -> _Item:
        if self.is_look:
            return _Item(may_be_empty=True)
        return _Item(
            may_be_empty=any(all(item.may_be_empty for item in one) for one in self.alternatives),
            is_repetition=not self.is_atomic and any(map(_is_repetition, self.alternatives)),
        )


def _is_repetition(items: list[_Item]) -> bool:
    """Return whether one repetition can make up all of a sequence."""
    return any(item.is_repetition and all(other.may_be_empty for other in items if other is not item) for item in items)


def regex_problem(pattern: str) -> str:
    """Return what is wrong with an expression, as in "it {problem}"; empty for one that may be used."""
    size = len(pattern.encode())
    if size > MAX_REGEX_BYTES:
        return f"has {size} bytes, at most {MAX_REGEX_BYTES}"
    groups, at = [_Group()], 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            if _REFERENCE.match(pattern, at):
                return "refers to a group, which can take exponential time"
            match = _ESCAPE.match(pattern, at)
            item = _Item(may_be_empty=match is not None and match.group() in _ZERO_WIDTH)
            at = match.end() if match else at + 1
        elif char == "[":
            item, at = _Item(), _end_of_class(pattern, at)
        elif char == "(":
            if _UNUSUAL.match(pattern, at):
                return "has a call, a condition or an absence, which can take exponential time"
            if (opening := _OPENING.match(pattern, at)) is None:
                return "cannot be read"
            at = opening.end()
            if not opening["alone"]:
                groups.append(_Group(is_look=bool(opening["look"]), is_atomic=bool(opening["atomic"])))
                if len(groups) > MAX_GROUPS_DEEP:
                    return f"has groups nested more than {MAX_GROUPS_DEEP} deep"
            continue
        elif char == "|":
            groups[-1].alternatives.append([])
            at += 1
            continue
        elif char == ")" and len(groups) > 1:
            item, at = groups.pop().item(), at + 1
        else:
            item, at = _Item(may_be_empty=char in "^$"), at + 1
        while quantifier := _QUANTIFIER.match(pattern, at):
            sign, least, comma, most, mode = quantifier.groups()
            if sign[0] == "{" and not least and not most:
                break  # a bracket that stands for itself
            at = quantifier.end()
            low, high = _range(sign, least, comma, most)
            if max(low, high or 0) > MAX_REPEATS:
                return f"repeats more than {MAX_REPEATS} times by a number"
            if high != 1 and item.is_repetition:
                return "repeats a group that is a repetition itself, which can take exponential time"
            item = _Item(
                may_be_empty=item.may_be_empty or low == 0,
                is_repetition=item.is_repetition or (high != 1 and low != high and mode != "+"),
            )
        groups[-1].add(item)
    return ""


def _range(sign: str, least: str, comma: str, most: str) -> tuple[int, int | None]:
    """Return the least and the most repetitions; None for no end."""
    if sign[0] != "{":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
    low = int(least or 0)
    return low, (int(most) if most else None) if comma else low


def _end_of_class(pattern: str, at: int) -> int:
    """Return the index behind a class of characters, which may hold others."""
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
            at += pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at + 1)  # the first one stands for itself
        elif pattern[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at
