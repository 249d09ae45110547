"""Make the tables of docs/policies.md: every preset over both traces at six loads, `orcinus` against `static`.

    python -m bench.studies.policies               runs everything; writes policies.json, page and pictures
    python -m bench.studies.policies --quick       the same in small in about a minute; prints, writes nothing
    python -m bench.studies.policies --literature  runs `orcinus simulate --reproduce`, writes literature.json
    python -m bench.studies.policies --docs        renders page and pictures from the committed results alone

Exit code 1 when a request did not finish; a goal that is missed is printed and stands in the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench import render
from bench.result import RESULTS, ROOT, provenance, read, write
from bench.studies.policies.claims import claims
from bench.studies.policies.runs import DEVICE, SHAPE, run_studies, studies
from bench.studies.policies.static import compare
from services.simulator.jobs import Finished, Job, run_all

PICTURES = ROOT / "docs" / "img"
RESULT = RESULTS / "policies.json"
LITERATURE = RESULTS / "literature.json"
PROCESSES = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.policies", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small, in about a minute; writes nothing")
    parser.add_argument("--literature", action="store_true", help="the tables of the literature, T1 to T11")
    parser.add_argument("--docs", action="store_true", help="page and pictures from the committed results alone")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    given = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(given)
    if options.quick + options.literature + options.docs > 1:
        parser.error("--quick, --literature and --docs exclude each other")
    if options.docs:
        show()
        return 0
    head = provenance(["python", "-m", "bench.studies.policies", *given])
    results = {**head, **(literature() if options.literature else measured(options.quick))}
    if not options.quick:
        write(LITERATURE if options.literature else RESULT, results, rows_on_lines=True)
        show()
    if options.json:
        print(json.dumps(results))
    elif not options.literature:
        print(render.section("policies", results={"policies": results}))
    return _told(results)


def measured(quick: bool) -> dict[str, Any]:
    """Return all studies, `static` against `orcinus`, and the claims about both."""
    begun = time.perf_counter()

    def run(jobs: list[Job]) -> list[Finished]:
        print(f"{time.perf_counter() - begun:6.0f} s: {len(jobs)} runs ...", file=sys.stderr, flush=True)
        return run_all(jobs, PROCESSES)

    heads, rows = run_studies(studies(quick), run)
    results = {"shape": SHAPE, "device": DEVICE, "studies": heads, "rows": rows, "static": compare(quick, run)}
    return {**results, "claims": claims(results), "wall_s": round(time.perf_counter() - begun, 1)}


def literature() -> dict[str, Any]:
    """Return the tables T1 to T11."""
    from services.simulator.literature.main import TABLES
    from services.simulator.literature.table import unseen

    tables: list[dict[str, Any]] = []
    for make in TABLES:
        print(f"table {len(tables) + 1} of {len(TABLES)} ...", file=sys.stderr, flush=True)
        tables.append(make(unseen).to_json())
    return {"tables": tables}


def show() -> None:
    """Render the pages and draw the pictures, from the committed results."""
    from bench.studies.policies.plots import draw

    render.write()
    if results := read("policies"):
        PICTURES.mkdir(exist_ok=True)
        draw(results, PICTURES)


def _told(results: dict[str, Any]) -> int:
    """Print missed claims on stderr; return 1 if a run lost a request or a table is not reproduced."""
    short = [row for row in results.get("rows", []) if row["finished"] < row["requests"]]
    for row in short:
        lost = row["requests"] - row["finished"]
        print(f"{row['study']}, {row['policy']} at {row['load']:g}: {lost} requests did not finish", file=sys.stderr)
    for claim in results.get("claims", []):
        if not claim["holds"]:
            print(
                f"missed: {claim['claim']}: {claim['ours']:,} against {claim['other']:,} of {claim['rival']}",
                file=sys.stderr,
            )
    wrong = [table["table"] for table in results.get("tables", []) if not table["reproduced"]]
    if wrong:
        print(f"not reproduced: {', '.join(wrong)}", file=sys.stderr)
    return 1 if short or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
