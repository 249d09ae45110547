"""The weights of a GGUF file as a Source: tensors under Hugging Face's names, rows in Hugging Face's order.

llama.cpp stores the rows of q and k of `llama` files so that the two numbers that turn together lie side by side;
they are read in the order of `kernels.ops`, the halves of a head one after the other. The experts of a layer lie in one
tensor, in old files each in its own; each matrix is read under a name of its own. Packed types become `Groups` with
ggml's formulas and rounding.
Sources, in https://github.com/ggml-org/llama.cpp: ggml-quants.h and convert_hf_to_gguf.py (`LlamaModel.permute`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.formats import TABLES
from kernels.ops import Groups
from services.worker.models.checkpoint import (
    DTYPES,
    FLOATS,
    Progress,
    Source,
    finite,
    memory,
    powers,
    read_into,
)
from services.worker.models.config import DecoderConfig
from services.worker.models.fingerprint import Span
from services.worker.models.registry import ExpertNames
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


def _half(raw: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte of each block, [rows, blocks, 1] float32."""
    return raw[:, :, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Return [..., n] bytes as [..., 2, n]: the low halves, then the high ones."""
    return torch.stack((raw & 15, raw >> 4), -2)


def _bits(raw: Tensor, width: int) -> Tensor:
    """Return [..., n] bytes as [..., 8 / width, n]: from the lowest bits on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return raw[..., None, :] >> shifts & (1 << width) - 1


def _fifth_bits(raw: Tensor) -> Tensor:
    """Return the bits of 4 bytes, [rows, blocks, 32], as 16."""
    return (raw[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2) << 4


def _groups(
    bits: int, size: int, numbers: Tensor, scales: Tensor, mins: Tensor | None = None, table: str = ""
) -> Groups:
    """Return Groups of [rows, blocks, ...] of each."""
    least = None if mins is None else mins.flatten(1).contiguous()
    return Groups(bits, size, numbers.flatten(1).contiguous(), scales.flatten(1).contiguous(), least, table)


def _q4_0(raw: Tensor) -> Groups:
    """Unpack d, 16 bytes: d * (q - 8)."""
    return _groups(4, 32, _nibbles(raw[:, :, 2:]), _half(raw, 0))


def _q4_1(raw: Tensor) -> Groups:
    """Unpack d, m, 16 bytes: d * q + m."""
    return _groups(4, 32, _nibbles(raw[:, :, 4:]), _half(raw, 0), -_half(raw, 2))


def _q5_0(raw: Tensor) -> Groups:
    """Unpack d, 4 bytes of fifth bits, 16 bytes: d * (q - 16)."""
    numbers = _nibbles(raw[:, :, 6:]).flatten(2) | _fifth_bits(raw[:, :, 2:6])
    return _groups(6, 32, numbers + (32 - 16), _half(raw, 0))


def _q5_1(raw: Tensor) -> Groups:
    """Unpack d, m, 4 bytes of fifth bits, 16 bytes: d * q + m."""
    numbers = _nibbles(raw[:, :, 8:]).flatten(2) | _fifth_bits(raw[:, :, 4:8])
    return _groups(6, 32, numbers, _half(raw, 0), -_half(raw, 2))


def _mxfp4(raw: Tensor) -> Groups:
    """Unpack an exponent, 16 bytes: 2^(e - 127) * FLOAT4[q]. An exponent of 255 is no number."""
    return _groups(4, 32, _nibbles(raw[:, :, 1:]), powers(raw[:, :, :1]), table="float4")


def _q8_0(raw: Tensor) -> Groups:
    """Unpack d, 32 signed bytes: d * q."""
    return _groups(8, 32, raw[:, :, 2:] ^ 128, _half(raw, 0))


def _iq4_nl(raw: Tensor) -> Groups:
    """Unpack d, 16 bytes: d * IQ4[q]."""
    return _groups(4, 32, _nibbles(raw[:, :, 2:]), _half(raw, 0), table="iq4")


def _iq4_xs(raw: Tensor) -> Groups:
    """Unpack 8 groups of 32, d, high 2 and low 4 bits of their scales: d * (sc - 32) * IQ4[q]."""
    low = _nibbles(raw[:, :, 4:8]).mT.flatten(2)
    scales = (low | _bits(raw[:, :, 2:4], 2).mT.flatten(2) << 4).float() - 32
    return _groups(4, 32, _nibbles(raw[:, :, 8:].unflatten(2, (8, 16))), _half(raw, 0) * scales, table="iq4")


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return d * sc and dmin * m of 8 groups, [rows, blocks, 8] each: d, dmin, 12 bytes of 6-bit numbers."""
    low, least, high = raw[:, :, 4:8], raw[:, :, 8:12], raw[:, :, 12:16]
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), -1)
    mins = torch.cat((least & 63, high >> 4 | least >> 2 & 48), -1)
    return _half(raw, 0) * scales, _half(raw, 2) * mins


def _q2_k(raw: Tensor) -> Groups:
    """Unpack 16 groups of 16, scales and minima of 4 bits first: d * sc * q - dmin * m."""
    numbers = _bits(raw[:, :, 16:80].unflatten(2, (2, 32)), 2)
    scales, mins = raw[:, :, :16] & 15, raw[:, :, :16] >> 4
    return _groups(2, 16, numbers, _half(raw, 80) * scales, _half(raw, 82) * mins)


def _q3_k(raw: Tensor) -> Groups:
    """Unpack 16 groups of 16, high bits, low 2 bits, scales of 6 bits, d: d * (sc - 32) * (q - 4)."""
    low = _bits(raw[:, :, 32:96].unflatten(2, (2, 32)), 2).flatten(2, 3)
    numbers = low | _bits(raw[:, :, :32], 1) << 2
    scales = _nibbles(raw[:, :, 96:104]).flatten(2) | _bits(raw[:, :, 104:108], 2).flatten(2) << 4
    return _groups(4, 16, numbers + (8 - 4), _half(raw, 108) * (scales.float() - 32))


def _q4_k(raw: Tensor) -> Groups:
    """Unpack 8 groups of 32: d * sc * q - dmin * m."""
    numbers = _nibbles(raw[:, :, 16:].unflatten(2, (4, 32)))
    return _groups(4, 32, numbers, *_k_scales(raw))


def _q5_k(raw: Tensor) -> Groups:
    """Unpack 8 groups of 32, the fifth bits first: d * sc * q - dmin * m."""
    numbers = _nibbles(raw[:, :, 48:].unflatten(2, (4, 32))).flatten(2, 3)
    return _groups(6, 32, numbers | _bits(raw[:, :, 16:48], 1) << 4, *_k_scales(raw))


def _q6_k(raw: Tensor) -> Groups:
    """Unpack 16 groups of 16, low 4 bits, high 2 bits, signed scales, d: d * sc * (q - 32)."""
    low = _nibbles(raw[:, :, :128].unflatten(2, (2, 64))).reshape(*raw.shape[:2], 8, 32)
    high = _bits(raw[:, :, 128:192].unflatten(2, (2, 32)), 2).flatten(2, 3)
    scales = raw[:, :, 192:208].contiguous().view(torch.int8).float()
    return _groups(6, 16, low | high << 4, _half(raw, 208) * scales)


UNPACK: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "MXFP4": _mxfp4,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Type -> its blocks, [rows, blocks, bytes of a block] uint8, as Groups. All products are exact in float32."""
