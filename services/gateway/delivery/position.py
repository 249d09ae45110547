"""How far a client has read: the second half of an event's id, with which it goes on at any gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.gateway.openai.errors import ApiError, shown

NOTHING, PREAMBLE = -2, -1
"""Positions before the first token: nothing was sent; what comes before the text was (a role, an echoed prompt)."""

_USAGE = "+"
_INDEX = re.compile(r"-?[0-9]{1,9}")


@dataclass(slots=True)
class Position:
    """last: by choice the index of the last token whose text the client has, NOTHING or PREAMBLE before; one more than
    the last token's with the text that only the end released, two more with the reason. usage: it has that, too."""

    last: list[int]
    usage: bool = False

    @staticmethod
    def parse(given: str, request_id: str, choices: int) -> Position:
        """From an event's id. Raises ApiError(400) for one that is not of this request.

        >>> Position.parse("cmpl-1:4.-1", "cmpl-1", 2)
        Position(last=[4, -1], usage=False)
        """
        owner, _, indices = given.rpartition(":")
        parts = indices.removesuffix(_USAGE).split(".")
        if owner != request_id or len(parts) != choices or not all(_INDEX.fullmatch(part) for part in parts):
            example = f"{request_id}:{'.'.join(['0'] * choices)}"
            raise ApiError(
                400,
                f"Last-Event-ID must be the id of an event of this request, such as {example}; got {shown(given)}",
                param="Last-Event-ID",
                code="invalid_event_id",
            )
        return Position([max(NOTHING, int(part)) for part in parts], indices.endswith(_USAGE))

    def __str__(self) -> str:
        return ".".join(map(str, self.last)) + _USAGE * self.usage
