"""Arrival schedules: reproducible, of the right rate and shape, and true to their trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.simulator.workload.traffic import Arrival, clip, from_trace, gamma_times, lengths, read_trace


def trace_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_same_seed_gives_same_poisson_schedule_and_another_seed_another() -> None:
    first, again, other = (gamma_times(50, 4.0, 1.0, seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first[0] == 0.0
    assert np.all(np.diff(first) > 0)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_intervals_have_asked_rate_and_variation_of_their_gamma_shape(burstiness: float, variation: float) -> None:
    intervals = np.diff(gamma_times(40_000, 5.0, burstiness, 3))
    assert intervals.mean() == pytest.approx(0.2, rel=0.05)
    assert intervals.std() / intervals.mean() == pytest.approx(variation, rel=0.05)


def test_lengths_stay_in_their_bounds_and_reach_both() -> None:
    drawn = lengths(2000, (3, 6), seed=1, stream=0)
    assert set(drawn.tolist()) == {3, 4, 5, 6}


def test_trace_keeps_its_times_divided_by_the_scale(tmp_path: Path) -> None:
    path = trace_file(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n9.0,30,3\n5.0,10,1\n6.0,20,2\n")
    trace = read_trace(path)
    assert from_trace(trace, 0, 0.0, 2.0, 1.0, 1) == [Arrival(0.0, 10, 1), Arrival(0.5, 20, 2), Arrival(2.0, 30, 3)]
    assert from_trace(trace, 2, 0.0, 1.0, 1.0, 1) == [Arrival(0.0, 10, 1), Arrival(1.0, 20, 2)]


def test_trace_without_times_gets_poisson_arrivals_or_is_refused(tmp_path: Path) -> None:
    trace = read_trace(trace_file(tmp_path, "num_prefill_tokens,num_decode_tokens\n10,1\n20,2\n"))
    arrivals = from_trace(trace, 0, 3.0, 1.0, 1.0, 5)
    assert [a.at_s for a in arrivals] == gamma_times(2, 3.0, 1.0, 5).tolist()
    assert [a.prompt_tokens for a in arrivals] == [10, 20]
    with pytest.raises(ValueError, match="give --rate"):
        from_trace(trace, 0, 0.0, 1.0, 1.0, 5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b\n1,2\n", "num_prefill_tokens"),
        ("num_prefill_tokens,num_decode_tokens\n", "no request"),
        ("num_prefill_tokens,num_decode_tokens\n5,x\n", "line 2"),
        ("num_prefill_tokens,num_decode_tokens\n5,0\n", "give an integer from 1"),
        ("num_prefill_tokens,num_decode_tokens\n5\n", "line 2: no num_decode_tokens"),
        ("num_prefill_tokens,num_decode_tokens,arrived_at\n5,5,0\n5,5\n", "line 3: no arrived_at"),
        ("num_prefill_tokens,num_decode_tokens,arrived_at\n5,5,\n", "line 2: no arrived_at"),
        ("num_prefill_tokens,num_decode_tokens,arrived_at\n5,5,nan\n", "line 2: arrived_at is 'nan'"),
        ("num_prefill_tokens,num_decode_tokens,arrived_at\n5,5,soon\n", "line 2: arrived_at is 'soon'"),
        ("num_prefill_tokens,num_decode_tokens\n5,99999999999\n", "line 2: num_decode_tokens is '99999999999'"),
        ("num_prefill_tokens,num_decode_tokens\n5,5\n99999999999999999999,5\n", "line 3: num_prefill_tokens"),
        ("num_prefill_tokens,num_decode_tokens,num_decode_tokens\n5,5,5\n", "two columns 'num_decode_tokens'"),
        ("num_prefill_tokens,num_decode_tokens\n5," + "9" * 200_000 + "\n", "line 2"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line_or_column(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_trace(trace_file(tmp_path, text))


def test_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    path = trace_file(tmp_path, "")
    path.write_bytes(b"\xef\xbb\xbfarrived_at,num_prefill_tokens,num_decode_tokens\n2,10,1\n")
    trace = read_trace(path)
    assert trace.arrived_at is not None and trace.arrived_at.tolist() == [2.0]


def test_clipping_cuts_only_what_does_not_fit_and_counts_it() -> None:
    arrivals = [Arrival(0.0, 100, 20), Arrival(1.0, 4000, 300), Arrival(2.0, 500, 4)]
    kept, cut = clip(arrivals, 400)
    assert kept == [Arrival(0.0, 100, 20), Arrival(1.0, 200, 200), Arrival(2.0, 396, 4)]
    assert cut == 2
