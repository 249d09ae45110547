"""The scheduler's model of step times against the CPU engine: does it keep what its error promises?

    python -m bench.studies.step_time          some minutes; writes bench/results/step-time.json
    python -m bench.studies.step_time --quick  in seconds; prints, writes nothing

The engine of the demo model runs in this process, on one thread. Each step has 1 to 65 sequences, every third step a
part of a prompt of 1 to 1,023 tokens. As in the scheduler, a step is predicted before its time is known, then observed:
each prediction is of a step that the model has not seen. The first WARM steps teach it and do not count.

Two models see the same steps: one the time that the worker sends to the scheduler ("wall"), one the CPU time of the
process ("cpu"), which leaves out what other programs took.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.result import RESULTS, provenance, write
from protos import worker_pb2
from services.scheduler.core.policy.step_time import StepTime
from services.worker.engine import Engine
from shared.settings import DEMO_MODEL, WorkerSettings
from shared.wire.columns import pack

DECODES, PROMPT, CONTEXT = 64, 1_024, 1_024
WARM, STEPS, QUICK_STEPS = 256, 4_096, 512
SIZES = ((1, 128), (129, 256), (257, 512), (513, PROMPT))
SEEDS = (1, 2, 3)
CLOCKS = ("wall", "cpu")
SPARE = 0.05  # what ModelBudget leaves of a limit beside the error


@dataclass(slots=True)
class Prediction:
    """A step: its predicted time and the model's error before it ran, and its time."""

    prompt_tokens: int
    predicted_ns: float
    error: float
    measured_ns: int


class Traffic:
    """Draws steps of sequences that enter in parts, decode and are replaced at random, as a worker gets them."""

    def __init__(self, engine: Engine, seed: int) -> None:
        engine.reset()
        self._rng = np.random.default_rng(seed)
        self._vocab = engine.config.vocab_size
        self._blocks = CONTEXT // engine.info().block_size  # of a slot
        self._planned: dict[int, int] = {}  # slot -> tokens computed, of those that decode
        self._entering: tuple[int, int, int] | None = None  # slot, prompt tokens, and those of them computed
        self._used = 0  # slots that had a sequence

    def next(self) -> tuple[worker_pb2.Step, tuple[int, int, float], int]:
        """Return a step, what the model takes of it, and its prompt tokens."""
        step, rng = worker_pb2.Step(), self._rng
        chunks = [self._prompt(step)] if not self._planned or rng.random() < 1 / 3 else []
        ready = [slot for slot, tokens in self._planned.items() if tokens < CONTEXT - 1]
        most = round((DECODES + 1) ** rng.random()) - (1 if chunks else 0)  # few about as often as many
        rows = [(slot, self._planned[slot], 1) for slot in rng.permutation(ready)[:most].tolist()]
        for slot, _, _ in rows:
            self._planned[slot] += 1
        for slot, start, length in chunks:
            if self._entering is None:  # the last part
                self._planned[slot] = start + length
        slots, starts, lengths = zip(*rows, *chunks, strict=True)
        step.chunk_slots, step.chunk_starts, step.chunk_lengths = pack(slots), pack(starts), pack(lengths)
        context = sum(start for _, start, _ in rows)
        pairs = sum(length * (start + (length + 1) / 2) for _, start, length in chunks)
        return step, (sum(lengths), context, pairs), sum(length for _, _, length in chunks)

    def _prompt(self, step: worker_pb2.Step) -> tuple[int, int, int]:
        """Return slot, start and length of the next part of a prompt; let a sequence enter where none is half done."""
        if self._entering is None:
            slot, count = self._room(step), int(self._rng.integers(1, PROMPT))
            self._entering = slot, count, 0
            blocks = np.arange(slot * self._blocks, (slot + 1) * self._blocks, dtype=np.int32)
            tokens = pack(self._rng.integers(0, self._vocab, count))
            step.enters.append(worker_pb2.Enter(slot=slot, tokens=tokens, prompt_tokens=count, blocks=pack(blocks)))
        slot, count, start = self._entering
        length = min(int(self._rng.integers(1, PROMPT + 1)), count - start)
        self._entering = (slot, count, start + length) if start + length < count else None
        return slot, start, length

    def _room(self, step: worker_pb2.Step) -> int:
        """Return a slot without a sequence; where there is none, free that of any."""
        if self._used <= DECODES:
            self._used += 1
            return self._used - 1
        slot = int(self._rng.choice(list(self._planned)))
        del self._planned[slot]
        step.free_slots = pack([slot])
        return slot


def run(engine: Engine, seed: int, steps: int) -> dict[str, list[Prediction]]:
    """Run steps; return by clock what a model that learns from it predicted of each."""
    traffic, models = Traffic(engine, seed), {clock: StepTime() for clock in CLOCKS}
    seen: dict[str, list[Prediction]] = {clock: [] for clock in CLOCKS}
    for _ in range(steps):
        step, features, prompt_tokens = traffic.next()
        begun = time.process_time_ns()
        result = engine.execute(step)
        times = {"wall": result.timings.total_ns, "cpu": time.process_time_ns() - begun}
        if result.error:
            raise RuntimeError(result.error)
        for clock, model in models.items():
            predicted = model.predict(*features)
            seen[clock].append(Prediction(prompt_tokens, predicted, model.error, times[clock]))
            model.observe(*features, times[clock])
    return seen


def figures(kept: Sequence[Prediction]) -> dict[str, float]:
    """Return how far steps were from their predictions, and from what the model's error then promised of 99 of 100."""
    ratio = np.array([one.measured_ns / one.predicted_ns for one in kept])
    error = np.array([one.error for one in kept])
    beyond = ratio / (1 + error)
    found = {
        "p50_ms": np.median([one.measured_ns for one in kept]) / 1e6,
        "off_median": np.median(np.abs(ratio - 1)),
        "ratio_p99": np.percentile(ratio, 99),
        "error_median": np.median(error),
        "beyond_p99": np.percentile(beyond, 99),
        "above_error": np.mean(beyond > 1),
        "above_limit": np.mean(beyond > 1 / (1 - SPARE)),
    }
    return {"steps": len(kept), **{name: round(float(value), 4) for name, value in found.items()}}


def by_kind(seen: Sequence[Prediction]) -> dict[str, dict[str, float]]:
    """Return the figures of steps with prompts, of these by tokens of the prompt, and of steps without."""
    kinds = {"with prompts": (1, PROMPT), "decodes alone": (0, 0)}
    kinds |= {f"{low} to {high} prompt tokens": (low, high) for low, high in SIZES}
    return {
        kind: figures([one for one in seen if low <= one.prompt_tokens <= high]) for kind, (low, high) in kinds.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.step_time", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small, in seconds; writes nothing")
    parser.add_argument("--note", default="", help="kept in the result: what else the machine was doing")
    given = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(given)
    facts = provenance(["python", "-m", "bench.studies.step_time", *given])
    blocks = (DECODES + 1) * CONTEXT // 16
    engine = Engine(
        WorkerSettings(
            model=DEMO_MODEL,
            device="cpu",
            threads=1,
            max_seqs=DECODES + 1,
            max_step_tokens=DECODES + PROMPT,
            kv_blocks=blocks,
        )
    )
    engine.warm_up()
    info, rows = engine.info(), []
    about = {"name": info.model, "dtype": info.dtype, "backend": info.backend, "numerics": info.numerics}
    for seed in SEEDS[:1] if options.quick else SEEDS:
        seen = run(engine, seed, QUICK_STEPS if options.quick else STEPS)
        load = round(os.getloadavg()[0], 2)
        for clock in CLOCKS:
            for kind, row in by_kind(seen[clock][WARM:]).items():
                rows.append({"clock": clock, "kind": kind, "seed": seed, "load_1m": load, **row})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if not options.quick:
        write(
            RESULTS / "step-time.json",
            {**facts, "note": options.note, "model": about, "warm_steps": WARM, "rows": rows},
            True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
