"""Scheduler and engine in one process, joined by the real wire forms: what both services do, without sockets.

Steps are planned as far ahead as (microbatches, lookahead) allow before the oldest is executed, as the service does; an
engine that overlaps is given as many of them as it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protos import queue_pb2, worker_pb2
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, NewRequest, Outcome
from services.scheduler.workers.wire import limits_from_wire, result_from_wire, step_to_wire
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep
from shared.wire.columns import pack, unpack

MAX_STEPS = 200_000
MAX_IDLE = 1_000
IDLE_NS = 1_000_000
STEP_NS, TOKEN_NS, BLOCK_NS = 1_000_000, 50_000, 5_000


@dataclass
class Recorded:
    """What a client would have got, by index, so that a gap or a double shows."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finish: dict[tuple[str, int], Finish] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], bytes] = field(default_factory=dict)  # records (shared/text/logprobs.py)
    prompt_logprobs: dict[tuple[str, int], bytes] = field(default_factory=dict)  # records, by request and prompt
    scored: dict[tuple[str, int], int] = field(default_factory=dict)  # tokens of the prompt that were told
    errors: list[str] = field(default_factory=list)

    def take(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        ends = np.concatenate([[0], np.cumsum(outcome.counts)])
        for row, request in enumerate(outcome.requests):
            at = (request.id, int(outcome.choices[row]))
            held = self.tokens.setdefault(at, [])
            new = outcome.tokens[ends[row] : ends[row + 1]].tolist()
            if new and int(outcome.first_indices[row]) != len(held):
                raise AssertionError(f"{at}: token {int(outcome.first_indices[row])} came when {len(held)} was next")
            if new and at in self.finish:
                raise AssertionError(f"{at}: a token came after the end")
            held += new
            if outcome.logprobs is not None:
                records = b"".join(outcome.logprobs[ends[row] : ends[row + 1]])
                self.logprobs[at] = self.logprobs.get(at, b"") + records
            if outcome.finish[row]:
                if at in self.finish:
                    raise AssertionError(f"{at} ended twice")
                self.finish[at] = Finish(int(outcome.finish[row]))
        self.errors += outcome.errors.values()
        for name, prompt, first, count, records in outcome.prompt_logprobs:
            if first != self.scored.get((name, prompt), 1):
                raise AssertionError(f"prompt {prompt} of {name}: token {first} was scored out of order")
            self.scored[name, prompt] = first + count
            self.prompt_logprobs[name, prompt] = self.prompt_logprobs.get((name, prompt), b"") + records


def request(name: str, prompt: list[int], max_tokens: int, n: int = 1, **sampling: Any) -> NewRequest:
    """A greedy request (temperature 0) unless sampling says otherwise."""
    drawn = queue_pb2.Sampling(**{"temperature": 0.0, "top_p": 1.0} | sampling)
    wire = queue_pb2.Request(id=name, n=n, max_tokens=max_tokens, sampling=drawn)
    wire.prompts.tokens.append(pack(prompt))
    scored = [1] if drawn.prompt_logprobs else None
    return NewRequest(
        name, [np.array(prompt, np.int32)], max_tokens, n=n, gateway="gateway-0", payload=wire, scored_tokens=scored,
        grammar=drawn.grammar,
    )  # fmt: skip


def run(
    engines: Engine | Sequence[Engine],
    requests: list[NewRequest],
    policy: str,
    known: Recorded | None = None,
    speculate: str = "auto",
    **settings: Any,
) -> tuple[Recorded, Scheduler]:
    """Run all requests to their ends and check the core's invariants after every step.

    Half of them are there from the beginning, each other one arrives with a step. Of several engines each executes a
    step in turn.

    known: what clients have of them already. settings: of the core, which without them has no lookahead.
    """
    core = Scheduler(policy, **{"lookahead": 0} | settings)
    workers = []
    for engine in engines if isinstance(engines, Sequence) else [engines]:
        engine.reset()
        workers.append(_Worker(engine, core.join(limits_from_wire(engine.info(), speculate))))
    recorded = known or Recorded()
    later, now, idle = deque(requests), 1, 0
    for _ in range(len(requests) // 2):
        recorded.take(core.add(later.popleft(), now))
    for _ in range(MAX_STEPS):
        if later:
            recorded.take(core.add(later.popleft(), now))
        for worker in workers:
            for outcome in worker.plan(core, now):
                recorded.take(outcome)
        if not any(worker.has_steps for worker in workers):
            if not core.unfinished_count and not later:
                break
            idle += 1
            if idle > MAX_IDLE:
                break
            now += IDLE_NS  # a policy may wait for company
            continue
        idle = 0
        for worker in workers:
            if worker.has_steps:
                result = worker.execute()
                now += result.timings.total_ns
                recorded.take(core.apply(result_from_wire(result, worker.replica), now))
                core.check()
    if core.unfinished_count:
        raise AssertionError(f"{core.unfinished_count} requests never ended; stats {core.stats()}")
    return recorded, core


class _Worker:
    """An engine, its number in the core, and its steps that are planned or in flight."""

    def __init__(self, engine: Engine, replica: int) -> None:
        self.replica = replica
        self._engine = engine
        self._waiting: deque[worker_pb2.Step] = deque()
        self._in_flight: deque[tuple[worker_pb2.Step, InFlightStep]] = deque()

    @property
    def has_steps(self) -> bool:
        return bool(self._waiting or self._in_flight)

    def plan(self, core: Scheduler, now_ns: int) -> Iterator[Outcome | None]:
        """Plan as many steps as the core allows; yield what each attempt ended."""
        while True:
            plan, outcome = core.plan(now_ns, self.replica)
            yield outcome
            if plan is None:
                return
            wire = step_to_wire(plan, epoch=1).SerializeToString()
            self._waiting.append(worker_pb2.Step.FromString(wire))

    def execute(self) -> worker_pb2.Result:
        """Submit as many steps as the engine takes; return the result of the oldest."""
        waiting, in_flight, engine = self._waiting, self._in_flight, self._engine
        while waiting and len(in_flight) < (engine.max_in_flight if engine.overlaps else 1):
            in_flight.append((waiting[0], engine.submit(waiting.popleft())))
        step, inflight = in_flight.popleft()
        result = engine.finish(inflight, lambda: self.has_steps)
        if result.error:
            raise AssertionError(f"step {result.id}: {result.error}")
        set_timings(step, result)
        return result


def set_timings(step: worker_pb2.Step, result: worker_pb2.Result) -> None:
    """Time by the work done instead of by the clock, so that no decision depends on how fast this machine is."""
    tokens = int(unpack(step.chunk_lengths).sum())
    result.timings.swap_ns = BLOCK_NS * (len(result.swap_out_acks) + len(result.swap_in_acks)) // 4
    result.timings.total_ns = STEP_NS + TOKEN_NS * tokens + result.timings.swap_ns
