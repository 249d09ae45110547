"""Scheduler and engine together: base and adapters in one stream of requests, whatever preempts, swaps or guesses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.scheduler.core.types import Finish, NewRequest
from services.worker.engine import Engine
from tests.engine.driver import make_engine, tokens_of
from tests.engine.ranks import Processes
from tests.support import in_process
from tests.support.checkpoints.adapters import Lora, make_lora, store, unmerged
from tests.support.checkpoints.models import MIN_GAP, Reference, make_llama

SEED = 20261127
NEW = 24
REQUESTS = 12
SIZES = {
    "max_seqs": REQUESTS, "block_size": 16, "max_input_tokens": 64, "max_output_tokens": 64, "max_step_tokens": 512,
}  # fmt: skip


@dataclasses.dataclass
class House:
    reference: Reference
    folder: Path
    loras: list[Lora]
    expected: list[list[int]]  # of request i, which has adapter i % 4 - 1; -1 is the base

    def requests(self, **sampling: Any) -> list[NewRequest]:
        made = []
        for index, prompt in enumerate(self.reference.prompts):
            digest = self.loras[index % 4 - 1].digest if index % 4 else b""
            request = in_process.request(f"r{index}", prompt, NEW, **sampling)
            made.append(dataclasses.replace(request, adapter=digest, salt=digest))
        return made

    def engine(self, pool_tokens: int = 4096, **settings: Any) -> Engine:
        given = {"kernels": "cpu", "host_blocks": 64, "adapter_dir": self.folder, "kv_blocks": pool_tokens // 16}
        return make_engine(self.reference.path, **(given | SIZES | settings))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    folder = tmp_path_factory.mktemp("adapters")
    reference = make_llama(folder / "tiny", requests=2, prompt_tokens=(20, 40), output_tokens=NEW, seed=SEED)
    loras = [make_lora(folder / name, reference.model, SEED + at, rank=2 + 3 * at) for at, name in enumerate("abc")]
    for lora in loras:
        store(lora, folder)
    # Two prompts for all, so that a prefix of another adapter would be taken if it could be.
    reference.prompts = [reference.prompts[index // 4 % 2] for index in range(REQUESTS)]
    expected = []
    for index, prompt in enumerate(reference.prompts):
        if not index % 4:
            expected.append(reference.outputs[index // 4 % 2])
            continue
        with unmerged(reference.model, loras[index % 4 - 1]):
            (tokens,), (gap,) = reference.run([prompt], NEW)
        assert gap > MIN_GAP, "choose another seed"
        expected.append(tokens)
    assert len({tuple(tokens) for tokens in expected}) == 8, "the adapters change too little"
    return House(reference, folder, loras, expected)


@pytest.mark.parametrize("host_blocks", [0, 64])
@pytest.mark.parametrize("policy", ["orcinus", "vllm", "sarathi"])
def test_preempted_and_swapped_sequences_keep_their_adapter(house: House, policy: str, host_blocks: int) -> None:
    engine = house.engine(pool_tokens=256, host_blocks=host_blocks)
    recorded, core = in_process.run(engine, house.requests(), policy, lookahead=1, step_tokens=16)
    assert tokens_of(recorded) == house.expected
    if policy == "vllm":
        assert core.stats()["preemptions"] > 0, "nothing was preempted: the pool is too large"


@pytest.mark.parametrize("max_loras", [1, 2])
def test_more_adapters_than_the_worker_holds_take_turns(house: House, max_loras: int) -> None:
    engine = house.engine(max_loras=max_loras)
    recorded, _ = in_process.run(
        engine, house.requests(), "orcinus", microbatches=2, lookahead=1, step_tokens=24, prefix_cache=True
    )
    assert tokens_of(recorded) == house.expected


def test_drafts_behind_adapted_rows_change_no_token(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.core.speculation.drafts.MIN_GAIN", 0.0)
    engine = house.engine()
    requests = []
    for request, expected in zip(house.requests(), house.expected, strict=True):
        guessed = [(token + 1) % 256 if at % 5 == 4 else token for at, token in enumerate(expected)]
        prediction = np.array([*request.prompts[0], *guessed], np.int32)
        requests.append(dataclasses.replace(request, prediction=prediction))
    recorded, core = in_process.run(engine, requests, "orcinus", lookahead=1, speculate="suffix")
    assert tokens_of(recorded) == house.expected
    stats = core.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_have_their_parts_of_each_adapter(house: House, processes: Processes, tp: int, pp: int) -> None:
    settings = {"dtype": "float32", "kernels": "cpu", "max_seqs": REQUESTS, "threads": 1, "kv_blocks": 256}
    with processes.replica(
        tp, pp, house.reference.path, **settings, block_size=16, adapter_dir=house.folder, max_loras=2
    ) as replica:
        recorded, _ = in_process.run(replica, house.requests(), "orcinus", step_tokens=24)
    assert tokens_of(recorded) == house.expected


def test_request_of_a_worker_without_adapters_ends_with_the_reason(house: House) -> None:
    engine = house.engine(adapter_dir=None)
    recorded, _ = in_process.run(engine, house.requests(), "orcinus")
    assert set(recorded.errors) == {"the worker has no adapters; start it with --adapter-dir"}
    served = [name for (name, _), finish in recorded.finish.items() if finish is not Finish.ERROR]
    assert sorted(served) == ["r0", "r4", "r8"]
