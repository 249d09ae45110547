"""The CUDA backend as a whole, emulated: decoders against the reference, long attention, work that is put off.

What each operation computes is in test_ops.py, plans are in test_planner.py, graphs in test_graphs.py.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels.emulator.device
from kernels import ops as kernel_ops
from kernels.cuda.backend import CudaOps
from kernels.cuda.loader import CudaError
from kernels.cuda.metadata import Column, Staging
from kernels.emulator.device import EmulatedDevice
from kernels.ops import Attention, CacheShape
from services.worker.models.decoder import Decoder
from tests.kernels import sampling_cases
from tests.kernels.cuda.decoders import (
    BLOCK,
    FAMILIES,
    World,
    new_decoder,
    reference_logits,
    shape_of,
    tables_of,
)
from tests.kernels.cuda.decoders import paths as paths  # the fixture
from tests.kernels.cuda.programs import FLAGS, SEEDS, device_of
from tests.kernels.cuda.test_races import launch_from
from tests.kernels.sequences import Sequences, batch_of, rounded
from tests.support.checkpoints.models import VOCAB
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

PLAIN = Attention(heads=4, scale=0.125)
TOLERANCE = 1.25
"""Errors against float32 beside those of the reference backend in bfloat16, root of the mean square."""


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, VOCAB, n).tolist() for n in (40, 3, 17)]


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
        results.append((sampled, kept, ops.sample_later(logits, sampling_cases.rows(len(sampled)), slots[sampled])))
    tokens: list[list[int]] = [[], [], []]
    rows: list[list[Tensor]] = [[], [], []]
    for sampled, kept, result in results:
        for sequence, token, row in zip(sampled, result.wait().tokens.tolist(), kept, strict=True):
            tokens[sequence].append(token)
            rows[sequence].append(row)
    return tokens, [torch.stack(found) for found in rows]


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.sanitized
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_of_decoder_are_the_references_in_float32(family: str, paths: Any) -> None:
    """As near as the reference backend in bfloat16 is: its roundings are as many."""
    ops = CudaOps(device_of())
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
            ops = CudaOps(device_of(order))
            found.append(generate(ops, new_decoder(paths("llama"), ops, torch.bfloat16), 12)[0])
    assert found[0] == found[1]


@pytest.mark.sanitized
def test_attention_wider_than_the_plan_is_planned_anew(paths: Any) -> None:
    """A direct user of the operations may ask for more than the compiled forward pass does."""
    with torch.inference_mode():
        world = World(paths("mistral-window"), device_of(), True)
        attention = world.decoder.layers[0].attention.spec
        batch = batch_of([[1]], [79], np.arange(5, dtype=np.int32)[None])
        q = torch.randn(1, attention.heads * 64, generator=torch.Generator().manual_seed(0))
        q = q.to(world.ops.device, torch.bfloat16)
        planned, free = world.ops.prepare(batch, world.cache), world.ops.new_cache(world.cache.shape)
        free.pool.copy_(torch.randn(free.pool.shape, generator=torch.Generator().manual_seed(1)))
        world.cache.pool.copy_(free.pool)
        wide = type(attention)(heads=attention.heads, scale=attention.scale)
        found = world.ops.attention(q, wide, planned, world.cache, 0)
        assert torch.equal(found, world.ops.attention(q, wide, world.ops.prepare(batch, free), free, 0))


@pytest.mark.sanitized
@pytest.mark.parametrize(("kind", "has_wgmma"), [("chunks", False), ("chunks", True), ("decodes", False)])
def test_split_attention_is_the_formula(kind: str, has_wgmma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launch_from(monkeypatch, kernels.emulator.device.program_of)
    device = EmulatedDevice(processors=132, has_wgmma=has_wgmma, flags=FLAGS)
    world = Sequences(CudaOps(device), torch.float16, [700, 40, 560], BLOCK, PLAIN)
    world.run([(0, 0, 600), (1, 0, 30), (2, 0, 559)])
    if kind == "chunks":
        world.check([(0, 600, 700), (1, 30, 40), (2, 559, 560)])
    else:
        world.run([(0, 600, 699), (1, 30, 39)])
        world.check([(2, 559, 560), (0, 699, 700), (1, 39, 40)])
    assert {"attention_merge_f16", f"attention_prefill{'_sm90' * has_wgmma}_f16_d64"} <= set(launched)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 32)])
def test_attention_over_fp8_is_that_over_the_decoded_numbers(
    head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Of the kernels without wgmma."""
    ops, contexts = CudaOps(EmulatedDevice(flags=FLAGS)), [100, 33, 300, 17, 16, 1]
    held, plain = (
        Sequences(ops, dtype, contexts, block_size, PLAIN, head_dim, kv_dtype=kv_dtype) for kv_dtype in ("fp8", "auto")
    )
    plain.keys, plain.values = ([rounded(x, "fp8") for x in kind] for kind in (plain.keys, plain.values))
    chunks = [(0, 60, 100), (1, 0, 33), (2, 299, 300), (3, 16, 17), (4, 15, 16), (5, 0, 1)]
    for world in (held, plain):
        world.write()
    assert torch.equal(held.run(chunks), plain.run(chunks))
    held.check(chunks)
    for sequence, context in enumerate(contexts):
        for block, first in zip(held.tables[sequence].tolist(), range(0, context, block_size), strict=False):
            (a, b), end = (one.cache.read_block(block)[1] for one in (held, plain)), min(block_size, context - first)
            assert torch.equal(a[:, :, :end], b[:, :, :end])


@pytest.mark.parametrize("order", SEEDS[1:])
def test_pinned_buffer_is_not_rewritten_before_its_copy_is_done(order: int) -> None:
    device = device_of(order)
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


@pytest.mark.parametrize("order", SEEDS)
def test_time_between_marks_is_known_once_device_has_passed_them(order: int | None) -> None:
    ops = CudaOps(device_of(order))
    x = ops.gpu.empty((4, 8), torch.bfloat16)
    start = ops.mark()
    ops.activate(x, "silu")
    end = ops.mark()
    assert ops.elapsed_ns(start, end) > 0


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
        ops.pack_linear(iter([wide.bfloat16()]), 8, 8, None, "int8")


@pytest.mark.sanitized
def test_step_that_samples_nothing_writes_keys_and_has_no_logits(paths: Any) -> None:
    with torch.inference_mode():
        world = World(paths("llama"), device_of(), True)
        before = world.pool()
        assert world.logits(batch_of([[1, 2]], [world.ends[0]], world.tables[:1], [False])).shape == (0, VOCAB)
        assert not torch.equal(world.pool(), before)


def test_backends_are_listed_by_name_without_importing_cupy() -> None:
    program = "import sys, kernels.emulator.device, kernels.ops; print(kernels.ops.names(), 'cupy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['cpu', 'cuda', 'emulator'] False"  # the emulator compiles as cpu does
    assert kernel_ops.create("emulator", torch.device("cpu")).name == "emulator"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_backend_cuda_says_what_is_missing() -> None:
    with pytest.raises(CudaError, match="torch"):
        kernel_ops.create("cuda", torch.device("cuda"))
