"""Count the tokens of a batch, in the form of `usage` of OpenAI's batch object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one answer, or of several."""

    input_tokens: int = 0
    cached_tokens: int = 0  # of the input
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of the output

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def body(self) -> dict[str, Any]:
        """Return the form of OpenAI's API."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


def usage_of(line: Any) -> Usage:
    """Return the tokens of an output line of any endpoint; none for a failed request.

    >>> usage_of({"response": {"body": {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}}})
    Usage(input_tokens=3, cached_tokens=0, output_tokens=2, reasoning_tokens=0)
    """
    usage = _within(_within(_within(line, "response"), "body"), "usage")
    given, got = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    return Usage(
        _number(usage, f"{given}_tokens"),
        _number(_within(usage, f"{given}_tokens_details"), "cached_tokens"),
        _number(usage, f"{got}_tokens"),
        _number(_within(usage, f"{got}_tokens_details"), "reasoning_tokens"),
    )


def _within(value: Any, name: str) -> dict[str, Any]:
    part = value.get(name) if isinstance(value, dict) else None
    return part if isinstance(part, dict) else {}


def _number(value: dict[str, Any], name: str) -> int:
    count = value.get(name)
    return count if isinstance(count, int) else 0
