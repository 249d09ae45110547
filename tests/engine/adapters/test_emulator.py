"""Adapters on an emulated GPU, in float16: tokens of transformers with each, in recorded steps and chunks of prompts.

What a GPU puts off is put off in several orders; prompts are those with best two logits never so close that rounding
decides.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kernels.emulator.device import EmulatedDevice
from kernels.ops import Batch, Cache
from protos import worker_pb2
from services.scheduler.core.types import NewRequest
from services.worker.engine import Engine
from shared.errors import ConfigurationError
from shared.wire.columns import pack
from tests.engine.driver import Ahead, tokens_of
from tests.engine.emulated import GAP, SHAPE, SMALL, emulated, engine_on
from tests.engine.ranks import Processes
from tests.support import in_process
from tests.support.checkpoints.adapters import Lora, make_lora, store, unmerged
from tests.support.checkpoints.models import Reference, make_llama, random_prompts
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

OUTPUTS = 8
EACH = 4
"""Requests of each model."""


@dataclasses.dataclass
class House:
    path: Path
    folder: Path
    loras: list[Lora]
    prompts: list[list[int]]
    expected: list[list[int]]  # of request i, which has adapter i % 3 - 1; -1 is the base

    def requests(self) -> list[NewRequest]:
        made = []
        for index, prompt in enumerate(self.prompts):
            digest = self.loras[index % 3 - 1].digest if index % 3 else b""
            request = in_process.request(f"r{index}", prompt, OUTPUTS)
            made.append(dataclasses.replace(request, adapter=digest, salt=digest))
        return made

    def emulated(self, monkeypatch: pytest.MonkeyPatch, order: int | None, **settings: Any) -> Engine:
        """An engine on a device that puts its work off in this order."""
        wanted = {"adapter_dir": self.folder, "max_loras": 2, "max_lora_rank": 12} | settings
        return emulated(monkeypatch, self.path, order, **wanted)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    folder = tmp_path_factory.mktemp("adapters")
    reference = make_llama(folder / "tiny", seed=9, requests=1, output_tokens=1, **SHAPE)
    loras = [
        make_lora(folder / "a", reference.model, 1, rank=12),
        make_lora(folder / "b", reference.model, 2, rank=3, targets=("q_proj", "v_proj", "down_proj", "gate_proj")),
    ]
    for lora in loras:
        store(lora, folder)
    tokens, gaps = zip(*(answers(reference, lora) for lora in (None, *loras)), strict=True)
    chosen = [[at for at, gap in enumerate(of_model) if gap > GAP][:EACH] for of_model in gaps]
    assert [len(each) for each in chosen] == [EACH] * 3
    order = [(model, chosen[model][at]) for at in range(EACH) for model in range(3)]
    base = tokens[0]
    assert all(tokens[model][at] != base[at] for model, at in order if model), "the adapters change too little"
    prompts = candidates()
    return House(
        reference.path, folder, loras, [prompts[at] for _, at in order], [tokens[model][at] for model, at in order]
    )


def candidates() -> list[list[int]]:
    shared = random_prompts(1, (33, 33), 2)[0]
    return random_prompts(20, (3, 40), 3) + [shared + end for end in random_prompts(10, (1, 9), 4)]


def answers(reference: Reference, lora: Lora | None) -> tuple[list[list[int]], list[float]]:
    if lora is None:
        return reference.run(candidates(), OUTPUTS)
    with unmerged(reference.model, lora):
        return reference.run(candidates(), OUTPUTS)


@pytest.mark.parametrize("order", [None, 1, 3])
def test_requests_of_three_models_get_the_tokens_of_each(
    house: House, monkeypatch: pytest.MonkeyPatch, order: int | None
) -> None:
    engine = house.emulated(monkeypatch, order, kv_blocks=18)
    engine.warm_up()
    prepare, recorded_steps = engine.ops.prepare, set()

    def watched(batch: Batch, cache: Cache) -> Any:
        prepared = prepare(batch, cache)
        if prepared.graph is not None:
            recorded_steps.add((engine.adapter_rows.computes, bool(prepared.graph.chunks)))
        return prepared

    monkeypatch.setattr(engine.ops, "prepare", watched)
    recorded, _ = in_process.run(engine, house.requests(), "orcinus", lookahead=1, step_tokens=16, prefix_cache=True)
    assert tokens_of(recorded) == house.expected
    assert {(True, True), (True, False)} <= recorded_steps, "steps with adapters, with chunks and without, have graphs"


@pytest.mark.parametrize("order", [1, 2])
def test_adapters_of_one_place_take_turns_behind_steps_in_flight(
    house: House, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    engine = house.emulated(monkeypatch, order, kv_blocks=18, max_loras=1)
    recorded, _ = in_process.run(engine, house.requests(), "orcinus", lookahead=1, step_tokens=24)
    assert tokens_of(recorded) == house.expected


def test_decodes_with_adapters_wait_for_no_device(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps are given to a device that does nothing before it is waited for."""
    engine = house.emulated(monkeypatch, 3, kv_blocks=18)
    ahead, prompts = Ahead(engine), [prompt[:4] for prompt in house.prompts[:2]]
    named = [worker_pb2.Adapter(number=1, digest=house.loras[0].digest)]
    enters = [
        worker_pb2.Enter(slot=slot, tokens=pack(prompt), prompt_tokens=4, blocks=pack([slot]), adapter=slot)
        for slot, prompt in enumerate(prompts)
    ]
    ahead.finish(ahead.submit({0: (0, 4), 1: (0, 4)}, adapters=named, enters=enters))
    device = engine.ops.gpu
    with monkeypatch.context() as patched:
        patched.setattr(device, "do_until", lambda event: pytest.fail("the host waits for the device"))
        steps = [ahead.submit({0: (at, 1), 1: (at, 1)}) for at in (4, 5)]
        assert engine.adapter_rows.computes
    for step in steps:
        ahead.finish(step)
    assert [len(ahead.outputs[slot]) for slot in range(2)] == [3, 3]


def test_adapters_without_room_on_the_device_are_refused_at_start(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, wanted = EmulatedDevice(memory_bytes=7 << 20), {"max_loras": 1024, "max_lora_rank": 64}
    with pytest.raises(ConfigurationError, match=r"no memory for the adapters .*; lower --max-loras"):
        engine_on(monkeypatch, device, house.path, adapter_dir=house.folder, **wanted)


def test_pool_is_what_adapters_and_both_passes_leave_of_the_device(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"max_seqs": 48, "max_input_tokens": 0, "max_output_tokens": 0}
    blocks, free = [], []
    settings: dict[str, Any]
    for settings in ({"adapter_dir": None}, {"adapter_dir": house.folder}):
        device = EmulatedDevice(memory_bytes=12 << 20, recording_bytes=1 << 14)
        engine = engine_on(monkeypatch, device, house.path, **wanted, **settings)
        engine.warm_up()
        blocks.append(engine.info().gpu_blocks)
        free.append(device.free_bytes()[0])
    assert 0 < blocks[1] < blocks[0] and min(free) > 0


def test_ranks_have_their_parts_of_each_adapter(house: House, processes: Processes) -> None:
    settings = {"kernels": "emulator", "dtype": "auto", "adapter_dir": house.folder, "max_loras": 2, "kv_blocks": 30}
    with processes.replica(2, 1, house.path, **SMALL, **settings) as replica:
        recorded, _ = in_process.run(replica, house.requests(), "orcinus", step_tokens=24)
    assert tokens_of(recorded) == house.expected
