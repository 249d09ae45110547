"""The shipped scheduler core with the preset `iteration-level`, as a program that runs the cases of cases.py."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.policy.iteration_level import iteration_level
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits, NewRequest, StepPlan, StepResult
from services.simulator.engine import START_NS
from services.simulator.policies.article import BLOCK_SIZE, Arrival, Planned, Settings

MS_NS = 1e6


class Core:
    """The core on the clock of a case, without steps ahead."""

    def __init__(self, settings: Settings, longest: int) -> None:
        """longest: most tokens of a request, prompt and outputs."""
        policy = iteration_level(settings.batch_tokens, settings.batch_requests, settings.chunk)
        slots, tokens = settings.batch_requests, settings.batch_tokens
        self.core = Scheduler(policy, max_seqs=slots, lookahead=0, checkpoint_tokens=0)
        self.core.join(Limits(slots, settings.blocks, BLOCK_SIZE, longest, max_step_tokens=max(tokens, slots)))
        self._step: StepPlan | None = None
        self._preemptions = 0

    def add(self, number: int, arrival: Arrival, now_ms: float) -> None:
        """Raise ValueError for a request that the core refuses."""
        request = NewRequest(
            id=str(number),
            prompts=[np.zeros(arrival.prompt, np.int32)],
            max_tokens=arrival.max_new,
            priority=arrival.priority,
            arrived_ns=_ns(now_ms),
            ttft_slo_ns=max(round(arrival.ttft_ms * MS_NS), 1),  # 0 is no limit
            tbt_slo_ns=max(round(arrival.tbt_ms * MS_NS), 1),
        )
        for ended in self.core.add(request, _ns(now_ms)).ended_requests:
            raise ValueError(f"request {number}: {ended.error}")

    def schedule(self, now_ms: float) -> Planned:
        self._step, _ = self.core.plan(_ns(now_ms))
        stats, step = self.core.stats(), self._step
        preempted = int(stats["preemptions"]) - self._preemptions
        self._preemptions += preempted
        counts = int(stats["waiting"]), int(stats["running"]), preempted
        if step is None:
            return Planned(0, 0, 0, *counts)
        chunks = step.chunk_slots.size - step.decode_tokens
        return Planned(step.decode_tokens, step.decode_tokens + step.prefill_tokens, chunks, *counts)

    def complete(self, now_ms: float) -> None:
        step = self._step
        if step is not None:
            slots = step.chunk_slots[step.samples]
            self.core.apply(StepResult(step.id, 0, slots, np.zeros(slots.size, np.int32), step_ns=1), _ns(now_ms))


def _ns(now_ms: float) -> int:
    return START_NS + round(now_ms * MS_NS)
