"""`python -m kernels.cuda.check`: compiles sources for every architecture and compares with registers.json.

No warning, nothing in local memory (by ptxas' log, and by the SASS where nvdisasm is installed), no kernel with more
registers or shared memory than recorded; `--write` compiles all and records what is there. A source is not compiled
again while it, its headers, options and compiler are those that were recorded. Run by `make kernels-check`; needs no
GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kernels.cuda import cubin
from kernels.cuda.loader import (
    ARCHITECTURES,
    OPTIONS,
    Cubin,
    CudaError,
    compiled,
    headers,
    is_for,
    nvrtc_version,
    sources,
)

RECORDED = Path(__file__).parent / "registers.json"
Table = dict[str, dict[str, dict[str, Any]]]  # architecture, kernel, figure


def digest_of(source: Path) -> str:
    """Return the digest of a source, of the headers that it includes, and of what compiles it."""
    by_name, found, waiting = {path.name: path for path in headers()}, dict[str, bytes](), [source]
    while waiting:
        path = waiting.pop()
        found[path.name] = path.read_bytes()
        included = re.findall(r'^#include "(.+)"', found[path.name].decode(), re.MULTILINE)
        waiting += [by_name[name] for name in included if name in by_name and name not in found]
    return hashlib.sha256(repr((OPTIONS, ARCHITECTURES, nvrtc_version(), sorted(found.items()))).encode()).hexdigest()


def current(document: Any, paths: Sequence[Path]) -> tuple[Table, list[str]]:
    """Return what the compiler makes of the sources, and what it warns of; compile those that changed since recorded.

    document: of registers.json. Raise CudaError when one does not compile.
    """
    rows = {path: document.get("sources", {}).get(path.name) for path in paths}
    same = {path: row["kernels"] for path, row in rows.items() if row and row["digest"] == digest_of(path)}
    table, complaints = measure([path for path in paths if path not in same])
    for path, names in same.items():
        for arch, kernels in document["kernels"].items():
            table[arch] |= {name: kernels[name] for name in names if is_for(path, arch)}
    return table, complaints


def write(paths: Sequence[Path]) -> None:
    """Compile all and record it in registers.json; what has warnings is compiled again next time. Raise CudaError."""
    table, complaints = measure(paths)
    without = [path for path in paths if not any(text.startswith(f"{path.name}, ") for text in complaints)]
    of_sources = {
        path.name: {
            "digest": digest_of(path),
            "kernels": sorted(compiled(path, next(arch for arch in ARCHITECTURES if is_for(path, arch))).usage()),
        }
        for path in without
    }
    with_sass = cubin.disassembler() is not None
    document = {"nvrtc": nvrtc_version(), "sass_read": with_sass, "sources": of_sources, "kernels": table}
    RECORDED.write_text(json.dumps(document, indent=1) + "\n")


def measure(paths: Sequence[Path]) -> tuple[Table, list[str]]:
    """Return what the compiler makes of the sources, and what it warns of.

    Raise CudaError when one does not compile.
    """
    jobs = [(path, arch) for arch in ARCHITECTURES for path in paths if is_for(path, arch)]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda job: compiled(*job), jobs))
    table: Table = {arch: {} for arch in ARCHITECTURES}
    complaints = []
    for (path, arch), one in zip(jobs, made, strict=True):
        table[arch] |= cubin.as_json(one.usage())
        complaints += [f"{path.name}, {arch}: {line}" for line in cubin.warnings(one.log)]
    return table, complaints + _in_sass(jobs, made)


def _in_sass(jobs: Sequence[tuple[Path, str]], made: Sequence[Cubin]) -> list[str]:
    """Return which kernels load from or store to local memory by their SASS; none without a disassembler."""
    tool = cubin.disassembler()
    if tool is None:
        return []
    try:
        with ThreadPoolExecutor(2) as pool:
            counts = list(pool.map(lambda one: cubin.local_accesses(cubin.sass_of(one.image, tool)), made))
    except ValueError as error:
        raise CudaError(str(error)) from error
    return [
        f"{path.name}, {arch}: {kernel} has {count} loads and stores of local memory in its SASS"
        for (path, arch), of_kernels in zip(jobs, counts, strict=True)
        for kernel, count in of_kernels.items()
        if count
    ]


def compare(found: Table, recorded: Table) -> list[str]:
    """Return each figure that is worse than recorded, and each kernel that only one table has."""
    complaints = []
    for arch in sorted({*found, *recorded}):
        now, before = found.get(arch, {}), recorded.get(arch, {})
        complaints += [f"{name}, {arch}: not recorded" for name in sorted(now.keys() - before.keys())]
        complaints += [
            f"{name}, {arch}: recorded, but there is no such kernel" for name in sorted(before.keys() - now.keys())
        ]
        for name in sorted(now.keys() & before.keys()):
            if now[name]["local_bytes"]:
                complaints.append(
                    f"{name}, {arch}: has {now[name]['local_bytes']} bytes in local memory, or spills them"
                )
            for figure in ("registers", "shared_bytes"):
                if now[name][figure] > before[name][figure]:
                    complaints.append(f"{name}, {arch}: {figure} {now[name][figure]}, recorded {before[name][figure]}")
    return complaints


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when all is as recorded."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cuda.check", description=__doc__)
    parser.add_argument("--write", action="store_true", help="record what is there in registers.json")
    options = parser.parse_args(arguments)
    try:
        if options.write:
            write(sources())
        document = json.loads(RECORDED.read_text())
        found, complaints = current(document, sources())
    except CudaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if document["nvrtc"] != nvrtc_version():
        complaints.append(f"recorded with NVRTC {document['nvrtc']}, this is {nvrtc_version()}: register counts differ")
    complaints += compare(found, document["kernels"])
    for arch, kernels in found.items():
        for name, row in kernels.items():
            print(f"{arch}  {name:24} {row['registers']:4} registers  {row['shared_bytes']:6} bytes of shared memory")
    if cubin.disassembler() is None:
        print("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm): the SASS of what changed was not read")
    for complaint in complaints:
        print(f"error: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
