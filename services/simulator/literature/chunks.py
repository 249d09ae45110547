"""T4 and T5: the cost of a prefill chunk in an iteration, and the effect of the chunk size on users."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from services.scheduler.core.policy.base import Policy
from services.scheduler.core.policy.presets import parse
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits, Outcome, StepResult
from services.simulator.jobs import Every64th, Report
from services.simulator.literature.table import Table, unseen
from services.simulator.workload.arrivals import CHAT, Spec, build
from services.simulator.workload.workload import Int64, Workload

# T4: tokens: GEMM ms, attention ms (an input), iteration ms
T4_SHEET = {
    32: (10.9, 8, 21),
    160: (54.4, 15, 72),
    288: (97.9, 25, 126),
    544: (184.9, 48, 237),
    1056: (359.0, 95, 460),
}
PARAMETERS_PER_LAYER, LAYERS, FLOPS = 1.7e9, 80, 800e12  # of the 70B model, as the sheet has them

# T5: tok/s, P50 TBT, P99 TBT, P99 TTFT (ms). Used in the final comparison only.
T5_SHEET = {
    "static": (1200, 45, 850, 3200),
    "orca": (2800, 38, 420, 1800),
    "chunk 512": (2650, 40, 85, 2100),
    "chunk 256": (2550, 42, 65, 2400),
    "chunk 128": (2400, 44, 55, 2800),
}
T5_COLUMNS = ("tok/s", "P50 TBT", "P99 TBT", "P99 TTFT")
Figures = tuple[float, float, float, float]
NEAR = 0.25
# One workload for all rows. The sheet gives 128 users and prompts of up to 4,800 tokens; the rest is ours. A user has
# one request at a time and sends the next when the last is delivered. There are half as many slots as users. One prompt
# in fifty is a document of 4,800 tokens; the rest are chat turns of 8 to 64. Outputs are geometric with a mean of 96,
# cut at 256. A chunk of 128 a step then keeps up with the prompts; else its row would be meaningless.
USERS, EACH, SLOTS, SEED = 128, 20, 64, 5
LONG, LONG_SHARE, SHORT = 4_800, 0.02, (8, 64)
OUTPUT_MEAN, MAX_OUTPUT = 96, 256
BLOCK = 16


def gemm_ms(tokens: int) -> float:
    """Return the GEMM time: 2 * projection parameters * layers / FLOP rate for each token."""
    return 2 * PARAMETERS_PER_LAYER * LAYERS / FLOPS * 1e3 * tokens


def iteration_ms(tokens: int, attention_ms: float) -> float:
    """Return GEMM + attention + overhead of 2.1 + 0.0038 x (tokens - 32)."""
    return gemm_ms(tokens) + attention_ms + 2.1 + 0.0038 * (tokens - 32)


def iteration_parts() -> Table:
    """Return T4."""
    columns = ("tokens", "sheet: GEMM ms", "ours", "attention ms (given)", "sheet: iteration ms", "ours")
    table = Table("T4", "an iteration of a 70B model", "GEMM to 0.1 ms, iteration to 1 ms", columns)
    gemm_off = step_off = 0.0
    for tokens, (gemm, attention, step) in T4_SHEET.items():
        ours, our_step = gemm_ms(tokens), iteration_ms(tokens, attention)
        table.rows.append([tokens, gemm, round(ours, 2), attention, step, round(our_step, 2)])
        gemm_off, step_off = max(gemm_off, abs(ours - gemm)), max(step_off, abs(our_step - step))
    table.claim(f"GEMM within 0.1 ms (furthest {gemm_off:.2f})", gemm_off <= 0.1)
    table.claim(f"iteration within 1 ms (furthest {step_off:.2f})", step_off <= 1)
    return table


def step_ns(prefill_tokens: int) -> int:
    """Return t = 45 ms + 0.078 ms x prefill tokens, for every row. Padding costs nothing, in favour of `static`."""
    return 45_000_000 + 78_000 * prefill_tokens


def drawn_workload() -> Workload:
    """Return the workload of T5. Outputs end by length; the requests of user u are u, u + users, u + 2 users, ..."""
    rng = np.random.default_rng(SEED)
    count = USERS * EACH
    prompt = rng.integers(SHORT[0], SHORT[1] + 1, count)
    prompt[rng.random(count) < LONG_SHARE] = LONG
    output = np.minimum(rng.geometric(1 / OUTPUT_MEAN, count), MAX_OUTPUT)
    return Workload(np.zeros(count, np.int64), prompt, output)


def chat_workload() -> Workload:
    """Return the first requests of the chat trace, as many as T5 has, with max_tokens equal to the true length."""
    return build(Spec(trace=CHAT, requests=USERS * EACH, at_once=True, max_tokens=0))


class Users:
    """A closed loop of `USERS` clients around one core. Times are those of delivery."""

    def __init__(
        self, policy: Policy, step_tokens: int, work: Workload, progress: Callable[[int], None], blocks: int = 0
    ) -> None:
        """progress: called with the number of requests that were sent. blocks: KV blocks of the replica; 0 means as
        many as the slots need at the longest request.
        """
        self._work, count = work, len(work)
        self._progress, self._sent = progress, 0
        self._core = Scheduler(policy, max_seqs=SLOTS, lookahead=0, step_tokens=step_tokens)
        self._at_end: bool = self._core.policy.batch.at_end
        blocks = blocks or SLOTS * -(-work.longest // BLOCK)
        self._core.join(Limits(SLOTS, blocks, BLOCK, work.longest, max_step_tokens=2 * int(work.prompt.max())))
        self._arrived: Int64 = np.zeros(count, np.int64)
        self._first: Int64 = np.full(count, -1, np.int64)
        self._dry = False
        self._held: list[int] = []
        self._gaps: list[npt.NDArray[np.float64]] = []
        self.prefill_gaps: list[npt.NDArray[np.float64]] = []  # of steps that computed a prompt, ns
        self.steps = self.slots_ns = self.core_ns = 0  # slots_ns: slots that computed, times the time of their step
        self.now_ns = 1_000_000_000
        self._begun_ns = self.now_ns

    def run(self) -> Figures:
        """Return output tok/s, P50 and P99 of all gaps, and P99 of the time to first token, in ms.

        The measurement ends when the first user has sent its last request, so it contains no draining.
        """
        for user in range(USERS):
            self._send(user)
        tokens = 0
        while not self._dry:
            begun_ns = time.thread_time_ns()
            step, _ = self._core.plan(self.now_ns)
            self.core_ns += time.thread_time_ns() - begun_ns
            if step is None:
                self.now_ns += 1_000_000  # a batch that waits for more members
                continue
            duration = step_ns(step.prefill_tokens)
            self.now_ns += duration
            slots = step.chunk_slots[step.samples]
            begun_ns = time.thread_time_ns()
            outcome = self._core.apply(
                StepResult(step.id, 0, slots, np.zeros(slots.size, np.int32), step_ns=duration), self.now_ns
            )
            self.core_ns += time.thread_time_ns() - begun_ns
            tokens += outcome.tokens.size
            self.steps += 1
            self.slots_ns += step.chunk_slots.size * duration
            if step.prefill_tokens:
                self.prefill_gaps.append(outcome.waits_ns[outcome.first_indices > 0].astype(np.float64))
            self._take(outcome)
        gaps = np.concatenate(self._gaps) / 1e6
        seconds = self.elapsed_ns / 1e9
        begun = self._first >= 0
        ttft = (self._first - self._arrived)[begun] / 1e6
        p50, p99 = np.percentile(gaps, (50, 99))
        return tokens / seconds, float(p50), float(p99), float(np.percentile(ttft, 99))

    @property
    def elapsed_ns(self) -> int:
        """Return the simulated time of the run."""
        return self.now_ns - self._begun_ns

    @property
    def started(self) -> int:
        """Return how many requests have had their first token."""
        return int((self._first >= 0).sum())

    def _send(self, index: int) -> None:
        if index >= len(self._work):
            self._dry = True
            return
        self._sent += 1
        self._progress(self._sent)
        self._arrived[index] = self.now_ns
        request = self._work.request(index, 0)
        request.arrived_ns = self.now_ns
        self._core.add(request, self.now_ns)

    def _take(self, outcome: Outcome) -> None:
        for request, first in zip(outcome.requests, outcome.first_indices.tolist(), strict=True):
            if not first:
                self._first[request.payload] = self.now_ns
        if not self._at_end:
            self._gaps.append(outcome.waits_ns[outcome.first_indices > 0].astype(np.float64))
            for done in outcome.ended_requests:
                self._send(done.request.payload + USERS)
            return
        self._held += [done.request.payload for done in outcome.ended_requests]
        if outcome.ended_requests and not self._core.stats()["running"]:  # deliver the batch in equal gaps
            for index in self._held:
                if (n := int(self._work.output[index]) - 1) > 0:
                    self._gaps.append(np.full(n, (self.now_ns - self._first[index]) / n))
                self._send(index + USERS)
            self._held.clear()


def measure(row: str, work: Workload, progress: Callable[[int], None]) -> Figures:
    """Return a row of T5. The budget is the chunk plus the decodes; static fills all slots."""
    if row.startswith("chunk"):
        return Users(parse("sarathi"), int(row.split()[1]) + SLOTS, work, progress).run()
    return Users(parse(f"static:batch=static-{SLOTS}" if row == "static" else row), 0, work, progress).run()


def _measured(work: Workload, report: Report) -> dict[str, Figures]:
    """Return all rows of T5 over one workload."""
    count = len(work)
    return {
        row: measure(row, work, Every64th(report, count * len(T5_SHEET), number * count))
        for number, row in enumerate(T5_SHEET)
    }


def chunk_sizes(report: Report = unseen) -> Table:
    """Return T5."""
    table = Table("T5", "chunk size against users", "order exact, ratios to orca within 25 %", ("row", *T5_COLUMNS))
    _compare(table, _measured(drawn_workload(), report), required=True)
    table.notes.append(
        f"{USERS} users, {SLOTS} slots, one request at a time, {EACH} each; {LONG_SHARE:.0%} of the prompts {LONG} "
        f"tokens, the others {SHORT[0]} to {SHORT[1]}; outputs geometric, mean {OUTPUT_MEAN}, at most {MAX_OUTPUT}; "
        "t = 45 ms + 0.078 ms x prefill tokens"
    )
    table.notes.append(
        "this workload was chosen with the sheet's ratios in view: close ratios show that such a workload exists, not "
        "that other workloads give the same; the next table uses lengths from a trace"
    )
    table.notes.append(
        "after the first comparison only the measurement was changed: static fills all slots (its preset takes 32), "
        "and the time after the first user's last request is left out"
    )
    return table


def chunk_sizes_chat(report: Report = unseen) -> Table:
    """Return T5 with the lengths of the chat trace."""
    table = Table("T5, chat trace", "the same with the chat trace's lengths", "informs", ("row", *T5_COLUMNS))
    work = chat_workload()
    _compare(table, _measured(work, report), required=False)
    table.notes.append(
        f"the lengths of the chat trace's first {len(work):,} requests (prompts of {work.prompt.mean():,.0f} tokens on "
        f"average, outputs of {work.output.mean():,.0f}); users, slots and step time as in T5, nothing tuned"
    )
    return table


def _compare(table: Table, ours: dict[str, Figures], required: bool) -> None:
    """Add the rows, the ratio of each row to orca, and the order of the rows by each figure."""
    for row, sheet in T5_SHEET.items():
        table.rows.append([f"{row}: sheet", *sheet])
        table.rows.append([f"{row}: ours", *(round(value, 1) for value in ours[row])])
        if row != "orca":
            shown: list[Any] = [f"{row}: ratio, sheet / ours"]
            for i, name in enumerate(T5_COLUMNS):
                theirs, mine = sheet[i] / T5_SHEET["orca"][i], ours[row][i] / ours["orca"][i]
                near = abs(mine / theirs - 1) <= NEAR
                shown.append(f"{theirs:.2f} / {mine:.2f}{'' if near else ' MISSED'}")
                table.claim(f"{row}, {name}: ratio {mine:.2f} within 25 % of {theirs:.2f}", near, required=False)
            table.rows.append(shown)
    for i, name in enumerate(T5_COLUMNS):
        order = sorted(T5_SHEET, key=lambda row: T5_SHEET[row][i])
        values = [ours[row][i] for row in order]
        exact = all(a < b for a, b in itertools.pairwise(values))
        table.claim(f"{name}: order {' < '.join(order)}", exact, required)
