"""Log-probabilities of prompts equal transformers', whatever the chunks, the preemptions and the ranks.

Tolerance: 1e-4 in float32, of log-probabilities down to about -30. On the cpu kernels the bits are equal, too.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protos import worker_pb2
from services.scheduler.core.types import NewRequest
from services.worker import engine as engine_module
from services.worker.engine import Engine
from shared.text.logprobs import MAX_LOGPROBS, TokenLogprobs, unpack_prompt_records
from tests.engine.driver import Driver, make_engine, requests_of
from tests.engine.ranks import Processes
from tests.support import in_process
from tests.support.checkpoints.models import VOCAB, Reference, one_thread
from tests.support.in_process import Recorded

LIKELY = 5
OUTPUTS = 6
TOLERANCE = 1e-4
CHUNKS = (1, 7, 64, 0)
SMALL: dict[str, Any] = {"max_seqs": 8, "max_step_tokens": 256, "max_input_tokens": 64, "max_output_tokens": 16}


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[torch.Tensor]:
    """Of each prompt [tokens - 1, vocab], the log-probabilities of the tokens behind the first."""
    model = AutoModelForCausalLM.from_pretrained(reference.path, dtype=torch.float32)
    with torch.inference_mode(), one_thread():
        logits = [model(torch.tensor([prompt])).logits[0, :-1] for prompt in reference.prompts]
    return [each.double().log_softmax(-1).float() for each in logits]


def scoring(reference: Reference, **sampling: Any) -> list[NewRequest]:
    return requests_of(reference.prompts, OUTPUTS, prompt_logprobs=LIKELY + 1, **sampling)


def compare(reference: Reference, expected: list[torch.Tensor], recorded: Recorded) -> None:
    assert not recorded.errors
    for index, (prompt, logprobs) in enumerate(zip(reference.prompts, expected, strict=True)):
        told = unpack_prompt_records(recorded.prompt_logprobs.get((f"r{index}", 0), b""), LIKELY + 1)
        check(prompt, logprobs, told)


def check(prompt: list[int], logprobs: torch.Tensor, told: list[tuple[int, TokenLogprobs]]) -> None:
    assert len(told) == len(prompt) - 1
    for token, row, (rank, one) in zip(prompt[1:], logprobs, told, strict=True):
        assert one.sampled_logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert abs(rank - int((row >= row[token]).sum())) <= int(((row - row[token]).abs() < TOLERANCE).sum()) - 1
        best = row.topk(LIKELY)
        assert [value for _, value in one.best] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        assert [float(row[found]) for found, _ in one.best] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


def small(model: Path, kernels: str, **settings: Any) -> Engine:
    return make_engine(model, kernels=kernels, **({"block_size": 16, "kv_blocks": 64} | SMALL | settings))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_chunk_size_gives_transformers_log_likelihoods(
    reference: Reference, expected: list[torch.Tensor], backend: str
) -> None:
    engine, found = small(reference.path, backend), []
    for chunk in CHUNKS:
        recorded, _ = in_process.run(engine, scoring(reference), "orcinus", step_tokens=chunk, prefix_cache=True)
        compare(reference, expected, recorded)
        found.append(recorded)
    if backend == "cpu":
        assert all(one.prompt_logprobs == found[0].prompt_logprobs for one in found)
    plain = requests_of(reference.prompts, OUTPUTS)
    recorded, core = in_process.run(engine, plain, "orcinus", prefix_cache=True)
    assert core.stats()["prefix_hit_tokens"] > 0
    if backend == "cpu":
        assert recorded.tokens == found[0].tokens


def test_preempted_prompts_tell_each_token_once(
    reference: Reference, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, halfway = small(reference.path, "cpu", kv_blocks=10, host_blocks=8, max_output_tokens=32), []
    undisturbed, _ = in_process.run(engine, scoring(reference), "orcinus", step_tokens=64)
    submit = engine.submit

    def watched(step: worker_pb2.Step) -> Any:
        halfway.extend(enter for enter in step.enters if 1 < enter.scored < enter.prompt_tokens)
        return submit(step)

    monkeypatch.setattr(engine, "submit", watched)
    for relief, lookahead in itertools.product(("newest", "newest-swap"), (0, 1)):
        requests = [dataclasses.replace(request, max_tokens=28) for request in scoring(reference)]
        for index, request in enumerate(requests):
            request.priority = 0 if index % 2 else 3  # the urgent come late, and take the room of the others
        policy = f"orcinus:memory=watermark,tokens=fixed-9,relief={relief}"  # sizes that no clock changes
        recorded, core = in_process.run(
            engine, requests[::2] + requests[1::2], policy, lookahead=lookahead, step_tokens=9, prefix_cache=True
        )
        assert core.stats()["preemptions"] > 0
        compare(reference, expected, recorded)
        assert recorded.prompt_logprobs == undisturbed.prompt_logprobs
    assert halfway, "no prompt was preempted halfway"


def test_a_request_goes_on_behind_the_tokens_that_were_recorded(
    reference: Reference, expected: list[torch.Tensor]
) -> None:
    engine = small(reference.path, "cpu")
    requests = scoring(reference)
    for request, prompt in zip(requests, reference.prompts, strict=True):
        request.scored_tokens = [max(1, len(prompt) // 2)]
    known = Recorded(scored={(each.id, 0): each.scored_tokens[0] for each in requests if each.scored_tokens})
    recorded, _ = in_process.run(engine, requests, "orcinus", known=known, prefix_cache=True)
    for index, (prompt, logprobs) in enumerate(zip(reference.prompts, expected, strict=True)):
        begin = max(1, len(prompt) // 2)
        told = unpack_prompt_records(recorded.prompt_logprobs.get((f"r{index}", 0), b""), LIKELY + 1)
        check(prompt[begin - 1 :], logprobs[begin - 1 :], told)


def test_other_choices_read_what_the_first_has_computed(reference: Reference, expected: list[torch.Tensor]) -> None:
    engine = small(reference.path, "cpu")
    requests = scoring(reference, n=3)
    recorded, core = in_process.run(engine, requests, "orcinus", prefix_cache=True)
    compare(reference, expected, recorded)
    assert core.stats()["prefix_hit_tokens"] > 0
    for index in range(len(requests)):
        assert recorded.tokens[f"r{index}", 0] == recorded.tokens[f"r{index}", 2]


def test_few_rows_are_scored_at_once(
    reference: Reference, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SCORED_BYTES", 4 * VOCAB * 3)
    engine, rows = small(reference.path, "cpu"), []
    score = engine.ops.score
    monkeypatch.setattr(engine.ops, "score", lambda logits, *rest: rows.append(len(logits)) or score(logits, *rest))
    recorded, _ = in_process.run(engine, scoring(reference), "orcinus")
    compare(reference, expected, recorded)
    assert max(rows) == 3


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_several_ranks_give_transformers_log_likelihoods(
    processes: Processes, reference: Reference, expected: list[torch.Tensor], tp: int, pp: int
) -> None:
    settings = {"kernels": "cpu", "block_size": 16, "kv_blocks": 64, **SMALL}
    with processes.replica(tp, pp, reference.path, **settings) as replica:
        recorded, _ = in_process.run(replica, scoring(reference), "orcinus", lookahead=1, step_tokens=24)
    compare(reference, expected, recorded)


def test_told_tokens_are_left_out_and_foreign_rows_stay(reference: Reference, expected: list[torch.Tensor]) -> None:
    driver = Driver(small(reference.path, "cpu", kv_blocks=40))
    prompt, logprobs = reference.prompts[6], expected[6]
    sampling = worker_pb2.Sampling(prompt_logprobs=LIKELY + 1)
    driver.enter(3, prompt, sampling=sampling, scored=10)
    driver.enter(5, reference.prompts[7])
    results = [driver.step({3: 8, 5: 100}), driver.step({3: 1}), driver.step({3: 5, 5: 1}), driver.step({3: 100, 5: 1})]
    counts = [np.frombuffer(result.prompt_counts, "<i4").tolist() for result in results]
    assert counts == [[], [], [5], [len(prompt) - 15]]
    records = b"".join(result.prompt_logprobs for result in results)
    assert results[2].prompt_firsts == np.array([10], "<i4").tobytes()
    check([0, *prompt[10:]], logprobs[9:], unpack_prompt_records(records, LIKELY + 1))


def test_logits_that_are_not_finite_fail_the_prompt_alone(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small(reference.path, "cpu")
    logits, broken = engine.decoder.logits, [True]

    def not_finite(rows: torch.Tensor) -> torch.Tensor:
        found = logits(rows)
        if broken and found.shape[0]:
            broken.clear()
            found[0, 3] = torch.nan
        return found

    monkeypatch.setattr(engine.decoder, "logits", not_finite)
    requests = scoring(reference)[:2]
    recorded, _ = in_process.run(engine, requests, "orcinus", step_tokens=5)
    assert recorded.errors == ["nan_logits: the model gave logits that are not finite"]
    assert sorted(len(recorded.tokens.get((f"r{index}", 0), [])) for index in range(2)) == [0, OUTPUTS]


def test_more_likely_tokens_than_served_are_refused(reference: Reference) -> None:
    driver = Driver(small(reference.path, "reference", kv_blocks=40))
    driver.enter(0, [1, 2, 3], sampling=worker_pb2.Sampling(prompt_logprobs=MAX_LOGPROBS + 2))
    (error,) = driver.step({0: 3}).errors
    assert (error.code, "prompt_logprobs: 21 tokens" in error.message) == ("invalid_sampling", True)
