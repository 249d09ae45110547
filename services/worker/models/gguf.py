"""The weights of a GGUF file as a Source: tensors under Hugging Face's names, rows in Hugging Face's order.

llama.cpp stores the rows of q and k of `llama` files so that the two numbers that turn together lie side by side;
they are read in the order of `kernels.ops`, the halves of a head one after the other. The experts of a layer lie in one
tensor, in old files each in its own; each matrix is read under a name of its own. `quantization/gguf.py` unpacks.
Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py (`LlamaModel.permute`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.formats import TABLES
from kernels.ops import Groups
from services.worker.checkpoint.fingerprint import Span
from services.worker.checkpoint.source import (
    DTYPES,
    FLOATS,
    Progress,
    Source,
    finite,
    memory,
    read_into,
)
from services.worker.models.config import DecoderConfig
from services.worker.models.registry import ExpertNames
from services.worker.quantization.gguf import UNPACK
from shared.errors import ModelError
from shared.models.gguf.config import bias_kind
from shared.models.gguf.reader import Tensor as Place
from shared.models.gguf.reader import open_gguf

_COMPUTED = ("rope_freqs.weight",)
_OF_IMAGES = ("v.", "mm.")
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_OLD_EXPERT = re.compile(r"(blk\.\d{1,5}\.ffn_(?:gate|up|down))\.(0|[1-9]\d{0,3})\.weight")
"""Of Mixtral before April 2024: a tensor for each expert."""
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_ANY = "*"
"""In place of the number of an expert: the tensor of all of a layer."""


class GgufWeights(Source):
    """The tensors of a file, or of all parts of a model; `read` returns packed ones in float32."""

    def __init__(self, config: DecoderConfig, model: Path, progress: Progress | None = None) -> None:
        """Read the header. config: of this file, for the names of its tensors. Raise ModelError."""
        self.model = model
        self._progress = progress
        file = open_gguf(model)
        self._header_bytes = file.header_bytes
        self._places: dict[str, Place] = {}
        self._heads: dict[str, int] = {}  # name -> heads, for matrices in llama.cpp's row order
        self._read: set[str] = set()
        self._bytes_read = 0
        self.bytes_total = sum(place.size_bytes for place in file.tensors.values())
        is_turned = file.text("general.architecture") == "llama"
        for place in file.tensors.values():
            name = _hugging_face_name(place.name, config)
            if name is None:
                raise ModelError(
                    f"{model}: tensor {place.name} is not supported for {config.architecture}; choose another model"
                )
            if _ANY in name:
                _check_stack(model, place, config)
            elif place.name.endswith("ffn_gate_inp_shexp.weight") and len(place.shape) == 1:
                place = replace(place, shape=(1, *place.shape))  # of one output
            self._places[name] = place
            if is_turned and ".attn_q." in place.name:
                self._heads[name] = config.heads
            elif is_turned and ".attn_k." in place.name:
                self._heads[name] = config.kv_heads
        for name, place in self._places.items():
            if (stack := self._places.get(_EXPERT.sub(_ANY, name), place)) is not place:
                raise ModelError(
                    f"{model}: tensors {place.name} and {stack.name} are both there; convert the model again"
                )

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place(name).shape

    def dtype(self, name: str) -> str:
        """Return the type of a tensor that is there: one of FLOATS or of UNPACK."""
        return self._place(name).type.name

    def check(self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS) -> None:
        """Raise ModelError as any Source; where a matrix of floats is wanted, packed types are as good."""
        place = self._place(name)
        if place.shape != shape:
            raise ModelError(
                f"{self.model}: tensor {place.name} has shape {list(place.shape)}, its metadata says {list(shape)}; "
                "convert the model again"
            )
        if place.type.name not in dtypes and (dtypes is not FLOATS or len(shape) == 1):
            raise ModelError(
                f"{self.model}: tensor {place.name} is {place.type.name}, expected {' or '.join(sorted(dtypes))}; "
                "choose another file of the model"
            )

    def read(self, name: str, shape: tuple[int, ...], first: int, rows: int) -> Tensor:
        if self.dtype(name) not in FLOATS:
            return self.read_groups(name, first, rows).plain().view(rows, *shape[1:])
        return self._rows(name, first, rows, DTYPES[self.dtype(name)]).view(rows, *shape[1:])

    def read_groups(self, name: str, first: int, rows: int) -> Groups:
        """Return rows of a packed tensor, [rows, inputs]. Raise ModelError for scales that are not finite."""
        kind = self._place(name).type
        raw = self._rows(name, first, rows, torch.uint8)
        groups = UNPACK[kind.name](raw.view(rows, -1, kind.size_bytes))
        scales = groups.scales if groups.mins is None else groups.scales + groups.mins
        finite(self, name, scales, max(map(abs, TABLES[groups.table])) if groups.table else 1.0)
        return groups

    def head(self) -> bytes:
        """Return the headers of all parts."""
        head = b""
        for path, count in self._header_bytes.items():
            with path.open("rb") as file:
                head += file.read(count)
        return head

    def spans(self) -> Iterator[Span]:
        for place in self._places.values():
            yield place.path, place.start, place.size_bytes

    def unread(self) -> list[str]:
        return sorted(
            name for name, place in self._places.items() if place.name not in self._read and name not in _COMPUTED
        )

    def _place(self, name: str) -> Place:
        place = self._find(name)
        if place is None:
            raise ModelError(f"{self.model}: tensor {name} is missing; choose another file of the model")
        return place

    def _find(self, name: str) -> Place | None:
        """Return where a tensor lies, an expert's in that of all experts of its layer; None where there is none."""
        match = _EXPERT.search(name)
        if match is None or name in self._places:
            return self._places.get(name)
        stack, index = self._places.get(_EXPERT.sub(_ANY, name)), int(match[0])
        if stack is None or index >= stack.shape[0]:
            return None
        size = stack.size_bytes // stack.shape[0]
        return replace(stack, shape=stack.shape[1:], start=stack.start + index * size)

    def _rows(self, name: str, first: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Return rows of a tensor in Hugging Face's order, [rows, bytes of a row as `dtype`]."""
        place = self._place(name)
        row_bytes = place.size_bytes // place.shape[0]
        heads = self._heads.get(name, 0)
        size = place.shape[0] // heads if heads else 1  # read by whole heads
        start, stop = first // size * size, -(-(first + rows) // size) * size
        tensor = memory((stop - start, row_bytes // dtype.itemsize), dtype)
        read_into(tensor, place.path, name, place.start + start * row_bytes, self._report)
        self._read.add(place.name)
        if not heads:
            return tensor
        at = torch.arange(first, first + rows)
        head, half, pair = at // size, at % size // (size // 2), at % (size // 2)
        return tensor[head * size + 2 * pair + half - start]

    def _report(self, count: int) -> None:
        self._bytes_read += count
        if self._progress:
            self._progress(min(self._bytes_read, self.bytes_total), self.bytes_total)


def _check_stack(model: Path, place: Place, config: DecoderConfig) -> None:
    """Raise ModelError for a tensor that does not hold a matrix, or a bias, of each expert."""
    experts = config.mixture.experts if config.mixture is not None else 0
    if place.shape[0] != experts or len(place.shape) != (2 if place.name.endswith(".bias") else 3):
        raise ModelError(
            f"{model}: tensor {place.name} has shape {list(place.shape)}, its metadata says {experts} experts; convert "
            "the model again"
        )


def _hugging_face_name(name: str, config: DecoderConfig) -> str | None:
    """Return the name that `Names` has for a tensor, None for one that would change the numbers and is not read.

    Those that are not of the text keep their own. That of all experts of a layer has _ANY for an expert's number.
    """
    if name in _COMPUTED or name.startswith(_OF_IMAGES):
        return name
    names = config.family.names
    *gate, up = names.gate_up_proj  # one name: one matrix
    if name.endswith(".bias") and bias_kind(name) not in config.biases:
        return None
    if match := _OLD_EXPERT.fullmatch(name):
        stack = _hugging_face_name(f"{match[1]}_exps.weight", config)
        experts = config.mixture.experts if config.mixture is not None else 0
        return None if stack is None or int(match[2]) >= experts else stack.replace(_ANY, match[2])
    if match := _LAYER.fullmatch(name):
        qkv = names.qkv_proj if len(names.qkv_proj) == 3 else (None, None, None)
        parts = {
            "attn_norm": names.input_norm,
            "attn_q": qkv[0],
            "attn_k": qkv[1],
            "attn_v": qkv[2],
            "attn_qkv": names.qkv_proj[0] if len(names.qkv_proj) == 1 else None,
            "attn_q_norm": names.q_norm,
            "attn_k_norm": names.k_norm,
            "attn_output": names.o_proj,
            "post_attention_norm": names.attention_norm,
            "ffn_norm": names.mlp_norm,
            "post_ffw_norm": names.down_norm,
        }
        if names.experts is None:
            parts |= {"ffn_gate": gate[0] if gate else None, "ffn_up": up, "ffn_down": names.down_proj}
        else:
            parts |= _expert_parts(names.experts)
        if names.sinks is not None:  # gpt-oss's norm before the experts has the name of another one
            parts |= {"attn_sinks": names.sinks, "post_attention_norm": names.mlp_norm, "ffn_norm": None}
        part, end = parts.get(match[2]), "" if match[2] == "attn_sinks" else f".{match[3]}"
        return None if part is None else f"{names.prefix}{names.layers}.{match[1]}.{part}{end}"
    stem, _, kind = name.rpartition(".")
    whole = {
        "token_embd": f"{names.prefix}{names.embed_tokens}",
        "output_norm": f"{names.prefix}{names.norm}",
        "output": names.lm_head,
    }.get(stem)
    return None if whole is None or kind not in ("weight", "bias") else f"{whole}.{kind}"


def _expert_parts(names: ExpertNames) -> dict[str, str | None]:
    """Return the file's names in a layer with a mixture of experts, and those that `names` has for them."""
    (gate, up), down = names.gate_up_proj, names.down_proj
    parts = {"ffn_gate_inp": names.router, "ffn_gate_inp_shexp": names.shared_gate}
    for ending, mlp in (("exps", f"{names.experts}.{_ANY}"), ("shexp", names.shared)):
        for name, part in (("ffn_gate", gate), ("ffn_up", up), ("ffn_down", down)):
            parts[f"{name}_{ending}"] = mlp and f"{mlp}.{part}"
    return parts
