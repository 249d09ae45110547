"""`make soak`: half an hour of constant load without a fault, and whether anything grows.

The load is that of `orcinus chaos`: disconnects, cancels, slow readers, streams that are gone on with, several choices,
long prompts. The soak adds requests with a grammar, a second tenant, and batches, one at a time. Every answer is
checked, the stack has to come back to rest, and no quantity may grow (trend.py).
Exit code 1 when something is wrong. Needs matplotlib for --plot.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop

from bench.result import provenance, write
from shared.settings import DEMO_MODEL
from tests.chaos.harness.load import GRAMMAR
from tests.chaos.harness.run import SEED, Result, Scenario, chaos
from tests.chaos.soak.samples import Samples, draw
from tests.chaos.soak.trend import Trend, by_minute, trend

WARM_UP_S = 480.0
"""Records of finished requests live for five minutes: only then does Redis hold as many as it will."""
LONGEST_WARM_UP = 0.4
"""Of a short run."""


@dataclass(frozen=True, slots=True)
class Soak:
    """What a soak found. minutes: medians behind the warm-up, by quantity; trends: where they are enough to tell."""

    result: Result
    samples: Samples
    warm_up_s: float
    minutes: dict[str, list[float]]
    trends: dict[str, Trend]

    @property
    def growing(self) -> list[str]:
        return [name for name, found in self.trends.items() if found.grows]

    def figures(self) -> dict[str, Any]:
        """What is kept of it."""
        figures = self.result.figures()
        counted = ("requests", "finished", "refused", "cut", "clients", "reconnects", "abandoned")
        wrong = [f"{found.kind}: {found.where}: {found.text}" for found in self.result.violations]
        return {
            "seconds": round(self.samples.at_s[-1], 1),
            "warm_up_s": self.warm_up_s,
            **{name: figures[name] for name in counted},
            "tenants": sorted(Counter(history.tenant for history in self.result.histories).values()),
            "grammars": sum(history.template.startswith(GRAMMAR) for history in self.result.histories),
            "batches": self.result.batches,
            "batch_lines": self.result.batch_lines,
            "violations": wrong,
            "growing": self.growing,
            "trends": {
                name: {key: round(value, 3) for key, value in asdict(found).items()}
                for name, found in self.trends.items()
            },
            "minutes": {name: [round(value, 2) for value in values] for name, values in self.minutes.items()},
        }


async def soak(directory: Path, minutes: float, clients: int, seed: int = SEED, templates: int | None = None) -> Soak:
    """Run it; templates: only so many. Raises NotReadyError when the stack does not start."""
    seconds = 60.0 * minutes
    scenario = Scenario(
        DEMO_MODEL, seed, seconds, faults=0, gap_s=1.0, clients=clients, kinds=(), templates=templates, is_mixed=True
    )
    samples = Samples()
    result = await chaos(directory, scenario, lambda text: print(text, file=sys.stderr), samples.collect)
    samples.drop_after(seconds)  # what followed was the end of the load
    warm_up_s = min(WARM_UP_S, LONGEST_WARM_UP * seconds)
    medians = {name: by_minute(samples.at_s, samples.column(name), warm_up_s) for name in samples.rows[0]}
    found = {name: trend(name.split()[0], values) for name, values in medians.items()}
    trends = {name: one for name, one in found.items() if one is not None}
    return Soak(result, samples, warm_up_s, medians, trends)


def main(argv: list[str]) -> int:
    """0: nothing grows and every answer is right."""
    build = argparse.ArgumentParser(
        prog="python -m tests.chaos.soak", description="Loads a stack for long and looks on."
    )
    build.add_argument("--minutes", type=float, default=30.0, help="of load (default: %(default)s)")
    build.add_argument("--clients", type=int, default=12, help="requests at a time (default: %(default)s)")
    build.add_argument("--output", type=Path, help="writes the figures there, as JSON")
    build.add_argument("--plot", type=Path, help="draws the samples there")
    options = build.parse_args(argv)
    facts = provenance(["python", "-m", "tests.chaos.soak", *argv], "orcinus")
    with (
        tempfile.TemporaryDirectory(prefix="orcinus-soak-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found = runner.run(soak(Path(directory), options.minutes, options.clients))
    figures = {**facts, **found.figures()}
    if options.output:
        write(options.output, figures)
    if options.plot:
        draw(found.samples, found.warm_up_s, options.plot)
    shown = {name: value for name, value in figures.items() if name not in ("minutes", "trends")}
    print(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
    return 1 if found.result.violations or found.growing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
