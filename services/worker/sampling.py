"""How each slot is sampled: worker.proto's Sampling as columns, and the rows of one iteration gathered from them.

Numbers live in columns because every iteration reads them; ids (bias, bans, stops) live in a small record per slot
because few sequences have any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kernels.ops import Bool, Int32, Int64, SamplingRows, Sparse
from protos import worker_pb2
from shared.text.logprobs import MAX_LOGPROBS
from shared.text.logprobs import wrong_number as wrong_logprobs
from shared.wire.columns import unpack, unpack_float

GREEDY_BELOW = 1e-5  # a temperature this small overflows float32 logits; its limit is the argmax


@dataclass(frozen=True, slots=True)
class SlotIds:
    """The sparse part of one slot."""

    bias_ids: Int32
    bias_values: npt.NDArray[np.float32]
    banned_ids: Int32
    stop_ids: Int32
    min_tokens: int


class SamplingTable:
    """Columns by slot. `vocab` bounds every id."""

    def __init__(self, max_seqs: int, vocab: int) -> None:
        self.vocab = vocab
        self.temperature = np.zeros(max_seqs, np.float32)
        self.top_p = np.ones(max_seqs, np.float32)
        self.top_k = np.zeros(max_seqs, np.int32)
        self.min_p = np.zeros(max_seqs, np.float32)
        self.seed = np.zeros(max_seqs, np.uint64)
        self.presence = np.zeros(max_seqs, np.float32)
        self.frequency = np.zeros(max_seqs, np.float32)
        self.repetition = np.ones(max_seqs, np.float32)
        self.penalised = np.zeros(max_seqs, np.bool_)
        self.logprobs = np.zeros(max_seqs, np.int32)  # as in the message
        self.prompt_logprobs = np.zeros(max_seqs, np.int32)
        self.has_grammar = np.zeros(max_seqs, np.bool_)
        self._has_ids = np.zeros(max_seqs, np.bool_)
        self._ids: dict[int, SlotIds] = {}
        # Slots and rows of the last iteration. Set only if no row has masks, penalties or ids; then only positions
        # change until `enter`.
        self._steady: tuple[bytes, SamplingRows] | None = None

    def clear(self) -> None:
        """Forget every slot. Columns of slots that are not in use are never read."""
        self._ids.clear()
        self._steady = None

    def enter(self, slot: int, message: worker_pb2.Sampling) -> str:
        """Take the sampling of an entering sequence; return what is wrong with it, or nothing."""
        self._ids.pop(slot, None)
        self._steady = None
        temperature = message.temperature
        self.temperature[slot] = 0.0 if temperature < GREEDY_BELOW else temperature
        self.top_p[slot] = message.top_p
        self.top_k[slot] = min(message.top_k, self.vocab)
        self.min_p[slot] = message.min_p
        self.seed[slot] = message.seed
        self.presence[slot] = message.presence_penalty
        self.frequency[slot] = message.frequency_penalty
        self.repetition[slot] = message.repetition_penalty or 1.0
        self.penalised[slot] = bool(
            message.presence_penalty or message.frequency_penalty or message.repetition_penalty not in (0.0, 1.0)
        )
        self.logprobs[slot] = min(message.logprobs, MAX_LOGPROBS + 1)
        self.prompt_logprobs[slot] = min(message.prompt_logprobs, MAX_LOGPROBS + 1)
        self.has_grammar[slot] = bool(message.grammar)
        self._has_ids[slot] = bool(message.bias_ids or message.banned_ids or message.stop_ids)
        try:
            if self._has_ids[slot]:
                self._ids[slot] = self._read_ids(message)
        except ValueError as error:
            return str(error)
        return _wrong_number(message)

    def rows(
        self, slots: Int32, known: Int32, prompt: Int32, tokens: Int32, masks: Mapping[int, bytes] | None = None
    ) -> SamplingRows:
        """Return the rows of one iteration. slots, known, prompt: [R]; tokens: [max_seqs, ...].

        masks: by row the ids that its token may have: bit i of little-endian word w allows id 32 w + i.
        """
        if not masks and self._steady is not None and self._steady[0] == slots.tobytes():
            return replace(self._steady[1], position=known.astype(np.int64))
        masked = [(row, np.frombuffer(mask, "<u4")) for row, mask in sorted(masks.items())] if masks else []
        penalised = self.penalised[slots].nonzero()[0]
        bias, banned = self._sparse(slots, known - prompt)
        logprobs = self.logprobs[slots]
        rows = SamplingRows(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            seed=self.seed[slots],
            position=known.astype(np.int64),
            want_logprob=logprobs > 0,
            likely=np.maximum(logprobs - 1, 0) if (logprobs > 1).any() else None,
            bias=bias,
            banned=banned,
            mask_rows=np.array([row for row, _ in masked], np.int64) if masked else None,
            mask_words=np.stack([words for _, words in masked]) if masked else None,
            history=_history(penalised, slots, known, prompt, tokens) if penalised.size else None,
            presence=self.presence[slots] if penalised.size else None,
            frequency=self.frequency[slots] if penalised.size else None,
            repetition=self.repetition[slots] if penalised.size else None,
        )
        if not (masked or penalised.size or self._has_ids[slots].any()):
            self._steady = slots.tobytes(), rows
        return rows

    def _sparse(self, slots: Int32, produced: Int32) -> tuple[Sparse | None, Sparse | None]:
        """Return the bias and bans of the rows that have any; a Python loop over those alone."""
        bias: list[tuple[int, Int32, npt.NDArray[np.float32]]] = []
        banned: list[tuple[int, Int32]] = []
        for row in self._has_ids[slots].nonzero()[0].tolist():
            ids = self._ids[int(slots[row])]
            if ids.bias_ids.size:
                bias.append((row, ids.bias_ids, ids.bias_values))
            if ids.banned_ids.size:
                banned.append((row, ids.banned_ids))
            if ids.stop_ids.size and produced[row] < ids.min_tokens:
                banned.append((row, ids.stop_ids))
        return (
            Sparse(_repeat(bias), _join(ids for _, ids, _ in bias), np.concatenate([values for *_, values in bias]))
            if bias
            else None,
            Sparse(_repeat(banned), _join(ids for _, ids in banned)) if banned else None,
        )

    def _read_ids(self, message: worker_pb2.Sampling) -> SlotIds:
        ids = SlotIds(
            bias_ids=unpack(message.bias_ids),
            bias_values=unpack_float(message.bias_values),
            banned_ids=unpack(message.banned_ids),
            stop_ids=unpack(message.stop_ids),
            min_tokens=message.min_tokens,
        )
        if len(ids.bias_ids) != len(ids.bias_values):
            raise ValueError(f"{len(ids.bias_ids)} bias_ids have {len(ids.bias_values)} bias_values")
        if not np.isfinite(ids.bias_values).all():
            raise ValueError("bias_values are not finite; ban an id instead")
        for name, column in (("bias_ids", ids.bias_ids), ("banned_ids", ids.banned_ids), ("stop_ids", ids.stop_ids)):
            outside = column[(column < 0) | (column >= self.vocab)]
            if outside.size:
                raise ValueError(f"{name}: {outside[0]} is outside the vocabulary of {self.vocab}")
        return ids


def _wrong_number(message: worker_pb2.Sampling) -> str:
    """Return what is out of range, or nothing."""
    for name in ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if not math.isfinite(getattr(message, name)):
            return f"{name} is not finite"
    if message.temperature < 0 or message.repetition_penalty < 0:
        return "temperature and repetition_penalty cannot be negative"
    if not 0 <= message.top_p <= 1 or not 0 <= message.min_p <= 1:
        return f"top_p {message.top_p} and min_p {message.min_p} must lie in 0..1"
    return wrong_logprobs(message.logprobs) or wrong_logprobs(message.prompt_logprobs, "prompt_logprobs")


def _history(rows: Int64, slots: Int32, known: Int32, prompt: Int32, tokens: Int32) -> Sparse:
    """Return every known token of the penalised rows, output or prompt."""
    lengths = known[rows].astype(np.int64)
    first = np.cumsum(lengths) - lengths
    row = np.repeat(rows, lengths)
    position = np.arange(len(row)) - np.repeat(first, lengths)
    is_output: Bool = position >= prompt[row]
    return Sparse(row, tokens[slots[row], position].astype(np.int64), is_output.astype(np.float32))


def _repeat(parts: list[tuple[int, Int32]] | list[tuple[int, Int32, npt.NDArray[np.float32]]]) -> Int64:
    return np.repeat(np.array([part[0] for part in parts], np.int64), [len(part[1]) for part in parts])


def _join(columns: Iterable[Int32]) -> Int64:
    return np.concatenate(list(columns)).astype(np.int64)
