"""The CUDA backend as a whole, emulated: decoders against the reference, graphs, padding, work that is put off.

What each operation computes is in test_ops.py, the plans are in test_cuda_planner.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import ops as kernel_ops
from kernels.cuda import backend
from kernels.cuda.backend import CudaOps
from kernels.cuda.calls import PADDING
from kernels.cuda.graphs import sizes_up_to
from kernels.cuda.loader import CudaError
from kernels.cuda.metadata import Column, Staging, page_columns, plan_columns, row_columns
from kernels.cuda.planner import Planner
from kernels.emulator.device import EmulatedDevice
from kernels.ops import AnyOps, Attention, Batch, CacheShape, Int32, SamplingRows
from kernels.reference import ReferenceOps
from services.worker.models.config import load_config
from services.worker.models.decoder import Decoder
from services.worker.models.loader import open_weights
from tests.kernels.cuda_programs import needs_compiler
from tests.kernels.sequences import Sequences
from tests.models import VOCAB, make_llama

pytestmark = needs_compiler

BLOCK = 16
PLAIN = Attention(heads=4, scale=0.125)
SEEDS = (None, 1, 2, 3)
TOLERANCE = 1.25
"""Errors against float32 beside those of the reference backend in bfloat16, root of the mean square."""
_LLAMA = {"max_position_embeddings": 1024, "hidden_size": 128, "intermediate_size": 160, "head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen3": {"kind": "qwen3", **_LLAMA},
    "mistral-window": {"kind": "mistral", **_LLAMA, "sliding_window": 21},
    "gpt2": {"kind": "gpt2", "n_embd": 128, "n_head": 2},
    "bloom": {"kind": "bloom", "hidden_size": 128, "n_head": 2},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model directories by family, made when they are asked for; weights in bfloat16."""
    made: dict[str, Path] = {}

    def path(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            fields = {"dtype": "bfloat16", **FAMILIES[family]}
            make_llama(made[family], seed=3, requests=1, prompt_tokens=(2, 2), output_tokens=1, **fields)
        return made[family]

    return path


def new_decoder(path: Path, ops: AnyOps, dtype: torch.dtype) -> Decoder:
    return Decoder(load_config(path), open_weights(path, "auto"), ops, dtype, 1024)


def shape_of(decoder: Decoder, blocks: int) -> CacheShape:
    config = decoder.config
    return CacheShape(blocks, 0, config.layers, config.kv_heads, BLOCK, config.head_dim, decoder.dtype)


def batch_of(tokens: list[list[int]], starts: list[int], tables: Int32, samples: list[bool] | None = None) -> Batch:
    """Rows tokens[s] of sequence s from position starts[s] on; all sequences sample unless `samples` says otherwise."""
    lengths = np.array([len(row) for row in tokens])
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    owner = np.repeat(np.arange(len(tokens)), lengths)
    positions = np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in zip(starts, lengths, strict=True)])
    chosen = np.ones(len(tokens), np.bool_) if samples is None else np.array(samples)
    return Batch(
        tokens=np.array(list(chain.from_iterable(tokens)), np.int32),
        positions=positions,
        query_start=query_start,
        context=(np.array(starts) + lengths).astype(np.int32),
        tables=tables,
        write_blocks=tables[owner, positions // BLOCK],
        write_offsets=positions % BLOCK,
        sample_rows=query_start[1:][chosen] - 1,
    )


def greedy(rows: int) -> SamplingRows:
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    return SamplingRows(
        zeros,
        np.zeros(rows, np.int32),
        ones,
        zeros,
        np.zeros(rows, np.uint64),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.bool_),
    )


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, VOCAB, n).tolist() for n in (40, 3, 17)]


def tables_of(sequences: int, blocks: int) -> Int32:
    """Shuffled blocks, as many for each."""
    order = np.random.default_rng(9).permutation(blocks).astype(np.int32)
    return order[: blocks // sequences * sequences].reshape(sequences, -1)


def generate(ops: CudaOps, decoder: Decoder, steps: int) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy tokens of three prompts, and the logits that they were drawn from.

    Nothing is waited for before the end: each step's tokens stay on the device. The first prompt comes in two chunks,
    the second decodes meanwhile; then all of them do.
    """
    cache = ops.new_cache(shape_of(decoder, 18))
    forward = ops.compile(lambda prepared: decoder.forward(prepared, cache), cache, 64, 4)
    tables, texts = tables_of(3, 18), prompts()
    slots = np.array([5, 0, 9], np.int32)
    given = [
        (batch_of([texts[0][:21], texts[1]], [0, 0], tables[:2], [False, True]), [1]),
        (batch_of([texts[0][21:], [~0], texts[2]], [21, len(texts[1]), 0], tables), [0, 1, 2]),
    ]
    ends = [len(texts[0]), len(texts[1]) + 1, len(texts[2])]
    for step in range(steps - 1):
        given.append((batch_of([[~5], [~0], [~9]], [end + step for end in ends], tables), [0, 1, 2]))
    results = []
    for batch, sampled in given:
        logits = forward(ops.prepare(batch, cache))
        kept = ops.gpu.pinned(tuple(logits.shape), torch.float32)
        ops.gpu.main.copy(kept, logits)
        results.append((sampled, kept, ops.sample_later(logits, greedy(len(sampled)), slots[sampled])))
    tokens: list[list[int]] = [[], [], []]
    rows: list[list[Tensor]] = [[], [], []]
    for sampled, kept, result in results:
        for sequence, token, row in zip(sampled, result.wait().tokens.tolist(), kept, strict=True):
            tokens[sequence].append(token)
            rows[sequence].append(row)
    return tokens, [torch.stack(found) for found in rows]


def reference_logits(path: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """[len(tokens), VOCAB]"""
    ops = ReferenceOps(torch.device("cpu"))
    decoder = new_decoder(path, ops, dtype)
    cache = ops.new_cache(shape_of(decoder, -(-len(tokens) // BLOCK)))
    batch = batch_of([tokens], [0], np.arange(cache.shape.blocks, dtype=np.int32)[None])
    batch = replace(batch, sample_rows=np.arange(len(tokens), dtype=np.int32))
    return decoder.forward(ops.prepare(batch, cache), cache)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_of_a_decoder_are_the_references_in_float32(family: str, paths: Any) -> None:
    """As near as the reference backend in bfloat16 is, whose roundings are as many."""
    ops = CudaOps(EmulatedDevice())
    with torch.inference_mode():
        outputs, found = generate(ops, new_decoder(paths(family), ops, torch.bfloat16), 32)
        exact, rounded = (
            torch.cat(
                [
                    reference_logits(paths(family), prompt + output, dtype)[len(prompt) - 1 : -1]
                    for prompt, output in zip(prompts(), outputs, strict=True)
                ]
            )
            for dtype in (torch.float32, torch.bfloat16)
        )
    best, logits = exact.argmax(-1), torch.cat(found)
    assert rms(logits - exact) <= TOLERANCE * rms(rounded - exact)
    tokens = torch.tensor(list(chain.from_iterable(outputs)))
    assert torch.equal(tokens, logits.argmax(-1))
    assert (tokens == best).sum() >= 0.95 * (rounded.argmax(-1) == best).sum()


@pytest.mark.parametrize("seed", SEEDS[1:])
def test_tokens_do_not_depend_on_when_the_device_works(seed: int, paths: Any) -> None:
    """Steps are given without any wait: a buffer rewritten too early or a wait too few would be another token."""
    found = []
    with torch.inference_mode():
        for order in (None, seed):
            ops = CudaOps(EmulatedDevice(order))
            found.append(generate(ops, new_decoder(paths("llama"), ops, torch.bfloat16), 12)[0])
    assert found[0] == found[1]


class World:
    """A decoder with a cache, three sequences whose prompts are computed, and a batch in which they decode."""

    def __init__(self, path: Path, device: EmulatedDevice, compiles: bool, sequences: int = 3, tokens: int = 0) -> None:
        """tokens: of the first prompt, if not few."""
        self.ops = CudaOps(device)
        self.decoder = new_decoder(path, self.ops, torch.bfloat16)
        blocks = 20 + tokens // BLOCK
        self.cache = self.ops.new_cache(shape_of(self.decoder, blocks + 4))
        self.cache.pool.zero_()  # so that NaN from memory that nobody wrote shows
        self.tables = tables_of(sequences, blocks)
        self.forward: Any = self.run
        if compiles:
            self.forward = self.ops.compile(self.run, self.cache, 1024, 8)
        rng = np.random.default_rng(4)
        self.texts = [rng.integers(0, VOCAB, 3 + 4 * s).tolist() for s in range(sequences)]
        self.texts[0] += rng.integers(0, VOCAB, tokens).tolist()
        self.ends = [len(text) for text in self.texts]
        self.logits(batch_of(self.texts, [0] * sequences, self.tables))

    def run(self, prepared: Any) -> Tensor:
        return self.decoder.forward(prepared, self.cache)

    def decodes(self, sequences: int) -> Batch:
        tokens = [[7 * s + 1] for s in range(sequences)]
        return batch_of(tokens, self.ends[:sequences], self.tables[:sequences])

    def logits(self, batch: Batch) -> Tensor:
        found = self.forward(self.ops.prepare(batch, self.cache))
        self.ops.mark().wait()
        return found.clone()

    def pool(self) -> Tensor:
        return self.cache.pool.view(torch.int16).clone()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window"])
@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_a_graph_computes_to_the_bit_what_its_operations_compute(family: str, sequences: int, paths: Any) -> None:
    with torch.inference_mode():
        eager, graph = (World(paths(family), EmulatedDevice(), compiles, 4) for compiles in (False, True))
        batch = eager.decodes(sequences)
        assert torch.equal(eager.logits(batch), graph.logits(batch))
        assert torch.equal(eager.pool(), graph.pool())


@pytest.mark.parametrize("order", SEEDS[:2])
def test_padded_rows_of_a_graph_write_nowhere_and_change_nothing(order: int | None, paths: Any) -> None:
    with torch.inference_mode():
        eager, graph = (World(paths("llama"), EmulatedDevice(order), compiles) for compiles in (False, True))
        assert not graph.cache.pool.isnan().any(), "nobody's rows were written when graphs were recorded"
        before, batch = graph.pool(), graph.decodes(3)  # in the graph of four
        prepared = graph.ops.prepare(batch, graph.cache)
        assert prepared.graph == 4
        graph.ops._last_tokens.fill_(-5)
        expected, found = eager.logits(batch), graph.logits(batch)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
        changed = (graph.pool() != before).flatten(5).any(-1)  # [block, layer, K/V, head, place]
        written = torch.zeros_like(changed)
        written[batch.write_blocks, :, :, :, batch.write_offsets] = True
        assert torch.equal(changed, written)
        assert (graph.ops._last_tokens == -5).all()


def test_a_batch_is_prepared_for_a_graph_only_if_all_of_it_decodes_and_samples(paths: Any) -> None:
    with torch.inference_mode():
        world = World(paths("llama"), EmulatedDevice(), True)
        decodes, ends = world.decodes(3), world.ends
        chunk = batch_of([[1], [2, 3], [4]], ends, world.tables)
        silent = batch_of([[1], [2], [3]], ends, world.tables, [True, False, True])
        assert world.ops.prepare(decodes, world.cache).graph == 4
        assert world.ops.prepare(chunk, world.cache).graph == 0
        assert world.ops.prepare(silent, world.cache).graph == 0
        assert world.logits(silent).shape == (2, VOCAB)
        other = world.ops.new_cache(shape_of(world.decoder, 4))
        assert world.ops.prepare(decodes, other).graph == 0, "of another cache"


def test_a_batch_prepared_for_a_graph_is_computed_by_operations_as_well(paths: Any) -> None:
    with torch.inference_mode():
        eager, graph = (World(paths("llama"), EmulatedDevice(), compiles) for compiles in (False, True))
        batch, other = graph.decodes(3), graph.decodes(1)
        prepared = graph.ops.prepare(batch, graph.cache)
        expected = eager.logits(batch)
        assert torch.equal(graph.run(prepared), expected)
        graph.logits(other)
        assert torch.equal(graph.forward(prepared), expected), "its buffer is another's by now"


def test_a_batch_with_more_pages_than_graphs_have_room_for_is_computed_without_one(
    paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "PAGES_OF_GRAPHS", 0)
    with torch.inference_mode():
        eager, graph = (World(paths("llama"), EmulatedDevice(), compiles, 8) for compiles in (False, True))
        batch = eager.decodes(8)
        assert graph.ops.prepare(batch, graph.cache).graph == 0
        assert torch.equal(graph.logits(batch), eager.logits(batch))


def test_what_was_recorded_is_let_go_with_the_compiled_pass(paths: Any) -> None:
    with torch.inference_mode():
        world = World(paths("llama"), EmulatedDevice(), True)
        with_graphs, _ = world.ops.gpu.free_bytes()
        del world.forward
        without_graphs, _ = world.ops.gpu.free_bytes()
        assert world.ops.prepare(world.decodes(1), world.cache).graph == 0
        assert without_graphs - with_graphs >= 8 * VOCAB * 4, "the logits at least"
        world.forward = world.ops.compile(world.run, world.cache, 1024, 8)
        assert world.ops.gpu.free_bytes()[0] == with_graphs


def test_batches_prepared_one_after_another_do_not_disturb_each_other(paths: Any) -> None:
    with torch.inference_mode():
        expected, world = (World(paths("llama"), EmulatedDevice(), True) for _ in range(2))
        batches = [world.decodes(2), world.decodes(1)]
        prepared = [world.ops.prepare(batch, world.cache) for batch in batches]
        for batch, one in zip(batches, prepared, strict=True):
            assert torch.equal(world.forward(one), expected.logits(batch))


def test_attention_wider_than_the_plan_is_planned_anew(paths: Any) -> None:
    """Who uses the operations directly may ask for more than the compiled forward pass does."""
    with torch.inference_mode():
        world = World(paths("mistral-window"), EmulatedDevice(), True)
        attention = world.decoder.weights.layers[0].attention
        batch = batch_of([[1]], [79], np.arange(5, dtype=np.int32)[None])
        q = torch.randn(1, attention.heads * 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        planned, free = world.ops.prepare(batch, world.cache), world.ops.new_cache(world.cache.shape)
        free.pool.copy_(torch.randn(free.pool.shape, generator=torch.Generator().manual_seed(1)))
        world.cache.pool.copy_(free.pool)
        wide = type(attention)(heads=attention.heads, scale=attention.scale)
        found = world.ops.attention(q, wide, planned, world.cache, 0)
        assert torch.equal(found, world.ops.attention(q, wide, world.ops.prepare(batch, free), free, 0))


def test_long_sequences_are_split_and_merged_in_a_graph_too(paths: Any) -> None:
    with torch.inference_mode():
        eager, graph = (
            World(paths("llama"), EmulatedDevice(processors=132), compiles, 1, 600) for compiles in (False, True)
        )
        batch = eager.decodes(1)
        prepared = graph.ops.prepare(batch, graph.cache)
        assert prepared.graph == 1 and prepared.work is not None and prepared.work.partial_rows
        assert torch.equal(eager.logits(batch), graph.logits(batch))
        expected = reference_logits(paths("llama"), [*graph.texts[0], 1])[-1]
        assert (graph.logits(batch)[0] - expected).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.parametrize("kind", ["chunks", "decodes"])
def test_split_attention_is_the_formula(kind: str) -> None:
    world = Sequences(CudaOps(EmulatedDevice(processors=132)), torch.float16, [700, 40, 560], BLOCK, PLAIN)
    world.run(1, [0, 1, 2], [0, 0, 0], [600, 30, 559])
    if kind == "chunks":
        world.check(2, [0, 1, 2], [600, 30, 559], [700, 40, 560])
    else:
        world.run(2, [0, 1], [600, 30], [699, 39])
        world.check(3, [2, 0, 1], [559, 699, 39], [560, 700, 40])


@pytest.mark.parametrize("order", SEEDS[1:])
def test_a_pinned_buffer_is_not_written_again_before_its_copy_is_done(order: int) -> None:
    device = EmulatedDevice(order)
    staging, rng = Staging(device), np.random.default_rng(order)
    sent, buffers = [], set()
    for _ in range(40):
        columns = [Column(name, rng.integers(0, 99, 5).astype(np.int32), 9, -1) for name in ("a", "b")]
        staged = staging.stage(columns)
        sent.append((columns, staging.send(staged)))
        buffers.add(staged.pinned.data_ptr())
    device.main.record().wait()
    for columns, found in sent:
        for column in columns:
            numbers = found.tensor[found.offsets[column.name] :][:9].tolist()
            assert numbers == [*column.values.tolist(), -1, -1, -1, -1]
    assert len(buffers) < len(sent), "never used again"


def test_what_pads_a_batch_belongs_to_nobody() -> None:
    batch = batch_of([[1], [2]], [40, 700], tables_of(2, 100))
    planner = Planner(132, 2, 2, 64)
    plan, bounds = planner.plan(batch.query_start, batch.context), planner.decode_bounds(8)
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


@pytest.mark.parametrize("order", SEEDS)
def test_the_time_between_marks_is_known_once_the_device_has_passed_them(order: int | None) -> None:
    ops = CudaOps(EmulatedDevice(order))
    start = ops.mark()
    ops.activate(torch.ones(4, 8).bfloat16(), "silu")
    end = ops.mark()
    assert ops.elapsed_ns(start, end) > 0


def test_graphs_are_recorded_at_these_numbers_of_rows() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(3) == [1, 2, 3]
    assert sizes_up_to(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert sizes_up_to(300) == [*sizes_up_to(64), 80, 96, 112, 128, 160, 192, 224, 256, 300]


def test_what_the_kernels_cannot_do_is_refused_by_name() -> None:
    ops = CudaOps(EmulatedDevice())
    wide = torch.ones(8, 8)
    for call in (
        lambda: ops.new_cache(CacheShape(1, 0, 1, 1, BLOCK, 64, torch.float32)),
        lambda: ops.pack_linear(iter([wide]), 8, 8, None),
        lambda: ops.pack_embedding(iter([wide]), 8, 8),
        lambda: ops.activate(wide, "relu"),
    ):
        with pytest.raises(ValueError, match=r"float32.*reference"):
            call()
    with pytest.raises(ValueError, match="int8"):
        ops.pack_linear(iter([wide.bfloat16()]), 8, 8, None, int8=True)


def test_a_step_that_samples_nothing_writes_its_keys_and_has_no_logits(paths: Any) -> None:
    with torch.inference_mode():
        world = World(paths("llama"), EmulatedDevice(), True)
        before = world.pool()
        assert world.logits(batch_of([[1, 2]], [world.ends[0]], world.tables[:1], [False])).shape == (0, VOCAB)
        assert not torch.equal(world.pool(), before)


def test_the_backends_are_known_by_name_and_cupy_is_left_until_a_gpu_is_wanted() -> None:
    program = "import sys, kernels.cuda.backend, kernels.ops; print(kernels.ops.names(), 'cupy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['cuda', 'emulator'] False"
    assert kernel_ops.create("emulator", torch.device("cpu")).name == "emulator"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_backend_cuda_says_what_is_missing() -> None:
    with pytest.raises(CudaError, match="torch"):
        kernel_ops.create("cuda", torch.device("cuda"))
