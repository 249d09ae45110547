"""How a quantized checkpoint holds the matrices of its layers, as `quantization_config` of config.json says.

Imports no torch: `orcinus up` looks here before anything starts. `quantization/` has a file for each method, which
reads the tensors. A matrix that the file has unquantized is read as it is, whatever the config says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.formats import FLOAT8, ROUNDINGS, W8A8, GroupFormat
from shared.errors import ModelError
from shared.messages import shorten
from shared.models.fields import LARGEST, Fields
from shared.models.gguf.reader import GgufFile

BITS = (4, 8)
UNITS = (128, 32)  # groups that kernels have, kernels/cpu/src/formats/groups.h
REMEDY = f"choose the unquantized model, and --quantize {' or '.join(sorted(ROUNDINGS))} if it is too large"


@dataclass(frozen=True, slots=True)
class Stored:
    """A kind of quantized matrix."""

    method: str  # quant_method: compressed-tensors, awq, gptq, fp8 or mxfp4; w8a8, gguf
    bits: int  # of a number as it is held; of a GGUF file, of most numbers
    group: int = 0  # inputs that share a scale; 0: all of a row
    has_mins: bool = False  # each group has a minimum, or a zero point that becomes one
    zero_offset: int = 0  # is added to a zero point as it is stored
    in_order: bool = True  # whether the inputs of a group lie side by side
    block: tuple[int, int] = (0, 0)  # outputs and inputs that share a scale, of fp8 and w8a8; 0: all
    table: str = ""  # of most matrices of a GGUF file: what their numbers choose from

    @property
    def rounds_rows(self) -> bool:
        """Return whether activations are rounded, too; such a matrix has no unpacked form."""
        return self.method == W8A8

    @property
    def unit(self) -> int:
        """Return the largest group of a kernel that the groups can be cut into; 0 where they have to be unpacked."""
        if self.rounds_rows or not self.in_order:
            return 0
        if self.method == "gguf":
            return self.group
        group = self.block[1] if self.method == "fp8" else self.group
        return next((unit for unit in UNITS if group % unit == 0), 0)

    @property
    def group_format(self) -> str:
        """Return the name of the kernels' format, as Groups.group_format; empty where there is none."""
        if not self.unit:
            return ""
        table = self.table or _TABLES.get(self.method, "")
        return GroupFormat(self.bits, self.unit, self.has_mins, table).name


_TABLES = {"fp8": FLOAT8, "mxfp4": "float4"}
"""Stored.method -> what its numbers choose from."""


def read_stored(config: Mapping[str, Any], where: str) -> Stored | None:
    """Return how the matrices are stored; None for plain ones. Raise ModelError naming the field that is refused."""
    given = config.get("quantization_config") or config.get("compression_config")  # the name of older files
    if not given:
        return None
    if not isinstance(given, dict):
        raise ModelError(f"{where}: quantization_config {_short(given)} is not supported; {REMEDY}")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise ModelError(
            f"{where}: quantization_config ({_short(method)}) is not supported, {', '.join(_READERS)} are; {REMEDY}"
        )
    return _READERS[method](Fields(given, f"{where}: quantization_config", remedy=REMEDY))


GGUF_FORMATS = {
    name: GroupFormat.parse(format_)
    for name, format_ in {
        "Q4_0": "int4-32", "Q4_1": "int4-32-mins", "Q5_0": "int6-32", "Q5_1": "int6-32-mins", "Q8_0": "int8-32",
        "Q2_K": "int2-16-mins", "Q3_K": "int4-16", "Q4_K": "int4-32-mins", "Q5_K": "int6-32-mins", "Q6_K": "int6-16",
        "IQ4_NL": "iq4-32", "IQ4_XS": "iq4-32", "MXFP4": "float4-32",
    }.items()
}  # fmt: skip
"""Packed types of GGUF -> the format of the Groups that they become."""


def stored_of_gguf(file: GgufFile) -> Stored | None:
    """Return how the layers' matrices of a GGUF file are packed, by the type of most of them; None for plain ones."""
    sizes = dict.fromkeys(GGUF_FORMATS, 0)
    for tensor in file.tensors.values():
        if tensor.name.startswith("blk.") and tensor.type.name in GGUF_FORMATS:
            sizes[tensor.type.name] += tensor.size_bytes
    if not any(sizes.values()):
        return None
    most = GGUF_FORMATS[max(sizes, key=lambda name: sizes[name])]
    return Stored("gguf", most.bits, most.group, has_mins=most.has_mins, table=most.table)


def _compressed_tensors(read: Fields) -> Stored:
    """https://github.com/vllm-project/compressed-tensors: weights alone; floats and W8A8 of 8 bits."""
    _demand(read, "format", ("pack-quantized", "float-quantized", "int-quantized"))
    for key in ("kv_cache_scheme", "transform_config"):
        if read.raw.get(key):
            raise ModelError(f"{read.source}: {key} is not supported; {REMEDY}")
    if read.fields("sparsity_config").get("format", "dense") != "dense":
        raise ModelError(f"{read.source}: sparsity_config is not supported; {REMEDY}")
    kinds = {_scheme(read, name, scheme) for name, scheme in read.fields("config_groups").items()}
    if len(kinds) != 1:
        raise ModelError(f"{read.source}: config_groups has {len(kinds)} kinds of weights, one is supported; {REMEDY}")
    return kinds.pop()


def _scheme(read: Fields, name: str, scheme: Any) -> Stored:
    where = f"{read.source}: config_groups.{_short(name)}"
    if not isinstance(scheme, dict):
        raise ModelError(f"{where} is no object; {REMEDY}")
    group = Fields(scheme, where, remedy=REMEDY)
    weights = Fields(group.fields("weights"), f"{where}.weights", remedy=REMEDY)
    if read.raw["format"] == "float-quantized":
        _demand(weights, "type", ("float",))
        _demand(weights, "num_bits", (8,))
        _demand(weights, "strategy", ("tensor", "channel", "block"))
        blocks = {"tensor": (0, 0), "channel": (1, 0)}
        return Stored("fp8", 8, block=blocks.get(weights.raw["strategy"]) or _block(weights, "block_structure"))
    if read.raw["format"] == "int-quantized":
        return _w8a8(group, weights)
    for key in ("input_activations", "output_activations"):
        if scheme.get(key):
            raise ModelError(f"{where}: {key} is not supported, activations stay exact; {REMEDY}")
    _demand(weights, "type", ("int",))
    _demand(weights, "num_bits", BITS)
    _demand(weights, "strategy", ("group", "channel"))
    size = weights.integer("group_size") if weights.raw["strategy"] == "group" else 0
    return Stored(
        "compressed-tensors",
        weights.raw["num_bits"],
        size,
        has_mins=not weights.flag("symmetric", True),
        in_order=weights.raw.get("actorder") not in ("group", "dynamic", True),
    )


def _w8a8(group: Fields, weights: Fields) -> Stored:
    """Weights and activations in 8 bits, these with a scale for each token that follows from its numbers."""
    activations = Fields(group.fields("input_activations"), f"{group.source}.input_activations", remedy=REMEDY)
    for part in (weights, activations):
        _demand(part, "type", ("int",))
        _demand(part, "num_bits", (8,))
        _demand(part, "symmetric", (True,), True)
        _demand(part, "actorder", ("weight", "static", False), False)
    _demand(activations, "strategy", ("token",))
    _demand(activations, "dynamic", (True,))
    _demand(weights, "strategy", ("channel", "tensor"))
    if group.raw.get("output_activations"):
        raise ModelError(f"{group.source}: output_activations is not supported; {REMEDY}")
    return Stored(W8A8, 8, block=(0 if weights.raw["strategy"] == "tensor" else 1, 0))


def _awq(read: Fields) -> Stored:
    """https://github.com/casper-hansen/AutoAWQ: the layout `gemm`."""
    _demand(read, "bits", (4,))
    for key in ("version", "format", "checkpoint_format"):
        _demand(read, key, ("gemm", "GEMM"), "gemm")
    _demand(read, "zero_point", (True,), True)
    return Stored("awq", 4, _group_size(read), has_mins=True)


def _gptq(read: Fields) -> Stored:
    """https://github.com/ModelCloud/GPTQModel: `gptq` stores a zero point less one, `gptq_v2` as it is."""
    _demand(read, "bits", BITS)
    names = ("checkpoint_format", "format")  # the older and the newer name, perhaps both
    for key in names:
        _demand(read, key, ("gptq", "gptq_v2"), "gptq")
    layouts = {read.raw[key] for key in names if read.raw.get(key) is not None}
    if len(layouts) > 1:
        raise ModelError(f"{read.source}: checkpoint_format and format are not the same; {REMEDY}")
    _demand(read, "lm_head", (False,), False)
    if read.raw.get("dynamic"):
        raise ModelError(f"{read.source}: dynamic is not supported, all layers must be alike; {REMEDY}")
    offset = 0 if layouts == {"gptq_v2"} else 1
    size = _group_size(read)
    in_order = not read.flag("desc_act") or size == 0  # one group has one order
    return Stored("gptq", read.raw["bits"], size, has_mins=True, zero_offset=offset, in_order=in_order)


def _fp8(read: Fields) -> Stored:
    """Blocks of 8-bit floats as Qwen3 and DeepSeek have them, `weight_scale_inv`; or one scale for a matrix."""
    _demand(read, "fmt", ("e4m3",), "e4m3")
    if read.raw.get("weight_block_size") is None:
        return Stored("fp8", 8)
    return Stored("fp8", 8, block=_block(read, "weight_block_size"))


def _mxfp4(read: Fields) -> Stored:
    """The experts of gpt-oss in MXFP4; everything else is plain."""
    return Stored("mxfp4", 4, 32)


_READERS = {"compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq, "fp8": _fp8, "mxfp4": _mxfp4}


def _block(read: Fields, key: str) -> tuple[int, int]:
    """Return the outputs and inputs of a block."""
    block = read.raw.get(key)
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n <= LARGEST for n in block)):
        raise ModelError(f"{read.source}: {key} {_short(block)}, expected two sizes; {REMEDY}")
    return block[0], block[1]


def _group_size(read: Fields) -> int:
    """Return group_size, -1 as 0."""
    size = read.integer("group_size", -1, least=-1)
    if size == 0:
        raise ModelError(f"{read.source}: group_size 0, expected -1 or a positive integer; {REMEDY}")
    return max(size, 0)


def _demand(read: Fields, key: str, allowed: tuple[Any, ...], default: Any = None) -> None:
    value = read.raw.get(key)
    value = default if value is None else value
    if not any(type(value) is type(one) and value == one for one in allowed):
        names = ", ".join(str(one) for one in allowed)
        raise ModelError(f"{read.source}: {key} {_short(value)} is not supported, {names} is; {REMEDY}")


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)  # printable, whatever a file holds
    text = text[1:-1] if isinstance(value, str) else text
    return shorten(text)
