"""Read the header of a GGUF file within bounds: metadata and the places of tensors, each checked against the file.

A model may lie in several files, as llama.cpp's gguf-split writes them: the first has the metadata, each has tensors.
`open_gguf` of the first one is the whole model. An own reader, as files come from strangers: that of the `gguf` package
loops over counts of the file unchecked, and brings three packages along.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import ModelError
from shared.messages import shorten
from shared.models.gguf.parts import MAX_PARTS, part_names, part_number

VERSIONS = (2, 3)
MAX_KEYS = 4096
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 1 << 10
MAX_STRING_BYTES = 1 << 20
"""Of one value. Chat templates have some 10 kB."""
MAX_ITEMS = 2 << 20
"""Of one array. Gemma 3 has 262,144 tokens, Llama 3 280,147 merges."""
MAX_METADATA_BYTES = 64 << 20
"""Of the headers of all parts of a model together. Gemma 3's has 7 MB."""
MAX_DIMENSION = 1 << 32
MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class BlockType:
    """How the numbers of a tensor lie: blocks of `numbers` that follow each other along a row."""

    name: str
    numbers: int
    size_bytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
"""Number of a type in the file -> the types that are read."""
FLOATS = ("F32", "F16", "BF16")
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a type of values -> its letter for `struct`."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the file; `shape` has the outputs first, as in a Hugging Face checkpoint."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    path: Path
    start: int  # byte of that file

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) // self.type.numbers * self.type.size_bytes


@dataclass(frozen=True, slots=True)
class _Array:
    """The place of an array in the file; decoded when it is asked for."""

    kind: int
    count: int
    start: int
    end: int


class GgufFile:
    """The header of a file, or of all parts of a model. All methods raise ModelError naming key, value and remedy."""

    def __init__(self, path: Path, file: int, size_bytes: int, most_bytes: int) -> None:
        """Read the header, of `most_bytes` at most, of an open file, `size_bytes` long, which may be a part."""
        self.path = path
        with mmap.mmap(file, size_bytes, prot=mmap.PROT_READ) as data:
            header = _Header(path, data, most_bytes)
            self._values, self.tensors = header.metadata, header.tensors
        self.header_bytes = {path: header.size_bytes}
        """File -> bytes of its header."""

    def part_paths(self) -> list[Path]:
        """Return the files of the model, this one first. Raise ModelError where it is not the first of its parts."""
        count = self.integer("split.count", 1, most=MAX_PARTS)
        if count <= 1:
            return [self.path]
        number, named = part_number(self.path.name) or (0, 0)
        if named != count or not 1 <= number <= count:
            raise ModelError(
                f"{self.path}: one of {count} parts, and its name does not end in -00001-of-{count:05}.gguf; give the "
                "parts the names that they were made with"
            )
        paths = [self.path.with_name(name) for name in part_names(self.path.name)]
        if number != 1:
            fetch = "" if paths[0].is_file() else "fetch all parts into one directory and "
            raise ModelError(f"{self.path}: part {number} of {count}; {fetch}give the first one, {paths[0].name}")
        return paths

    def join(self, parts: Iterable[GgufFile]) -> None:
        """Add the tensors of the other parts. Raise ModelError for those that are not of the same model."""
        count, total = len(self.part_paths()), self.integer("split.tensors.count", most=MAX_TENSORS)
        self._check_part(self, 0, count, total)
        for number, part in enumerate(parts, 1):
            self._check_part(part, number, count, total)
            self.tensors |= part.tensors
            self.header_bytes |= part.header_bytes
        if len(self.tensors) != total:
            raise ModelError(
                f"{self.path}: {len(self.tensors)} tensors in {count} parts, split.tensors.count is {total}; fetch all "
                "parts again, from one place"
            )

    def _check_part(self, part: GgufFile, number: int, count: int, total: int) -> None:
        """Raise ModelError for a part that is not this one of `count` that have `total` tensors together."""
        remedy = "fetch all parts again, from one place"
        for key, expected in (("split.no", number), ("split.count", count), ("split.tensors.count", total)):
            if (value := part.integer(key)) != expected:
                raise ModelError(
                    f"{part.path}: {key} is {value}, expected {expected} in part {number + 1} of {count}; {remedy}"
                )
        for key in ("general.architecture", "general.name"):  # which parts behind the first one need not have
            if key in part and part.text(key) != self.text(key, ""):
                raise ModelError(f"{part.path}: {key} differs from that of {self.path.name}; {remedy}")
        for name in part.tensors if number else ():
            if (other := self.tensors.get(name)) is not None:
                raise ModelError(f"{part.path}: tensor {_short(name)} is in {other.path.name}, too; {remedy}")
        if len(self.tensors) + (len(part.tensors) if number else 0) > total:
            raise ModelError(f"{part.path}: more than the {total} tensors of split.tensors.count; {remedy}")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._type_error(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None, least: int = 0, most: int = 1 << 32) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._type_error(key, value, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._type_error(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._type_error(key, value, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """Return an array of strings; empty where there is none."""
        return [text.decode("utf-8", "replace") for text in self._array(key, (_STRING,))]

    def integers(self, key: str) -> list[int]:
        """Return an array of integers; empty where there is none."""
        return self._array(key, (0, 1, 2, 3, 4, 5, 10, 11))

    def numbers(self, key: str) -> list[float]:
        """Return an array of float32; empty where there is none."""
        return self._array(key, (6,))

    def flags(self, key: str) -> list[bool]:
        """Return an array of booleans; empty where there is none."""
        return self._array(key, (7,))

    def count(self, key: str) -> int:
        """Return the length of an array; 0 where there is none."""
        array = self._values.get(key)
        return array.count if isinstance(array, _Array) else 0

    def floats(self, name: str, count: int) -> list[float]:
        """Return the numbers of a small tensor that must be F32 and of this size."""
        tensor = self.tensors[name]
        if tensor.type.name != "F32" or tensor.shape != (count,):
            raise ModelError(
                f"{self.path}: tensor {_short(name)} is {tensor.type.name} {list(tensor.shape)}, expected F32 "
                f"[{count}]; convert the model again"
            )
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            return [float(number) for number in np.frombuffer(file.read(tensor.size_bytes), "<f4", count)]

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: {key} is missing; convert the model again")
        return value

    def _array(self, key: str, kinds: tuple[int, ...]) -> list[Any]:
        array = self._values.get(key)
        if array is None or (isinstance(array, _Array) and not array.count):
            return []
        if not isinstance(array, _Array) or array.kind not in kinds:
            raise self._type_error(key, array, "an array of another type")
        with self.path.open("rb") as file:
            file.seek(array.start)
            data = file.read(array.end - array.start)
        if len(data) != array.end - array.start:
            raise ModelError(f"{self.path}: cut off since its header was read; fetch it again")
        if array.kind == _STRING:
            return list(_strings(data, array.count))
        return list(struct.unpack(f"<{array.count}{_SCALARS[array.kind]}", data))

    def _type_error(self, key: str, value: Any, expected: str) -> ModelError:
        said = "an array" if isinstance(value, _Array) else _short(value)
        return ModelError(f"{self.path}: {key} is {said}, expected {expected}; convert the model again")


def is_gguf(path: Path) -> bool:
    """Return whether the path is a file with the ending of GGUF."""
    return path.suffix == ".gguf" and path.is_file()


def open_gguf(path: Path) -> GgufFile:
    """Return the header of a file, or of the model that it is the first part of.

    Raise ModelError for whatever the format or the bounds do not allow, and for parts that do not belong together.
    """
    first = _read(_version(path))
    paths = first.part_paths()
    if len(paths) == 1:
        return first
    for number, part in enumerate(paths, 1):
        if not part.exists():
            raise ModelError(f"{part}: part {number} of {len(paths)} is missing; fetch it into the same directory")
    return _join(tuple(_version(part) for part in paths))


_Version = tuple[Path, int, int]
"""A file as it is now: its time of modification in ns, its bytes."""


def _version(path: Path) -> _Version:
    try:
        # O_NONBLOCK: to open a FIFO would wait for its writer.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            facts = os.fstat(file)
            if not stat.S_ISREG(facts.st_mode):
                raise ModelError(f"{path}: not a regular file; give the file of the model")
            return path, facts.st_mtime_ns, facts.st_size
        finally:
            os.close(file)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}; check its permissions") from error


@lru_cache(maxsize=4)
def _join(parts: tuple[_Version, ...]) -> GgufFile:
    """Read the headers of all parts once as long as the files are the same ones."""
    headers = _headers(parts)
    first = next(headers)
    first.join(headers)
    return first


def _headers(parts: tuple[_Version, ...]) -> Iterator[GgufFile]:
    """Read one at a time, as any may be refused, and within one bound: 512 of the largest would take minutes."""
    remaining_bytes = MAX_METADATA_BYTES
    for path, _, size_bytes in parts:
        header = _read_header(path, size_bytes, remaining_bytes)
        remaining_bytes -= header.header_bytes[path]
        yield header


@lru_cache(maxsize=4)
def _read(version: _Version) -> GgufFile:
    """Read the header once as long as the file is the same one."""
    path, _, size_bytes = version
    return _read_header(path, size_bytes, MAX_METADATA_BYTES)


def _read_header(path: Path, size_bytes: int, most_bytes: int) -> GgufFile:
    try:
        with path.open("rb") as file:
            if size_bytes < 24 or file.read(4) != b"GGUF":
                raise ValueError("not a GGUF file, or cut off")
            return GgufFile(path, file.fileno(), size_bytes, most_bytes)
    except (ValueError, struct.error) as error:
        raise ModelError(f"{path}: {error}; fetch or convert it again") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}; check its permissions") from error


class _Header:
    """Walk through the header; every count and length is compared with the bytes that are left before it is used."""

    def __init__(self, path: Path, data: mmap.mmap, most_bytes: int) -> None:
        """Raise ValueError with the problem."""
        self._data = data
        self._at = 4
        self._end = min(len(data), most_bytes)
        version = self._number("I", "the version")
        if version not in VERSIONS:
            big = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
            kind = "big-endian" if big else f"version {version}"
            raise ValueError(f"{kind}, versions 2 and 3 in little-endian order are read")
        tensors, keys = self._number("Q", "the number of tensors"), self._number("Q", "the number of keys")
        self._demand("tensors", tensors, MAX_TENSORS, 32)
        self._demand("keys", keys, MAX_KEYS, 13)
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string("a key", MAX_KEY_BYTES)
            if key in self.metadata:
                raise ValueError(f"key {_short(key)} is there twice")
            self.metadata[key] = self._value(key)
        infos = [self._tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {_short(alignment)}, expected a power of two")
        self.size_bytes = begin = -(-self._at // alignment) * alignment
        self.tensors: dict[str, Tensor] = {}
        for name, type_, shape, offset in infos:
            if name in self.tensors:
                raise ValueError(f"tensor {_short(name)} is there twice")
            if offset % alignment:
                raise ValueError(f"tensor {_short(name)} begins at {offset}, no multiple of {alignment}")
            self.tensors[name] = tensor = Tensor(name, type_, shape, path, begin + offset)
            if tensor.start + tensor.size_bytes > len(data):
                raise ValueError(
                    f"tensor {_short(name)} ends at byte {tensor.start + tensor.size_bytes} of {len(data)}: cut off"
                )
        self._check_apart()

    def _check_apart(self) -> None:
        end, last = 0, ""
        for tensor in sorted(self.tensors.values(), key=lambda one: (one.start, one.size_bytes)):
            if tensor.start < end:
                raise ValueError(f"tensors {_short(last)} and {_short(tensor.name)} overlap")
            end, last = tensor.start + tensor.size_bytes, tensor.name

    def _tensor(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        name = self._string("the name of a tensor", MAX_KEY_BYTES)
        if not name.isprintable():  # errors quote it
            raise ValueError(f"tensor {_short(name)} has a name that cannot be printed")
        dimensions = self._number("I", f"tensor {_short(name)}")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"tensor {_short(name)} has {dimensions} dimensions, from 1 to 4 are read")
        sizes = [self._number("Q", f"tensor {_short(name)}") for _ in range(dimensions)]
        if not all(0 < size <= MAX_DIMENSION for size in sizes):
            raise ValueError(f"tensor {_short(name)} has the shape {sizes}, sizes from 1 to {MAX_DIMENSION} are read")
        number = self._number("I", f"tensor {_short(name)}")
        type_ = BLOCK_TYPES.get(number)
        if type_ is None:
            names = ", ".join(one.name for one in BLOCK_TYPES.values())
            raise ValueError(
                f"tensor {_short(name)} is of type {_OTHER_TYPES.get(number, number)}, {names} are read; choose a file "
                "of another quantization, such as Q4_K_M"
            )
        if sizes[0] % type_.numbers:
            raise ValueError(
                f"tensor {_short(name)} has rows of {sizes[0]}, blocks of {type_.name} hold {type_.numbers}"
            )
        return name, type_, tuple(reversed(sizes)), self._number("Q", f"tensor {_short(name)}")

    def _value(self, key: str) -> Any:
        kind = self._number("I", key)
        if kind == _STRING:
            return self._string(key, MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise ValueError(f"{_short(key)} has a value of the unknown type {kind}")
        return self._number(_SCALARS[kind], key)

    def _array(self, key: str) -> _Array:
        kind, count = self._number("I", key), self._number("Q", key)
        if kind not in _SCALARS and kind != _STRING:
            raise ValueError(f"{_short(key)} is an array of type {kind}, scalars and strings are read")
        each = 8 if kind == _STRING else struct.calcsize(f"<{_SCALARS[kind]}")
        self._demand(f"values of {_short(key)}", count, MAX_ITEMS, each)
        start = self._at
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q", key), key, MAX_STRING_BYTES)
        else:
            self._at += count * each
        return _Array(kind, count, start, self._at)

    def _demand(self, kind: str, count: int, most: int, item_bytes: int) -> None:
        """Raise ValueError where so many things of at least `item_bytes` bytes are not in the file, or are too many."""
        if count > most:
            raise ValueError(f"{count} {kind}, at most {most}")
        if count * item_bytes > self._end - self._at:
            raise ValueError(f"{count} {kind} do not fit into {self._end - self._at} bytes")

    def _string(self, kind: str, most: int) -> str:
        length = self._number("Q", kind)
        start = self._at
        self._skip(length, kind, most)
        return self._data[start : self._at].decode("utf-8", "replace")

    def _skip(self, length: int, kind: str, most: int) -> None:
        if length > most:
            raise ValueError(f"{_short(kind)} has a text of {length} bytes, at most {most}")
        if length > self._end - self._at:
            raise ValueError(f"{_short(kind)} has a text of {length} bytes, {self._end - self._at} are left")
        self._at += length

    def _number(self, letter: str, kind: str) -> Any:
        size = struct.calcsize(f"<{letter}")
        if size > self._end - self._at:
            raise ValueError(
                f"cut off in {_short(kind)}, or its metadata, of all parts together, has more than "
                f"{MAX_METADATA_BYTES} bytes"
            )
        (value,) = struct.unpack_from(f"<{letter}", self._data, self._at)
        self._at += size
        return value


def _strings(data: bytes, count: int) -> Iterator[bytes]:
    """Yield strings that were walked over before."""
    at = 0
    for _ in range(count):
        length = int.from_bytes(data[at : at + 8], "little")
        yield data[at + 8 : at + 8 + length]
        at += 8 + length


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return shorten(text)
