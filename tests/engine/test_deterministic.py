"""With --deterministic a request's logits and KV are the same bits alone, in any batch, in any chunks, after recompute.

Logits are compared as the compiled pass returned them, for every token of every request. The twin of the tiles runs
where the CPU has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from protos import worker_pb2
from services.worker.engine import Engine
from shared.wire.columns import unpack
from tests.engine.driver import Driver, make_engine
from tests.kernels import cpu_variants
from tests.support.checkpoints.models import Reference, make_llama

OUTPUTS = 20
SEED = 20261120
SIZES = {"block_size": 16, "max_seqs": 6, "max_step_tokens": 512}


@pytest.fixture(scope="module", params=["llama", "qwen2_moe", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = tmp_path_factory.mktemp("deterministic") / request.param
    return make_llama(path, seed=11, requests=5, prompt_tokens=(3, 150), hidden_size=96, kind=request.param)


@pytest.fixture(params=["float32", "bfloat16", *(f"bfloat16-{name}" for name in cpu_variants.with_tiles())])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    """The type, with the kernels of this machine or with those of a variant."""
    dtype, _, variant = request.param.partition("-")
    with cpu_variants.serving(variant):
        yield dtype


class Recorder(Driver):
    """Keeps the logits of every sampled token, by slot."""

    def __init__(self, engine: Engine, prompts: list[list[int]]) -> None:
        super().__init__(engine, prompts)
        self.logits: dict[int, list[torch.Tensor]] = {}
        compiled = engine.compiled
        self._last = torch.zeros(0)

        def keep(prepared: Any) -> torch.Tensor:
            found = compiled(prepared)
            self._last = found.clone()
            return found

        engine.compiled = keep

    def step(self, chunks: dict[int, int], **fields: Any) -> worker_pb2.Result:
        result = super().step(chunks, **fields)
        for row, slot in enumerate(unpack(result.slots).tolist()):
            self.logits.setdefault(slot, []).append(self._last[row])
        return result


def engine_of(model: Reference, dtype: str, threads: int) -> Engine:
    return make_engine(model.path, kernels="cpu", deterministic=True, dtype=dtype, threads=threads, **SIZES)


def alone(model: Reference, dtype: str, prompt: list[int]) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
    """Tokens, logits and KV blocks of one request that runs by itself, its prompt in one chunk, on one thread."""
    driver = Recorder(engine_of(model, dtype, threads=1), [prompt])
    tokens = list(driver.run(0, OUTPUTS))
    used = driver.blocks(0)[: -(-(len(prompt) + OUTPUTS - 1) // 16)]
    return tokens, driver.logits[0], [driver.engine.read_block(int(block)) for block in used]


def in_company(model: Reference, dtype: str, threads: int) -> Recorder:
    """Run all requests together in chunks and batches of any size; one is preempted."""
    rng = np.random.default_rng(SEED + threads)
    driver = Recorder(engine_of(model, dtype, threads), model.prompts)
    recomputed = 2
    while any(len(driver.outputs[slot]) < OUTPUTS for slot in range(len(model.prompts))):
        running = [slot for slot in range(len(model.prompts)) if len(driver.outputs[slot]) < OUTPUTS]
        picked = rng.permutation(running)[: rng.integers(1, len(running) + 1)]
        driver.step({int(slot): int(rng.integers(1, 90)) for slot in picked})
        if recomputed >= 0 and len(driver.outputs[recomputed]) == OUTPUTS // 2:
            # Preempted: its blocks are lost, everything it has is computed again in chunks of another size.
            known = [*model.prompts[recomputed], *driver.outputs[recomputed]]
            driver.free(recomputed)
            driver.enter(recomputed, known, prompt=len(model.prompts[recomputed]))
            recomputed = -1
    return driver


def test_logits_do_not_depend_on_what_else_runs(model: Reference, dtype: str) -> None:
    expected = [alone(model, dtype, prompt) for prompt in model.prompts]
    for threads in (1, 2, 3):
        driver = in_company(model, dtype, threads)
        for slot, (tokens, logits, blocks) in enumerate(expected):
            assert driver.outputs[slot] == tokens
            assert len(driver.logits[slot]) == len(logits) == OUTPUTS
            for found, wanted in zip(driver.logits[slot], logits, strict=True):
                assert torch.equal(found, wanted)
            written = len(model.prompts[slot]) + OUTPUTS - 1
            for index, wanted in enumerate(blocks):
                rows = min(16, written - 16 * index)
                found = driver.engine.read_block(int(driver.blocks(slot)[index]))
                assert torch.equal(found[..., :rows, :], wanted[..., :rows, :])


@pytest.mark.parametrize("variant", ["", *cpu_variants.with_tiles()])
def test_numerics_name_instructions_type_and_weights(model: Reference, variant: str) -> None:
    with cpu_variants.serving(variant):
        float32, bfloat16 = (engine_of(model, dtype, 1).info().numerics for dtype in ("float32", "bfloat16"))
    assert float32.startswith("cpu ") and float32.endswith(" float32 none") and bfloat16.endswith(" bfloat16 none")
    has_tiles = bool(variant) or "native" in cpu_variants.with_tiles()
    assert (bfloat16 == "cpu amx bfloat16 none") == has_tiles and "amx" not in float32


@pytest.mark.parametrize("variant", cpu_variants.with_tiles())
def test_logits_by_tiles_are_near_those_in_float32(model: Reference, variant: str) -> None:
    with cpu_variants.serving(variant):
        by_tiles = alone(model, "bfloat16", model.prompts[0])[1][0]
    exact = alone(model, "float32", model.prompts[0])[1][0]
    assert (by_tiles - exact).abs().max() < 0.05 * exact.abs().max()
