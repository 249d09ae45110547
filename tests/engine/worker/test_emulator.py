"""The whole engine on an emulated GPU, in 16 bits: transformers' tokens in process and from a worker's process.

What a GPU puts off is put off in several orders; prompts are those with best two logits never so close that
rounding to float16 decides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from kernels.emulator.device import EmulatedDevice
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import NewRequest
from shared.text.logprobs import unpack_prompt_records, unpack_records
from shared.wire.columns import unpack_float
from tests.engine.driver import Driver, tokens_of
from tests.engine.emulated import SHAPE, SMALL, emulated, engine_on, float16_model
from tests.engine.ranks import Processes
from tests.kernels.cuda.programs import FLAGS
from tests.support import in_process
from tests.support.checkpoints.models import EOS, Reference, make_llama, random_prompts
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

OUTPUTS = 10


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """With prompts that share a prefix, and prompts that do not."""
    shared = random_prompts(1, (33, 33), 2)[0]
    prompts = random_prompts(30, (3, 40), 3) + [shared + end for end in random_prompts(10, (1, 9), 4)]
    found = float16_model(tmp_path_factory.mktemp("emulator") / "tiny", prompts, OUTPUTS)
    assert len(found.prompts) >= 12
    return found


@pytest.mark.parametrize("order", [1, 3])
def test_overlapped_preemption_swap_and_sharing_give_transformers_tokens(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    engine = emulated(monkeypatch, reference.path, order, kv_blocks=9, host_blocks=12)
    engine.warm_up()
    requests = [
        in_process.request(f"r{i}", prompt, OUTPUTS, logprobs=3 * (i % 2)) for i, prompt in enumerate(reference.prompts)
    ]
    policy = "orcinus:memory=watermark,relief=newest-swap"
    recorded, core = in_process.run(engine, requests, policy, lookahead=1, prefix_cache=True)
    assert tokens_of(recorded) == reference.outputs
    for i in range(1, len(requests), 2):
        told = unpack_records(recorded.logprobs[f"r{i}", 0], 3)
        assert [one.best[0][0] for one in told] == reference.outputs[i]
        assert [one.sampled_logprob for one in told] == pytest.approx([one.best[0][1] for one in told], abs=1e-4)
    stats = core.stats()
    assert stats["swapped_blocks"] > 0 and stats["prefix_hit_tokens"] > 0 and stats["blocks_draining"] == 0


@pytest.mark.parametrize("order", [1, 3])
def test_prompts_are_scored_beside_decodes_that_overlap(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    engine = emulated(monkeypatch, reference.path, order, kv_blocks=18)
    engine.warm_up()
    requests = [
        in_process.request(f"r{i}", prompt, OUTPUTS, prompt_logprobs=3 * (i % 2))
        for i, prompt in enumerate(reference.prompts)
    ]
    recorded, _ = in_process.run(engine, requests, "orcinus", lookahead=1, step_tokens=16, prefix_cache=True)
    assert tokens_of(recorded) == reference.outputs
    for i in range(1, len(requests), 2):
        prompt = reference.prompts[i]
        expected = reference.logits(prompt).log_softmax(-1)[:-1]
        told = unpack_prompt_records(recorded.prompt_logprobs[f"r{i}", 0], 3)
        assert len(told) == len(prompt) - 1
        for token, row, (_, one) in zip(prompt[1:], expected, told, strict=True):
            assert one.sampled_logprob == pytest.approx(float(row[token]), abs=0.25)  # float16, logits of 30
            assert [value for _, value in one.best] == pytest.approx(row.topk(2).values.tolist(), abs=0.25)


def test_vectors_come_beside_decodes_that_overlap(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = emulated(monkeypatch, reference.path, 3, kv_blocks=18)
    engine.warm_up()
    requests = [
        in_process.request(f"r{i}", prompt, OUTPUTS if i % 2 else 1) for i, prompt in enumerate(reference.prompts)
    ]
    for one in requests[::2]:
        one.payload.pooling = 1
    recorded, _ = in_process.run(engine, requests, "orcinus", lookahead=1, step_tokens=16, prefix_cache=True)
    assert not recorded.errors
    model: Any = reference.model
    for i, prompt in enumerate(reference.prompts):
        if i % 2:
            assert recorded.tokens[f"r{i}", 0] == reference.outputs[i]
            continue
        with torch.inference_mode():
            row = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        told = unpack_float(recorded.logprobs[f"r{i}", 0])
        assert float(told @ torch.nn.functional.normalize(row, dim=0).numpy()) > 0.999  # float16


def test_a_grammar_is_given_the_tokens_that_the_device_keeps(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = "[a-z]{1,4}(-[0-9]{1,3})?"

    def run(order: int | None, lookahead: int) -> in_process.Recorded:
        requests = []
        for at, prompt in enumerate(reference.prompts[:6]):
            grammar = LLMatcher.grammar_from_regex(pattern) if at % 3 else ""
            request = in_process.request(f"r{at}", prompt, OUTPUTS, temperature=1.0, seed=at, grammar=grammar)
            request.stop_ids = np.array([EOS], np.int32)
            requests.append(request)
        engine = emulated(monkeypatch, reference.path, order, kv_blocks=24)
        return in_process.run(engine, requests, "orcinus", lookahead=lookahead)[0]

    at_once, late = run(None, 0), run(2, 1)
    assert late.tokens == at_once.tokens and not late.errors
    for at in (1, 2, 4, 5):
        *text, end = late.tokens[f"r{at}", 0]
        assert end == EOS and re.fullmatch(pattern, bytes(text).decode())


def drafted(reference: Reference) -> list[NewRequest]:
    """Requests with their true outputs as predictions, in which every fourth token is another one."""
    made = []
    for at, (prompt, output) in enumerate(zip(reference.prompts, reference.outputs, strict=True)):
        guess = [token if (at + place) % 4 else (token + 1) % 256 for place, token in enumerate(output)]
        request = in_process.request(f"r{at}", prompt, OUTPUTS, logprobs=3 * (at % 2))
        request.prediction = np.array([*prompt, *guess], np.int32)
        made.append(request)
    return made


def check_drafts(core: Scheduler) -> None:
    stats = core.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


@pytest.mark.parametrize(("order", "lookahead", "microbatches"), [(None, 0, 2), (1, 1, 1), (3, 1, 1)])
def test_drafts_leave_transformers_tokens(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, order: int | None, lookahead: int, microbatches: int
) -> None:
    """Greedy, as a row may have other bits beside other rows; no token hangs on them here."""
    monkeypatch.setattr("services.scheduler.core.speculation.drafts.MIN_GAIN", 0.0)
    engine = emulated(monkeypatch, reference.path, order, kv_blocks=9, host_blocks=12)
    engine.warm_up()
    policy = "orcinus:memory=watermark,relief=newest-swap"
    settings: dict[str, Any] = {"lookahead": lookahead, "microbatches": microbatches}
    recorded, core = in_process.run(engine, drafted(reference), policy, speculate="suffix", **settings)
    assert tokens_of(recorded) == reference.outputs and not recorded.errors
    for at in range(1, len(reference.prompts), 2):
        told = unpack_records(recorded.logprobs[f"r{at}", 0], 3)
        assert [one.best[0][0] for one in told] == reference.outputs[at]
    check_drafts(core)
    assert core.stats()["swapped_blocks"] > 0


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"head_dim": 64, "norm_topk_prob": True},
}
"""Fields beside those of every model here."""


@pytest.mark.parametrize("kind", EXPERTS)
def test_mixtures_of_experts_give_transformers_tokens(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps with recordings, padded, and larger ones without."""
    found = float16_model(tmp_path, random_prompts(60, (3, 12), 5), 6, kind=kind, **EXPERTS[kind])
    assert len(found.prompts) >= 8
    engine = emulated(monkeypatch, found.path, 1, kv_blocks=18)
    engine.warm_up()
    requests = [in_process.request(f"r{i}", prompt, 6) for i, prompt in enumerate(found.prompts[:8])]
    recorded, _ = in_process.run(engine, requests, "orcinus", lookahead=1)
    assert tokens_of(recorded) == found.outputs[:8]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_of_emulated_gpus_give_transformers_tokens(
    processes: Processes, reference: Reference, monkeypatch: pytest.MonkeyPatch, tp: int, pp: int
) -> None:
    """Each device's work is put off, and done when the ranks meet. Then with drafts, two microbatches at a time."""
    with processes.replica(tp, pp, reference.path, kernels="emulator", dtype="auto", **SMALL) as replica:
        found = Driver(replica, reference.prompts[:3]).run_all(4, 15)
        assert found == [output[:4] for output in reference.outputs[:3]]
        monkeypatch.setattr("services.scheduler.core.speculation.drafts.MIN_GAIN", 0.0)
        requests = drafted(reference)[:4]
        recorded, core = in_process.run(replica, requests, "orcinus", lookahead=0, microbatches=2, speculate="suffix")
    assert tokens_of(recorded) == reference.outputs[:4]
    check_drafts(core)


class CountedDevice(EmulatedDevice):
    """Notes what is given to it, and how often memory is taken."""

    def __init__(self) -> None:
        super().__init__(flags=FLAGS)
        self.given: list[str] = []
        self.taken = 0
        self.recorded: Counter[str] = Counter()
        """Of the recording with most: one for a step with chunks."""

    def give(self, stream: Any, work: Any) -> None:
        self.given.append(work.name)
        super().give(stream, work)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.taken += 1
        return super().empty(shape, dtype)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.given.clear()
        replay = super().capture(work)
        self.recorded = max(self.recorded, Counter(self.given), key=Counter.total)

        def named() -> None:
            self.given.append("recording")
            before = len(self.given)
            replay()
            del self.given[before:]

        return named


def test_step_is_one_recording_and_takes_no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_pass = {}
    for layers in (1, 2):
        make_llama(tmp_path / str(layers), 9, 1, output_tokens=1, **(SHAPE | {"num_hidden_layers": layers}))
        device = CountedDevice()
        driver = Driver(engine_on(monkeypatch, device, tmp_path / str(layers)), [[5, 6, 7]])
        driver.step({0: 3})
        driver.enter(1, list(range(10, 30)))
        device.given.clear()
        device.taken = 0
        driver.step({0: 1, 1: 20})
        assert device.taken == 0
        assert Counter(device.given) == {"copy": 3, "record": 6, "recording": 1, "sample": 1}
        a_pass[layers] = device.recorded
    a_layer = a_pass[2] - a_pass[1]
    multiplied = a_layer.pop("CudaOps._multiply.<locals>.<lambda>")
    assert (a_layer.total(), multiplied) == (7, 4), a_layer


@pytest.mark.parametrize("recording_bytes", [0, 1 << 16], ids=["", "kept by the driver"])
def test_pool_is_what_weights_and_largest_step_leave_of_device(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, recording_bytes: int
) -> None:
    wanted = {"max_seqs": 48, "max_input_tokens": 0, "max_output_tokens": 0}
    plenty = emulated(monkeypatch, reference.path, None, **wanted).info()
    device = EmulatedDevice(memory_bytes=7 << 20, recording_bytes=recording_bytes)
    engine = engine_on(monkeypatch, device, reference.path, **wanted)
    info = engine.info()
    assert 16 <= info.gpu_blocks < plenty.gpu_blocks == 48 * 16
    free, total = device.free_bytes()
    assert total // 50 < free, "what the share leaves"
    engine.warm_up()
    assert device.free_bytes()[0] > 0
