"""T6: compare the preset `iteration-level` with the article's scheduler, step by step."""

from __future__ import annotations

import random

from services.simulator.jobs import Report
from services.simulator.literature.cases import PROGRAMS, ROW, Case, Row, run_case
from services.simulator.literature.table import Table, unseen
from services.simulator.policies.article import HIGH, NORMAL, Arrival, Settings

TIGHT = (3_000, 1_000, 500)  # smaller pools for the same comparison: the article's holds all 100 requests at once
SHOWN = (1, 2, 3, 4, 5, 10, 20, 40, 80, 160, 280)  # printed steps, besides the first that differ
DRAWN, SEED = 20, 6  # random cases


def usage_example(blocks: int = 20_000) -> Case:
    """Return the article's usage example: 100 requests at once, prompts 128 + 10 i, 256 new, every fifth high."""
    requests = [Arrival(0.0, 128 + 10 * i, 256, HIGH if i % 5 == 0 else NORMAL, 2000.0, 100.0) for i in range(100)]
    return Case("usage example", {}, requests, Settings(blocks=blocks), None)


def drawn(seed: int) -> Case:
    """Return a random case that the core takes: all classes, limits at risk in some, tight blocks in some."""
    rng = random.Random(seed)
    blocks, prompt, span = rng.choice((60, 300, 20_000)), rng.choice((100, 600)), rng.choice((0, 400, 4_000))
    limits = rng.choice(((1e9,), (10.0, 15.0, 1e9), (100.0,)))
    requests = [
        Arrival(
            float(rng.randint(0, span)),
            rng.randint(1, prompt),
            rng.randint(1, 40),
            rng.randint(0, 3),
            rng.choice((300.0, 2000.0)),
            rng.choice(limits),
        )
        for _ in range(40)
    ]
    settings = Settings(
        batch_tokens=rng.choice((50, 512, 2048)),
        batch_requests=rng.choice((4, 128)),
        chunk=rng.choice((50, 100, 256)),
        blocks=blocks,
        fixed_ms=rng.choice((2.0, 25.0)),
        token_ms=rng.choice((0.02, 0.2)),
        steps=400,
    )
    return Case(f"drawn {seed}", {}, requests, settings, None)


def steps(case: Case, program: str) -> list[Row]:
    return run_case(case, PROGRAMS[program](case))


def classes(report: Report = unseen) -> Table:
    """Return T6."""
    cases = [drawn(SEED * 1_000 + i) for i in range(DRAWN)]
    tight = [usage_example(blocks) for blocks in TIGHT]
    total = 3 * len(usage_example().requests) + 2 * sum(len(case.requests) for case in (*tight, *cases))
    done = 0

    def run(case: Case, program: str) -> list[Row]:
        nonlocal done
        rows = steps(case, program)
        done += len(case.requests)
        report(done, total)
        return rows

    programs = ("article", "article-corrected", "iteration-level")
    columns = ("step", *(f"{program}: {name}" for program in programs for name in ROW))
    table = Table("T6", "the article's scheduler, step by step", "exact", columns)
    exact, corrected, ours = (run(usage_example(), program) for program in programs)
    differ = [i for i in range(min(len(corrected), len(ours))) if corrected[i] != ours[i]]
    for i in sorted({step - 1 for step in SHOWN} | set(differ[:5])):
        if i < min(len(exact), len(corrected), len(ours)):
            table.rows.append([i + 1, *exact[i], *corrected[i], *ours[i]])
    blank = [None] * (len(ROW) - 1)
    table.rows.append(["steps", len(exact), *blank, len(corrected), *blank, len(ours), *blank])
    table.claim(f"all {len(corrected)} steps of article-corrected and iteration-level alike", corrected == ours)
    for blocks, case in zip(TIGHT, tight, strict=True):
        wanted = run(case, "article-corrected")
        alike = wanted == run(case, "iteration-level")
        table.claim(f"with {blocks} blocks all {len(wanted)} steps alike", alike)
    wanted_steps = [run(case, "article-corrected") for case in cases]
    equal = sum(run(case, "iteration-level") == rows for case, rows in zip(cases, wanted_steps, strict=True))
    victims = sum(row[4] for rows in wanted_steps for row in rows)
    table.claim(
        f"{equal} of {DRAWN} random cases alike ({sum(map(len, wanted_steps))} steps, {victims} preemptions)",
        equal == DRAWN,
    )
    table.notes.append(
        "article: the article's program; article-corrected: the last chunk samples, and a preempted sequence computes "
        "its outputs again; iteration-level: the shipped core"
    )
    return table
