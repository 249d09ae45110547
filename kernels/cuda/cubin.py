"""Read facts of a compiled program: registers and shared memory from ptxas's log, constants from the ELF file, accesses
to local memory from its SASS where NVIDIA's nvdisasm is installed (a wheel, nvidia-cuda-nvdisasm)."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_WARNING = re.compile(r"warning", re.IGNORECASE)
_CODE = re.compile(r"\s*\.section\s+\.text\.(\w+)")
_LOCAL = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@\S+\s+)?(?:LDL|STL)\b")
DISASSEMBLER = "nvdisasm"

_SYMBOLS = 2  # section type SHT_SYMTAB
_EMPTY = 8  # SHT_NOBITS: no bytes in the file


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that one kernel takes of a multiprocessor. Shared memory is what it declares, without the dynamic
    part."""

    registers: int  # of a thread
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int  # written and read


def usage(log: str) -> dict[str, Usage]:
    """Return the kernels of a log made with --ptxas-options=-v."""
    found = {}
    name, stack, spills = "", 0, 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            name = match[1]
        elif match := _FRAME.search(line):
            stack, spills = int(match[1]), int(match[2]) + int(match[3])
        elif name and (match := _USED.search(line)):
            found[name] = Usage(int(match[1]), int(match[2] or 0), stack, spills)
            name = ""
    return found


def warnings(log: str) -> list[str]:
    """Return the lines of a log that warn."""
    return [line.strip() for line in log.splitlines() if _WARNING.search(line)]


@cache
def disassembler() -> str | None:
    """Return the path of nvdisasm, of its wheel or of a CUDA toolkit; None where there is none."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        files = []
    return next((str(file.locate()) for file in files if file.name == DISASSEMBLER), shutil.which(DISASSEMBLER))


def sass_of(image: bytes, tool: str) -> str:
    """Return the machine's instructions. tool: as of `disassembler`.

    Raise ValueError for what it cannot read: no cubin, or one for a newer architecture.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ValueError(
            f"{tool}: {said}; install the wheel nvidia-cuda-nvdisasm, which knows all of these architectures"
        )
    return done.stdout


def local_accesses(sass: str) -> dict[str, int]:
    """Return for each kernel how many instructions load from or store to local memory."""
    found, name = dict[str, int](), ""
    for line in sass.splitlines():
        if match := _CODE.match(line):
            name = match[1]
            found[name] = 0
        elif name and _LOCAL.search(line):
            found[name] += 1
    return found


def constants(image: bytes, suffix: str) -> dict[str, int]:
    """Return the 32-bit constants with names that end in `suffix`, by what stands before it.

    Raise ValueError when not an ELF.
    """
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    sections_at = struct.unpack_from("<Q", image, 40)[0]
    size, count = struct.unpack_from("<HH", image, 58)
    # name, type, flags, address, offset, bytes, link, info, alignment, bytes of an entry
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, sections_at + i * size) for i in range(count)]
    found = {}
    for section in sections:
        if section[1] != _SYMBOLS:
            continue
        names_at = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], section[9]):
            name = _text(image, names_at + struct.unpack_from("<I", image, at)[0])
            index, value, length = struct.unpack_from("<HQQ", image, at + 6)
            if name.endswith(suffix) and length == 4 and index < count and sections[index][1] != _EMPTY:
                found[name.removesuffix(suffix)] = int(struct.unpack_from("<I", image, sections[index][4] + value)[0])
    return found


def _text(image: bytes, at: int) -> str:
    return image[at : image.index(b"\0", at)].decode()


def as_json(table: dict[str, Usage]) -> dict[str, dict[str, Any]]:
    """Return the rows of registers.json."""
    return {
        name: {
            "registers": row.registers,
            "shared_bytes": row.shared_bytes,
            "local_bytes": row.stack_bytes + row.spill_bytes,
        }
        for name, row in sorted(table.items())
    }
