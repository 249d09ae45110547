"""LoRA adapters as PEFT saves them: what a folder may hold, by what name it is stored, which are refused.

The gateway checks a folder when an adapter is registered, the worker again when it loads one. Imports no torch.
Format: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from shared.errors import ModelError
from shared.models.hub import is_repository, repository_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
STORE = ".store"
"""Folder of --adapter-dir with the files of each registered adapter, in a folder named by their digest."""
DIGEST_BYTES = 32
CONFIG_BYTES = 1 << 20
WEIGHTS_BYTES = 4 << 30
HEADER_BYTES = 8 << 20
"""Of the names and shapes in the weights: the library holds Python's lock while it parses them."""
MAX_MODULES = 1 << 16
DTYPES = ("F32", "BF16", "F16")
"""Types of tensors, as safetensors calls them."""
REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole matrices beside the adapter",
    "lora_bias": "biases of the adapter",
    "layer_replication": "repeated layers",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "aLoRA",
    "target_parameters": "parameters that are no linear layer",
    "trainable_token_indices": "trained tokens",
    "arrow_config": "Arrow",
}
"""Fields of adapter_config.json that must be unset, and what they stand for."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""init_lora_weights that leave the base as it is."""
OTHER_BASE = "the adapter is of another base: load it for that one, with `model`, or train one for this base"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>[\w.-]{1,200})\.(?P<part>lora_A|lora_B)\.weight")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(?P<index>[0-9]{1,9})\.")
_PATTERN = re.compile(r"[\w.-]{1,200}")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """How the products of an adapter are scaled, and for which model it was trained."""

    alpha: float
    rslora: bool
    alphas: Mapping[str, float]  # of modules that end so, without those of an end of theirs that comes before them
    base: str  # the repository of the Hub that it names; empty for a path, or for none

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's product: alpha / rank, with rsLoRA alpha / sqrt(rank)."""
        alpha = next((self.alphas[name] for name in _ends(module) if name in self.alphas), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True, slots=True)
class Shape:
    """The two matrices of a module: [rank, inputs] and [outputs, rank]."""

    rank: int
    inputs: int
    outputs: int


def parse_config(raw: bytes) -> AdapterConfig:
    """Return what adapter_config.json says. Raise ModelError for an adapter that cannot be served."""
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{CONFIG}: no JSON ({error}); save the adapter again") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{CONFIG}: no JSON object; save the adapter again")
    if (kind := fields.get("peft_type", "LORA")) != "LORA":
        raise _config_error("peft_type", kind, "LORA is served")
    for name, meaning in REFUSED.items():
        if value := fields.get(name):
            raise _config_error(name, value, f"{meaning} cannot be served, train without")
    if (bias := fields.get("bias", "none")) != "none":
        raise _config_error("bias", bias, "biases of the base cannot be changed, use none")
    if (start := fields.get("init_lora_weights", True)) not in PLAIN_STARTS:
        raise _config_error("init_lora_weights", start, "it changes the base; convert the adapter to plain LoRA")
    if not isinstance(rslora := fields.get("use_rslora") or False, bool):
        raise _config_error("use_rslora", rslora, "true or false")
    patterns = fields.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_MODULES:
        raise _config_error("alpha_pattern", patterns, "an object of numbers by module")
    if wrong := next((name for name in patterns if not _PATTERN.fullmatch(name)), None):
        raise _config_error("alpha_pattern", wrong, "names of modules are served, no expressions")
    alphas: dict[str, float] = {}
    for name, value in patterns.items():
        alpha = _number("alpha_pattern", value)
        if not any(end in alphas for end in _ends(name)):  # PEFT takes the first that fits, so the longest of these
            alphas[name] = alpha
    base = _repository(fields.get("base_model_name_or_path"))
    return AdapterConfig(_number("lora_alpha", fields.get("lora_alpha", 8)), rslora, alphas, base)


def parse_shapes(shapes: Mapping[str, tuple[int, ...]], max_rank: int) -> dict[str, Shape]:
    """Return the modules of the tensors of an adapter by name, without `base_model.model.`. Raise ModelError."""
    if not shapes or len(shapes) > MAX_MODULES:
        raise ModelError(f"{WEIGHTS}: {len(shapes)} tensors; from 1 to {MAX_MODULES} are served")
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(f"{WEIGHTS}: tensor {name[:200]!r} is no lora_A or lora_B of a linear layer; leave it out")
        if len(shape) != 2 or min(shape) < 1:
            raise ModelError(f"{WEIGHTS}: tensor {name} has shape {list(shape)}; it must be a matrix")
        parts.setdefault(match["module"], {})[match["part"]] = shape
    for module in parts:
        if _LAYER.search(module) is None:
            raise ModelError(
                f"{WEIGHTS}: {module}: adapters of embeddings and of the head cannot be served; leave it out"
            )
        if ".experts." in module:
            raise ModelError(f"{WEIGHTS}: {module}: adapters of single experts cannot be served; leave it out")
    modules = {}
    for module, pair in parts.items():
        if len(pair) != 2:
            raise ModelError(f"{WEIGHTS}: {module} has {next(iter(pair))} alone; save the adapter again")
        (rank, inputs), (outputs, other) = pair["lora_A"], pair["lora_B"]
        if rank != other:
            raise ModelError(f"{WEIGHTS}: {module} has rank {rank} in lora_A and {other} in lora_B; save it again")
        if rank > max_rank:
            raise ModelError(
                f"{WEIGHTS}: {module} has rank {rank}, at most {max_rank} is served; raise --max-lora-rank"
            )
        modules[module] = Shape(rank, inputs, outputs)
    return modules


def check_header(weights: Path) -> None:
    """Raise ModelError for a file with a header that takes long to parse, and OSError."""
    with open_regular(weights) as file:
        length = int.from_bytes(file.read(8), "little")
    if length > HEADER_BYTES:
        raise ModelError(
            f"{WEIGHTS}: its header has {length} bytes, at most {HEADER_BYTES} are read; save fewer tensors or metadata"
        )


def check_dtypes(dtypes: Mapping[str, str]) -> None:
    """Raise ModelError for a tensor of another type than DTYPES. dtypes: by the names of the tensors."""
    if wrong := next((name for name, dtype in dtypes.items() if dtype not in DTYPES), None):
        raise ModelError(f"{WEIGHTS}: tensor {wrong[:200]} is {dtypes[wrong]}; save it as float32, bfloat16 or float16")


def check_base(adapter: AdapterConfig, base: str) -> None:
    """Raise ModelError where an adapter names another repository of the Hub than `base`. Either may be empty."""
    if adapter.base and base and adapter.base.lower() != base.lower():  # as on the Hub, case is no difference
        raise ModelError(
            f"{CONFIG}: base_model_name_or_path is {adapter.base}, the served model is {base}; load the adapter for "
            f"{adapter.base}, with `model`, or write {base} there if it fits that model too"
        )


def check_hidden_size(modules: Mapping[str, Shape], hidden_size: int) -> None:
    """Raise ModelError where an adapter is of another base: each linear layer begins or ends at the hidden size."""
    for module, shape in modules.items():
        if hidden_size not in (shape.inputs, shape.outputs):
            raise ModelError(
                f"{WEIGHTS}: {module} is [{shape.outputs}, {shape.inputs}], the served model has hidden size "
                f"{hidden_size}; {OTHER_BASE}"
            )


def check_layers(modules: Mapping[str, Shape], layers: int) -> None:
    """Raise ModelError for a module of a layer that the base lacks."""
    for module in modules:
        match = _LAYER.search(module)
        if match is not None and int(match["index"]) >= layers:
            raise ModelError(f"{WEIGHTS}: {module}: the served model has {layers} layers; {OTHER_BASE}")


def check_modules(modules: Mapping[str, Shape], base_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError for a module of a layer that the base lacks, or has with another shape.

    base_shapes: shapes of the base's tensors by name. Names of tensors and modules may begin differently, so they are
    compared from the layer on; towers of images have layers with the same numbers, so any of the shapes may fit. A
    matrix that is quantized has no shape to compare, and GPT-2's are transposed.
    """
    if not base_shapes:
        return
    by_module: dict[str, list[tuple[int, ...]]] = {}  # shapes of weights by the module from its layer on
    for name, shape in base_shapes.items():
        module, _, rest = name.rpartition(".")
        module_shapes = by_module.setdefault(_from_layer(module), [])
        if rest == "weight" and len(shape) == 2:
            module_shapes.append(shape)
    for module, adapter_shape in modules.items():
        if (weights := by_module.get(_from_layer(module))) is None:
            raise ModelError(f"{WEIGHTS}: {module}: the served model has no such module; {OTHER_BASE}")
        if weights and sorted((adapter_shape.outputs, adapter_shape.inputs)) not in map(sorted, weights):
            raise ModelError(
                f"{WEIGHTS}: {module} is [{adapter_shape.outputs}, {adapter_shape.inputs}], "
                f"the served model has {list(weights[0])}; {OTHER_BASE}"
            )


def _ends(module: str) -> Iterator[str]:
    """Yield the name of a module and its ends behind a dot, the longest first."""
    yield module
    for at, char in enumerate(module):
        if char == ".":
            yield module[at + 1 :]


def _from_layer(module: str) -> str:
    match = _LAYER.search(module)
    return module[match.start("index") :] if match else module


def digest_of(folder: Path) -> bytes:
    """Return the SHA-256 over the SHA-256 of the two files of an adapter. Raise ModelError, OSError."""
    sums = []
    for name in (CONFIG, WEIGHTS):
        with open_regular(folder / name) as file:
            sums.append(hashlib.file_digest(file, "sha256").digest())
    return join_digests(sums)


def join_digests(sums: Iterable[bytes]) -> bytes:
    """Return the digest of an adapter. sums: SHA-256 of adapter_config.json, then of the weights."""
    return hashlib.sha256(b"".join(sums)).digest()


def read_file(path: Path, most: int) -> bytes:
    """Return the bytes of a file of an adapter. Raise ModelError for one that is missing, a link, or has more than
    `most`.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise ModelError(f"{path.name}: {size} bytes, at most {most} are served; use a smaller adapter")
            return file.read(size)
    except OSError as error:
        raise ModelError(f"{path.name}: cannot be read ({error.strerror}); save the adapter there") from error


def open_regular(path: Path, folder: int | None = None) -> BufferedReader:
    """Open a file for reading. Raise ModelError for a FIFO or folder, and OSError, also for a link.

    folder: descriptor of the one that a relative path begins at.
    """
    # O_NONBLOCK: to open a FIFO would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{path.name}: not a regular file; save the adapter again")
    return open(descriptor, "rb")


def _repository(base: object) -> str:
    """Return the repository that a base is, by its name or as a snapshot in a cache of the Hub; empty for others."""
    if not isinstance(base, str):
        return ""
    return base if is_repository(base) else repository_of(Path(base)) or ""


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e6:  # NaN is in no range
        raise _config_error(name, value, "a number from 0 to 1000000")
    return float(value)


def _config_error(name: str, value: Any, problem: str) -> ModelError:
    return ModelError(f"{CONFIG}: {name} is {json.dumps(value, default=str)[:100]}; {problem}")
