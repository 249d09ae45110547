"""The CUDA backend: our kernels, torch's matrices, graphs for decode. On a GPU it is `cuda`, on a CPU `emulator`.

Every operation is given to the device's main stream and returns at once; only what is called at load waits. Importing
this registers `cuda`; what a GPU needs is imported when that is created. `kernels.emulator.device` has the other name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.cache import CudaCache
from kernels.cuda.device import Device, Event, borrowed, dtype_name, launch, pointer, put
from kernels.cuda.graphs import Graphs, rooms_up_to
from kernels.cuda.metadata import CudaPrepared, Staging, Work, page_columns, plan_columns, row_columns
from kernels.cuda.operations import quantized
from kernels.cuda.operations.adapters import CudaLowRankPairs, CudaRowsByAdapter, LowRankRoom
from kernels.cuda.operations.attention import PagedAttention
from kernels.cuda.operations.experts import Experts, PackedExperts, stacked
from kernels.cuda.operations.quantized import Quantized
from kernels.cuda.operations.sampling import Sampler
from kernels.cuda.planner import Planner, Room
from kernels.formats import CUDA_FORMATS
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
    Pending,
    Routing,
    RowsByAdapter,
    Sampled,
    SamplingRows,
    ranks_of,
    register,
)

MAX_SLOTS = 1 << 16

PAGES_OF_GRAPHS = 1 << 12
"""For each sequence, on average: graphs have room for so many pages. A batch with more is computed without a graph."""

_EMPTY = np.zeros(0, np.int32)
NO_ROWS = Batch(_EMPTY, _EMPTY, np.zeros(1, np.int32), _EMPTY, _EMPTY.reshape(0, 0), _EMPTY, _EMPTY, _EMPTY)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [outputs, inputs] on the device; an embedding is one too."""

    weight: Tensor
    transposed: Tensor
    bias: Tensor | None  # [outputs] float32
    rounded_bias: Tensor | None  # of the weight's dtype

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0])

    @property
    def numbers(self) -> int:
        """Return how many weights it has."""
        return self.weight.numel()


@dataclass(frozen=True, slots=True)
class Stacked:
    """Matrices in several formats, one under the other."""

    parts: tuple[Packed | Quantized, ...]

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    @property
    def numbers(self) -> int:
        """Return how many weights they have."""
        return sum(part.numbers for part in self.parts)


class CudaOps(Ops[CudaPrepared, CudaCache]):
    """See kernels.ops. Models in bfloat16 or float16; those in float32 are the reference backend's."""

    overlaps = True
    group_formats = CUDA_FORMATS
    packs_experts = packs_tables = False

    def __init__(self, gpu: Device) -> None:
        self.gpu = gpu
        self.device = gpu.torch_device
        self.name = "cuda" if gpu.torch_device.type == "cuda" else "emulator"
        self._main = gpu.main
        self._staging = Staging(gpu)
        self.last_tokens = gpu.empty((MAX_SLOTS,), torch.int32)  # of each slot
        self._main.run(self.last_tokens.zero_)
        self._low_rank_room = LowRankRoom(gpu)
        self._samplers: dict[int, Sampler] = {}
        self._attention = PagedAttention(gpu, self._staging)
        self._experts = Experts(gpu)
        self._graphs: weakref.ref[Graphs] | None = None  # of the compiled pass, while it is referenced
        self._logits_room: Tensor | None = None  # where the next logits go
        self._present: tuple[Tensor, int] | None = None  # of a compiled pass: numbers below zero are rows of padding
        self._counts = [0, 0]  # of the batch that a graph computes: rows, and those that sample
        self._has_selected = False  # whether those that sample have been selected in the pass that is recorded
        self._weight_numbers = 0  # numbers in the matrices that `linear` was given

    def group_numerics(self, dtype: torch.dtype) -> str:
        return " packed"

    def numerics(self, dtype: torch.dtype) -> str:
        return f"{self.name} wgmma" if self.gpu.has_wgmma else self.name

    def new_cache(self, shape: CacheShape, host: Tensor | None = None) -> CudaCache:
        dtype_name(shape.dtype)
        if shape.head_dim not in calls.HEAD_DIMS:
            known = ", ".join(map(str, calls.HEAD_DIMS))
            raise ValueError(
                f"heads of {shape.head_dim} numbers: the cuda kernels have {known}; give --kernels reference"
            )
        return CudaCache(shape, self.gpu, host=host)

    def prepare(self, batch: Batch, cache: CudaCache) -> CudaPrepared:
        graphs = None if self._graphs is None else self._graphs()
        if graphs is None or graphs.cache is not cache:
            prepared = self._prepare(batch, cache)
        else:
            room = graphs.room_for(batch)
            prepared = self._prepare(batch, cache, graphs.planner, room)
            if room and prepared.numbers <= graphs.columns.numel():
                return prepared
        prepared.graph = None
        prepared.send()
        return prepared

    def _prepare(
        self, batch: Batch, cache: CudaCache, planner: Planner | None = None, room: Room | None = None
    ) -> CudaPrepared:
        """Return the metadata, not sent yet. room: of the graph that it is padded for."""
        size, rows = cache.shape.block_size, room.rows if room else 0
        columns, work = row_columns(batch, size, rows), None
        if planner is not None:
            plan = planner.plan(batch.query_start, batch.context)
            bounds = planner.bounds(room) if room else None
            work = Work.of(planner, plan, bounds)
            columns += plan_columns(plan, bounds)
        staged = self._staging.stage(columns + page_columns(batch, size, rows))
        return CudaPrepared(batch, staged, self._staging, work, room)

    def pack_linear(
        self, parts: Iterable[Tensor], outputs: int, inputs: int, bias: Tensor | None, weight_format: str = ""
    ) -> Packed:
        self.demand_format(weight_format)
        weight = self._join(parts, outputs, inputs)
        if bias is None:
            return Packed(weight, weight.t(), None, None)
        return Packed(weight, weight.t(), put(self.gpu, bias), put(self.gpu, bias.to(weight.dtype)))

    def pack_groups(self, parts: Iterable[Groups], outputs: int, inputs: int, bias: Tensor | None) -> Quantized:
        return quantized.pack(self.gpu, parts, outputs, inputs, bias)

    def stack(self, packed: Sequence[Packed | Quantized]) -> Stacked:
        return Stacked(tuple(packed))

    def pack_embedding(self, parts: Iterable[Tensor], tokens: int, hidden: int) -> Packed:
        return self.pack_linear(parts, tokens, hidden, None)

    def _join(self, parts: Iterable[Tensor], rows: int, width: int) -> Tensor:
        whole: Tensor | None = None
        first = 0
        for part in parts:
            if whole is None:
                dtype_name(part.dtype)
                whole = self.gpu.empty((rows, width), part.dtype)
            put(self.gpu, part, whole[first : first + part.shape[0]])
            first += part.shape[0]
        if whole is None or first != rows:
            raise ValueError(f"the parts of a matrix of {rows} rows have {first}")
        return whole

    def linear(self, x: Tensor, packed: Packed | Quantized | Stacked) -> Tensor:
        out = self._empty(x.shape[0], packed.outputs, x.dtype)
        self._weight_numbers += packed.numbers
        first = 0
        for part in packed.parts if isinstance(packed, Stacked) else (packed,):
            self._multiply(x, part, out[:, first : first + part.outputs])
            first += part.outputs
        return out

    def _multiply(self, x: Tensor, packed: Packed | Quantized, out: Tensor) -> None:
        if isinstance(packed, Quantized):
            if x.shape[0]:
                quantized.multiply(self.gpu, x, packed, out)
            return
        bias = packed.rounded_bias
        if bias is None:
            self._main.run(lambda: torch.mm(x, packed.transposed, out=out))
        else:
            self._main.run(lambda: torch.addmm(bias, x, packed.transposed, out=out))

    def logits(self, x: Tensor, packed: Packed) -> Tensor:
        (rows, _), outputs, room = x.shape, packed.weight.shape[0], self._logits_room
        if room is not None and room.shape[1] == outputs:  # not the logits of a router
            out, self._logits_room = room[:rows], None  # a second matrix of logits would overwrite the first
        else:
            out = self._empty(rows, outputs, torch.float32)

        def multiply() -> None:
            if self.device.type == "cuda":
                torch.mm(x, packed.transposed, out_dtype=torch.float32, out=out)
            else:
                torch.mm(x.float(), packed.transposed.float(), out=out)
            if packed.bias is not None:
                out.add_(packed.bias)

        if rows:
            self._main.run(multiply)
        return out

    def batch_sizes(self, dtype: torch.dtype, most: int) -> list[int]:
        return []

    def embed(
        self, prepared: CudaPrepared, table: Packed, scale: float = 1.0, position_embeddings: Tensor | None = None
    ) -> Tensor:
        weight, columns = table.weight, prepared.columns
        out = self._empty(prepared.rows, weight.shape[1], weight.dtype)
        call = calls.embed(
            dtype_name(weight.dtype),
            prepared.rows,
            weight.shape[1],
            weight.data_ptr(),
            out.data_ptr(),
            columns.address("tokens"),
            scale=scale,
            places=pointer(position_embeddings),
            positions=columns.address("positions"),
            last_tokens=self.last_tokens.data_ptr(),
        )
        launch(self._main, call, weight, out, columns.tensor, position_embeddings, self.last_tokens)
        return out

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self._norm(x, None, norm)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        return self._norm(x, residual, norm)

    def _norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> Tensor:
        rows, hidden = x.shape
        out = self._empty(rows, hidden, x.dtype)
        if rows:
            call = calls.norm(
                dtype_name(x.dtype),
                rows,
                hidden,
                x.data_ptr(),
                out.data_ptr(),
                norm.weight.data_ptr(),
                norm.eps,
                pointer(norm.bias),
                pointer(residual),
                norm.layer_norm,
            )
            launch(self._main, call, x, out, residual, norm.weight, norm.bias)
        return out

    def add(self, x: Tensor, residual: Tensor) -> None:
        rows, width = x.shape
        if rows:
            call = calls.add(dtype_name(x.dtype), rows, width, x.data_ptr(), residual.data_ptr())
            launch(self._main, call, x, residual)

    def blank(self, prepared: CudaPrepared, width: int, dtype: torch.dtype) -> Tensor:
        return self._empty(prepared.rows, width, dtype)

    def exchange(self, x: Tensor, call: Callable[[Tensor], object]) -> None:
        """Call it on the device's stream. A recording is cut here: at each repetition it is called with the rows that
        the batch has, so that ranks agree on them whatever each one pads.
        """
        if self.gpu.is_recording:
            counts, of_samples, rows = self._counts, self._has_selected, borrowed(x)
            self.gpu.cut(lambda: self._exchange(rows[: counts[of_samples]], call))
        else:
            self._exchange(x, call)

    def _exchange(self, x: Tensor, call: Callable[[Tensor], object]) -> None:
        if self.device.type == "cuda":
            self._main.run(lambda: call(x))
        else:
            self._main.record().wait()
            call(x)

    def new_rows_by_adapter(self) -> RowsByAdapter:
        return CudaRowsByAdapter(self.gpu, self._staging)

    def new_low_rank_pairs(self, shape: LowRankShape) -> LowRankPairs:
        return CudaLowRankPairs(self, shape, self.gpu, self._low_rank_room)

    def add_low_rank(self, x: Tensor, out: Tensor, pairs: LowRankPairs, rows: RowsByAdapter) -> None:
        if not isinstance(pairs, CudaLowRankPairs) or not isinstance(rows, CudaRowsByAdapter):
            raise TypeError("add_low_rank: pairs and rows of another backend; take this one's")
        if x.shape[0]:
            pairs.add(x, out, rows)

    def select(self, x: Tensor, prepared: CudaPrepared) -> Tensor:
        rows, width = prepared.samples, x.shape[1]
        out = self._empty(rows, width, x.dtype)
        self._has_selected = True
        if rows:
            columns = prepared.columns
            call = calls.select(rows, width, x.data_ptr(), out.data_ptr(), columns.address("sample_rows"))
            launch(self._main, call, x, out, columns.tensor)
            if self._present is not None:
                self._present = columns.tensor, columns.address("sample_rows")
        return out

    def rope_and_write(
        self, qkv: Tensor, attention: Attention, prepared: CudaPrepared, cache: CudaCache, layer: int
    ) -> Tensor:
        shape, columns = cache.shape, prepared.columns
        out = self._empty(qkv.shape[0], attention.heads * shape.head_dim, qkv.dtype)
        rope, q_norm, k_norm = attention.rope, attention.q_norm, attention.k_norm
        weights = tuple(None if norm is None else norm.weight for norm in (q_norm, k_norm))
        call = calls.rope_and_write(
            dtype_name(qkv.dtype),
            qkv.shape[0],
            attention.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_size,
            cache.block_stride,
            qkv.data_ptr(),
            out.data_ptr(),
            cache.keys(layer),
            cache.values(layer),
            columns.address("slots"),
            angles=pointer(rope),
            rotary=0 if rope is None else rope.shape[1],
            positions=columns.address("positions"),
            q_norm=pointer(weights[0]),
            k_norm=pointer(weights[1]),
            eps=(0.0 if q_norm is None else q_norm.eps, 0.0 if k_norm is None else k_norm.eps),
            fp8=shape.is_8bit,
        )
        launch(self._main, call, qkv, out, cache.pool, columns.tensor, rope, *weights)
        return out

    def attention(
        self, q: Tensor, attention: Attention, prepared: CudaPrepared, cache: CudaCache, layer: int
    ) -> Tensor:
        return self._attention(q, attention, prepared, cache, layer)

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation not in calls.ACTIVATIONS:
            raise ValueError(f"{activation}: the {self.name} backend has no kernel for it")
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty(rows, width, gate_up.dtype)
        if rows:
            name = dtype_name(gate_up.dtype)
            call = calls.gated(name, rows, width, gate_up.data_ptr(), out.data_ptr(), activation)
            launch(self._main, call, gate_up, out)
        return out

    def activate(self, x: Tensor, activation: str) -> Tensor:
        rows, width = x.shape
        if rows:
            pointer = x.data_ptr()
            launch(self._main, calls.activate(dtype_name(x.dtype), rows, width, pointer, pointer, activation), x)
        return x

    def pack_experts(self, gate_up: Sequence[Packed], down: Sequence[Packed]) -> PackedExperts:
        """Copy the matrices to one piece of memory for each of both. Raise ValueError for experts with biases."""
        if any(one.bias is not None for one in (*gate_up, *down)):
            raise ValueError(f"experts with biases: the {self.name} backend has no kernels for them")
        both = (stacked(self.gpu, [one.weight for one in matrices]) for matrices in (gate_up, down))
        return PackedExperts(*both)

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        packed: PackedExperts,
        routing: Routing,
        shared: Tensor | None = None,
        shared_logits: Tensor | None = None,
    ) -> Tensor:
        if routing.activation not in calls.ACTIVATIONS:
            raise ValueError(f"{routing.activation}: the {self.name} backend has no kernel for it")
        # All experts: a step of a few dozen rows reads them all.
        self._weight_numbers += packed.gate_up.numel() + packed.down.numel()
        return self._experts.multiply(x, logits, packed, routing, shared, shared_logits, self._present)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        return self._sampler(logits).sample(logits, rows)

    def ranks(self, logits: Tensor, tokens: Int32) -> Int32:
        of_tokens = put(self.gpu, torch.from_numpy(tokens.astype(np.int64)))
        found = self.gpu.empty((len(tokens),), torch.int32)
        self._main.run(lambda: found.copy_(ranks_of(logits, of_tokens)))
        self._main.record().wait()
        return found.cpu().numpy()

    def sample_later(self, logits: Tensor, rows: SamplingRows, slots: Int32) -> Pending[Sampled]:
        return self._sampler(logits).sample_later(logits, rows, slots, self.last_tokens)

    def mark(self) -> Event:
        return self._main.record()

    def elapsed_ns(self, start: Event, end: Event) -> int:
        end.wait()
        return self.gpu.elapsed_ns(start, end)

    def compile(
        self,
        forward: Callable[[Any], Tensor],
        cache: CudaCache,
        max_tokens: int,
        max_samples: int,
        least: Callable[[list[int]], list[int]] = list,
    ) -> Callable[[CudaPrepared], Tensor]:
        """Run the forward pass on padding, to see what its attention is, and record it (see Graphs).

        Takes the memory of all logits and of all partial results. The batches that `prepare` makes for this cache from
        now on are planned for this forward pass. The pass of an earlier call stays valid only if it has the same cache,
        sizes and attention: passes with and without adapters read the same columns and write the same logits.
        """
        most = min(max_tokens, max_samples)
        before = self._weight_numbers
        attention, vocabulary = self._try_pass(forward, cache)
        if not attention:
            return forward
        # Ranks exchange rows while they record, so all record the same numbers of rows, also where their layers differ.
        [layer_numbers] = least([(self._weight_numbers - before) // len(attention)])
        planner = self._attention.planner(attention, cache)
        partial_rows = planner.bounds(Room(max_tokens, most, max_tokens)).partial_rows
        self._attention.reserve(partial_rows, attention[0].heads, cache.shape.head_dim)
        adapters = self._low_rank_room.is_taken
        rooms = rooms_up_to(max_tokens, max_samples, layer_numbers, adapters)
        earlier = None if self._graphs is None else self._graphs()
        if earlier is not None and earlier.fits(cache, planner, rooms, (most, vocabulary)):
            logits, columns = earlier.logits, earlier.columns
        else:
            logits = self.gpu.empty((most, vocabulary), torch.float32)
            numbers = max((self._prepare(NO_ROWS, cache, planner, room).numbers for room in rooms), default=0)
            columns = self.gpu.empty((numbers + most * PAGES_OF_GRAPHS,), torch.int32)

        def run(prepared: CudaPrepared) -> Tensor:
            columns = prepared.columns
            self._logits_room, self._present = logits, (columns.tensor, columns.address("slots"))
            self._has_selected = False
            try:
                return forward(prepared)
            finally:
                self._logits_room = self._present = None

        graphs = Graphs(self.gpu, run, rooms, columns, cache, planner, logits, self._counts)
        graphs.record(lambda room: self._prepare(NO_ROWS, cache, planner, room))
        self._graphs = weakref.ref(graphs)
        return graphs

    def _try_pass(self, forward: Callable[[Any], Tensor], cache: CudaCache) -> tuple[list[Attention], int]:
        """Return what the layers' attention is, and how many logits a row has; found by computing one padded row."""
        prepared = self._prepare(NO_ROWS, cache, room=Room(1, 1, 0))
        prepared.rows = prepared.samples = 1
        seen = self._attention.layers = []
        try:
            return seen, forward(prepared).shape[1]
        finally:
            self._attention.layers = None

    def _sampler(self, logits: Tensor) -> Sampler:
        rows, vocabulary = logits.shape
        if vocabulary not in self._samplers:
            self._samplers[vocabulary] = Sampler(self.gpu, vocabulary, rows)
        return self._samplers[vocabulary]

    def _empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self.gpu.empty((rows, width), dtype)


def _cuda(device: torch.device) -> CudaOps:
    from kernels.cuda.gpu import CudaDevice

    return CudaOps(CudaDevice(device.index or 0))


register("cuda", _cuda)
