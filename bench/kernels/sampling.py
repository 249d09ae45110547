"""The sampler, beside torch's ways to draw from the same distribution (with another random stream)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.kernels.case import Bench, Case, Maker
from bench.kernels.clock import Thunk
from bench.kernels.shapes import Plan
from kernels.ops import SamplingRows
from kernels.reference.sampling import sample as reference_sample

COMPARED_ROWS = 16  # with the reference, which takes its time
WRONG_ROWS = 0.0  # share of them that may differ


@dataclass(frozen=True, slots=True)
class Setting:
    """How all rows of a case are sampled."""

    name: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0


SETTINGS = (Setting("greedy", 0.0), Setting("top-p 0.9", 0.8, 0, 0.9), Setting("top-k 50, top-p 0.9", 0.8, 50, 0.9))


def samplers(plan: Plan) -> list[Maker]:
    """Yield every setting at every number of rows."""
    return [
        (f"sample {count} x {plan.model.vocab}, {setting.name}", partial(sampler, setting, count))
        for setting in SETTINGS
        for count in plan.sampled
    ]


def sampler(setting: Setting, count: int, bench: Bench) -> Case:
    """Return a case with logits spread like a model's; the floor is one read of them."""
    clock, vocab = bench.clock, bench.plan.model.vocab
    logits = clock.random(count, vocab, dtype=torch.float32)
    clock.compute(lambda: logits.mul_(3.0))
    rows, slots = rows_of(setting, count), np.arange(count, dtype=np.int32)
    operands = [clock.compute(logits.clone) for _ in range(min(4, bench.plan.copies(logits.nbytes)))]

    def fresh() -> None:
        for operand in operands:
            operand.copy_(logits)

    def error() -> float:
        fresh_one = clock.compute(logits.clone)
        found = clock.ops.sample_later(fresh_one, rows, slots).wait()
        compared = min(count, COMPARED_ROWS)
        exact = reference_sample(logits[:compared].cpu().clone(), rows_of(setting, compared))
        return float((found.tokens[:compared] != exact.tokens).mean())

    ways = {"greedy": ("argmax", _argmax)}.get(setting.name, ("torch sort, multinomial", partial(_torch, setting)))
    calls = [partial(clock.ops.sample_later, operand, rows, slots) for operand in operands]
    return Case(
        "sample",
        f"{count} x {vocab}, {setting.name}",
        float(logits.nbytes),
        0.0,
        time=lambda: clock.called(calls, fresh),
        error=error,
        limit=WRONG_ROWS,
        peers={ways[0]: lambda: clock.eager(_each(ways[1], operands))},
        dtype=logits.dtype,
    )


def rows_of(setting: Setting, count: int) -> SamplingRows:
    """Return this number of rows, each with a different seed."""
    return SamplingRows(
        temperature=np.full(count, setting.temperature, np.float32),
        top_k=np.full(count, setting.top_k, np.int32),
        top_p=np.full(count, setting.top_p, np.float32),
        min_p=np.zeros(count, np.float32),
        seed=np.arange(count, dtype=np.uint64) + np.uint64(20261120),
        position=np.full(count, 100, np.int64),
        want_logprob=np.zeros(count, np.bool_),
    )


def _each(way: Callable[[Tensor], object], operands: Sequence[Tensor]) -> list[Thunk]:
    return [partial(way, operand) for operand in operands]


def _argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _torch(setting: Setting, logits: Tensor) -> Tensor:
    """Sample with torch's operations: sort, cut, draw."""
    if setting.top_k:
        values, ids = logits.topk(setting.top_k)
    else:
        values, ids = logits.sort(descending=True)
    weights = (values / setting.temperature).softmax(-1)
    before = weights.cumsum(-1) - weights
    drawn = torch.multinomial(weights.masked_fill(before > setting.top_p, 0.0), 1)
    return ids.gather(-1, drawn)
