"""The roofline against figures worked out by hand and by published parameter counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.simulator.device.roofline import DEVICES, SHAPES, Device, Roofline, Shape

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
