"""T6: compare the steps of the preset `iteration-level` with those of the transcribed reference scheduler."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import StepPlan
from services.simulator.device.clock import Linear
from services.simulator.engine import Setup, simulate
from services.simulator.literature import reference_scheduler
from services.simulator.literature.reference_scheduler import Counts, Request
from services.simulator.literature.table import Table
from services.simulator.workload.workload import Workload

TIGHT = (3_000, 1_000, 500)  # smaller pools for the same comparison: the sheet's pool holds all 100 requests at once
SHOWN = (1, 2, 3, 4, 5, 10, 20, 40, 80, 160, 280)  # printed steps, besides the first that differ
MAX_REQUESTS, MAX_TOKENS, BLOCKS = 128, 2048, 10_000


def core_steps(requests: list[Request], blocks: int = BLOCKS) -> list[Counts]:
    """Return the counts of the core's steps, with a scheduler that takes no time and plans no step ahead."""
    steps: list[Counts] = []

    def observe(now_ns: int, core: Scheduler, plan: StepPlan) -> None:
        stats = core.stats()
        steps.append(Counts(plan.decode_tokens, plan.prefill_tokens, int(stats["waiting"]), int(stats["running"])))

    def column(values: list[float]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        rounded: np.ndarray[tuple[int], np.dtype[np.int64]] = np.rint(np.array(values)).astype(np.int64)
        return rounded

    workload = Workload(
        column([request.arrival_ms * 1e6 for request in requests]),
        column([request.prompt for request in requests]),
        column([request.max_new for request in requests]),
        priority=column([request.priority for request in requests]),
        ttft_slo_ns=column([request.ttft_ms * 1e6 for request in requests]),
        tbt_slo_ns=column([request.tbt_ms * 1e6 for request in requests]),
    )
    setup = Setup(blocks, max_seqs=MAX_REQUESTS, max_step_tokens=MAX_TOKENS, lookahead=0, host_us=0.0)
    clock = Linear(reference_scheduler.step_ms(0) * 1e6, 50_000.0)
    simulate("iteration-level", workload, setup, clock, observer=observe)
    return steps


def classes() -> Table:
    """Return T6."""
    columns = ("step", *(f"{side}: {name}" for side in ("rules", "ours") for name in Counts._fields))
    table = Table("T6", "the reference scheduler, step by step", "exact", columns)
    rules = reference_scheduler.run(
        reference_scheduler.table_six(), max_batch_requests=MAX_REQUESTS, max_batch_tokens=MAX_TOKENS, blocks=BLOCKS
    )
    ours = core_steps(reference_scheduler.table_six())
    differ = [i for i in range(min(len(rules), len(ours))) if rules[i] != ours[i]]
    printed = {step - 1 for step in SHOWN} | set(differ[:5])
    for i in sorted(printed):
        if i < min(len(rules), len(ours)):
            table.rows.append([i + 1, *rules[i], *ours[i]])
    table.rows.append(["steps", len(rules), None, None, None, len(ours), None, None, None])
    table.claim(f"all {len(rules)} steps alike ({len(differ)} differ)", rules == ours)
    for blocks in TIGHT:
        rules = reference_scheduler.run(reference_scheduler.table_six(), max_batch_requests=MAX_REQUESTS, blocks=blocks)
        alike = rules == core_steps(reference_scheduler.table_six(), blocks)
        table.claim(f"with {blocks} blocks all {len(rules)} steps alike", alike)
    return table
