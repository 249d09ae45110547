"""Make OpenAI's log-probabilities from the records that come with the tokens (shared/text/logprobs.py).

A log-probability is the log softmax of the model's logits before temperature, penalties, bias and masks. There is one
entry for each token that counts, also where its text is held back, left out (special tokens) or cut off (stop strings).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.gateway.request import GenerationSpec
from services.gateway.text.detokenizer import TokenText
from shared.text.logprobs import TokenLogprobs, unpack_records

LEAST = -9999.0
"""The log-probability of an impossible token, as OpenAI sends it: JSON has no number for minus infinity."""


class Offsets(Protocol):
    """One choice: where in its text each of its tokens begins."""

    offsets: list[int]


@dataclass(slots=True)
class _Held:
    """Tokens of one choice that no answer or event has had yet; `first`: the index of the first of them."""

    first: int = 0
    tokens: list[int] = field(default_factory=list)
    records: bytearray = field(default_factory=bytearray)


class Logprobs:
    """The log-probabilities of one request, kept until they are sent, and the means that best_of compares."""

    def __init__(self, spec: GenerationSpec, text: TokenText, choices: Sequence[Offsets]) -> None:
        self._spec = spec
        self._text = text
        self._choices = choices
        self._held = [_Held() for _ in choices]
        self._sampled = [array("d") for _ in choices]  # of each token, for best_of alone

    def keep(self, choice: int, first: int, tokens: list[int], records: bytes) -> None:
        """Keep tokens that a choice gained, from index `first` on, and their records."""
        if not tokens:
            return
        if self._spec.keep:
            found = unpack_records(records, self._spec.sampling.logprobs)
            self._sampled[choice].extend(one.sampled for one in found)
        if self._spec.logprobs is not None:
            held = self._held[choice]
            held.first = held.first if held.tokens else first
            held.tokens += tokens
            held.records += records

    def take(self, choice: int) -> dict[str, Any] | None:
        """Return `logprobs` of a choice, of the tokens since the last call; None when there are none, or the request
        wants none.
        """
        held, self._held[choice] = self._held[choice], _Held()
        if not held.tokens:
            return None
        found = unpack_records(bytes(held.records), self._spec.sampling.logprobs)
        found = [_agreeing(one, token) for one, token in zip(found, held.tokens, strict=True)]
        if self._spec.endpoint == "chat":
            return {"content": self._content(held.tokens, found), "refusal": None}
        return self._columns(choice, held, found)

    def kept(self) -> list[int]:
        """Return the choices to send: of each prompt the `keep` with the highest log-probability per token."""
        spec, every = self._spec, range(len(self._choices))
        if not spec.keep:
            return list(every)
        # fsum is exact: the same choice however the rows were cut.
        means = [math.fsum(values) / max(1, len(values)) for values in self._sampled]
        chosen: list[int] = []
        for first in every[:: spec.n]:
            chosen += sorted(every[first : first + spec.n], key=lambda choice: -means[choice])[: spec.keep]
        return chosen

    def _content(self, tokens: list[int], found: list[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            self._entry(token, one.sampled) | {"top_logprobs": [self._entry(*best) for best in one.best]}
            for token, one in zip(tokens, found, strict=True)
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._text.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(piece)}

    def _columns(self, choice: int, held: _Held, found: list[TokenLogprobs]) -> dict[str, Any]:
        names = [self._name(token) for token in held.tokens]
        return {
            "tokens": names,
            "token_logprobs": [_number(one.sampled) for one in found],
            "top_logprobs": [self._named(one.best, name, one.sampled) for name, one in zip(names, found, strict=True)],
            "text_offset": self._choices[choice].offsets[held.first : held.first + len(names)],
        }

    def _named(self, best: list[tuple[int, float]], sampled: str, logprob: float) -> dict[str, float]:
        """Return the best and the sampled one, most likely first; of tokens that are the same text the most likely."""
        named: dict[str, float] = {}
        for token, value in best:
            named.setdefault(self._name(token), _number(value))
        named.setdefault(sampled, _number(logprob))
        return named

    def _name(self, token: int) -> str:
        """Return a unique name of a token: its text, its bytes where those are no text, its id without bytes."""
        piece = self._text.piece(token)
        try:
            return piece.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _agreeing(one: TokenLogprobs, token: int) -> TokenLogprobs:
    """Give the sampled token one number, also where two kernels summed in another order."""
    return TokenLogprobs(dict(one.best).get(token, one.sampled), one.best)


def _number(logprob: float) -> float:
    return max(logprob, LEAST)
