"""The study of a flooding tenant: what it sends, and what the other tenants get."""

from __future__ import annotations

import numpy as np
import pytest

from bench.studies.fairness import GOAL, OTHERS, SATURATION_RPS, arrivals, p99, run, served


def test_the_others_send_the_same_whatever_the_first_tenant_does() -> None:
    calm, flood = arrivals(0.1, 30.0, 1), arrivals(3.0, 30.0, 1)
    for tenant in range(1, 1 + len(OTHERS)):
        for column in ("arrived_ns", "prompt", "output"):
            np.testing.assert_array_equal(
                getattr(calm, column)[calm.tenant == tenant], getattr(flood, column)[flood.tenant == tenant]
            )
    assert (flood.tenant == 0).sum() > 20 * (calm.tenant == 0).sum()


def test_a_tenant_that_floods_no_other_is_served_what_it_sends() -> None:
    workload, seen = run("orcinus", 0.1, 15.0, 1)
    sent = (workload.tenant == 0).sum() / 15.0 / SATURATION_RPS
    assert served(workload, seen, 15.0) == pytest.approx(sent, rel=0.2)


@pytest.mark.slow
def test_flood_leaves_other_tenants_their_first_token_early() -> None:
    """Simulated time: the same on every machine."""
    ratios = []
    for seed in (1, 2, 3):
        workload, seen = run("orcinus", 2.0, 30.0, seed)
        others = workload.tenant > 0
        assert np.percentile(seen.ttft_ns[others], 99) < 0.25 * np.percentile(seen.ttft_ns[~others], 50)
        share = served(workload, seen, 30.0)
        assert share > 0.45
        held = p99(*run("orcinus", share, 30.0, seed))
        ratios.append(p99(workload, seen)["ttft_ms"] / held["ttft_ms"])
    assert np.median(ratios) < GOAL, "beside the same tenant held to what it was served"
