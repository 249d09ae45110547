"""SamplingRows as the arguments of the sampler kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cpu.commands import SampleArgs
from kernels.cpu.program import Immediate, address
from kernels.likely import likely_of
from kernels.ops import Int64, Sampled, SamplingRows, Sparse

Array = npt.NDArray[Any]

DRAW = 16
"""What one number of a row that is drawn costs beside one of a row that takes its largest, roughly."""

SHARED = 1 << 19
"""Numbers from which threads share the work: about 50 us. One that is woken comes after 30 (AMD EPYC, a guest)."""


def sample(runner: Immediate, logits: Tensor, rows: SamplingRows) -> Sampled:
    """Sample from logits [R, V] float32, which are overwritten."""
    count, vocab = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError("the sampler wants contiguous float32 logits")
    tokens, status = drawn = np.empty((2, count), np.int64)
    greedy = rows.is_plain_greedy
    wanted = not greedy and bool(rows.want_logprob.any())
    logprobs = np.empty(count, np.float32) if wanted else None
    likely = likely_of(logits, rows)
    columns: dict[str, Array] = {}
    if not greedy:
        columns = _columns(rows, count, vocab)
    args = SampleArgs(
        logits=logits.data_ptr(),
        tokens=address(drawn),
        status=address(drawn) + tokens.nbytes,
        logprobs=None if logprobs is None else address(logprobs),
        vocab=vocab,
        greedy=greedy,
        **{name: address(column) for name, column in columns.items()},
    )
    work = count * vocab * (1 if greedy else DRAW)
    is_small = work < SHARED or (count == 1 and not greedy)  # a row is drawn by one thread
    run = runner.alone if is_small else runner.now
    run(count, args)
    return Sampled(tokens, status, logprobs, likely)


def _columns(rows: SamplingRows, count: int, vocab: int) -> dict[str, Array]:
    columns: dict[str, Array] = {
        "temperature": rows.temperature.astype(np.float32, copy=False),
        "top_k": rows.top_k.astype(np.int32, copy=False),
        "top_p": rows.top_p.astype(np.float32, copy=False),
        "min_p": rows.min_p.astype(np.float32, copy=False),
        "seed": rows.seed.astype(np.uint64, copy=False),
        "position": rows.position.astype(np.int64, copy=False),
        "want_logprob": rows.want_logprob.view(np.uint8),
    }
    if rows.bias is not None and rows.bias.values is not None:
        columns["bias_start"], columns["bias_ids"], columns["bias_values"] = _by_row(rows.bias, count)
    if rows.banned is not None:
        columns["banned_start"], columns["banned_ids"], _ = _by_row(rows.banned, count)
    if rows.mask_rows is not None and rows.mask_words is not None:
        if rows.mask_words.shape[1] != -(-vocab // 32):
            raise ValueError(f"masks of {rows.mask_words.shape[1]} words for a vocabulary of {vocab}")
        columns["mask_row"] = np.full(count, -1, np.int64)
        columns["mask_row"][rows.mask_rows] = np.arange(len(rows.mask_rows))
        columns["mask_words"] = np.ascontiguousarray(rows.mask_words, np.uint32)
    if rows.history is not None:
        if rows.presence is None or rows.frequency is None or rows.repetition is None:
            raise ValueError("a sampling batch with a history needs all three penalty columns")
        start, ids, values = _by_row(rows.history, count)
        columns |= {"history_start": start, "history_ids": ids, "history_is_output": values}
        columns["presence"] = rows.presence.astype(np.float32, copy=False)
        columns["frequency"] = rows.frequency.astype(np.float32, copy=False)
        columns["repetition"] = rows.repetition.astype(np.float32, copy=False)
    return {name: np.ascontiguousarray(column) for name, column in columns.items()}


def _by_row(sparse: Sparse, count: int) -> tuple[Int64, Int64, Array]:
    """Return start [count + 1], ids, values, sorted by row."""
    order = np.argsort(sparse.rows, kind="stable")
    start = np.searchsorted(sparse.rows[order], np.arange(count + 1)).astype(np.int64)
    values = np.zeros(0, np.float32) if sparse.values is None else sparse.values[order].astype(np.float32, copy=False)
    return start, sparse.ids[order].astype(np.int64, copy=False), values
