"""Every model family against transformers: logits, and greedy tokens of sequences in a batch, cut up and set aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.driver import Driver, make_engine
from tests.engine.test_tokens import all_logits, close
from tests.support.checkpoints.models import Reference, make_llama
from tests.support.compiler import demand_compiler

TOKENS = 32
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"kind": "mistral"},
    "mistral-window": {"kind": "mistral", "sliding_window": 13},
    "qwen2": {"kind": "qwen2"},
    "qwen2-upper-windows": {
        "kind": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3": {"kind": "qwen3"},
    "qwen3-biases-window-first": {
        "kind": "qwen3",
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"kind": "mixtral"},
    "mixtral-window": {"kind": "mixtral", "sliding_window": 13, "num_experts_per_tok": 1},
    "qwen2-moe": {"kind": "qwen2_moe"},
    "qwen2-moe-some-layers": {
        "kind": "qwen2_moe",
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "qkv_bias": False,
    },
    "qwen3-moe": {"kind": "qwen3_moe", "norm_topk_prob": True},
    "qwen3-moe-biases-window": {
        "kind": "qwen3_moe",
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 9,
        "mlp_only_layers": [0],
    },
    "gpt-oss": {"kind": "gpt_oss", "sliding_window": 11, "rms_norm_eps": 1e-6},
    "gpt-oss-other-layers": {
        "kind": "gpt_oss",
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "gemma": {"kind": "gemma"},
    "gemma2": {"kind": "gemma2", "sliding_window": 11, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 12.0},
    "gemma2-no-caps": {"kind": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3-and-images": {"kind": "gemma3_and_images", "sliding_window": 11},
    "gemma3-capped-logits": {"kind": "gemma3", "final_logit_softcapping": 12.0},
    "gemma3": {"kind": "gemma3", "sliding_window": 11, "sliding_window_pattern": 2},
    "gpt2": {"kind": "gpt2"},
    "gpt2-narrow-relu": {"kind": "gpt2", "n_inner": 80, "activation_function": "relu"},
    "bloom": {"kind": "bloom"},
    "bloom-six-heads": {"kind": "bloom", "hidden_size": 96, "n_head": 6},
    "opt": {"kind": "opt"},
    "opt-without-biases": {"kind": "opt", "enable_bias": False},
    "phi": {"kind": "phi"},
    "phi-tied": {"kind": "phi", "tie_word_embeddings": True},
    "phi3": {"kind": "phi3"},
    "phi3-partial-window": {"kind": "phi3", "partial_rotary_factor": 0.75, "sliding_window": 15},
    "neox": {"kind": "neox"},
    "neox-one-after-the-other": {"kind": "neox", "use_parallel_residual": False},
}

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "as-many-kv-heads": {"num_key_value_heads": 4},
    "one-kv-head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 24},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "bfloat16-on-disk": {"dtype": "bfloat16"},
}
"""Of the first family."""


@pytest.fixture(scope="module", params=[*FAMILIES, *VARIANTS])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = tmp_path_factory.mktemp(request.param) / "tiny"
    return make_llama(path, seed=5, requests=3, output_tokens=TOKENS, **(FAMILIES | VARIANTS)[request.param])


def test_int8_weights_of_layers_stay_near_whatever_way_matrices_lie(tmp_path: Path) -> None:
    demand_compiler()
    for family in ("llama", "phi3", "qwen2"):
        found = make_llama(tmp_path / family, seed=5, requests=1, output_tokens=1, **FAMILIES[family])
        engine = make_engine(found.path, kernels="cpu", block_size=16, quantize="int8")
        expected = found.logits(found.prompts[0])
        error = float((all_logits(engine, found.prompts[0]) - expected).abs().max() / expected.abs().max())
        assert 1e-4 < error < 0.05, (family, error)


@pytest.mark.parametrize(("kernels", "block_size"), [("reference", 4), ("cpu", 16)])
def test_tokens_and_logits_of_a_family_are_those_of_transformers(
    reference: Reference, kernels: str, block_size: int
) -> None:
    """Three sequences of 32 new tokens in chunks of any size, one of them preempted twice and computed anew."""
    demand_compiler(kernels)
    # Deterministic: the kernels of this tree, not those that happen to be faster here.
    engine = make_engine(reference.path, kernels=kernels, block_size=block_size, deterministic=kernels == "cpu")
    driver, slot_of = Driver(engine, reference.prompts), {request: request for request in range(3)}
    rng, preempted, free = np.random.default_rng(1), 0, [3, 4]
    while any(len(driver.outputs[slot]) < TOKENS for slot in slot_of.values()):
        driver.step({s: int(rng.integers(1, 24)) for s in slot_of.values() if len(driver.outputs[s]) < TOKENS})
        if free and len(driver.outputs[slot_of[1]]) > 10 * (preempted + 1):
            before, prompt = driver.outputs[slot_of[1]], reference.prompts[1]
            driver.free(slot_of[1])
            slot_of[1] = free.pop()
            driver.enter(slot_of[1], prompt + before, prompt=len(prompt))
            preempted += 1
    assert preempted == 2
    assert [driver.outputs[slot_of[request]][:TOKENS] for request in range(3)] == reference.outputs
    tokens = reference.prompts[0] + reference.outputs[0]
    close(all_logits(engine, tokens), reference.logits(tokens))
