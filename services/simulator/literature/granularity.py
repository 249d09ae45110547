"""T7 and T8: scheduling by request and by iteration, and the timeline of a long prompt beside decodes."""

from __future__ import annotations

import itertools

import numpy as np

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits, NewRequest, StepResult
from services.simulator.jobs import Every64th, Report
from services.simulator.literature.chunks import (
    BLOCK,
    LONG,
    MAX_OUTPUT,
    OUTPUT_MEAN,
    SLOTS,
    USERS,
    Users,
    drawn_workload,
)
from services.simulator.literature.table import Table, unseen
from services.simulator.policies.parts import parse
from services.simulator.workload.workload import Workload

MS_NS = 1_000_000
CHUNK = 256
EACH = 8  # requests of each user

# T7: what, range of request-level scheduling, of iteration-level scheduling, range of the gain
T7_SHEET = {
    "between decisions, ms": ((100, 10_000), (20, 50), (10, 200)),
    "slots in use, %": ((60, 75), (90, 98), (20, 30)),
    "P99 TBT beside prompts, ms": ((200, 500), (35, 80), (3, 10)),
    "scheduler, % of the time": ((0.01, 0.01), (0.1, 0.5), (10, 50)),
}
# T8: ms at which a step of the sheet begins, and what the new request does in it
T8_SHEET = {
    "whole": ((0, ""), (30, ""), (60, "0-2047"), (360, "decode")),
    f"chunks of {CHUNK}": (
        (0, ""), (30, ""), (35, "0-255"), (70, "256-511"), (105, "512-767"), (140, "768-1023"), (175, "1024-1279"),
        (210, "1280-1535"), (245, "1536-1791"), (280, "1792-2047"), (315, "decode"),
    ),
}  # fmt: skip
T8_GAPS = {"whole": 300.0, f"chunks of {CHUNK}": 35.0}  # ms, the longest time between tokens of the decodes
POLICIES = {"whole": ("orca", 0), f"chunks of {CHUNK}": ("sarathi", CHUNK + 8)}  # with the token budget
PROMPT, DECODES, ARRIVES_MS = 2_048, 8, 31
STEP_MS = {0: 30, CHUNK: 35, PROMPT: 300}  # time of a step with so many prompt tokens, as the sheet has them


def by_request_and_iteration(report: Report = unseen) -> Table:
    """Return T7: the users of T5 with `max_tokens` 256, so that memory has to be reserved before a length is known.

    There are as many blocks as 64 requests of mean length and one long prompt fill.
    """
    columns = (
        "",
        "sheet: request",
        "sheet: iteration",
        "sheet: gain",
        "ours: request",
        "ours: iteration",
        "ours: gain",
    )
    table = Table("T7", "decisions at requests and at iterations", "slots in use and TBT: shape", columns)
    drawn, count = drawn_workload(), USERS * EACH
    limits = np.full(count, MAX_OUTPUT, np.int64)
    work = Workload(drawn.arrived_ns[:count], drawn.prompt[:count], drawn.output[:count], max_tokens=limits)
    blocks = SLOTS * -(-int(work.prompt.mean() + work.output.mean()) // BLOCK) + LONG // BLOCK
    ours = [
        _measured(Users(parse("request-capacity"), 0, work, Every64th(report, 2 * count), blocks), by_request=True),
        _measured(
            Users(parse("sarathi"), CHUNK + SLOTS, work, Every64th(report, 2 * count, count), blocks), by_request=False
        ),
    ]
    for number, (name, sheet) in enumerate(T7_SHEET.items()):
        request, iteration = ours[0][number], ours[1][number]
        gain = iteration - request if name.startswith("slots") else max(request, iteration) / min(request, iteration)
        table.rows.append(
            [name, *(_range(*ends) for ends in sheet), *(_rounded(x) for x in (request, iteration, gain))]
        )
        required = name.startswith(("slots", "P99"))
        better = iteration > request if name.startswith(("slots", "scheduler")) else iteration < request
        table.claim(f"{name}: {'more' if name[0] == 's' else 'less'} with decisions at iterations", better, required)
        for kind, value, (low, high) in zip(
            ("request", "iteration", "gain"), (request, iteration, gain), sheet, strict=True
        ):
            held = 0.9 * low <= value <= 1.1 * high
            table.claim(f"{name}, {kind}: {_rounded(value)} in {_range(low, high)} (10 % beyond)", held, required=False)
    table.notes.append(
        f"request: preset request-capacity; iteration: sarathi, chunks of {CHUNK}; {USERS} users and {SLOTS} slots as "
        f"in T5, max_tokens {MAX_OUTPUT} for outputs of {OUTPUT_MEAN} on average, {blocks} blocks of {BLOCK}"
    )
    table.notes.append(
        "between decisions: the mean time for which a request runs, as in the sheet, and the mean step; scheduler: CPU "
        "time of plan and apply, which our core calls at each step whatever the policy, so the sheet's gain has no "
        "counterpart; the sheet's gain in slots is in points"
    )
    return table


def _measured(users: Users, by_request: bool) -> tuple[float, float, float, float]:
    """Return our column of T7: ms between decisions, % of the slots, ms of P99 TBT beside prompts, % of the time."""
    users.run()
    apart_ns = users.slots_ns / users.started if by_request else users.elapsed_ns / users.steps
    return (
        apart_ns / MS_NS,
        100 * users.slots_ns / (SLOTS * users.elapsed_ns),
        float(np.percentile(np.concatenate(users.prefill_gaps), 99)) / MS_NS,
        100 * users.core_ns / users.elapsed_ns,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _range(low: float, high: float) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def timeline(policy: str, step_tokens: int) -> list[tuple[int, str, int]]:
    """Return the steps from the arrival of a prompt of 2,048 tokens to its first decode: ms at which the step begins,
    what the prompt's request does in it, and decodes of the others.

    Eight sequences decode; a step takes the sheet's time for what it computes.
    """
    core = Scheduler(parse(policy), max_seqs=DECODES + 1, lookahead=0, step_tokens=step_tokens)
    core.join(Limits(DECODES + 1, 1_000, BLOCK, 4_096, max_step_tokens=4_096))
    for number in range(DECODES):
        core.add(NewRequest(f"decodes-{number}", [np.zeros(1, np.int32)], max_tokens=1_000), 0)
    rows: list[tuple[int, str, int]] = []
    now_ms, new_slot, begun_ms = 0, -1, 0
    while not rows or rows[-1][1] != "decode":
        step, _ = core.plan(now_ms * MS_NS)
        if step is None:
            raise RuntimeError(f"{policy}: nothing can be planned at {now_ms} ms")
        new_slot = next((enter.slot for enter in step.enters if enter.request.id == "new"), new_slot)
        doing = ""
        for slot, start, length in zip(step.chunk_slots, step.chunk_starts, step.chunk_lengths, strict=True):
            if slot == new_slot:
                doing = "decode" if start >= PROMPT else f"{start}-{start + length - 1}"
        prompt = step.prefill_tokens
        if first := not begun_ms:
            begun_ms, prompt = now_ms + STEP_MS[0], 0
        else:
            rows.append((now_ms - begun_ms, doing, step.decode_tokens - (doing == "decode")))
        before_ms, now_ms = now_ms, now_ms + STEP_MS[prompt]
        sampled = step.chunk_slots[step.samples]
        core.apply(
            StepResult(step.id, 0, sampled, sampled * 0 + 9, step_ns=(now_ms - before_ms) * MS_NS), now_ms * MS_NS
        )
        if not first and before_ms - begun_ms <= ARRIVES_MS < now_ms - begun_ms:
            core.add(NewRequest("new", [np.zeros(PROMPT, np.int32)], max_tokens=9), (begun_ms + ARRIVES_MS) * MS_NS)
    return rows


def timelines() -> Table:
    """Return T8."""
    columns = ("a step begins at, ms: sheet", "ours", "the new request: sheet", "ours", "others that decode")
    table = Table("T8", "a prompt of 2,048 tokens beside decodes", "steps exact, times to a step", columns)
    for name, sheet in T8_SHEET.items():
        rows = timeline(*POLICIES[name])
        table.rows.append([f"{name}:", None, None, None, None])
        for (at, doing), (our_at, our_doing, decodes) in zip(sheet, rows, strict=False):
            table.rows.append([at, our_at, doing or "-", our_doing or "-", decodes])
        same = [doing for _, doing in sheet] == [doing for _, doing, _ in rows]
        table.claim(f"{name}: the new request does the same in each of {len(sheet)} steps", same)
        table.claim(f"{name}: all others decode in each step", all(decodes == DECODES for *_, decodes in rows))
        longest = max(b - a for (a, *_), (b, *_) in itertools.pairwise(rows))
        table.claim(
            f"{name}: at most {longest} ms between tokens, {T8_GAPS[name]:.0f} in the sheet", longest == T8_GAPS[name]
        )
        off = max(abs(at - our_at) for (at, _), (our_at, *_) in zip(sheet, rows, strict=False))
        table.claim(
            f"{name}: no step begins more than {STEP_MS[0]} ms away from the sheet's ({off})", off <= STEP_MS[0]
        )
    table.notes.append(
        f"{DECODES} decodes; the request arrives {ARRIVES_MS} ms after the first step; a step takes 30 ms, with a "
        "chunk 35 and with the whole prompt 300, as in the sheet and on no device: eight chunks cost 40 ms there, the "
        "whole prompt 300. The sheet gives the second step with chunks 5 ms, so all later ones begin 25 ms earlier"
    )
    return table
