"""The cost of an iteration against running and waiting sequences and blocks, and its plot.

Called by bench/scheduler/main.py. The aim is flat or near flat. The picture needs matplotlib (the `bench` extra).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.scheduler.drive import BLOCK_SIZE, STEP_NS, Drive, Setup, Watch, costs
from bench.scheduler.parts import LENGTHS, WARM, admitting, steady
from services.scheduler.core.types import Limits

RUNNING = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
WAITING = (0, 10, 100, 1000, 10_000, 100_000)
BLOCKS = (2_500, 10_000, 50_000, 250_000, 1_000_000)
HEAD_PROMPT = 1000  # tokens of prompts with a free slot and no memory
BASE_PROMPT = 128
UNENDING = 1 << 20  # asked for by the waiting: to the end of the context, which the running never reach
NEVER_LATE_NS = 3600 * 10**9
FORECAST_SHARE = 0.99  # of the pool, that `orcinus` gives away at most; the running are to have just that
BLOCKS_RUNNING = 32  # where the number of blocks varies
FREE_SLOTS = 64
SETTLING = 20
ENTERING, ENTERING_PROMPT = 4, 256
FILLER_TOKENS = 16_000  # a prompt of those that fill the prefix cache, at most

Line = dict[str, Any]


def by_running(counts: Sequence[int], setup: Setup) -> list[Line]:
    """Measure steady decode with an empty waiting queue."""
    return [_decode(steady(count, setup), setup, {"case": "steady decode", "running": count}) for count in counts]


def by_waiting(counts: Sequence[int], running: int, setup: Setup) -> list[Line]:
    """Measure `running` decodes while sequences wait that cannot enter.

    slots full: as many run as may. head judged: slots are free, and the memory that is left is too little for the first
    of the waiting. falling late: the same, and they pass their TTFT limits meanwhile, evenly over the iterations.
    """
    lines = []
    for case, slots in (("slots full", 0), ("head judged", FREE_SLOTS), ("falling late", FREE_SLOTS)):
        drive = _scarce(running, slots, len(counts) * (setup.samples + SETTLING), setup)
        prompt, waiting = drive.prompt(HEAD_PROMPT if slots else BASE_PROMPT), 0
        for count in counts:
            new, waiting = count - waiting, count
            for number in range(new):
                limit_ns = NEVER_LATE_NS
                if case == "falling late":
                    limit_ns = 2 * STEP_NS * setup.samples * (number + 1) // new
                drive.add(prompt, UNENDING, salt=number.to_bytes(4, "little"), ttft_slo_ns=limit_ns)
            for _ in drive.steps(SETTLING):  # some may enter yet, until memory is short
                pass
            about = {"case": case, "running": drive.running, "waiting": count}
            lines.append(_decode(drive, setup, about) | {"still_waiting": drive.core.waiting_count})
    return lines


def by_blocks(counts: Sequence[int], setup: Setup) -> list[Line]:
    """With the prefix cache on and full, so that every block taken is evicted from it: steady decode, and iterations
    that admit some short prompts of which half is cached."""
    lines = []
    for blocks in counts:
        for case in ("decode", "admission"):
            drive = _full(blocks, setup)
            about: Line = {"case": case, "running": BLOCKS_RUNNING, "blocks": blocks}
            line = _decode(drive, setup, about) if case == "decode" else _admission(drive, setup, about)
            stats = drive.core.stats()
            lines.append(line | {"blocks_cached": stats["blocks_cached"], "blocks_free": stats["blocks_free"]})
    return lines


def _decode(drive: Drive, setup: Setup, about: Line) -> Line:
    with Watch() as watch:
        taken = [(done.plan_ns, done.apply_ns) for done in drive.steps(setup.samples)]
    return about | costs(taken, setup.rounds) | {"iterations": len(taken)} | watch.figures()


def _admission(drive: Drive, setup: Setup, about: Line) -> Line:
    samples = _admissions(setup) - WARM
    with Watch() as watch:
        admitted = admitting(drive, ENTERING, ENTERING_PROMPT, ENTERING_PROMPT // 2, samples)
        taken = [(done.plan_ns, done.apply_ns) for done in admitted]
    if not taken:
        raise RuntimeError(f"no iteration admitted {ENTERING} prompts at once")
    about = about | {"entering": ENTERING, "prompt_tokens": ENTERING_PROMPT}
    return about | costs(taken, setup.rounds) | {"iterations": len(taken)} | watch.figures()


def _scarce(running: int, slots: int, steps: int, setup: Setup) -> Drive:
    """`running` decode for `steps` more with the memory they need to their ends, and hardly any more is there; `slots`
    are free."""
    length = BASE_PROMPT + steps + 200
    blocks = int(running * -(-length // BLOCK_SIZE) / FORECAST_SHARE) + 8
    limits = Limits(running + slots, blocks, BLOCK_SIZE, length + HEAD_PROMPT, running * BASE_PROMPT + HEAD_PROMPT)
    drive = Drive(limits, setup)
    drive.run([drive.prompt(BASE_PROMPT) for _ in range(running)], length - BASE_PROMPT)
    return drive


def _full(blocks: int, setup: Setup) -> Drive:
    """BLOCKS_RUNNING decode, and all other blocks are cached. A prompt that fills the cache is its own prefix."""
    filler = min(FILLER_TOKENS, blocks // 8 * BLOCK_SIZE)
    ahead = setup.lookahead + 2
    length = (
        200 + (blocks * BLOCK_SIZE // filler + 1) * ahead + max(setup.samples, _admissions(setup) * (LENGTHS + ahead))
    )
    slots = BLOCKS_RUNNING + ENTERING
    longest = max(filler + BLOCK_SIZE, BASE_PROMPT + length)
    drive = Drive(Limits(slots, blocks, BLOCK_SIZE, longest, filler + slots * BASE_PROMPT), setup)
    drive.run([drive.prompt(BASE_PROMPT) for _ in range(BLOCKS_RUNNING)], length)
    drive.fill(filler, 1)
    return drive


def _admissions(setup: Setup) -> int:
    """Of one figure, those that warm up included: each needs many iterations."""
    return max(setup.samples // 5, 1) + WARM


def draw(curves: dict[str, list[Line]], directory: Path, title: str) -> Path:
    """Write scheduler.png, with a panel for each measured curve."""
    from matplotlib.figure import Figure

    labels = {"running": "sequences running", "waiting": "requests waiting", "blocks": "blocks, prefix cache full"}
    directory.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(5 * len(curves), 4.2), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    for axes, (name, lines) in zip(panels, curves.items(), strict=True):
        for case in dict.fromkeys(line["case"] for line in lines):
            mine = [line for line in lines if line["case"] == case]
            at = [line[name] for line in mine]
            (p50,) = axes.plot(at, [line["total_us"]["p50"] for line in mine], marker="o", label=f"{case}, p50")
            p99 = [line["total_us"]["p99"] for line in mine]
            axes.plot(at, p99, marker=".", linestyle=":", color=p50.get_color(), label=f"{case}, p99")
        if name == "waiting":
            axes.set_xscale("symlog", linthresh=10)
        else:
            axes.set_xscale("log", base=2 if name == "running" else 10)
        axes.set_yscale("log")
        axes.set_xlabel(labels[name] if name == "running" else f"{labels[name]}; {lines[0]['running']} running")
        axes.set_ylabel("plan + apply, microseconds")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small", loc="lower center", ncols=2)
    panels[0].set_ylim(bottom=5)  # of all panels, which share it; room for the legends
    path = directory / "scheduler.png"
    figure.savefig(path, dpi=110)
    return path
