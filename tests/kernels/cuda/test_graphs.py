"""Graphs for decode: what they compute, which batches they take, what padding leaves alone, what they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.engine.cases import layer_matrices
from kernels.cuda import backend
from kernels.cuda.backend import CudaOps
from kernels.cuda.cache import CudaCache
from kernels.cuda.calls import PADDING
from kernels.cuda.graphs import CHUNKS, Graphs, rooms_up_to, sizes_up_to
from kernels.cuda.metadata import Staging, page_columns, plan_columns, row_columns
from kernels.cuda.planner import Planner, Room, Seats
from kernels.emulator.device import EmulatedDevice
from kernels.ops import Batch
from services.worker.adapters.peft import linear_layers
from services.worker.checkpoint.source import open_weights
from services.worker.models.adapters import Pair
from services.worker.models.config import load_config
from services.worker.models.decoder import Decoder
from services.worker.models.layers import RowParallelLinear
from services.worker.parallel.state import ParallelState
from tests.kernels.cuda.decoders import BLOCK, World, batch_of, reference_logits, shape_of, tables_of
from tests.kernels.cuda.decoders import paths as paths  # the fixture
from tests.kernels.cuda.programs import SEEDS, device_of
from tests.support.checkpoints.models import VOCAB
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window"])
@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_a_graph_computes_to_the_bit_what_its_operations_compute(family: str, sequences: int, paths: Any) -> None:
    with torch.inference_mode():
        eager, graph = (World(paths(family), device_of(), compiles, 4) for compiles in (False, True))
        batch = eager.decodes(sequences)
        assert torch.equal(eager.logits(batch), graph.logits(batch))
        assert torch.equal(eager.pool(), graph.pool())


@pytest.mark.parametrize("order", SEEDS[:2])
def test_padded_rows_of_a_graph_write_nowhere_and_change_nothing(order: int | None, paths: Any) -> None:
    with torch.inference_mode():
        eager, graph = (World(paths("llama"), device_of(order), compiles) for compiles in (False, True))
        assert not graph.cache.pool.isnan().any(), "only rows of sequences were written when graphs were recorded"
        before, batch = graph.pool(), graph.decodes(3)  # in the graph of four
        prepared = graph.ops.prepare(batch, graph.cache)
        assert prepared.graph == Room(4, 4, 0)
        graph.ops.last_tokens.fill_(-5)
        expected, found = eager.logits(batch), graph.logits(batch)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
        changed = (graph.pool() != before).flatten(5).any(-1)  # [block, layer, K/V, head, place]
        written = torch.zeros_like(changed)
        written[batch.write_blocks, :, :, :, batch.write_offsets] = True
        assert torch.equal(changed, written)
        assert (graph.ops.last_tokens == -5).all()


def test_padding_of_a_batch_belongs_to_no_sequence() -> None:
    batch = batch_of([[1], [2]], [40, 700], tables_of(2, 100))
    planner, room = Planner(Seats(396, 396), 2, 2, 64), Room(8, 8, 0)
    plan, bounds = planner.plan(batch.query_start, batch.context), planner.bounds(room)
    columns = [*row_columns(batch, BLOCK, 8), *plan_columns(plan, bounds), *page_columns(batch, BLOCK, 8)]
    staged = Staging(EmulatedDevice()).stage(columns)
    padding = {}
    for column in columns:
        start = staged.offsets[column.name]
        padding[column.name] = staged.pinned[start + len(column.values) : start + column.room]
        assert start % 8 == 0 and np.array_equal(staged.pinned[start:][: len(column.values)], column.values)
    assert (padding["tokens"] == PADDING).all() and len(padding["tokens"]) == 6
    for name in ("slots", "sample_rows", "decode_items", "merge_rows"):
        assert len(padding[name]) and (padding[name] == -1).all(), name
    assert list(staged.offsets)[-1] == "pages" and not len(padding["pages"]), "only what is used is copied"


def test_batch_gets_the_smallest_graph_that_has_room(paths: Any) -> None:
    with torch.inference_mode():
        world = World(paths("llama"), device_of(), True)
        decodes, ends = world.decodes(3), world.ends

        def graph(batch: Batch, cache: CudaCache = world.cache) -> Room | None:
            return world.ops.prepare(batch, cache).graph

        silent = batch_of([[1], [2], [3]], ends, world.tables, [True, False, True])
        assert graph(decodes) == graph(silent) == Room(4, 4, 0)
        assert world.logits(silent).shape == (2, VOCAB)
        assert graph(batch_of([[1], [2, 3], [4]], ends, world.tables)) == Room(16, 8, 8)
        assert graph(batch_of([[1], [2] * 30, [4]], ends, world.tables)) == Room(32, 8, 16)
        assert graph(batch_of([[1], [2] * 70, [4]], ends, world.tables)) is None, "more rows than a step has"
        scored = replace(decodes, scored=1)
        assert graph(scored) is None
        assert graph(decodes, world.ops.new_cache(shape_of(world.decoder, 4))) is None, "of another cache"


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window"])
def test_chunks_beside_decodes_are_computed_in_a_graph(family: str, paths: Any) -> None:
    with torch.inference_mode():
        eager, graph = (World(paths(family), device_of(), compiles, 4) for compiles in (False, True))
        tokens = [[1], [2, 3, 4, 5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16]]  # the rows of a graph
        batch = batch_of(tokens, eager.ends, eager.tables, [True, False, True, True])
        assert graph.ops.prepare(batch, graph.cache).graph == Room(16, 8, 8)
        expected, found = eager.logits(batch), graph.logits(batch)
        assert torch.equal(eager.pool(), graph.pool())
        assert found.shape == expected.shape == (3, VOCAB)
        assert (found - expected).abs().max() <= 0.02 * expected.abs().max(), "the head's rows are padded"


@pytest.mark.parametrize("order", SEEDS[:2])
def test_exchanges_between_the_parts_of_a_graph_see_the_rows_of_the_batch(
    order: int | None, paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that pad differently, or not at all, exchange equally much; what follows uses what an exchange has left."""
    product, seen = RowParallelLinear.forward, []

    def halve(x: Tensor) -> None:
        seen.append(len(x))
        x.mul_(0.5)

    def exchanged(layer: RowParallelLinear, x: Tensor, selected: bool = False) -> Tensor:
        out = product(layer, x, selected)
        layer.ops.exchange(out, halve)
        return out

    monkeypatch.setattr(RowParallelLinear, "forward", exchanged)
    with torch.inference_mode():
        eager, graph = (World(paths("llama"), device_of(order), compiles, 4) for compiles in (False, True))
        layers = len(graph.decoder.layers)
        chunks = [[1], [2, 3, 4, 5], [9], [10, 11, 12, 13]]  # in a graph of 16 rows
        mixed = batch_of(chunks, eager.ends, eager.tables, [True, False, True, True])
        silent = batch_of([[1], [2], [3]], eager.ends[:3], eager.tables[:3], [True, False, True])
        for batch, rows, samples in ((eager.decodes(3), 3, 3), (mixed, 10, 3), (silent, 3, 2)):
            assert graph.ops.prepare(batch, graph.cache).graph is not None
            found = []
            for world in (eager, graph):
                seen.clear()
                found.append(world.logits(batch))
                assert seen == [rows] * (2 * layers - 2) + [samples] * 2
            assert (found[1] - found[0]).abs().max() <= 0.02 * found[0].abs().max()


class Pool(EmulatedDevice):
    """Records as a GPU does: work is not kept, so a recording holds what calls of the host in it refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def capture(self, work: Any) -> Any:
        self.calls.append(None)
        work()
        self.calls.append(None)
        return lambda: None

    @property
    def is_recording(self) -> bool:
        return self.calls.count(None) % 2 == 1

    def cut(self, call: Any) -> None:
        self.calls.append(call)


def test_graphs_of_ranks_keep_no_memory_of_what_they_exchange(paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each sum over the ranks has memory of its own in each graph."""
    product, taken = RowParallelLinear.forward, []

    def exchanged(layer: RowParallelLinear, x: Tensor, selected: bool = False) -> Tensor:
        out = product(layer, x, selected)
        layer.ops.exchange(out, lambda rows: None)
        return out

    with torch.inference_mode():
        for forward in (product, exchanged):
            monkeypatch.setattr(RowParallelLinear, "forward", forward)
            device = Pool()
            world = World(paths("llama"), device, True)
            taken.append(device.free_bytes()[1] - device.free_bytes()[0])
            sums = sum(call is not None for call in device.calls)
            assert sums == (0 if forward is product else 2 * len(world.decoder.layers) * device.calls.count(None) // 2)
    assert taken[1] == taken[0]


def test_graphs_of_a_stage_keep_no_memory_of_the_rows_that_it_sends_on(
    paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParallelState, "send_rows", lambda stage, x: None)
    path, taken = paths("llama"), []
    with torch.inference_mode():
        for is_result in (True, False):
            device = Pool()
            ops = CudaOps(device)
            stage = Decoder(
                load_config(path), open_weights(path, "auto"), ops, torch.bfloat16, 1024, parallel=ParallelState(1, 2)
            )
            cache = ops.new_cache(shape_of(stage, 4))
            nothing = torch.zeros(1, stage.config.hidden_size)

            def forward(prepared: Any, stage: Decoder = stage, cache: CudaCache = cache) -> Tensor:
                rows = stage.forward(prepared, cache)
                return rows if is_result else nothing  # noqa: B023 - called in this turn alone

            graphs = ops.compile(forward, cache, 64, 8)
            taken.append(device.free_bytes()[1] - device.free_bytes()[0])
            del graphs
    assert taken[0] == taken[1]


def adapters_of(world: World, numbers: int) -> None:
    """Load adapters 1 .. numbers of other ranks beside q, v, o, gate and down of both layers."""
    rows, generator = world.decoder.adapters, torch.Generator().manual_seed(7)
    rows.reserve(numbers, 20, 64)
    for number in range(1, numbers + 1):
        adapter = {}
        for name, (outputs, inputs) in linear_layers(world.decoder.config).items():
            if not name.endswith(("k_proj", "up_proj")):
                rank = 3 * number
                down, up = (torch.randn(shape, generator=generator) for shape in ((rank, inputs), (outputs, rank)))
                adapter[name] = Pair(down / inputs**0.5, up / rank**0.5)
        rows.load(number, adapter)


@pytest.mark.parametrize("order", SEEDS[:2])
def test_passes_with_and_without_adapters_take_turns_in_graphs(order: int | None, paths: Any) -> None:
    """What was recorded without a row of an adapter computes to the bit what operations compute for some."""
    with torch.inference_mode():
        eager, graph = (World(paths("llama"), device_of(order), False, 4) for _ in range(2))
        passes: dict[bool, Any] = {}
        for world in (eager, graph):
            adapters_of(world, 2)
        for adapted in (False, True):
            graph.decoder.adapters.begin(np.zeros(0, np.int32) if adapted else None)
            passes[adapted] = graph.ops.compile(graph.run, graph.cache, 64, 8)
        assert passes[True].logits is passes[False].logits and passes[True].columns is passes[False].columns
        tokens = [[1], [2, 3, 4, 5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16]]  # the rows of a graph
        chunks = batch_of(tokens, eager.ends, eager.tables, [True, False, True, True])
        seen = []
        for batch, of_sequences in (
            (graph.decodes(4), [1, 0, 2, 1]),
            (graph.decodes(4), []),
            (graph.decodes(4), [2, 2, 2, 2]),
            (chunks, [0, 2, 0, 1]),
            (graph.decodes(4), [0, 0, 0, 1]),
            (chunks, []),
        ):
            lengths = batch.query_start[1:] - batch.query_start[:-1]
            of_rows = np.repeat(np.array(of_sequences, np.int32), lengths) if of_sequences else None
            for world in (eager, graph):
                world.decoder.adapters.begin(of_rows, batch.sample_rows)
            prepared = graph.ops.prepare(batch, graph.cache)
            assert prepared.graph is not None
            found = passes[of_rows is not None](prepared)
            graph.ops.mark().wait()
            found, expected = found.clone().cpu(), eager.logits(batch)
            seen.append(found)
            assert torch.equal(eager.pool(), graph.pool())
            assert (found - expected).abs().max() <= 0.02 * expected.abs().max(), "the head's rows are padded"
            if batch is not chunks:
                assert torch.equal(found, expected)
        differs = (seen[0] != seen[1]).any(-1)
        assert differs.tolist() == [True, False, True, True], "rows of the base keep their bits"


def test_steps_without_adapters_launch_nothing_for_them(paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        world, launched = World(paths("llama"), device_of(), False, 4), []
        adapters_of(world, 1)
        main = world.ops.gpu.main
        launch = main.launch
        monkeypatch.setattr(main, "launch", lambda call, *touched: (launched.append(call.name), launch(call, *touched)))
        batch = world.decodes(4)
        for of_rows, expected in ((np.array([0, 1, 0, 0], np.int32), 16), (None, 0)):
            launched.clear()
            world.decoder.adapters.begin(of_rows, batch.sample_rows)
            world.logits(batch)
            assert sum(name.startswith("low_rank") for name in launched) == expected


def test_more_chunks_than_a_graph_has_room_for_are_computed_without() -> None:
    nothing: Any = None
    graphs = Graphs(nothing, nothing, rooms_up_to(512, 300, 1), *[nothing] * 5)
    for chunks, room in ((CHUNKS, Room(128, 128, CHUNKS)), (CHUNKS + 1, None)):
        batch = batch_of([[1, 2]] * chunks, [0] * chunks, tables_of(chunks, chunks))
        assert graphs.room_for(batch) == room


def test_batch_prepared_for_graph_is_computed_by_operations_as_well(paths: Any) -> None:
    with torch.inference_mode():
        eager, graph = (World(paths("llama"), device_of(), compiles) for compiles in (False, True))
        batch, other = graph.decodes(3), graph.decodes(1)
        prepared = graph.ops.prepare(batch, graph.cache)
        expected = eager.logits(batch)
        assert torch.equal(graph.run(prepared).cpu(), expected)
        graph.logits(other)
        assert torch.equal(graph.forward(prepared).cpu(), expected), "its buffer is another's by now"


def test_batch_with_too_many_pages_is_computed_without_graph(paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "PAGES_OF_GRAPHS", 0)
    with torch.inference_mode():
        eager, graph = (World(paths("llama"), device_of(), compiles, 1) for compiles in (False, True))
        batch = batch_of([[1] * 64], [100], tables_of(1, 20))  # the largest graph, so that only pages have no room
        assert graph.ops.prepare(batch, graph.cache).graph is None
        assert torch.equal(graph.logits(batch), eager.logits(batch))


def test_what_was_recorded_is_let_go_with_the_compiled_pass(paths: Any) -> None:
    with torch.inference_mode():
        world = World(paths("llama"), EmulatedDevice(), True)
        with_graphs, _ = world.ops.gpu.free_bytes()
        del world.forward
        without_graphs, _ = world.ops.gpu.free_bytes()
        assert world.ops.prepare(world.decodes(1), world.cache).graph is None
        assert without_graphs - with_graphs >= 8 * VOCAB * 4, "the logits at least"
        world.forward = world.ops.compile(world.run, world.cache, 64, 8)
        assert world.ops.gpu.free_bytes()[0] == with_graphs


def test_long_sequences_are_split_and_merged_in_a_graph_too(paths: Any) -> None:
    with torch.inference_mode():
        eager, graph = (
            World(paths("llama"), device_of(processors=132), compiles, 1, 600) for compiles in (False, True)
        )
        batch = eager.decodes(1)
        prepared = graph.ops.prepare(batch, graph.cache)
        assert prepared.graph == Room(1, 1, 0) and prepared.work is not None and prepared.work.partial_rows
        assert torch.equal(eager.logits(batch), graph.logits(batch))
        expected = reference_logits(paths("llama"), [*graph.texts[0], 1])[-1]
        assert (graph.logits(batch)[0] - expected).abs().max() <= 0.05 * expected.abs().max()


def test_rows_of_graphs_are_bound_by_the_matrices_of_a_layer(paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def rooms(tokens: int, samples: int, layer_numbers: int, adapters: bool) -> list[Room]:
        asked.append((layer_numbers, adapters))
        return rooms_up_to(tokens, samples, layer_numbers, adapters)

    monkeypatch.setattr(backend, "rooms_up_to", rooms)
    with torch.inference_mode():
        world = World(paths("llama"), device_of(), True)
        adapters_of(world, 1)
        world.ops.compile(world.run, world.cache, 64, 8)
        world.ops.compile(world.run, world.cache, 64, 8, lambda mine: [min(number, 7) for number in mine])
    numbers = sum(outputs * inputs for outputs, inputs in layer_matrices(world.decoder.config))
    assert asked == [(numbers, False), (numbers, True), (7, True)], "the least of all ranks"


def test_graphs_are_recorded_at_these_numbers_of_rows() -> None:
    mixed = [Room(16, 6, 8), Room(32, 6, 16), Room(40, 6, 20)]
    assert rooms_up_to(40, 6, 1) == [*(Room(n, n, 0) for n in (1, 2, 4, 6)), *mixed]
    assert rooms_up_to(1, 6, 1) == [Room(1, 1, 0)]
    for model, numbers, most in (("0.6B", 15_700_000, 2048), ("8B", 218_000_000, 512), ("405B", 1 << 40, 16)):
        assert rooms_up_to(3000, 6, numbers)[-1] == Room(most, 6, min(CHUNKS, most // 2)), model
    assert rooms_up_to(3000, 6, 218_000_000, adapters=True)[-1] == Room(896, 6, CHUNKS)
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(3) == [1, 2, 3]
    assert sizes_up_to(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert sizes_up_to(300) == [*sizes_up_to(64), 80, 96, 112, 128, 160, 192, 224, 256, 300]
