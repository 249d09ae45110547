"""Replicas of several ranks on several GPUs: their tokens beside those of one GPU, their steps, what they exchange.

Each rank is a process with a GPU of its own, as `orcinus worker --tp 2` has them; they meet over NCCL. The emulator
stands for two GPUs that meet over Gloo. Where a machine has one GPU the part says so and measures nothing.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.engine.cases import Case
from bench.engine.ranks import Processes, Replica
from bench.gpu.context import Context
from bench.gpu.engine import config_of, started, timed
from bench.kernels.backends import type_name
from bench.kernels.shapes import LLAMA_8B, TINY
from protos import worker_pb2
from services.worker.engine import Engine
from services.worker.parallel.state import own_gpu
from shared.errors import RankError
from shared.text.logprobs import split_records, unpack_records
from shared.wire.columns import pack, unpack

SIZES = ((2, 1), (1, 2), (2, 2), (4, 1))
"""Ranks of a stage, and stages; those for which there are GPUs."""

CASES = (Case("decode-1", 1, 1024), Case("decode-64", 64, 1024), Case("mixed-32-512", 32, 1024, 512, 1))
QUICK_CASES = (Case("decode-2", 2, 20), Case("mixed-2-20", 2, 20, 20, 1))
STEPS = 50
ROWS = (1, 64, 512, 4096)
"""Of an exchange that is timed."""

PROMPTS, TOKENS = 48, 8
LIMIT = 0.1
"""Of the difference of a token's log-probabilities. Logits of made-up weights have a deviation of about 1, and differ
by about that where a sum is missing. Two tokens are as good as each other up to twice this."""

BEST = 2


@dataclass(frozen=True, slots=True)
class Drawn:
    """A greedy token, its log-probability and how far the next best one is behind."""

    token: int
    logprob: float
    gap: float


def ranks(context: Context) -> Iterator[tuple[str, Any]]:
    """Yield `gpus`, and `tokens`, `steps` and `exchanges` with rows for each size of replica; `skipped` with one GPU.

    Raise RankError where a replica has other tokens than one GPU, or none, when all sizes were tried.
    """
    gpus = torch.cuda.device_count() if context.device == "cuda" else 2
    yield "gpus", gpus
    if gpus < 2:
        yield "skipped", f"{gpus} GPU is here, and replicas of several ranks need two: nothing was measured"
        return
    if context.device == "cuda":
        yield "nccl", ".".join(map(str, torch.cuda.nccl.version()))
    model, cases, steps = (TINY, QUICK_CASES, 3) if context.quick else (LLAMA_8B, CASES, STEPS)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(model)))
        make = partial(started, Path(folder), context, cases, steps)
        one = make()
        prompts = prompts_for(one, cases)
        expected = generate(one, prompts)
        yield "steps", step_rows(one, cases, steps, 1, 1)
        del one
        gc.collect()  # before ranks take its memory
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        others = [{"CUDA_VISIBLE_DEVICES": own_gpu(rank, visible)} for rank in range(1, gpus)]
        processes = Processes(environments=others if context.device == "cuda" else ())
        for tp, pp in SIZES:
            if tp * pp > gpus:
                continue
            try:
                with processes.replica_of(tp, pp, make) as replica:
                    row = {"tp": tp, "pp": pp, **comparison(expected, generate(replica, prompts))}
                    wrong += [] if row["right"] else [f"--tp {tp} --pp {pp}: other tokens than one GPU: {row}"]
                    yield "tokens", [row]
                    yield "steps", step_rows(replica, cases, steps, tp, pp)
                    for rows in ROWS[:2] if context.quick else ROWS:
                        yield "exchanges", exchange_rows(replica, rows, steps)
            except Exception as error:
                traceback.print_exc()
                wrong.append(f"--tp {tp} --pp {pp}: {type(error).__name__}: {error}")
                processes.stop()  # those of the next size have no state of these
        processes.stop()
    if wrong:
        raise RankError("; ".join(wrong))


def prompts_for(engine: Engine, cases: Sequence[Case]) -> list[list[int]]:
    """Return prompts for which an engine of the cases has room."""
    longest, most = max(case.context for case in cases) // 2, max(case.sequences for case in cases)
    rng = np.random.default_rng(20261130)
    lengths = rng.integers(1, longest + 1, min(PROMPTS, most))
    return [rng.integers(0, engine.config.vocab_size, length).tolist() for length in lengths]


def generate(engine: Engine | Replica, prompts: Sequence[list[int]]) -> list[list[Drawn]]:
    """Return TOKENS greedy tokens behind each prompt. Each prompt enters one step after the one before it: first steps
    have chunks beside decodes, the last ones decodes alone."""
    engine.reset()
    size = engine.info().block_size
    blocks = -(-(max(map(len, prompts)) + TOKENS) // size)
    found: list[list[Drawn]] = [[] for _ in prompts]
    for at in range(len(prompts) + TOKENS - 1):
        decoding = [slot for slot in range(min(at, len(prompts))) if len(found[slot]) < TOKENS]
        entering = list(range(at, min(at + 1, len(prompts))))
        lengths = [1] * len(decoding) + [len(prompts[slot]) for slot in entering]
        known = [len(prompts[slot]) + len(found[slot]) for slot in decoding + entering]
        step = worker_pb2.Step(
            enters=[
                worker_pb2.Enter(
                    slot=slot,
                    tokens=pack(prompts[slot]),
                    prompt_tokens=len(prompts[slot]),
                    blocks=pack(np.arange(slot * blocks, (slot + 1) * blocks, dtype=np.int32)),
                    sampling=worker_pb2.Sampling(top_p=1, logprobs=BEST + 1),
                )
                for slot in entering
            ],
            chunk_slots=pack(decoding + entering),
            chunk_starts=pack([end - length for end, length in zip(known, lengths, strict=True)]),
            chunk_lengths=pack(lengths),
        )
        result = engine.execute(step)
        slots = unpack(result.slots)
        records = split_records(result.logprobs, unpack(result.logprob_sizes), len(slots))
        for slot, token, record in zip(slots.tolist(), unpack(result.tokens).tolist(), records.tolist(), strict=True):
            about = unpack_records(record, BEST + 1)[0]
            (_, first), (_, second) = about.best
            found[slot].append(Drawn(token, about.sampled_logprob, first - second))
    return found


def comparison(expected: Sequence[Sequence[Drawn]], found: Sequence[Sequence[Drawn]]) -> dict[str, Any]:
    """Return how many tokens were compared and are wrong, and how far apart the log-probabilities of equal ones are.

    A sequence is compared up to its first other token, which is wrong if the expected one was clearly the best.
    """
    tokens = wrong = 0
    errors = [0.0]
    for theirs, mine in zip(expected, found, strict=True):
        for one, other in zip(theirs, mine, strict=True):
            tokens += 1
            if one.token != other.token:
                wrong += not one.gap <= 2 * LIMIT  # NaN is wrong too
                break
            errors.append(abs(one.logprob - other.logprob))
    error = float(np.max(errors))  # NaN if one is
    return {"tokens": tokens, "wrong": wrong, "error": error, "limit": LIMIT, "right": not wrong and error <= LIMIT}


def step_rows(engine: Engine | Replica, cases: Sequence[Case], steps: int, tp: int, pp: int) -> list[dict[str, Any]]:
    """Return a row for each case. Only stages have more than one step on the way; there is one microbatch."""
    like: Any = engine
    return [{"tp": tp, "pp": pp, **timed(like, case, steps, 1 if engine.overlaps else 0)} for case in cases]


def exchange_rows(replica: Replica, rows: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each kind of exchange, with the time at the slowest rank."""
    parallel, itemsize = replica.parallel, replica.dtype.itemsize
    times = replica.everywhere(partial(time_exchanges, rows=rows, repeats=repeats))
    numbers = rows * replica.config.hidden_size
    place = {"tp": parallel.tp, "pp": parallel.pp, "dtype": type_name(replica.dtype), "rows": rows}
    return [{**place, "exchange": name, "bytes": numbers * itemsize, "us": us} for name, us in times.items()]


def time_exchanges(engine: Engine, rows: int, repeats: int) -> dict[str, float]:
    """Time each exchange of rows [rows, hidden] at this rank; return the time of one, in us, of the slowest of all."""
    ops, parallel = engine.ops, engine.parallel

    def pass_on(x: Tensor) -> None:
        if not parallel.first:
            parallel.receive_rows(x)
        if not parallel.last:
            parallel.send_rows(x)

    calls: dict[str, Callable[[Tensor], object]] = {}
    if parallel.tp > 1:
        calls["sum over a stage"] = parallel.all_reduce
        calls["parts to one rank"] = parallel.gather
    if parallel.pp > 1:
        calls["rows to the next stage"] = pass_on
    slowest = {}
    with torch.inference_mode():
        x = torch.zeros(rows, engine.config.hidden_size, dtype=engine.dtype, device=ops.device)
        for name, call in calls.items():
            for _ in range(repeats):  # connections are made at the first
                ops.exchange(x, call)
            begun = ops.mark()
            for _ in range(repeats):
                ops.exchange(x, call)
            us = ops.elapsed_ns(begun, ops.mark()) / repeats / 1e3
            slowest[name] = max(map(float, parallel.texts(repr(us))))
    return slowest
