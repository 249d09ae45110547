"""quantization_config: what each kind means, and what is refused by its field and value."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from services.worker.checkpoint.stored import Stored, read_stored
from shared.errors import ModelError

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
BLOCKS = {"strategy": "block", "block_structure": [128, 64]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def compressed(name: str = "pack-quantized", weights: Any = WEIGHTS, **fields: Any) -> dict[str, Any]:
    scheme = {"weights": weights, **{key: fields.pop(key) for key in ("input_activations",) if key in fields}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": scheme}, **fields}


def w8a8(weights: Any = None, output: Any = None, **activations: Any) -> dict[str, Any]:
    given = compressed("int-quantized", W8 | (weights or {}), input_activations=TOKENS | activations)
    if output:
        given["config_groups"]["group_0"]["output_activations"] = output
    return given


def stored(given: Any) -> Stored | None:
    return read_stored({"quantization_config": given}, "config.json")


@pytest.mark.parametrize(
    ("given", "expected", "unit"),
    [
        (compressed(), Stored("compressed-tensors", 4, 128), 128),
        (compressed(weights={**WEIGHTS, "symmetric": False}), Stored("compressed-tensors", 4, 128, has_mins=True), 128),
        (compressed("float-quantized", FP8, input_activations={"num_bits": 8}), Stored("fp8", 8), 128),
        (compressed("float-quantized", {**FP8, **BLOCKS}), Stored("fp8", 8, block=(128, 64)), 32),
        (w8a8(), Stored("w8a8", 8, block=(1, 0)), 0),
        (w8a8({"strategy": "tensor", "actorder": "static"}), Stored("w8a8", 8), 0),
        ({**AWQ, "group_size": 64}, Stored("awq", 4, 64, has_mins=True), 32),
        (GPTQ, Stored("gptq", 4, 128, has_mins=True, zero_offset=1), 128),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "group_size": -1}, Stored("gptq", 4, 0, has_mins=True), 128),
        ({**GPTQ, "format": "gptq_v2"}, Stored("gptq", 4, 128, has_mins=True), 128),
        ({**GPTQ, "desc_act": True}, Stored("gptq", 4, 128, has_mins=True, zero_offset=1, in_order=False), 0),
        ({**GPTQ, "desc_act": True, "group_size": -1}, Stored("gptq", 4, 0, has_mins=True, zero_offset=1), 128),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, Stored("fp8", 8, block=(128, 64)), 32),
        (None, None, 0),
    ],
)
def test_a_config_says_how_matrices_are_stored(given: Any, expected: Stored | None, unit: int) -> None:
    assert stored(given) == expected
    assert expected is None or expected.unit == unit


def test_the_older_name_of_the_config_is_read() -> None:
    assert read_stored({"compression_config": compressed()}, "config.json") == stored(compressed())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quant_method": "exl3"}, r"\(exl3\) is not supported, compressed-tensors, awq"),
        ({"quant_method": "\ud800\x1b[31mX"}, r"\(\\ud800\\u001b\[31mX\)"),
        ({"quant_method": ["awq"]}, r'\(\["awq"\]\)'),
        ([1], r"quantization_config \[1\]"),
        ({**AWQ, "bits": 3}, "bits 3 is not supported, 4 is"),
        ({**AWQ, "bits": True}, "bits true"),
        ({**AWQ, "version": "gemv"}, "version gemv"),
        ({**AWQ, "format": "gemv"}, "format gemv"),
        ({**AWQ, "checkpoint_format": "gemv_fast"}, "checkpoint_format gemv_fast"),
        ({**AWQ, "group_size": 0}, "group_size 0"),
        ({**AWQ, "group_size": 1 << 40}, "group_size is 1099511627776"),
        ({**AWQ, "zero_point": False}, "zero_point false"),
        ({**GPTQ, "bits": 2}, "bits 2 is not supported, 4, 8 is"),
        ({**GPTQ, "lm_head": True}, "lm_head true"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({**GPTQ, "format": "marlin"}, r": format marlin"),
        ({**GPTQ, "format": "gptq_v2", "checkpoint_format": "gptq"}, "checkpoint_format and format are not the same"),
        ({**GPTQ, "dynamic": {"-:x": {}}}, "dynamic is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
        (compressed("float-quantized", {**FP8, **BLOCKS, "block_structure": [128]}), r"block_structure \[128\]"),
        (compressed("float-quantized", {**FP8, "strategy": "block"}), "block_structure null, expected two sizes"),
        (compressed("float-quantized", {**FP8, "strategy": "group"}), "weights: strategy group"),
        (compressed("naive-quantized"), "format naive-quantized"),
        (compressed("int-quantized", W8), "input_activations: type null"),
        (compressed("int-quantized", W8, input_activations=3), "input_activations is 3, expected an object"),
        (w8a8({"num_bits": 4}), "weights: num_bits 4 is not supported, 8 is"),
        (w8a8({"symmetric": False}), "weights: symmetric false"),
        (w8a8({"strategy": "group", "group_size": 128}), "weights: strategy group"),
        (w8a8({"actorder": "group"}), "weights: actorder group"),
        (w8a8(dynamic=False), "input_activations: dynamic false"),
        (w8a8(dynamic="local"), "input_activations: dynamic local"),
        (w8a8(strategy="tensor"), "input_activations: strategy tensor"),
        (w8a8(symmetric=False), "input_activations: symmetric false"),
        (w8a8(num_bits=4), "input_activations: num_bits 4"),
        (w8a8(type="float"), "input_activations: type float"),
        (w8a8(output={"num_bits": 8}), "output_activations is not supported"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(transform_config={"config_groups": {}}), "transform_config"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (compressed(input_activations={"num_bits": 8}), "input_activations is not supported, activations stay exact"),
        (compressed(weights={**WEIGHTS, "num_bits": 2}), "weights: num_bits 2"),
        (compressed(weights={**WEIGHTS, "strategy": "block"}), "strategy block"),
        (compressed(weights={**WEIGHTS, "group_size": -5}), "group_size is -5"),
        (compressed(weights={**WEIGHTS, "group_size": 1 << 31}), "group_size is 2147483648"),
        (compressed(weights={**WEIGHTS, "num_bits": 3}), "weights: num_bits 3"),
        ({**GPTQ, "bits": 3}, "bits 3 is not supported, 4, 8 is"),
        (compressed(weights=3), "weights is 3, expected an object"),
        ({**compressed(), "config_groups": {}}, "config_groups has 0 kinds"),
    ],
)
def test_a_config_that_is_not_read_names_its_field(given: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        stored(given)
    assert "choose the unquantized model" in str(caught.value)


def test_the_check_before_the_start_needs_no_torch() -> None:
    code = "import sys, services.worker.checkpoint.stored; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
