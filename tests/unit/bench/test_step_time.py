"""The study of step times against the engine: its figures, from predictions with known errors."""

from __future__ import annotations

import pytest

from bench.studies.step_time import Prediction, by_kind, figures


def test_a_step_counts_as_above_only_beyond_what_the_error_promised() -> None:
    """Of 100 steps predicted at 10 ms with an error of 0.1, three take 10.5, 11.2 and 12; a limit has 5 % to spare."""
    times = [10_000_000] * 97 + [10_500_000, 11_200_000, 12_000_000]
    row = figures([Prediction(0, 10e6, 0.1, ns) for ns in times])
    assert (row["steps"], row["above_error"], row["above_limit"], row["off_median"]) == (100, 0.02, 0.01, 0)
    assert row["p50_ms"] == 10


def test_steps_are_told_apart_by_their_prompt_tokens() -> None:
    tokens = [0, 0, 0, 1, 128, 129, 256, 257, 512, 513, 1023]
    rows = by_kind([Prediction(count, 1e6, 0.0, 1_000_000) for count in tokens])
    assert {kind: row["steps"] for kind, row in rows.items()} == {
        "with prompts": 8, "decodes alone": 3, "1 to 128 prompt tokens": 2, "129 to 256 prompt tokens": 2,
        "257 to 512 prompt tokens": 2, "513 to 1024 prompt tokens": 2,
    }  # fmt: skip
    assert rows["with prompts"]["ratio_p99"] == pytest.approx(1.0)
