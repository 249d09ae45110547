"""The claims about the measured tables, each with figures computed from the rows.

Called by policies.py when it writes the result; the test computes them again from the committed rows.
"""

from __future__ import annotations

from typing import Any

from bench.studies.policies.static import GOALS

NEAR = 0.98  # "within 2 % of first"
OURS = "orcinus"


def claims(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one entry for each claim.

    Fields: claim, ours, other (the figure of policy `rival`), ratio (ours / other), goal, holds.
    """
    found = []
    for head in results["studies"]:
        if head["study"] != "main":
            continue
        for load in head["loads"]:
            goodput = {
                row["policy"]: row["goodput_rps"]
                for row in results["rows"]
                if (row["study"], row["trace"], row["load"]) == ("main", head["trace"], load)
            }
            best = max((name for name in goodput if name != OURS), key=goodput.__getitem__)
            claim = f"goodput, {head['trace']}, load {load:g}"
            found.append(_entry(claim, goodput[OURS], best, goodput[best], NEAR))
    return found + _static(results["static"])


def _static(static: dict[str, Any]) -> list[dict[str, Any]]:
    ours, others = static["policies"][0], static["policies"][1:]
    found = []
    for claim, key, goal in (
        ("throughput at twice the unloaded latency", "crossing", GOALS["latency"]),
        ("throughput at saturation", "saturation", GOALS["saturation"]),
    ):
        speed = {one["policy"]: one[key]["throughput_tok_s"] if one[key] else 0.0 for one in others}
        best = max(speed, key=speed.__getitem__)
        mine = ours[key]["throughput_tok_s"] if ours[key] else 0.0
        found.append(_entry(claim, mine, best, speed[best], goal))
    return found


def _entry(claim: str, ours: float, best: str, other: float, goal: float) -> dict[str, Any]:
    ratio = round(ours / other, 4) if other else None
    holds = ours >= goal * other
    return {"claim": claim, "ours": ours, "rival": best, "other": other, "ratio": ratio, "goal": goal, "holds": holds}
