"""Make OpenAI's log-probabilities from the records that come with the tokens (shared/text/logprobs.py).

A log-probability is the log softmax of the model's logits before temperature, penalties, bias and masks. There is one
entry for each token that counts, also where its text is held back, left out (special tokens) or cut off (stop strings).
An entry with twenty others is 50 times as large as its record, and its JSON seven times; so JSON is made of a few
tokens at a time.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import orjson

from services.gateway.errors import broken_record
from services.gateway.request import GenerationSpec
from services.gateway.text.detokenizer import TokenText
from shared.text.logprobs import (
    TokenLogprobs,
    check_records,
    prompt_record_bytes,
    unpack_prompt_records,
    unpack_records,
)

LEAST = -9999.0
"""The log-probability of an impossible token, as OpenAI sends it: JSON has no number for minus infinity."""
AT_ONCE = 1024
"""Log-probabilities of which JSON is made in one turn of the event loop, with those of the most likely tokens."""


class Offsets(Protocol):
    """One choice: where in its text each of its tokens begins."""

    offsets: list[int]


@dataclass(slots=True)
class _UnsentTokens:
    """Tokens of one choice that no answer or event has had yet; `first_index`: of the first of them."""

    first_index: int = 0
    tokens: list[int] = field(default_factory=list)
    records: bytearray = field(default_factory=bytearray)
    written_tokens: int = 0  # so many of the tokens are in `columns`
    columns: dict[str, list[bytes]] = field(default_factory=dict)  # JSON of items, without the brackets of the list


class Logprobs:
    """The log-probabilities of one request, kept until they are sent, and the means that best_of compares."""

    def __init__(self, spec: GenerationSpec, text: TokenText, choices: Sequence[Offsets]) -> None:
        self._spec = spec
        self._text = text
        self._choices = choices
        self._unsent = [_UnsentTokens() for _ in choices]
        self._sampled_logprobs = [array("d") for _ in choices]  # of each token, for best_of alone

    def keep(self, choice: int, first: int, tokens: list[int], records: bytes) -> None:
        """Keep tokens that a choice gained, from index `first` on, and their records."""
        if not tokens:
            return
        if self._spec.keep:
            logprobs = unpack_records(records, self._spec.sampling.logprobs)
            self._sampled_logprobs[choice].extend(one.sampled_logprob for one in logprobs)
        if self._spec.logprobs is not None:
            unsent = self._unsent[choice]
            unsent.first_index = unsent.first_index if unsent.tokens else first
            unsent.tokens += tokens
            unsent.records += records

    async def write(self) -> None:
        """Make the JSON of all choices to send, a few tokens in one turn of the event loop."""
        for choice in self.choices_to_send():
            held = self._unsent[choice]
            while held.written_tokens < len(held.tokens):
                self._write(choice, max(1, AT_ONCE // self._spec.sampling.logprobs))
                await asyncio.sleep(0)

    def take(self, choice: int) -> dict[str, Any] | None:
        """Return `logprobs` of a choice, of the tokens since the last call; None when there are none, or the request
        wants none. Its lists are fragments of JSON.
        """
        if not self._unsent[choice].tokens:
            return None
        self._write(choice, len(self._unsent[choice].tokens))
        unsent, self._unsent[choice] = self._unsent[choice], _UnsentTokens()
        columns: dict[str, Any] = {
            name: orjson.Fragment(b"[" + b",".join(parts) + b"]") for name, parts in unsent.columns.items()
        }
        return columns | {"refusal": None} if self._spec.endpoint == "chat" else columns

    def choices_to_send(self) -> list[int]:
        """Return the choices to send: of each prompt the `keep` with the highest log-probability per token."""
        spec, choices = self._spec, range(len(self._choices))
        if not spec.keep:
            return list(choices)
        # fsum is exact: the same choice however the rows were cut.
        means = [math.fsum(values) / max(1, len(values)) for values in self._sampled_logprobs]
        best_choices: list[int] = []
        for first in choices[:: spec.n]:
            best_choices += sorted(choices[first : first + spec.n], key=lambda choice: -means[choice])[: spec.keep]
        return best_choices

    def _write(self, choice: int, most: int) -> None:
        """Make the JSON of the next tokens of a choice."""
        unsent, size = self._unsent[choice], self._spec.record_bytes
        begin, end = unsent.written_tokens, min(unsent.written_tokens + most, len(unsent.tokens))
        if begin == end:
            return
        tokens = unsent.tokens[begin:end]
        logprobs = unpack_records(bytes(unsent.records[size * begin : size * end]), self._spec.sampling.logprobs)
        logprobs = [_with_sampled(one, token) for one, token in zip(logprobs, tokens, strict=True)]
        if self._spec.endpoint == "chat":
            columns: dict[str, list[Any]] = {"content": self._content(tokens, logprobs)}
        else:
            offset_base = len(self._spec.prompt_texts[choice // self._spec.n]) if self._spec.echo else 0
            offsets = self._choices[choice].offsets[unsent.first_index + begin : unsent.first_index + end]
            columns = _columns(self._text, tokens, logprobs, [offset_base + offset for offset in offsets])
        for name, items in columns.items():
            unsent.columns.setdefault(name, []).append(orjson.dumps(items)[1:-1])
        unsent.written_tokens = end

    def _content(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            self._entry(token, one.sampled_logprob) | {"top_logprobs": [self._entry(*best) for best in one.best]}
            for token, one in zip(tokens, logprobs, strict=True)
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """Return OpenAI's form of one token in a chat."""
        piece = self._text.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(piece)}


class PromptLogprobs:
    """The log-probabilities of the prompts of one request."""

    def __init__(self, spec: GenerationSpec, text: TokenText, records: Sequence[bytes]) -> None:
        """records: of each prompt, as `prompt_logprobs:{id}:{prompt}` keeps them."""
        self._spec = spec
        self._text = text
        self._records = records

    def has(self, prompt: int) -> bool:
        """Return whether every token of a prompt but the first has its record."""
        size = prompt_record_bytes(self._spec.prompt_wanted)
        return len(self._records[prompt]) == size * (len(self._spec.prompts[prompt]) - 1)

    def check(self, prompt: int, vocab_size: int) -> None:
        """Raise ApiError(500) for records of a prompt that no worker made."""
        records = np.frombuffer(self._records[prompt], np.uint8)
        rows = records.reshape(-1, prompt_record_bytes(self._spec.prompt_wanted))
        try:
            check_records(rows[:, 4:].tobytes(), self._spec.prompt_wanted, vocab_size)
        except ValueError as error:
            raise broken_record() from error

    def echo(self, prompt: int) -> dict[str, list[Any]]:
        """Return `logprobs` of a completion for its echoed prompt; the first token has none."""
        tokens, most = self._spec.prompts[prompt], self._spec.logprobs or 0
        logprobs = [TokenLogprobs(one.sampled_logprob, one.best[:most]) for _, one in self._parse_records(prompt)]
        columns = _columns(self._text, tokens[1:], logprobs, self._offsets(tokens))
        first: dict[str, Any] = {"tokens": _name(self._text, tokens[0]), "text_offset": 0}
        return {name: [first.get(name), *column] for name, column in columns.items()}

    def list_tokens(self, prompt: int) -> list[dict[str, Any] | None]:
        """Return vLLM's `prompt_logprobs`: of each token itself and the most likely ones by id; None for the first."""
        tokens, most = self._spec.prompts[prompt], self._spec.prompt_logprobs or 0
        entries: list[dict[str, Any] | None] = [None]
        for token, (rank, one) in zip(tokens[1:], self._parse_records(prompt), strict=True):
            entry = {str(token): self._entry(token, one.sampled_logprob, rank)}
            for place, (other, logprob) in enumerate(one.best[:most], 1):
                entry.setdefault(str(other), self._entry(other, logprob, place))
            entries.append(entry)
        return entries

    def _parse_records(self, prompt: int) -> list[tuple[int, TokenLogprobs]]:
        tokens = self._spec.prompts[prompt][1:]
        logprobs = unpack_prompt_records(self._records[prompt], self._spec.prompt_wanted)
        return [(rank, _with_sampled(one, token)) for token, (rank, one) in zip(tokens, logprobs, strict=True)]

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        piece = self._text.piece(token).decode("utf-8", "replace")
        return {"logprob": _number(logprob), "rank": rank, "decoded_token": piece}

    def _offsets(self, tokens: list[int]) -> list[int]:
        """Return where in the text of a prompt its second token and each later one begins."""
        detokenizer, length, offsets = self._text.start([], self._spec.skip_special_tokens), 0, []
        for token in tokens[:-1]:
            length += len(detokenizer.feed(token))
            offsets.append(length)
        return offsets


def _columns(
    text: TokenText, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> dict[str, list[Any]]:
    """Return `logprobs` of a completion."""
    names = [_name(text, token) for token in tokens]
    rows = zip(names, logprobs, strict=True)
    return {
        "tokens": names,
        "token_logprobs": [_number(one.sampled_logprob) for one in logprobs],
        "top_logprobs": [_name_best(text, one.best, name, one.sampled_logprob) for name, one in rows],
        "text_offset": list(offsets),
    }


def _name_best(text: TokenText, best: list[tuple[int, float]], sampled_text: str, logprob: float) -> dict[str, float]:
    """Return the best and the sampled one, most likely first; of tokens that are the same text the most likely."""
    logprob_of: dict[str, float] = {}
    for token, value in best:
        logprob_of.setdefault(_name(text, token), _number(value))
    logprob_of.setdefault(sampled_text, _number(logprob))
    return logprob_of


def _name(text: TokenText, token: int) -> str:
    """Return a unique name of a token: its text, its bytes where those are no text, its id without bytes."""
    piece = text.piece(token)
    try:
        return piece.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _with_sampled(logprobs: TokenLogprobs, token: int) -> TokenLogprobs:
    """Give the sampled token one number, also where two kernels summed in another order."""
    return TokenLogprobs(dict(logprobs.best).get(token, logprobs.sampled_logprob), logprobs.best)


def _number(logprob: float) -> float:
    return max(logprob, LEAST)
