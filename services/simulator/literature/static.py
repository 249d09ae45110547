"""T1 and T2: slots and padding that a static batch wastes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import StepPlan
from services.simulator.device.clock import Features, Linear, RooflineClock
from services.simulator.device.roofline import Roofline
from services.simulator.engine import Setup, simulate
from services.simulator.jobs import Every64th, Report
from services.simulator.literature.table import Table, monotone, unseen
from services.simulator.workload.arrivals import TRACES, Spec, build
from services.simulator.workload.traffic import read_trace
from services.simulator.workload.workload import Int64, all_at_once

T1_REQUESTS = {"A": (128, 500), "B": (64, 50), "C": (256, 200), "D": (32, 30)}
T1_SHEET = [(62, 4), (114, 3), (456, 2), (628, 1)]  # until step, slots active
GROUPED = 256  # requests that wait together when they are grouped by length
REQUESTS = 2_000  # of each trace that are simulated
# Batch sizes for which a decode graph is captured: powers of two to 8, then every 8.
BUCKETS = np.array([1, 2, 4, *range(8, 257, 8)])


def slots_in_use(report: Report = unseen) -> Table:
    """Return T1, from the steps that the core plans under `static`.

    A sequence computes one token a step, so prompt tokens count like output tokens (prompt 1, output prompt + new - 1).
    """
    table = Table("T1", "static batch: slots active until step", "exact", ("until step", "sheet: slots", "ours: slots"))
    totals = [prompt + new for prompt, new in T1_REQUESTS.values()]
    many = totals * 25
    of = len(totals) + 2 * len(many)
    active = _active(totals, "static", Every64th(report, of))
    ends = stretches(active)
    for (step, slots), (our_step, our_slots) in zip(T1_SHEET, ends, strict=False):
        table.rows.append([step, slots, our_slots if our_step == step else f"{our_slots} until {our_step}"])
    ours = sum(active) / (4 * len(active))
    table.rows.append(["utilisation %", 50.2, round(100 * ours, 1)])
    table.claim("the same slots at the same steps", ends == T1_SHEET)
    table.claim("utilisation 50.2 %", round(100 * ours, 1) == 50.2)
    waiting = _active(many, "orca", Every64th(report, of, len(totals)))
    filled = sum(waiting) / (4 * len(waiting))
    behind = _active(many, "static", Every64th(report, of, len(totals) + len(many)))
    table.rows.append(["utilisation %, 100 of them", None, round(100 * sum(behind) / (4 * len(behind)), 1)])
    table.rows.append(["the same, orca", "fills the empty slots", round(100 * filled, 1)])
    table.claim("iteration-level batching fills the empty slots (over 95 %)", filled > 0.95)
    return table


def _active(totals: Sequence[int], policy: str, progress: Callable[[int], None]) -> list[int]:
    """Return the number of slots that compute in each step, with 4 slots and no other limit."""
    counts: list[int] = []

    def observe(now_ns: int, core: Scheduler, plan: StepPlan) -> None:
        counts.append(plan.decode_tokens + plan.prefill_tokens)

    # a prompt of one token samples in its first step, so an output of n takes n steps
    workload = all_at_once([1] * len(totals), list(totals))
    blocks = len(totals) * (max(totals) // 16 + 2)
    setup = Setup(blocks, max_seqs=4, lookahead=0, host_us=0.0)
    simulate(policy, workload, setup, Linear(1e6), observer=observe, progress=progress)
    return counts


def stretches(active: Sequence[int]) -> list[tuple[int, int]]:
    """Return (last step, slots) of each run of steps with the same number of slots."""
    following = [*active[1:], 0]
    return [(i + 1, now) for i, (now, then) in enumerate(zip(active, following, strict=True)) if now != then]


def padding(lengths: Int64, batch: int, grouped: bool = False) -> float:
    """Return 1 - sum(l) / sum(batch size x longest) over batches of consecutive `lengths` [n].

    grouped: sort each run of `GROUPED` consecutive lengths first.
    """
    used = lengths
    if grouped:
        used = np.concatenate([np.sort(lengths[i : i + GROUPED]) for i in range(0, len(lengths), GROUPED)])
    batches = [used[i : i + batch] for i in range(0, len(used), batch)]
    return 1 - float(used.sum()) / sum(len(one) * int(one.max()) for one in batches)


class GraphClock:
    """A roofline that counts the batch sizes of steps without a prompt, which run as captured graphs."""

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()
        self.tokens = 0
        self._clock = RooflineClock(Roofline("llama-8b", "h100"))

    def duration_ns(self, plan: StepPlan, features: Features) -> int:
        self.tokens += features.tokens
        if not plan.prefill_tokens:
            self.sizes[plan.decode_tokens] += 1
        return self._clock.duration_ns(plan, features)

    def padding(self) -> float:
        """Return the share of rows that were added to reach a captured size."""
        sizes = np.array(sorted(self.sizes))
        added = BUCKETS[np.searchsorted(BUCKETS, sizes)] - sizes
        extra = int((added * np.array([self.sizes[size] for size in sizes.tolist()])).sum())
        return extra / max(self.tokens + extra, 1)


def padded_batches(report: Report = unseen) -> Table:
    """Return T2: padding of prompts in padded batches, and of captured batch sizes in our simulated engine."""
    columns = ("trace", "by arrival, 8", "by arrival, 32", "grouped, 8", "grouped, 32", "ours (buckets)")
    table = Table("T2", "padding, % of what is computed", "shape", columns)
    table.rows.append(["sheet (one article)", None, 31.7, None, 8.7, 0.0])
    names = ("azure_conv_2023", "azure_code_2023")
    for number, name in enumerate(names):
        prompts = read_trace(TRACES / f"{name}.csv").prompt_tokens
        arrival = [padding(prompts, 8), padding(prompts, 32)]
        grouped = [padding(prompts, 8, grouped=True), padding(prompts, 32, grouped=True)]
        clock = GraphClock()
        blocks = Roofline("llama-8b", "h100").kv_blocks(16)
        spec = Spec(trace=TRACES / f"{name}.csv", requests=REQUESTS)
        progress = Every64th(report, REQUESTS * len(names), number * REQUESTS)
        simulate("orcinus", build(spec), Setup(blocks, max_seqs=256), clock, progress=progress)
        ours = clock.padding()
        table.rows.append([name, *(round(100 * share, 2) for share in (*arrival, *grouped, ours))])
        table.claim(f"{name}: more in batches of 32 than of 8, by arrival", monotone(arrival))
        table.claim(f"{name}: less when grouped by length", grouped[0] < arrival[0] and grouped[1] < arrival[1])
        table.claim(f"{name}: ours least", ours < min(arrival + grouped))
    table.notes.append(
        f"prompts of the whole trace; grouped: sorted {GROUPED} at a time; ours: decode graphs of 1, 2, 4, 8, 16, 24 "
        f"and so on rows, over the first {REQUESTS} requests (orcinus, llama-8b on h100); flat prompts pad nothing"
    )
    return table
