"""Linear layers of the CPU engine beside torch's: F.linear, and oneDNN with a reordered weight.

`python -m bench.kernels.gemm` multiplies, for each shape, as many different weights as fill --megabytes (more than the
caches hold, unless asked otherwise), all three ways in turn. About CHUNK_US are timed together, each chunk's fastest of
--repeats kept and the mean reported: the machine may be busy with other things now and then. The floor is reading the
weights or computing at the machine's peaks, measured first (bench.kernels.floor), whichever is longer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.backends import instructions
from bench.kernels.floor import Floor, machine_floor
from bench.kernels.rows import torch_packs
from kernels.cpu.commands import BFLOAT16, FLOAT32, Command, LinearArgs, Step, command
from kernels.cpu.library import Library, load
from kernels.formats import W8A8, GroupFormat

CHUNK_US = 500
SHAPES = ("1024x512", "512x512", "2816x512", "512x1408", "8192x512", "1152x896", "896x896", "9728x896", "896x4864")
TYPES = ("float32", "bfloat16", "int8", "int4-32", "int4-128-mins")
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)


@dataclass(frozen=True, slots=True)
class Row:
    """One case; times are microseconds a multiplication, ratios how often ours is faster (4, 8 bits: than float32)."""

    type: str
    outputs: int
    inputs: int
    rows: int
    us: float
    gflops: float
    gbs: float
    of_floor: float
    over_linear: float
    over_prepacked: float | None  # None: torch has no packed form of the type on this CPU


def measure(
    library: Library, peaks: Floor, name: str, shape: tuple[int, int], rows: Sequence[int], options: argparse.Namespace
) -> list[Row]:
    outputs, inputs = shape
    weight_format = library.format_numbers[name]
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    if name not in ("float32", "bfloat16") and options.activations == "bfloat16":
        dtype = torch.bfloat16
    weight_bytes = library.packed_bytes(weight_format, outputs, inputs)
    copies = max(1, options.megabytes * 1_000_000 // weight_bytes)
    plain_copies = max(1, options.megabytes * 1_000_000 // (outputs * inputs * dtype.itemsize))
    grouped = name in library.group_formats
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(min(copies, 4))]
    kind_of_groups = GroupFormat(8, inputs) if name == W8A8 or not grouped else GroupFormat.parse(name)
    numbers = [torch.randint(0, 1 << kind_of_groups.bits, (outputs, inputs), dtype=torch.uint8) for _ in weights]
    scales = torch.rand(outputs, -(-inputs // kind_of_groups.group)) / 8
    packed = []
    for i in range(copies):
        memory = torch.empty(library.packed_bytes(weight_format, outputs, inputs) + 64, dtype=torch.uint8)
        at = -(-memory.data_ptr() // 64) * 64
        source = (numbers if grouped else weights)[i % len(weights)]
        held = scales.data_ptr(), scales.data_ptr() if kind_of_groups.has_mins else None
        kind = BFLOAT16 if dtype is torch.bfloat16 else FLOAT32
        library.pack(weight_format, at, shape, 0, outputs, source.data_ptr(), kind, *(held if grouped else ()))
        packed.append((memory, at))
    # Different memory each, as different layers are.
    plain = [weights[i % len(weights)].clone() for i in range(plain_copies)]
    packs = torch_packs(dtype)
    reordered = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in plain] if packs else []
    found = []
    for m in rows:
        x = torch.randn(m, inputs).to(dtype)
        out = torch.empty(m, outputs, dtype=dtype)
        flops, moved = 2 * m * outputs * inputs, weight_bytes + m * (inputs + outputs) * dtype.itemsize
        floor = peaks.step_ms(weight_bytes, flops, dtype.itemsize) * 1000
        chunk = max(1, min(8, int(CHUNK_US / floor)))
        commands = [
            (Command * len(part))(*(_command(x, at, out, weight_format, dtype) for _, at in part))
            for part in (packed[i : i + chunk] for i in range(0, copies, chunk))
        ]
        step = Step()

        def own(i: int, commands: list[ctypes.Array[Command]] = commands, step: Step = step) -> None:
            program = commands[i]
            library.run(ctypes.addressof(program), len(program), ctypes.addressof(step), options.threads)

        def linear(i: int, x: Tensor = x, chunk: int = chunk) -> None:
            for weight in plain[i * chunk : (i + 1) * chunk]:
                F.linear(x, weight)

        def prepacked(i: int, x: Tensor = x, chunk: int = chunk) -> None:
            for weight in reordered[i * chunk : (i + 1) * chunk]:
                torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

        ways: list[tuple[Callable[[int], None], int]]
        ways = [(own, copies), (linear, plain_copies), *([(prepacked, plain_copies)] if packs else [])]
        us, linear_us, *prepacked_us = _fastest(ways, chunk, options.repeats, options.seconds)
        found.append(
            Row(
                name,
                outputs,
                inputs,
                m,
                round(us, 2),
                round(flops / us / 1000, 1),
                round(moved / us / 1000, 1),
                round(us / floor, 2),
                round(linear_us / us, 2),
                round(prepacked_us[0] / us, 2) if packs else None,
            )
        )
    return found


def _command(x: Tensor, packed: int, out: Tensor, weight_format: int, dtype: torch.dtype) -> Command:
    kind = BFLOAT16 if dtype is torch.bfloat16 else FLOAT32
    args = LinearArgs(
        x=x.data_ptr(),
        weight=packed,
        out=out.data_ptr(),
        inputs=x.shape[1],
        outputs=out.shape[1],
        out_stride=out.shape[1],
        dtype=kind,
        weight_format=weight_format,
        out_dtype=kind,
    )
    return command(x.shape[0], args)


def _fastest(
    ways: Sequence[tuple[Callable[[int], None], int]], chunk: int, repeats: int, seconds: float
) -> list[float]:
    """Return the mean microseconds of each way. The ways take turns, so a busy moment hits all."""
    best = [[float("inf")] * -(-count // chunk) for _, count in ways]
    begun = time.perf_counter()
    done = 0
    while done < 3 or (done < repeats and time.perf_counter() - begun < seconds):
        for (way, _), times in zip(ways, best, strict=True):
            for i, before in enumerate(times):
                at = time.perf_counter()
                way(i)
                times[i] = min(before, (time.perf_counter() - at) * 1e6)
        done += 1
    return [sum(times) / count for times, (_, count) in zip(best, ways, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    library = load()
    formats = [*library.format_numbers]
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.gemm", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="OUTPUTSxINPUTS")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--types", nargs="+", choices=formats, default=TYPES)
    parser.add_argument("--activations", choices=("float32", "bfloat16"), default="float32", help="of 8 and 4 bits")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--megabytes", type=int, default=96, help="of different weights per shape")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=2.0, help="at most, per case")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    peaks = machine_floor()
    rows: list[Row] = []
    if not options.json:
        print(
            f"{peaks.threads} threads: {peaks.read_gb_s:.1f} GB/s, {peaks.float32_gflop_s:.0f} GFLOP/s in float32, "
            f"{peaks.bfloat16_gflop_s:.0f} in bfloat16"
        )
        print(instructions(library))
        print("type      out x in      rows        us  GFLOP/s    GB/s  of floor  F.linear  prepacked")
    with torch.inference_mode():
        for name in options.types:
            for shape in options.shapes:
                outputs, inputs = map(int, shape.split("x"))
                for row in measure(library, peaks, name, (outputs, inputs), options.rows, options):
                    rows.append(row)
                    if not options.json:
                        print(
                            f"{row.type:8}  {shape:12}  {row.rows:4}  {row.us:8.1f}  {row.gflops:7.0f}  {row.gbs:6.1f}"
                            f"  {row.of_floor:7.2f}x  {row.over_linear:7.2f}x  {row.over_prepacked or math.nan:8.2f}x",
                            flush=True,
                        )
    if options.json:
        print(
            json.dumps(
                {
                    "floor": peaks.as_dict(),
                    "instructions": instructions(library),
                    "rows": [asdict(row) for row in rows],
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
