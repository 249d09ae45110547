"""Read the weights of a Hugging Face directory, one safetensors file or shards with an index; or make them up.

Tensors are read a few rows at a time, through no mapping, so that memory never holds more than what was packed and one
piece. Nothing of the directory is executed; pickled checkpoints are refused.
Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.ops import Groups
from services.worker.checkpoint.fingerprint import Span
from shared.errors import ModelError
from shared.models.model_files import AGAIN, read_bounded, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Types of safetensors -> torch's."""
HEADER_BYTES = 16 << 20  # of one file: some 100,000 tensors; parsed JSON takes many times as much memory
MAX_DIMENSIONS = 8  # no model has more; the product of a million sizes takes minutes
PIECE_BYTES = 2 << 20  # of a tensor at a time, in float32, and between two reports of progress
SHIFT = 61
"""Numbers between the begins of two rows of a random matrix."""
SPAN = 1 << 14
"""Random numbers that are drawn from one seed."""

Progress = Callable[[int, int], None]  # bytes read, bytes in all


class Source(ABC):
    """Tensors by name."""

    model: Path
    prefix = ""
    """Of the fingerprint, for what is no model of a file."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is there."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """Return the type (DTYPES) of a tensor that is there."""

    @abstractmethod
    def check(self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS) -> None:
        """Raise ModelError when that tensor is missing, or has another shape or none of these types (DTYPES)."""

    @abstractmethod
    def read(self, name: str, shape: tuple[int, ...], first: int, rows: int) -> Tensor:
        """Return rows first .. first + rows of a checked tensor, in the type that it is stored in."""

    def read_groups(self, name: str, first: int, rows: int) -> Groups:
        """Return rows of a packed tensor of a GGUF file, [rows, inputs]. Raise ModelError."""
        raise ModelError(f"{self.model}: no GGUF file; choose another model")

    @abstractmethod
    def head(self) -> bytes:
        """Return what decides the numbers besides those of the tensors: settings, names, types and shapes."""

    @abstractmethod
    def spans(self) -> Iterator[Span]:
        """Yield where the bytes of each tensor lie."""

    @abstractmethod
    def unread(self) -> list[str]:
        """Return the names of the tensors that were not read."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the whole tensor in `dtype`. Raise ModelError."""
        self.check(name, shape)
        return as_piece(self.read(name, shape, 0, shape[0]), dtype)

    def pieces(
        self, name: str, shape: tuple[int, int], dtype: torch.dtype, rows: range, columns: range
    ) -> Iterator[Tensor]:
        """Yield these rows and columns of the tensor in `dtype`, a few rows at a time. Raise ModelError.

        Rows that are not asked for are not read; columns are cut from whole rows.
        """
        self.check(name, shape)
        step = max(1, PIECE_BYTES // (shape[1] * 4))
        for first in range(rows.start, rows.stop, step):
            piece = self.read(name, shape, first, min(step, rows.stop - first))
            yield as_piece(piece[:, columns.start : columns.stop], dtype)


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte of the file

    @property
    def size(self) -> int:
        """Return the bytes; 0 for an unknown type."""
        return math.prod(self.shape) * (DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0)


class Checkpoint(Source):
    """The safetensors of a model directory."""

    def __init__(self, model: Path, progress: Progress | None = None) -> None:
        """Read the headers. Raise ModelError."""
        self.model = model
        self._progress = progress
        self._where: dict[str, _Place] = {}
        self._sizes: dict[str, int] = {}
        self._read_names: set[str] = set()
        self._bytes_read = 0
        for name in _shards(model):
            size, places = _header(model / name)
            if twice := self._where.keys() & places.keys():
                tensor = min(twice)
                first = self._where[tensor].file
                raise ModelError(
                    f"{model}: tensor {tensor} is in two shards, {first} and {name}; remove one of the two"
                )
            self._sizes[name] = size
            self._where.update(places)
        self.bytes_total = sum(self._sizes.values())

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name].shape

    def dtype(self, name: str) -> str:
        return self._where[name].dtype

    def check(self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS) -> None:
        place = self._where.get(name)
        if place is None:
            raise ModelError(f"{self.model}: tensor {name} is missing from the checkpoint; fetch the model again")
        if place.shape != shape:
            raise ModelError(
                f"{self.model}: tensor {name} has shape {list(place.shape)}, config.json says {list(shape)}; "
                "fetch config.json and weights again, both of the same model"
            )
        if place.dtype not in dtypes:
            raise ModelError(
                f"{self.model}: tensor {name} is {place.dtype}, expected {' or '.join(sorted(dtypes))}; "
                "use another checkpoint of the model"
            )

    def read(self, name: str, shape: tuple[int, ...], first: int, rows: int) -> Tensor:
        place = self._where[name]
        tensor = memory((rows, *shape[1:]), DTYPES[place.dtype])
        read_into(tensor, self.model / place.file, name, place.start + first * (tensor.nbytes // rows), self._report)
        self._read_names.add(name)
        return tensor

    def _report(self, count: int) -> None:
        self._bytes_read += count
        if self._progress:
            self._progress(min(self._bytes_read, self.bytes_total), self.bytes_total)

    def unread(self) -> list[str]:
        return sorted(self._where.keys() - self._read_names)

    def head(self) -> bytes:
        tensors = sorted(self._where.items())
        names = "".join(f"{name} {place.dtype} {list(place.shape)}\n" for name, place in tensors)
        return read_bounded(self.model / "config.json") + names.encode()

    def spans(self) -> Iterator[Span]:
        for _, place in sorted(self._where.items()):
            yield self.model / place.file, place.start, place.size


class Dummy(Source):
    """Random weights of any shape, the same in every run: for benches, where only sizes matter."""

    prefix = "dummy-"

    def __init__(self, model: Path) -> None:
        self.model = model

    def __contains__(self, name: str) -> bool:
        return True

    def shape(self, name: str) -> tuple[int, ...]:
        """Return that of a scalar: no random tensor is asked for its shape."""
        return ()

    def dtype(self, name: str) -> str:
        return "F32"

    def check(self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS) -> None:
        """Accept every tensor."""

    def read(self, name: str, shape: tuple[int, ...], first: int, rows: int) -> Tensor:
        """Return random numbers: matrices of variance 1 / inputs, norms near 1, small biases.

        A number follows from the tensor's name and its place there: ranks have parts of one tensor. Rows overlap in
        memory, each SHIFT numbers behind the one before: to draw eight billion takes a minute.
        """
        if len(shape) < 2:
            center = 0.0 if name.endswith("bias") else 1.0
            return self._uniform(name, first, rows, 0.1).add_(center)
        a_row, width = math.prod(shape[1:-1]), shape[-1]
        count = rows * a_row
        drawn = self._uniform(name, SHIFT * first * a_row, width + SHIFT * (count - 1), math.sqrt(3 / width))
        return drawn.as_strided((count, width), (SHIFT, 1)).reshape(rows, *shape[1:])

    def _uniform(self, name: str, first: int, count: int, bound: float) -> Tensor:
        """Return numbers first .. first + count of an endless row of that name; draw at most two SPANs beside them."""
        spans = range(first // SPAN, -(-(first + count) // SPAN))
        drawn = torch.empty(len(spans), SPAN)
        for place, span in zip(drawn, spans, strict=True):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {span}".encode()))
            place.uniform_(-bound, bound, generator=generator)
        return drawn.view(-1)[first - spans.start * SPAN :][:count]

    def unread(self) -> list[str]:
        return []

    def head(self) -> bytes:
        return read_bounded(self.model / "config.json")

    def spans(self) -> Iterator[Span]:
        """Yield none: what is made up follows from names and shapes."""
        return iter(())


def open_weights(
    model: Path, load_format: Literal["auto", "safetensors", "dummy"], progress: Progress | None = None
) -> Source:
    """Return the weights as --load-format says; auto means what the directory has. Raise ModelError."""
    return Dummy(model) if load_format == "dummy" else Checkpoint(model, progress)


def read_into(found: Tensor, path: Path, name: str, start: int, report: Callable[[int], None]) -> None:
    """Fill a tensor with the bytes of a file from `start` on; report counts of bytes. Raise ModelError."""
    # A mapping would leave every page that was read in this process's memory until the file is closed.
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        into = found.view(-1).view(torch.uint8).numpy().data
        while into.nbytes:
            count = file.readinto(into[:PIECE_BYTES])
            if not count:
                raise ModelError(f"{path}: cannot read tensor {name}: the file is cut off; {AGAIN}")
            into = into[count:]
            report(count)


def memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor; its memory goes back to the system as soon as it is freed.

    Pieces from the heap, freed between matrices that stay, would leave holes: 15 % of a small model.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < PIECE_BYTES // 16:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


def trim_heap() -> None:
    """Give the free memory of malloc back to the system, with glibc; elsewhere do nothing.

    Unpacking leaves holes between matrices that are too small for mappings of their own: 20 % of an expert's.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def finite(source: Source, name: str, found: Tensor, largest: float = 1.0) -> Tensor:
    """Return numbers of a tensor, in float32. Each times `largest` must be finite in bfloat16. largest: the largest
    number that a scale multiplies. Raise ModelError.
    """
    good = found.abs() * largest <= torch.finfo(torch.bfloat16).max
    if not good.all():
        value = float(found[~good][0])
        raise ModelError(
            f"{source.model}: tensor {name} holds {value:g}, expected finite weights; fetch or convert the file again"
        )
    return found


def powers(exponents: Tensor) -> Tensor:
    """Return 2^(exponents - 127) in float32 of a tensor of bytes; NaN for 255."""
    numbers = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
    return numbers.masked_fill_(exponents == 255, torch.nan)


def as_piece(found: Tensor, dtype: torch.dtype) -> Tensor:
    """Return it contiguous and in `dtype`; a copy unless it is so already."""
    if found.dtype == dtype and found.is_contiguous():
        return found
    return memory(found.shape, dtype).copy_(found)


def _shards(model: Path) -> list[str]:
    if (model / SINGLE).is_file():
        return [SINGLE]
    if not (model / INDEX).is_file():
        pickled = any(model.glob("*.bin"))
        raise ModelError(
            f"{model} has no weights: neither {SINGLE} nor {INDEX} is there"
            + ("; convert its pickled .bin weights to safetensors" if pickled else "")
        )
    shards = read_json(model / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{model / INDEX} holds no weight_map; {AGAIN}")
    for name in shards.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{model / INDEX}: {json.dumps(name)} is no file name; {AGAIN}")
    names = sorted(set(shards.values()))
    for name in names:
        if not (model / name).is_file():
            raise ModelError(f"{model}: shard {name} of {INDEX} is missing; fetch the model again")
    return names


def _header(path: Path) -> tuple[int, dict[str, _Place]]:
    """Return the file's size and its tensors. Raise ModelError for whatever the format does not allow."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError("the file may be cut off")
            if length > HEADER_BYTES:
                raise ModelError(
                    f"{path}: its header has {length} bytes, more than {HEADER_BYTES}; split it into shards"
                )
            entries = json.loads(file.read(length))
        if not isinstance(entries, dict):
            raise ValueError("its header is no JSON object")
        begin = 8 + length
        places = {name: _place(path.name, entry, begin) for name, entry in entries.items() if name != "__metadata__"}
        for place in places.values():
            if place.start + place.size > size:
                raise ValueError("the file may be cut off")
        _check_apart(places)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}; {AGAIN}") from error
    return size, places


def _check_apart(places: dict[str, _Place]) -> None:
    """Raise ValueError for two tensors that share bytes: the format has none."""
    end, last = 0, ""
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].size)):
        if place.size and place.start < end:
            raise ValueError(f"its tensors {last[:100]} and {name[:100]} overlap")
        if place.size:
            end, last = place.start + place.size, name


def _place(file: str, entry: Any, begin: int) -> _Place:
    start, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise ValueError("its header has a tensor of no size")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"its header has a tensor of {len(shape)} dimensions, at most {MAX_DIMENSIONS}")
    if dtype in DTYPES and end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError("its header has a tensor with a size that is not that of its shape")
    return _Place(file, dtype, shape, begin + start)
