"""Look into a model directory or GGUF file before anything starts: can it be served here, and if not, what helps?

`orcinus up`, `orcinus pull`, `orcinus list` and `orcinus doctor` ask. It needs no torch; the worker reads the same
files more closely. Nothing of the directory is executed.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kernels.formats import CUDA_FORMATS, FLOAT8, ROUNDINGS, GroupFormat
from services.launcher.gpu.facts import device_files, gather_driver
from services.worker.checkpoint.stored import GGUF_FORMATS, Stored, read_stored, stored_of_gguf
from services.worker.gpu_choice import demands_gpu, lacks_kernels, may_use_gpu, stays_on_cpu
from services.worker.models.config import DecoderConfig, load_config, rank_config
from services.worker.models.matrices import shapes, tables
from services.worker.models.registry import FAMILIES
from shared.errors import ConfigurationError, ModelError
from shared.messages import quantity
from shared.models.gguf.config import config_of
from shared.models.gguf.reader import is_gguf, open_gguf
from shared.models.hub import gguf_files, gguf_in, in_address, repository_of, require_local
from shared.models.model_files import POINTER, read_bounded, read_json
from shared.settings import WorkerSettings

GIB = 1 << 30
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER_BYTES = 16 << 20
WORK_BYTES = GIB // 2
"""Beside the weights: processes, the smallest KV pool, the largest step."""
HEAD_STEP = 16
"""The cpu kernels pad heads to a multiple (kernels/cpu/src/kv.h)."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
EXPERTS = re.compile(r"\.experts\.|_exps\.|\.ffn_(gate|up|down)\.\d")
"""In the names of experts' matrices, other than a shared one's."""
_GGUF_TABLES = {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
UNROUNDED = (
    "embed", "wte", "wpe", "lm_head", ".gate.weight", "expert_gate.weight", "router.weight", "ffn_gate_inp", "bias",
)  # fmt: skip
"""Parts of names of tables, heads, routers of experts and biases, which --quantize leaves alone."""
WORDS = (".weight_packed", ".qweight", "_blocks")  # ends of names in quantized checkpoints
SCALES = (".weight_scale", ".scales", "_scales")
UNPACKED = (".weight_zero_point", ".qzeros", ".g_idx", ".weight_g_idx", ".weight_shape", ".weight_scale_inv")


def model_problem(model: Path, load_format: str) -> str:
    """Return why a model directory cannot be served, with the remedy; empty when it can, as far as can be seen here.

    load_format as --load-format: dummy needs no weights, and its size follows from config.json.
    """
    try:
        read_model(model, load_format)
    except ModelError as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from config.json and the headers of the weights."""

    dtype: str
    tensors: Mapping[str, tuple[int, ...]]  # shape by name; of dummy weights the matrices
    stored: Stored | None = None  # how the layers' matrices are quantized
    packed_bits: Mapping[str, float] = field(default_factory=dict)  # name -> bits of a weight as the kernels hold it
    gpu_packed: frozenset[str] = frozenset()  # those of packed_bits that a GPU holds so, too

    def held_bytes(self, worker: WorkerSettings, config: DecoderConfig | None = None) -> int:
        """Return the memory that the weights take with these settings, all ranks of one replica together.

        config: None stands for a model that all kernels can compute.
        """
        bits, total = 8 * _held_item_bytes(self.dtype, worker), 0
        on_gpu = _on_gpu(worker)
        keeps = self.stored is not None and _keeps(self.stored, worker, config)
        for name, shape in self.tensors.items():
            count, is_matrix = math.prod(shape), len(shape) > 1 and not any(part in name for part in UNROUNDED)
            kept = keeps and not (on_gpu and EXPERTS.search(name))
            if name in self.packed_bits:
                is_fp8 = self.stored is not None and self.stored.method == "fp8"
                if on_gpu:
                    is_packed = is_fp8 or (name in self.gpu_packed and name not in _GGUF_TABLES.values())
                else:
                    is_packed = is_fp8 or _packs_gguf(name, bits, worker)
                is_packed &= kept
                total += int(count * (self.packed_bits[name] if is_packed else bits))
            elif self.stored is not None and name.endswith(WORDS):
                word = 8 if name.endswith("_blocks") else 32
                numbers, scale = word // self.stored.bits * count, 64 if self.stored.has_mins else 32
                is_packed = kept and self.stored.unit > 0  # in a W8A8 checkpoint the worker refuses words
                total += word * count + numbers * scale // self.stored.unit if is_packed else numbers * bits
            elif self.stored is None or not name.endswith(SCALES + UNPACKED):
                total += int(count * (_rounded_bits(worker, bits) if is_matrix else bits))
        return total // 8


def read_model(model: Path, load_format: str = "auto") -> ModelFacts:
    """Return the facts of a directory or GGUF file. Raise ModelError for one that cannot be served, with the remedy."""
    model = gguf_in(model)
    if is_gguf(model):
        return _read_gguf(model, load_format)
    _check_directory(model)
    config = read_config(model)
    stored = read_stored(config, str(model / "config.json"))
    tensors: dict[str, tuple[int, ...]] = {}
    packed: dict[str, float] = {}
    if load_format == "dummy":
        if stored is not None:
            raise ModelError(
                f"--load-format dummy: {model / 'config.json'} has a quantization_config, random weights are plain; "
                "take it out"
            )
        tensors.update(shapes(load_config(model)))
    else:
        unread = FAMILIES[_architecture(config)].unread
        for file in _weight_files(model):
            for name, (dtype, shape) in _tensors(file).items():
                if not name.startswith(unread):
                    tensors[name] = shape
                    if dtype == "I8":
                        packed[name] = 8
                    elif dtype == "F8_E4M3" and stored is not None and stored.unit:
                        packed[name] = GroupFormat(8, stored.unit, table=FLOAT8).bits_per_weight
    read_json(model / "tokenizer.json", remedy=_again(model))
    return ModelFacts(_dtype(config), tensors, stored, packed)


def _read_gguf(model: Path, load_format: str) -> ModelFacts:
    _refuse_pointer(model)
    if load_format != "auto":
        raise ModelError(f"--load-format {load_format}: {model} is a GGUF file; leave the option out")
    file = open_gguf(model)
    config = config_of(file)
    read_bounded(model / "tokenizer.json")
    places = {_GGUF_TABLES.get(tensor.name, tensor.name): tensor for tensor in file.tensors.values()}
    tensors = {name: tensor.shape for name, tensor in places.items()}
    formats = {name: GGUF_FORMATS[one.type.name] for name, one in places.items() if one.type.name in GGUF_FORMATS}
    packed = {name: format_.bits_per_weight for name, format_ in formats.items()}
    on_gpu = frozenset(name for name, format_ in formats.items() if format_.name in CUDA_FORMATS)
    return ModelFacts(_dtype(config), tensors, stored_of_gguf(file), packed, on_gpu)


def read_config(model: Path) -> dict[str, Any]:
    """Return config.json. Raise ModelError when no worker computes its architecture, or not with such weights."""
    where = model / "config.json"
    config = read_json(where, remedy=_again(model))
    name = _architecture(config)
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f"{where}: architecture {name!r} is not supported; choose a model of one of {', '.join(FAMILIES)}"
        )
    read_stored(config, str(where))
    return config


def _architecture(config: dict[str, Any]) -> Any:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names else names


def expected_bytes(
    config: dict[str, Any], weights_bytes: int, worker: WorkerSettings, decoder: DecoderConfig | None = None
) -> int:
    """Return what weights of that size on disk will take in memory, roughly: for a model that is not here yet.

    config: its config.json; decoder: what was read of it, as in `held_bytes`.
    """
    dtype, stored = _dtype(config), read_stored(config, "config.json")
    held = _rounded_bits(worker, 8 * _held_item_bytes(dtype, worker))
    if stored is not None:
        if stored.method == "mxfp4":  # of 4.25 bits in the file, 5 are held
            return int(weights_bytes * 4 * (5 if _keeps(stored, worker, decoder) else held)) // 17
        has_experts = any("experts" in field for field in config)  # nearly all of the weights
        kept = _keeps(stored, worker, decoder) and not (has_experts and _on_gpu(worker))
        return weights_bytes if kept else int(weights_bytes * held) // stored.bits
    return int(weights_bytes * held) // (8 * ITEM_BYTES.get(dtype, 4))


def shape_problem(model: Path, load_format: str) -> str:
    """Return how the embedding differs from config.json, with the remedy; empty when it does not, or has another name.

    The worker compares every matrix.
    """
    name, *shape = tables(load_config(model))[0]
    stored = read_model(model, load_format).tensors.get(f"{name}.weight")
    if stored is None or list(stored) == shape:
        return ""
    return (
        f"{model}: tensor {name}.weight has shape {list(stored)}, config.json says {shape}; "
        "fetch config.json and weights again, both of the same model"
    )


def memory_problem(model: Path, worker: WorkerSettings, replicas: int = 1) -> str:
    """Return that the model does not fit, with both sizes and the remedy; empty when it fits. Raise ModelError."""
    facts = read_model(model, worker.load_format)
    held = facts.held_bytes(worker, load_config(gguf_in(model)))
    return size_problem(repository_of(model) or str(model), held, worker, replicas, bool(facts.stored))


@dataclass(frozen=True, slots=True)
class Share:
    """The memory of a machine that one of several models takes. replica_bytes: weights of one of its workers, and the
    blocks that the settings give it.
    """

    name: str
    replica_bytes: int
    replicas: int
    kv_fraction: float = 0.0  # of the free memory, for the KV of each worker; 0 where it is not given

    def needed_bytes(self, free_bytes: int) -> int:
        return self.replicas * (self.replica_bytes + int(self.kv_fraction * free_bytes) + WORK_BYTES)


def share_of(model: Path, worker: WorkerSettings, replicas: int) -> Share:
    """Return what a model takes. Raise ModelError."""
    facts, config = read_model(model, worker.load_format), load_config(gguf_in(model))
    blocks = worker.kv_blocks + (worker.host_blocks or 0)
    blocks_bytes = blocks * block_bytes(config, facts.dtype, worker)
    fraction = 0.0 if worker.kv_blocks else worker.kv_memory_fraction or 0.0
    return Share(worker.served_model_name, facts.held_bytes(worker, config) + blocks_bytes, replicas, fraction)


def block_bytes(config: DecoderConfig, dtype: str, worker: WorkerSettings) -> int:
    """Return the bytes of a KV block, all ranks of a replica together; 0 for an encoder. dtype: of the checkpoint."""
    if config.family.is_encoder:
        return 0
    head = -(-config.head_dim // HEAD_STEP) * HEAD_STEP
    vector = head + 4 if worker.kv_dtype != "auto" else head * _held_item_bytes(dtype, worker)
    return 2 * config.layers * config.kv_heads * worker.block_size * vector


def sum_problem(shares: Sequence[Share], free_bytes: int) -> str:
    """Return that models do not fit into the memory of a machine together, with all sizes; empty when they do."""
    needed = [share.needed_bytes(free_bytes) for share in shares]
    if sum(needed) <= free_bytes:
        return ""
    each = ", ".join(
        f"{share.name} {size / GIB:.1f}" + (f" ({share.replicas} workers)" if share.replicas > 1 else "")
        for share, size in zip(shares, needed, strict=True)
    )
    turns = ", or let them take turns (`awake: 1`)" if len(shares) > 1 else ""
    return (
        f"{quantity(len(shares), 'model')}: need {sum(needed) / GIB:.1f} GiB together ({each}), {free_bytes / GIB:.1f} "
        "are free; choose fewer or smaller models, fewer workers, quantize, fewer kv_blocks or host_blocks, or a "
        f"smaller kv_memory_fraction{turns}"
    )


def size_problem(
    name: str, held_bytes: int, worker: WorkerSettings, replicas: int = 1, is_quantized: bool = False
) -> str:
    """The same for weights of that size, a part of them in each of several replicas. is_quantized: the checkpoint."""
    if _on_gpu(worker):
        ranks = worker.tp * worker.pp
        devices = gather_driver().devices[:1]  # the first stands for all
        needed, free, remedies = held_bytes // ranks, sum(one.total_bytes for one in devices), ["more ranks (TP=)"]
        if not devices or needed <= free:
            return ""
    else:
        needed, free = replicas * held_bytes + WORK_BYTES, free_memory()
        smaller = [name for name, rounding in ROUNDINGS.items() if rounding.bits_per_weight < _rounded_bits(worker)]
        quantize = [f"--quantize {' or '.join(smaller)}"] if smaller and not is_quantized else []
        remedies = [*quantize, *(["fewer replicas"] if replicas > 1 else [])]
        if needed <= free:
            return ""
    choices = ", ".join(["a smaller model", *remedies])
    return (
        f"{name}: needs {needed / GIB:.1f} GiB, {free / GIB:.1f} are free; choose {choices} "
        "or a machine with more memory"
    )


def free_memory() -> int:
    """Return the bytes of memory that can still be taken: of the machine, or of the container where that is less."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        if limit != "max":
            free = min(free, int(limit) - used + int(stat["inactive_file"]))  # pages of files make room
    except (OSError, ValueError, KeyError):
        pass
    return max(0, free)


def _dtype(config: dict[str, Any]) -> str:
    text = config.get("text_config")
    config = {**(text if isinstance(text, dict) else {}), **config}
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _held_item_bytes(dtype: str, worker: WorkerSettings) -> int:
    """Return the bytes of a number of a checkpoint of that type in the worker's memory."""
    if worker.dtype != "auto":
        dtype = worker.dtype
    elif dtype == "float16" and not _on_gpu(worker):
        dtype = "float32"
    return ITEM_BYTES.get(dtype, 4)


def _rounded_bits(worker: WorkerSettings, bits: float = math.inf) -> float:
    """Return the bits of a weight that --quantize rounds; `bits` where it rounds none."""
    rounding = ROUNDINGS.get(worker.quantize)
    return bits if rounding is None else rounding.bits_per_weight


def _keeps(stored: Stored, worker: WorkerSettings, config: DecoderConfig | None) -> bool:
    """Return whether the worker multiplies the packed numbers, and does not unpack them while it reads."""
    if stored.rounds_rows:
        return True
    if _on_gpu(worker):
        packs = stored.method in ("gguf", "fp8") or (stored.bits == 4 and stored.method != "mxfp4")
        return stored.unit > 0 and packs and worker.kernels != "reference" and not _lacks_kernels(worker, config)
    return stored.unit > 0 and stored.method != "fp8" and worker.kernels in ("auto", "cpu")


def _lacks_kernels(worker: WorkerSettings, config: DecoderConfig | None) -> bool:
    """Return whether a worker on a GPU takes the reference kernels, as the cuda kernels lack some for the model."""
    try:
        return config is not None and bool(lacks_kernels(worker, rank_config(config, worker.tp, worker.pp)))
    except ConfigurationError:  # which the worker will raise
        return False


def _packs_gguf(name: str, bits: int, worker: WorkerSettings) -> bool:
    """Return whether the worker on a CPU holds a packed matrix of a GGUF file as it is (`models/weights.py`)."""
    is_table = name in _GGUF_TABLES.values()
    return not is_table or (worker.tp == 1 and (bits == 32 or name == "lm_head.weight"))


def wants_gpu(worker: WorkerSettings) -> bool:
    """Return whether a worker takes a GPU that can be used, as it will decide itself where its model is here."""
    if not may_use_gpu(worker):
        return False
    if demands_gpu(worker) or worker.quantize == "none":
        return True
    try:
        return not stays_on_cpu(worker, rank_config(load_config(gguf_in(worker.model)), worker.tp, worker.pp))
    except (ModelError, ConfigurationError):  # the model is not here, or the worker will refuse what is said of it
        return True


def _on_gpu(worker: WorkerSettings) -> bool:
    return wants_gpu(worker) and (demands_gpu(worker) or device_files())


def _check_directory(model: Path) -> None:
    require_local(model)
    if model.is_file():
        raise ModelError(f"model {model}: a file, not a directory; give the directory with config.json")
    if not model.is_dir():
        if name := in_address(str(model)):
            raise ModelError(f"model {model}: an address, not a directory; give the name, {name}")
        raise ModelError(f"model directory {model} does not exist; give a Hugging Face directory or ORG/NAME")
    if not (model / "config.json").exists():
        _refuse_several_gguf(model)
        raise ModelError(f"model directory {model} has no config.json; give the directory that has one")


def _weight_files(model: Path) -> Iterator[Path]:
    if (model / SINGLE).is_file():
        yield model / SINGLE
        return
    if not (model / INDEX).is_file():
        _refuse_other_weights(model)
    names = read_json(model / INDEX, remedy=_again(model)).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{model / INDEX}: no weight_map; fetch the file again")
    for name in sorted({str(name) for name in names.values()}):
        if Path(name).name != name:
            raise ModelError(f"{model / INDEX}: {json.dumps(name)} is no file name; fetch the file again")
        if not (model / name).is_file():
            raise ModelError(f"{model / name}: a part of the weights that is missing; {_again(model)}")
        yield model / name


def _refuse_other_weights(model: Path) -> None:
    if pickles := sorted([*model.glob("*.bin"), *model.glob("*.pt"), *model.glob("*.pth")]):
        raise ModelError(
            f"{pickles[0]}: pickled weights, which run code when they are read; choose a model with safetensors, "
            "or convert them with transformers' save_pretrained"
        )
    _refuse_several_gguf(model)
    raise ModelError(f"model directory {model} has no *.safetensors weights; {_again(model)}")


def _refuse_several_gguf(model: Path) -> None:
    """Raise ModelError for a directory with more than one GGUF file: `gguf_in` has found the only one."""
    if files := gguf_files(model):
        names = ", ".join(str(file.relative_to(model)) for file in files[:20])
        raise ModelError(f"model directory {model}: {len(files)} GGUF files, {names}; give the path of one")


def _tensors(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of each tensor of a safetensors file, checked against the file's size."""
    _refuse_pointer(file)
    try:
        with file.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            length = int.from_bytes(source.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_BYTES):
                raise ValueError("cut off, or not a safetensors file")
            header = json.loads(source.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
        if 8 + length + max(ends, default=0) > size:
            raise ValueError(f"cut off: {size} of {8 + length + max(ends)} bytes")
        shapes = {name: tuple(int(number) for number in entry["shape"]) for name, entry in entries.items()}
        if any(number < 0 for shape in shapes.values() for number in shape):
            raise ValueError("a tensor of a negative size")
        return {name: (str(entries[name]["dtype"]), shape) for name, shape in shapes.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(f"{file}: {error}; {_again(file.parent)}") from error


def _refuse_pointer(path: Path) -> None:
    """Raise ModelError for the text that git leaves in place of a large file."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(POINTER))
    except OSError as error:
        raise ModelError(f"{path}: not readable: {error}; {_again(path.parent)}") from error
    if begin == POINTER:
        raise ModelError(
            f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull` in the directory, "
            "or use `orcinus pull ORG/NAME`"
        )


def _again(model: Path) -> str:
    """Return the remedy for a file that is damaged or missing."""
    repository = repository_of(model)
    return f"run `orcinus pull {repository}` to complete it" if repository else "fetch it again"
