"""The study of drafts: ratios of pairs and their interval, and what its command refuses."""

from __future__ import annotations

import pytest

from bench.studies.acceptance import interval, main


def test_interval_is_around_the_geometric_mean_of_paired_ratios() -> None:
    found = interval([(2.0, 1.0), (8.0, 1.0)])
    assert found["ratio"] == pytest.approx(4)
    assert found["low"] * found["high"] == pytest.approx(16, rel=1e-2) and found["low"] < 0.1
    assert interval([(3.0, 2.0)] * 5) == {"ratio": 1.5, "low": 1.5, "high": 1.5}


@pytest.mark.parametrize("loads", ["0", "much", "0.3,11"])
def test_wrong_loads_are_refused_with_the_remedy(loads: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--loads", loads])
    said = capsys.readouterr().err
    assert loads in said and ("0.01 to 10" in said or "as 0.3,0.8" in said)
