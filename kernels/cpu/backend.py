"""The CPU backend: every operation is a command for the C++ library; a forward pass is recorded and run in one call.

Numbers of a row never depend on the batch, on chunking or on threads: the kernels promise it (src/ops.h), and nothing
here divides work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import pointer
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import commands
from kernels.cpu.cache import CpuCache, block_bytes
from kernels.cpu.commands import (
    ACTIVATIONS,
    FLOAT32,
    GATED_ACTIVATIONS,
    ROWS_SAMPLES,
    ROWS_TOKENS,
    SOFTCAP,
    ActivateArgs,
    AdapterRows,
    AddArgs,
    AttentionArgs,
    CombineArgs,
    EmbedArgs,
    ExpertsArgs,
    ExpertWeight,
    GatedArgs,
    LinearArgs,
    LowRankArgs,
    LowRankPair,
    LowRankUp,
    NormArgs,
    RopeArgs,
    RouteArgs,
    SelectArgs,
    Step,
    times,
)
from kernels.cpu.library import Library
from kernels.cpu.memory import large
from kernels.cpu.program import DTYPE_NAMES, DTYPES, Immediate, Program, Recording, Runner, address, dtype_code
from kernels.cpu.sampling import sample
from kernels.ops import (
    Attention,
    Batch,
    CacheShape,
    Groups,
    Int32,
    LowRankPairs,
    LowRankShape,
    Norm,
    Ops,
    Prepared,
    Routing,
    RowsByAdapter,
    Sampled,
    SamplingRows,
)


class CpuPrepared(Prepared):
    """The batch as a Step of addresses, and the array that they point into."""

    __slots__ = ("columns", "step")

    def __init__(self, columns: Int32, step: Step) -> None:
        self.columns, self.step = columns, step


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [outputs, inputs] in the order of these kernels."""

    memory: Tensor
    bias: Tensor | None  # [outputs] float32
    outputs: int
    inputs: int
    format_number: int  # of Library.format_numbers
    computes_in: torch.dtype


@dataclass(frozen=True, slots=True)
class Stacked:
    """Weights one under the other that are held in different formats."""

    parts: tuple[Packed, ...]


AnyPacked = Packed | Stacked


class Experts:
    """A layer's experts: weights of the same shape, each in a format of its own."""

    def __init__(self, gate_up: Sequence[AnyPacked], down: Sequence[AnyPacked]) -> None:
        self.count = len(gate_up)
        self.gate_up, self.down = _side_by_side(gate_up), _side_by_side(down)
        self.starts = torch.zeros(self.count + 1, dtype=torch.int32)  # of the step at hand, see RouteArgs
        self._kept = (gate_up, down)


class CpuRowsByAdapter(RowsByAdapter):
    """Its arrays as a struct of addresses; the struct stays where it is, as recorded programs read it."""

    def __init__(self) -> None:
        self.struct = AdapterRows()
        super().__init__()

    def set(self, numbers: Int32) -> None:
        super().set(numbers)
        self.struct.adapters, self.struct.starts = address(self.adapters), address(self.starts)
        self.struct.order, self.struct.count = address(self.order), len(self.adapters)


class CpuLowRankPairs(LowRankPairs):
    """Its pairs as a struct of addresses; the struct stays where it is, as recorded programs read it."""

    def __init__(self, ops: CpuOps, shape: LowRankShape) -> None:
        super().__init__(ops, shape)
        self._lanes = ops.library.lanes
        self.struct = commands.LowRankPairs()
        self._ups: list[ctypes.Array[LowRankUp]] = []  # that the struct points at

    def set(self, number: int, downs: Mapping[int, Tensor], ups: Mapping[int, Tensor]) -> None:
        super().set(number, downs, ups)
        self._show()

    def remove(self, number: int) -> None:
        super().remove(number)
        self._show()

    def _show(self) -> None:
        count = max(self.by_number, default=0) + 1
        pairs, self._ups = (LowRankPair * count)(), []
        for number, (down, ups) in self.by_number.items():
            parts = [
                LowRankUp(
                    weight=up.matrix.data_ptr(),
                    first_output=up.outputs.start,
                    outputs=len(up.outputs),
                    first_rank=up.ranks.start,
                    rank=len(up.ranks),
                )
                for up in ups
            ]
            self._ups.append((LowRankUp * len(parts))(*parts))
            rank = max(up.ranks.stop for up in ups)
            pairs[number] = LowRankPair(down.data_ptr(), self._ups[-1], len(parts), rank)
        self.struct.pairs, self.struct.count = pairs, count

    def _pack(self, matrix: Tensor) -> Tensor:
        """Return it in panels [outputs / lanes, inputs / depth, lanes, depth], as src/gemm/low_rank.cpp reads them."""
        (outputs, inputs), lanes = matrix.shape, self._lanes
        depth = 1 if matrix.dtype == torch.float32 else 2
        padded = F.pad(matrix, (0, -inputs % depth, 0, -outputs % lanes))
        return padded.view(-1, lanes, padded.shape[1] // depth, depth).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding, row by row."""

    memory: Tensor  # [tokens, hidden]


class Compiled:
    """A forward pass as one call, or as one between each two exchanges."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.workspace_bytes = program.workspace_bytes  # all that its operations write into

    def __call__(self, prepared: CpuPrepared) -> Tensor:
        return self._program.run(prepared.step)

    def profile(self, prepared: CpuPrepared) -> list[tuple[str, int]]:
        """Run it too; (operation, ns) of each command in order."""
        return self._program.profile(prepared.step)


class CpuOps(Ops[CpuPrepared, CpuCache]):
    name = "cpu"

    def __init__(self, library: Library, threads: int) -> None:
        self.device = torch.device("cpu")
        self.library = library
        self.group_formats = library.group_formats
        self.weight_formats = frozenset(library.format_numbers) - set(DTYPE_NAMES.values()) - library.group_formats
        self.threads = threads
        self._immediate = Immediate(library, threads)
        self._runner: Runner = self._immediate

    def numerics(self, dtype: torch.dtype) -> str:
        return f"{self.name} {self.library.numerics(dtype_code(dtype))}"

    def group_numerics(self, dtype: torch.dtype) -> str:
        order = self.library.group_order if dtype == torch.bfloat16 else ""
        return f" {order}" if order else ""

    def block_bytes(self, shape: CacheShape) -> int:
        return block_bytes(self.library, shape)

    def new_cache(self, shape: CacheShape, host: Tensor | None = None) -> CpuCache:
        return CpuCache(shape, self.library, self._immediate, host)

    def prepare(self, batch: Batch, cache: CpuCache) -> CpuPrepared:
        columns = (
            batch.tokens,
            batch.positions,
            batch.query_start,
            batch.context,
            batch.tables.ravel(),
            batch.write_blocks,
            batch.write_offsets,
            batch.sample_rows,
        )
        kept = np.concatenate(columns, dtype=np.int32)  # one array has one address
        sizes = [column.size * kept.itemsize for column in columns]
        step = Step(
            len(batch.tokens),
            len(batch.sample_rows),
            len(batch.context),
            batch.tables.shape[1],
            *accumulate(sizes[:-1], initial=address(kept)),
        )
        return CpuPrepared(kept, step)

    def pack_linear(
        self, parts: Iterable[Tensor], outputs: int, inputs: int, bias: Tensor | None, weight_format: str = ""
    ) -> Packed:
        self.demand_format(weight_format)
        return self._pack(parts, outputs, inputs, bias, weight_format)

    def pack_groups(self, parts: Iterable[Groups], outputs: int, inputs: int, bias: Tensor | None) -> Packed:
        return self._pack(parts, outputs, inputs, bias, "")

    def stack(self, packed: Sequence[Packed]) -> Stacked:
        return Stacked(tuple(packed))

    def _pack(
        self, parts: Iterable[Tensor | Groups], outputs: int, inputs: int, bias: Tensor | None, weight_format: str
    ) -> Packed:
        packed: Packed | None = None
        first = 0
        for part in parts:
            groups = part if isinstance(part, Groups) else None
            numbers = part.numbers if isinstance(part, Groups) else part
            source = FLOAT32 if groups else dtype_code(numbers.dtype)
            name = groups.group_format if groups else weight_format or DTYPE_NAMES[numbers.dtype]
            number = self.library.format_numbers[name]
            if packed is None:
                memory = large(self.library.packed_bytes(number, outputs, inputs))
                packed = Packed(memory, bias, outputs, inputs, number, torch.float32 if groups else numbers.dtype)
            rows = numbers.shape[0]
            if number != packed.format_number or numbers.shape[1] != inputs:
                raise ValueError(f"rows of {numbers.shape[1]} numbers in {name} were given after others")
            if first + rows > outputs:
                raise ValueError(f"{first + rows} rows were given for a weight of {outputs}")
            self.library.pack(
                number,
                packed.memory.data_ptr(),
                (outputs, inputs),
                first,
                rows,
                numbers.data_ptr(),
                source,
                _pointer(groups.scales) if groups else None,
                _pointer(groups.mins) if groups else None,
            )
            first += rows
        if packed is None or first != outputs:
            raise ValueError(f"{first} rows were given for a weight of {outputs}")
        return packed

    def pack_embedding(self, parts: Iterable[Tensor], tokens: int, hidden: int) -> Table:
        table: Table | None = None
        first = 0
        for part in parts:
            if table is None:
                table = Table(torch.empty((tokens, hidden), dtype=part.dtype))
            if first + part.shape[0] > tokens:
                raise ValueError(f"{first + part.shape[0]} rows were given for an embedding of {tokens}")
            table.memory[first : first + part.shape[0]] = part
            first += part.shape[0]
        if table is None or first != tokens:
            raise ValueError(f"{first} rows were given for an embedding of {tokens}")
        return table

    def linear(self, x: Tensor, packed: AnyPacked) -> Tensor:
        return self._linear(x, packed, x.dtype)

    def logits(self, x: Tensor, packed: AnyPacked) -> Tensor:
        return self._linear(x, packed, torch.float32)

    def _linear(self, x: Tensor, packed: Packed | Stacked, dtype: torch.dtype) -> Tensor:
        rows, parts = self._runner.rows(x), packed.parts if isinstance(packed, Stacked) else (packed,)
        outputs = sum(part.outputs for part in parts)
        out = self._runner.out(rows, outputs, dtype)
        at = out.data_ptr()
        for part in parts:
            args = LinearArgs(
                x=x.data_ptr(),
                weight=part.memory.data_ptr(),
                bias=_pointer(part.bias),
                out=at,
                inputs=part.inputs,
                outputs=part.outputs,
                out_stride=outputs,
                dtype=DTYPES[x.dtype],
                weight_format=part.format_number,
                out_dtype=DTYPES[dtype],
            )
            self._runner.emit(rows, args, None, part)
            at += part.outputs * dtype.itemsize
        return out

    def batch_sizes(self, dtype: torch.dtype, most: int) -> list[int]:
        return []

    def embed(
        self,
        prepared: CpuPrepared,
        table: Packed | Table,
        scale: float = 1.0,
        position_embeddings: Tensor | None = None,
    ) -> Tensor:
        packed = isinstance(table, Packed)
        if isinstance(table, Packed):
            vocab, hidden, code = table.outputs, table.inputs, table.format_number
            dtype = table.computes_in
        else:
            vocab, hidden = table.memory.shape
            dtype, code = table.memory.dtype, DTYPES[table.memory.dtype]
        rows = self._count(prepared, ROWS_TOKENS)
        out = self._runner.out(rows, hidden, dtype)
        args = EmbedArgs(
            table=table.memory.data_ptr(),
            places=_pointer(position_embeddings),
            out=out.data_ptr(),
            hidden=hidden,
            vocab=vocab,
            dtype=DTYPES[dtype],
            table_dtype=code,
            packed=packed,
            scale=scale,
        )
        self._runner.emit(rows, args, prepared.step, (table, position_embeddings))
        return out

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self._norm(x, None, norm)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        return self._norm(x, residual, norm)

    def _norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> Tensor:
        rows = self._runner.rows(x)
        out = self._runner.out(rows, x.shape[1], x.dtype)
        args = NormArgs(
            x=x.data_ptr(),
            residual=_pointer(residual),
            out=out.data_ptr(),
            weight=norm.weight.data_ptr(),
            bias=_pointer(norm.bias),
            hidden=x.shape[1],
            dtype=DTYPES[x.dtype],
            layer_norm=norm.layer_norm,
            eps=norm.eps,
        )
        self._runner.emit(rows, args, None, norm)
        return out

    def add(self, x: Tensor, residual: Tensor) -> None:
        args = AddArgs(residual.data_ptr(), x.data_ptr(), x.shape[1], DTYPES[x.dtype])
        self._runner.emit(self._runner.rows(x), args, None)

    def blank(self, prepared: CpuPrepared, width: int, dtype: torch.dtype) -> Tensor:
        return self._runner.out(self._count(prepared, ROWS_TOKENS), width, dtype)

    def exchange(self, x: Tensor, call: Callable[[Tensor], object]) -> None:
        self._runner.exchange(x, call)

    def up_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype  # a step is bound by the bytes that it reads

    def new_rows_by_adapter(self) -> RowsByAdapter:
        return CpuRowsByAdapter()

    def new_low_rank_pairs(self, shape: LowRankShape) -> LowRankPairs:
        return CpuLowRankPairs(self, shape)

    def add_low_rank(self, x: Tensor, out: Tensor, pairs: LowRankPairs, rows: RowsByAdapter) -> None:
        if not isinstance(pairs, CpuLowRankPairs) or not isinstance(rows, CpuRowsByAdapter):
            raise TypeError("add_low_rank: pairs and rows of another backend; take this one's")
        args = LowRankArgs(
            x=x.data_ptr(),
            out=out.data_ptr(),
            pairs=pointer(pairs.struct),
            adapters=pointer(rows.struct),
            inputs=x.shape[1],
            outputs=out.shape[1],
            dtype=DTYPES[x.dtype],
        )
        self._runner.emit(self._runner.rows(x), args, None, (pairs, rows))

    def select(self, x: Tensor, prepared: CpuPrepared) -> Tensor:
        rows = self._count(prepared, ROWS_SAMPLES)
        out = self._runner.out(rows, x.shape[1], x.dtype)
        args = SelectArgs(x.data_ptr(), out.data_ptr(), x.shape[1], DTYPES[x.dtype])
        self._runner.emit(rows, args, prepared.step)
        return out

    def rope_and_write(
        self, qkv: Tensor, attention: Attention, prepared: CpuPrepared, cache: CpuCache, layer: int
    ) -> Tensor:
        rows = self._runner.rows(qkv)
        out = self._runner.out(rows, attention.heads * cache.shape.head_dim, qkv.dtype)
        rope, q_norm, k_norm = attention.rope, attention.q_norm, attention.k_norm
        args = RopeArgs(
            qkv=qkv.data_ptr(),
            q=out.data_ptr(),
            rope=_pointer(rope),
            q_norm=_pointer(q_norm.weight if q_norm else None),
            k_norm=_pointer(k_norm.weight if k_norm else None),
            pool=pointer(cache.pool),
            heads=attention.heads,
            layer=layer,
            rotary=0 if rope is None else rope.shape[1],
            dtype=DTYPES[qkv.dtype],
            eps=0.0 if q_norm is None else q_norm.eps,
        )
        self._runner.emit(rows, args, prepared.step, (attention, cache))
        return out

    def attention(self, q: Tensor, attention: Attention, prepared: CpuPrepared, cache: CpuCache, layer: int) -> Tensor:
        rows = self._runner.rows(q)
        out = self._runner.out(rows, q.shape[1], q.dtype)
        args = AttentionArgs(
            q=q.data_ptr(),
            out=out.data_ptr(),
            slopes=_pointer(attention.slopes),
            sinks=_pointer(attention.sinks),
            pool=pointer(cache.pool),
            heads=attention.heads,
            layer=layer,
            dtype=DTYPES[q.dtype],
            window=attention.window,
            scale=attention.scale,
            softcap=attention.softcap,
            causal=attention.causal,
        )
        self._runner.emit(rows, args, prepared.step, (attention, cache))
        return out

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        rows, size = self._runner.rows(gate_up), gate_up.shape[1] // 2
        out = self._runner.out(rows, size, gate_up.dtype)
        kind = GATED_ACTIVATIONS[activation]
        args = GatedArgs(gate_up.data_ptr(), out.data_ptr(), size, DTYPES[gate_up.dtype], kind)
        self._runner.emit(rows, args, None)
        return out

    def activate(self, x: Tensor, activation: str) -> Tensor:
        args = ActivateArgs(x.data_ptr(), x.shape[1], DTYPES[x.dtype], ACTIVATIONS[activation])
        self._runner.emit(self._runner.rows(x), args, None)
        return x

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        args = ActivateArgs(logits.data_ptr(), logits.shape[1], DTYPES[logits.dtype], SOFTCAP, cap)
        self._runner.emit(self._runner.rows(logits), args, None)
        return logits

    def pack_experts(self, gate_up: Sequence[AnyPacked], down: Sequence[AnyPacked]) -> Experts:
        return Experts(gate_up, down)

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        packed: Experts,
        routing: Routing,
        shared: Tensor | None = None,
        shared_logits: Tensor | None = None,
    ) -> Tensor:
        runner, rows, top_k = self._runner, self._runner.rows(x), routing.top_k
        weights = runner.out(rows, top_k, torch.float32)
        places, order = (runner.out(rows, top_k, torch.int32) for _ in range(2))
        args = RouteArgs(
            logits=logits.data_ptr(),
            weights=weights.data_ptr(),
            places=places.data_ptr(),
            order=order.data_ptr(),
            starts=packed.starts.data_ptr(),
            experts=packed.count,
            top_k=top_k,
            normalize=routing.normalize,
        )
        runner.emit(rows, args, None, packed)
        inner = self._multiply_by_experts(x, packed, packed.gate_up, times(rows, top_k), order)
        del order
        inner = self.act_and_mul(inner, routing.activation)
        inner = self._multiply_by_experts(inner, packed, packed.down, times(rows, top_k), None)
        out = runner.out(rows, inner.shape[1], x.dtype)
        combine = CombineArgs(
            x=inner.data_ptr(),
            weights=weights.data_ptr(),
            places=places.data_ptr(),
            shared=_pointer(shared),
            shared_logits=_pointer(shared_logits),
            out=out.data_ptr(),
            top_k=top_k,
            size=inner.shape[1],
            dtype=DTYPES[x.dtype],
        )
        runner.emit(rows, combine, None)
        return out

    def _multiply_by_experts(
        self, x: Tensor, packed: Experts, parts: Sequence[_ExpertPart], places: int, order: Tensor | None
    ) -> Tensor:
        outputs = sum(part.outputs for part in parts)
        out = self._runner.out(places, outputs, x.dtype)
        at = out.data_ptr()
        for part in parts:
            args = ExpertsArgs(
                x=x.data_ptr(),
                weights=part.weights,
                order=_pointer(order),
                starts=packed.starts.data_ptr(),
                out=at,
                experts=packed.count,
                inputs=part.inputs,
                outputs=part.outputs,
                out_stride=outputs,
                dtype=DTYPES[x.dtype],
            )
            self._runner.emit(places, args, None, packed)
            at += part.outputs * x.dtype.itemsize
        return out

    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        return sample(self._immediate, logits, rows)

    def compile(
        self,
        forward: Callable[[Any], Tensor],
        cache: CpuCache,
        max_tokens: int,
        max_samples: int,
        least: Callable[[list[int]], list[int]] = list,
    ) -> Compiled:
        recording = Recording(self._immediate, max_tokens, max_samples)
        self._runner = recording
        try:
            result = forward(CpuPrepared(np.zeros(0, np.int32), Step()))
        finally:
            self._runner = self._immediate
        return Compiled(Program(self.library, self.threads, recording, result))

    def _count(self, prepared: CpuPrepared, symbol: int) -> int:
        if isinstance(self._runner, Recording):
            return symbol
        return int(prepared.step.tokens_count if symbol == ROWS_TOKENS else prepared.step.samples_count)


@dataclass(frozen=True, slots=True)
class _ExpertPart:
    """The same rows of each expert's matrix."""

    weights: ctypes.Array[ExpertWeight]
    outputs: int
    inputs: int


def _side_by_side(experts: Sequence[AnyPacked]) -> list[_ExpertPart]:
    """Return the parts of the experts' matrices. Raise ValueError for those that are not cut alike."""
    cut = [one.parts if isinstance(one, Stacked) else (one,) for one in experts]
    found = []
    for parts in zip(*cut, strict=True):
        shapes = {(part.outputs, part.inputs) for part in parts}
        if len(shapes) != 1:
            raise ValueError(f"experts of {len(shapes)} shapes: the cpu backend has no kernels for them")
        weights = (ExpertWeight(part.memory.data_ptr(), _pointer(part.bias), part.format_number) for part in parts)
        found.append(_ExpertPart((ExpertWeight * len(parts))(*weights), *shapes.pop()))
    return found


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
