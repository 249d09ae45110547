"""The article's program as the policy of a simulated replica: `orcinus simulate --policy article`.

engine.py drives it beside the core's policies, over the same requests and step times. The program knows `max_tokens` of
a request and reserves all of it; its true length, at which it stops, only the model knows.
"""

from __future__ import annotations

import math

import numpy as np

from services.scheduler.core.types import EMPTY, Finish, FinishedRequest, NewRequest, Outcome, StepPlan
from services.simulator.device.clock import Features, StepClock
from services.simulator.policies.article import CORRECTED, EXACT, Arrival, Article, Rules, Settings
from services.simulator.workload.workload import PLAIN_ID, Workload

MS_NS = 1e6
TTFT_MS = 2_000.0  # of a request without a limit
RULES: dict[str, Rules] = {"article": EXACT, "article-corrected": CORRECTED}
"""The names as policies, those of the programs of literature/cases.py."""
_NO_ROWS = StepPlan(
    0, 0, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, [], EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, np.zeros(0, np.bool_)
)
"""No clock of the command line needs the rows of a step."""


class ArticleReplica:
    """The program and its device.

    running, waiting, blocks_used (share): of the step that was planned last. counts: those of a result.
    """

    def __init__(self, settings: Settings, rules: Rules, workload: Workload, clock: StepClock, start_ns: int) -> None:
        self.running = self.waiting = 0
        self.busy_ns = 0
        self.counts: dict[str, int | float] = dict.fromkeys(
            (
                "preemptions", "recomputed_tokens", "swapped_blocks", "swapped_bytes", "prefix_hit_tokens", "padding",
                "computed_tokens", "iterations", "drafted_tokens", "accepted_tokens",
            ),
            0,
        )  # fmt: skip
        self._program = Article(settings, rules)
        self._blocks = settings.blocks
        self._workload, self._clock, self._start_ns = workload, clock, start_ns
        self._outputs = [0] * len(workload)
        self._last_ns = (workload.arrived_ns + start_ns).tolist()  # of the latest output, or of the arrival

    @property
    def blocks_used(self) -> float:
        return 1 - self._program.free_blocks / self._blocks

    def add(self, index: int) -> None:
        """Let a request of the workload wait."""
        work = self._workload
        ttft_ns, tbt_ns = int(work.ttft_slo_ns[index]), int(work.tbt_slo_ns[index])
        arrival = Arrival(
            self._last_ns[index] / MS_NS,
            int(work.prompt[index]),
            int(work.max_tokens[index]),
            int(work.priority[index]),
            ttft_ns / MS_NS if ttft_ns else TTFT_MS,
            tbt_ns / MS_NS if tbt_ns else math.inf,
        )
        self._program.add(index, arrival, arrival.arrival_ms, int(work.output[index]))
        self.counts["recomputed_tokens"] -= arrival.prompt

    def plan(self, now_ns: int) -> int:
        """Plan a step and return how long it takes, in ns; 0 where there is nothing to compute."""
        step, counts = self._program.schedule(now_ns / MS_NS), self.counts
        self.running, self.waiting = step.running, step.waiting
        if not (step.decode or step.chunks):
            return 0
        prefill = step.tokens - step.decode
        features = Features(step.tokens, *self._program.contexts(), prefill)
        duration = self._clock.duration_ns(_NO_ROWS, features)
        self.busy_ns += duration
        counts["preemptions"] += step.preempted
        counts["recomputed_tokens"] += prefill
        counts["computed_tokens"] += step.tokens
        counts["iterations"] += 1
        return duration

    def complete(self, now_ns: int) -> Outcome:
        """End the step that was planned last; return the outputs and ends."""
        self._program.complete(now_ns / MS_NS)
        outcome, first, waits = Outcome(), [], []
        for index in self._program.sampled:
            request = NewRequest(str(index), [], int(self._workload.max_tokens[index]), payload=index)
            outcome.requests.append(request)
            first.append(self._outputs[index])
            waits.append(now_ns - self._last_ns[index])
            self._outputs[index] += 1
            self._last_ns[index] = now_ns
            if self._outputs[index] == self._workload.output[index]:
                tokens = np.full(self._outputs[index], PLAIN_ID, np.int32)
                outcome.ended_requests.append(FinishedRequest(request, [tokens], [Finish.STOP]))
        outcome.first_indices, outcome.waits_ns = np.array(first, np.int32), np.array(waits, np.int64)
        outcome.counts = np.ones(len(first), np.int32)
        outcome.tokens = np.full(len(first), PLAIN_ID, np.int32)
        return outcome
