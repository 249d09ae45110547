"""Sampling on a device: SamplingRows as one buffer, one copy, one launch, and the results behind an event.

The CUDA backend calls this once per iteration, so nothing here waits and no Python loop runs over rows.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.device import Device, Event
from kernels.likely import write_likely
from kernels.ops import Done, Float32, Int32, Int64, Likely, Pending, Sampled, SamplingRows, Sparse

Array = npt.NDArray[Any]

ALIGNMENT = 16  # bytes
ENTRY_BYTES = 64
"""Of each row, for which memory is taken at first: some biases, or bans, or a mask of a small vocabulary."""

RESULTS = 3  # a row's token, status, log-probability; behind those of all rows the most likely ids and theirs


class Sampler:
    """Draw tokens of one vocabulary on one device, on its main stream."""

    def __init__(self, device: Device, vocab: int, rows: int) -> None:
        """Take memory for so many rows. More rows, and long histories, take more when they come, and keep it."""
        self._device, self._vocab = device, vocab
        self._packed = device.empty((rows * (calls.SAMPLER_ROW.itemsize + ENTRY_BYTES),), torch.uint8)
        self._results = device.empty((RESULTS * rows,), torch.int32)
        self._free: list[_Pinned] = []
        self._blocks = device.processors
        self._room = _Room(device, self._blocks)

    def sample_later(
        self, logits: Tensor, rows: SamplingRows, slots: Int32, last_tokens: Tensor | None
    ) -> Pending[Sampled]:
        """Sample as Ops.sample_later. logits [R or more, vocab] float32; the rows beyond R are padding.

        last_tokens: [slots] int32 on the device; row r's token goes to last_tokens[slots[r]], unless slots[r] is
        below zero. Raise ValueError for logits, masks or penalties of the wrong shape.
        """
        count = len(rows.temperature)
        if logits.dtype != torch.float32 or not logits.is_contiguous() or logits.shape[1] != self._vocab:
            raise ValueError(f"the sampler wants contiguous float32 logits of {self._vocab} ids")
        if len(slots) != count or logits.shape[0] < count:
            raise ValueError(f"{count} rows with {len(slots)} slots and {logits.shape[0]} rows of logits")
        shape = _ResultShape(count, bool(rows.want_logprob.any()), 0 if rows.likely is None else int(rows.likely.max()))
        if not count:
            return Done(_sampled(np.zeros(0, np.int32), shape))
        layout = _layout(rows, slots, self._vocab)
        pinned = self._pinned(layout.copied, shape.numbers)
        layout.write(pinned.packed.numpy())
        main = self._device.main
        if layout.whole > self._packed.numel():
            self._packed = self._device.empty((_rounded_up(layout.whole),), torch.uint8)
        if shape.numbers > self._results.numel():
            self._results = self._device.empty((shape.numbers,), torch.int32)
        packed, results = self._packed, self._results[: shape.numbers]
        if (asked := rows.likely) is not None:
            found = _likely(results, shape)
            main.run(lambda: write_likely(logits, asked, found))
        main.copy(packed[: layout.copied], pinned.packed[: layout.copied])
        room, parts = self._room, calls.sampler_parts(count, self._vocab, self._blocks)
        call = calls.sample(
            count,
            self._vocab,
            logits.data_ptr(),
            tokens=results.data_ptr(),
            status=results.data_ptr() + 4 * count,
            logprobs=results.data_ptr() + 8 * count,
            last_tokens=0 if last_tokens is None else last_tokens.data_ptr(),
            parts=parts,
            found=room.found.data_ptr(),
            listed_scores=room.scores.data_ptr(),
            listed_ids=room.ids.data_ptr(),
            arrived=room.arrived.data_ptr(),
            **{name: packed.data_ptr() + offset for name, offset in layout.offsets.items()},
        )
        touched = (logits, packed, results, room.found, room.scores, room.ids, room.arrived)
        main.launch(call, *touched, *(() if last_tokens is None else (last_tokens,)))
        main.copy(pinned.results[: shape.numbers], results)
        return _Drawing(main.record(), pinned, shape, self._free)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        """Sample rows without a slot and wait. The history names no slot."""
        no_slots = np.full(len(rows.temperature), -1, np.int32)
        return self.sample_later(logits, rows, no_slots, None).wait()

    def _pinned(self, packed_bytes: int, numbers: int) -> _Pinned:
        """Return the memory that no launch uses any more, or else new memory; one that is too small is let go."""
        while self._free:
            pinned = self._free.pop()
            if pinned.packed.numel() >= packed_bytes and pinned.results.numel() >= numbers:
                return pinned
        packed = self._device.pinned((_rounded_up(packed_bytes),), torch.uint8)
        return _Pinned(packed, self._device.pinned((_rounded_up(numbers),), torch.int32))


@dataclass(frozen=True, slots=True)
class _ResultShape:
    """The sizes that fix where each result of an iteration lies in the array of results."""

    rows: int
    logprobs: bool
    likely: int  # of each row

    @property
    def numbers(self) -> int:
        return (RESULTS + 2 * self.likely) * self.rows


@dataclass(frozen=True, slots=True)
class _Pinned:
    """One iteration's memory on the host: free again once the results have been read, for then all copies are done."""

    packed: Tensor  # uint8
    results: Tensor  # int32


class _Room:
    """Results that the blocks of one row leave for the last of them; one launch after the other uses it."""

    def __init__(self, device: Device, blocks: int) -> None:
        listed = (blocks, calls.SAMPLER_LISTED)
        self.found = device.empty((blocks * calls.SAMPLER_PART.itemsize,), torch.uint8)
        self.scores, self.ids = device.empty(listed, torch.float32), device.empty(listed, torch.int32)
        self.arrived = device.empty((blocks,), torch.int32)
        device.main.run(self.arrived.zero_)


class _Drawing(Pending[Sampled]):
    def __init__(self, event: Event, pinned: _Pinned, shape: _ResultShape, free: list[_Pinned]) -> None:
        self._event, self._pinned, self._shape, self._free = event, pinned, shape, free
        self._result: Sampled | None = None
        self._reading = threading.Lock()  # the memory is given back once

    def ready(self) -> bool:
        return self._result is not None or self._event.done()

    def wait(self) -> Sampled:
        self._event.wait()
        with self._reading:
            if self._result is None:
                numbers: Int32 = self._pinned.results[: self._shape.numbers].numpy()
                self._result = _sampled(numbers, self._shape)
                self._free.append(self._pinned)
        return self._result


def _sampled(results: Int32, shape: _ResultShape) -> Sampled:
    """Return the sample.

    results: of all rows tokens, status, the bits of log-probabilities, and what _likely names; copied.
    """
    columns = results[: RESULTS * shape.rows].reshape(RESULTS, shape.rows)
    tokens, status = (column.astype(np.int64) for column in columns[:2])
    logprobs = columns[2].view(np.float32).copy() if shape.logprobs else None
    likely = _likely(torch.from_numpy(results.copy()), shape) if shape.likely else None
    return Sampled(tokens, status, logprobs, likely)


def _likely(results: Tensor, shape: _ResultShape) -> Likely:
    """Return the part of the results that holds the most likely ids and their log-probabilities; no copy."""
    ids, logprobs = results[RESULTS * shape.rows :].view(2, shape.rows, shape.likely)
    return Likely(ids, logprobs.view(torch.float32))


@dataclass(slots=True)
class _Layout:
    """Where the arrays of a launch lie in its buffer; behind those that are copied comes scratch room of the kernel."""

    arrays: dict[str, Array] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    copied: int = 0  # bytes
    whole: int = 0

    def add(self, name: str, array: Array) -> None:
        self.arrays[name] = array
        self.copied = self.add_room(name, array.nbytes)

    def add_room(self, name: str, size: int) -> int:
        """Return where it ends."""
        self.offsets[name] = self.whole
        end = self.whole + size
        self.whole = -(-end // ALIGNMENT) * ALIGNMENT
        return end

    def write(self, buffer: npt.NDArray[np.uint8]) -> None:
        for name, array in self.arrays.items():
            offset = self.offsets[name]
            buffer[offset : offset + array.nbytes].view(array.dtype)[:] = array.ravel()


def _layout(rows: SamplingRows, slots: Int32, vocab: int) -> _Layout:
    count, layout = len(slots), _Layout()
    table = np.zeros(count, calls.SAMPLER_ROW)
    for name in ("seed", "position", "temperature", "top_p", "min_p", "top_k", "want_logprob"):
        table[name] = getattr(rows, name)
    table["slot"], table["mask"] = slots, -1
    layout.add("row_array", table)
    if rows.bias is not None and rows.bias.values is not None:
        ids, values = _biases(rows.bias, table)
        layout.add("bias_ids", ids)
        layout.add("bias_values", values)
    if rows.banned is not None:
        layout.add("banned_ids", _banned(rows.banned, table))
    if rows.mask_rows is not None and rows.mask_words is not None:
        if rows.mask_words.shape[1] != -(-vocab // 32):
            raise ValueError(f"masks of {rows.mask_words.shape[1]} words for a vocabulary of {vocab}")
        table["mask"][rows.mask_rows] = np.arange(len(rows.mask_rows))
        layout.add("mask_words", rows.mask_words.astype(np.uint32, copy=False))
    if rows.history is not None and rows.history.values is not None:
        if rows.presence is None or rows.frequency is None or rows.repetition is None:
            raise ValueError("a sampling batch with a history needs all three penalty columns")
        for name in ("presence", "frequency", "repetition"):
            table[name] = getattr(rows, name)
        layout.add("history_ids", _history(rows.history, rows.history.values, table))
    for name, of in (("bias_before", "bias_ids"), ("history_before", "history_ids"), ("history_counts", "history_ids")):
        if of in layout.arrays:
            layout.add_room(name, layout.arrays[of].nbytes)
    return layout


def _biases(bias: Sparse, table: Array) -> tuple[Int32, Float32]:
    """Return it sorted by row and id; equal ones keep their order."""
    order = np.lexsort((bias.ids, bias.rows))
    _fill_bounds(table, bias.rows[order], ("first_bias", "end_bias"))
    values = np.zeros(0, np.float32) if bias.values is None else bias.values[order].astype(np.float32, copy=False)
    return bias.ids[order].astype(np.int32), values


def _banned(banned: Sparse, table: Array) -> Int32:
    order = np.argsort(banned.rows, kind="stable")
    _fill_bounds(table, banned.rows[order], ("first_banned", "end_banned"))
    return banned.ids[order].astype(np.int32)


def _history(history: Sparse, is_output: Float32, table: Array) -> Int32:
    """Return it sorted by row, the prompt before the outputs; they mostly come so, and may be millions."""
    place, ids = 2 * history.rows + (is_output != 0), history.ids
    if (place[1:] < place[:-1]).any():
        order = np.argsort(place, kind="stable")
        place, ids = place[order], ids[order]
    bounds = np.searchsorted(place, np.arange(2 * len(table) + 1))
    table["first_history"], table["first_output"], table["end_history"] = bounds[:-1:2], bounds[1::2], bounds[2::2]
    return ids.astype(np.int32)


def _fill_bounds(table: Array, rows: Int64, names: tuple[str, str]) -> None:
    bounds = np.searchsorted(rows, np.arange(len(table) + 1))
    table[names[0]], table[names[1]] = bounds[:-1], bounds[1:]


def _rounded_up(size: int) -> int:
    """Return a size that a slightly larger next batch fits too."""
    return 1 << (size - 1).bit_length()
