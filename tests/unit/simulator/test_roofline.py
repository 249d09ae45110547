"""Devices of the simulator and the traffic that they get."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from services.simulator.device.roofline import DEVICES, SHAPES, Device, Roofline, Shape
from services.simulator.workload.traffic import Arrival, clip, from_trace, gamma_times, lengths, read_trace

# One layer, hidden 4, two heads of 2, one KV head, intermediate 8, 10 words: attention 4*2*2*(2+1) = 48, mlp 96.
SMALL = Shape(1, 4, 2, 1, 2, 8, 10)
# 1 FLOP and 1 byte a nanosecond at full shares; 100 ns a step and 10 a layer.
PLAIN = Device(1e9, 1e9, 10_000, 2e9, 1_000, 1.0, 1.0, 1.0, 0.5, 100.0, 10.0)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2-xl", 1.557),
        ("qwen-7b", 7.616),
        ("mistral-7b", 7.242),
        ("llama-8b", 8.030),
        ("llama-13b", 13.016),
        ("llama-70b", 70.554),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_the_demo_shape_is_that_of_the_committed_model() -> None:
    config = json.loads((Path(__file__).parents[3] / "assets/demo-model/config.json").read_text())
    demo = SHAPES["demo"]
    names = {
        "layers": "num_hidden_layers", "hidden": "hidden_size", "intermediate": "intermediate_size",
        "vocab": "vocab_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
        "tied": "tie_word_embeddings",
    }  # fmt: skip
    assert {name: getattr(demo, name) for name in names} == {name: config[field] for name, field in names.items()}
    assert demo.head_dim == config.get("head_dim", demo.hidden // demo.heads)


def test_kv_of_llama_8b_is_128_kib_a_token() -> None:
    assert Roofline("llama-8b", "h100").kv_bytes_per_token == 128 * 1024


def test_small_step_costs_its_weights_and_a_large_one_flops() -> None:
    roofline = Roofline(SMALL, PLAIN, dtype_bytes=1)
    # weights read: 48 + 96 + 10*4 = 184 bytes; a token: 2 * 144 = 288 FLOPs; fixed 110 ns
    assert roofline.step_ns(0, 0, 0) == pytest.approx(110 + 184)
    assert roofline.step_ns(1, 0, 0) == pytest.approx(110 + 288)
    assert Roofline(SMALL, PLAIN, dtype_bytes=2).step_ns(1, 0, 0) == pytest.approx(110 + 368)
    assert roofline.step_ns(5, 0, 0) == pytest.approx(110 + 1440)


def test_context_of_decodes_costs_bytes_and_that_of_prompts_flops() -> None:
    roofline = Roofline(SMALL, PLAIN, dtype_bytes=1)
    base = roofline.step_ns(2, 0, 0)
    assert roofline.kv_bytes_per_token == 2 * 1 * 1 * 2
    assert roofline.step_ns(2, 7, 0) - base == pytest.approx(7 * 4)
    # chunks (start 0, length 3) and (start 5, length 2): pairs 1+2+3 and 6+7
    pairs = 3 * (0 + 2) + 2 * (5 + 1.5)
    assert pairs == (1 + 2 + 3) + (6 + 7)
    assert roofline.step_ns(2, 0, pairs) - base == pytest.approx(19 * 4 * 2 * 2)
    # with many FLOPs the keys' bytes rule, read once for each 128 queries
    slow_memory = Device(1e15, 1e9, 10_000, 2e9, 1_000, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0)
    memory_bound = Roofline(SMALL, slow_memory, dtype_bytes=1)
    assert memory_bound.step_ns(0, 0, 128) - memory_bound.step_ns(0, 0, 0) == pytest.approx(4)


def test_blocks_fill_what_the_weights_leave() -> None:
    roofline = Roofline(SMALL, PLAIN, dtype_bytes=2)
    # 0.9 * 10,000 - 2 * (144 + 2*40) = 8,552 bytes; a block of 16 tokens is 16 * 8 = 128
    assert roofline.kv_blocks(16) == 66
    assert roofline.kv_blocks(16, memory_fraction=0.5) == 35
    assert roofline.host_blocks(16) == 7
    assert roofline.host_blocks(16, host_bytes=1280) == 10
    assert roofline.swap_bytes_s == 1e9
    with pytest.raises(ValueError, match="larger device"):
        Roofline("llama-70b", "h100").kv_blocks(16)
    # 72 GB - 16.06 GB = 55.9 GB at 2 MiB a block
    assert Roofline("llama-8b", "h100").kv_blocks(16) == pytest.approx(26_673, rel=1e-3)


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_steps_grow_with_tokens_and_context(device: str) -> None:
    roofline = Roofline("llama-8b", device)
    for args in ((1, 0, 0.0), (300, 1000, 0.0), (4096, 1000, 5e6)):
        base = roofline.step_ns(*args)
        assert base > 1e5
        assert roofline.step_ns(args[0] + 1, args[1], args[2]) >= base
        assert roofline.step_ns(args[0], args[1] + 1, args[2]) > base
        assert roofline.step_ns(args[0], args[1], args[2] + 1) > base


def test_llama_8b_on_an_h200_has_its_published_ridge() -> None:
    roofline = Roofline("llama-8b", "h200")
    # 128 sequences of 1k: 15.0 GB of weights and 17.2 GB of KV at 0.85 of 4.8 TB/s, 0.3 ms and 32 layers of 6 us
    assert roofline.step_ns(128, 128 * 1024, 0) / 1e6 == pytest.approx((15.0 + 17.2) / 4.08 + 0.492, rel=0.01)
    # 256 of them: 256 * 2 * 6.98e9 FLOPs at 0.7 of 989 TFLOP/s take longer than the weights
    assert roofline.step_ns(256, 256 * 1024, 0) / 1e6 == pytest.approx(5.16 + 34.4 / 4.08 + 0.492, rel=0.01)


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
