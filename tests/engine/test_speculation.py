"""With drafts every token is that without them: any temperature, penalty, batch, preemption and engine.

The client's prediction is the true output with some tokens changed, so that of most drafts some are right and some not.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from protos import worker_pb2
from services.scheduler.core import speculation
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import NewRequest
from services.scheduler.workers.wire import limits_from_wire, result_from_wire, step_to_wire
from services.worker.engine import Engine
from shared.errors import ProtocolError
from shared.wire.columns import pack, unpack
from tests.engine.driver import Driver, make_engine, requests_of, tokens_of
from tests.engine.ranks import Processes
from tests.support import in_process
from tests.support.checkpoints.models import Reference
from tests.support.in_process import Recorded

REQUESTS = 32
OUTPUT_TOKENS = 40
WORDS = LLMatcher.grammar_from_regex("([a-m]{2,5} ){20}")
FORCED = LLMatcher.grammar_from_regex("abcdefghijk[l-z]mnopqrstuv[a-z]")
SEED = 20261124
MODEL = {"requests": REQUESTS, "prompt_tokens": (2, 40), "output_tokens": 40, "hidden_size": 32, "seed": SEED}


@pytest.fixture(autouse=True)
def drafts_whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MIN_GAIN", 0.0)


def engine_of(reference: Reference, pool_tokens: int = 4096, **settings: Any) -> Engine:
    lengths = {"max_seqs": REQUESTS, "max_input_tokens": 64, "max_output_tokens": 64, "max_step_tokens": 512}
    given = {"kernels": "cpu", "host_blocks": 64, "block_size": 16, "kv_blocks": pool_tokens // 16}
    return make_engine(reference.path, **(given | lengths | settings))


@pytest.fixture(scope="module")
def runner(reference: Reference) -> Engine:
    return engine_of(reference)


def predicted(requests: list[NewRequest], truth: Recorded, wrong: float) -> list[NewRequest]:
    """The same requests with their true outputs as predictions, of which a share `wrong` of the tokens is changed."""
    rng = np.random.default_rng(SEED)
    made = []
    for request in requests:
        output = np.array(truth.tokens[request.id, 0], np.int32)
        changed = rng.random(output.size) < wrong
        prediction = np.where(changed, (output + 1) % 256, output).astype(np.int32)
        made.append(dataclasses.replace(request, prediction=np.concatenate([request.prompts[0], prediction])))
    return made


def compare(runner: Engine, requests: list[NewRequest], wrong: float, **settings: Any) -> tuple[Scheduler, Recorded]:
    """Run without drafts, then with; demand the same tokens, records and ends."""
    settings = {"policy": "orcinus", "lookahead": 1} | settings
    truth, _ = in_process.run(runner, requests, speculate="off", **settings)
    found, core = in_process.run(runner, predicted(requests, truth, wrong), speculate="suffix", **settings)
    assert not truth.errors and found.errors == truth.errors
    assert found.tokens == truth.tokens
    assert found.finish == truth.finish
    assert found.logprobs == truth.logprobs
    return core, truth


def drafts_of(core: Scheduler) -> tuple[int, int]:
    stats = core.stats()
    return int(stats["drafted_tokens"]), int(stats["accepted_tokens"])


@pytest.mark.parametrize(("temperature", "wrong"), [(0.0, 0.1), (0.7, 0.0), (1.3, 0.3)])
def test_tokens_equal_those_without_drafts(
    reference: Reference, runner: Engine, temperature: float, wrong: float
) -> None:
    requests = requests_of(reference.prompts, OUTPUT_TOKENS, temperature=temperature, seed=SEED)
    core, truth = compare(runner, requests, wrong)
    drafted, accepted = drafts_of(core)
    assert drafted > 0 and accepted > 0
    if wrong:
        assert accepted < drafted
    if temperature == 0.0:
        assert tokens_of(truth) == reference.outputs


SAMPLINGS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "logprobs": {"logprobs": 4},
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_penalties_filters_and_logprobs_see_the_drafts_before_them(
    reference: Reference, runner: Engine, name: str
) -> None:
    requests = requests_of(reference.prompts, OUTPUT_TOKENS, temperature=0.9, seed=SEED, **SAMPLINGS[name])
    core, _ = compare(runner, requests, 0.1)
    assert drafts_of(core)[1] > 0


def test_stop_ids_and_least_tokens_end_outputs_where_they_did(reference: Reference, runner: Engine) -> None:
    requests = requests_of(reference.prompts, OUTPUT_TOKENS, temperature=0.9, seed=SEED)
    for at, request in enumerate(requests):
        request.stop_ids, request.min_tokens = np.arange(at, 256, 16, np.int32)[:16], 5 * (at % 3)
        request.payload.stop_token_ids, request.payload.min_tokens = pack(request.stop_ids), request.min_tokens
        request.n = request.payload.n = 2
    truth, _ = in_process.run(runner, requests, "orcinus", speculate="off")
    ends = {len(tokens) for tokens in truth.tokens.values()}
    assert len(ends) > 5, "the stops end nothing"
    core, _ = compare(runner, requests, 0.1)
    assert drafts_of(core)[1] > 0


@pytest.mark.parametrize(
    ("policy", "microbatches", "lookahead"), [("sarathi", 1, 0), ("vllm", 1, 2), ("orcinus", 2, 1), ("sarathi", 3, 1)]
)
def test_preempted_and_overlapped_sequences_keep_their_tokens(
    reference: Reference, policy: str, microbatches: int, lookahead: int
) -> None:
    small = engine_of(reference, pool_tokens=256)
    requests = requests_of(reference.prompts, OUTPUT_TOKENS, temperature=0.7, seed=SEED)
    core, _ = compare(small, requests, 0.1, policy=policy, microbatches=microbatches, lookahead=lookahead)
    assert drafts_of(core)[1] > 0
    if policy != "orcinus":
        assert core.stats()["preemptions"] > 0, "nothing was preempted: the pool is too large"


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_bfloat16_and_reference_kernels_take_drafts(reference: Reference, kernels: str) -> None:
    """Greedy, as the reference kernels may sum differently in another batch; the outputs have no near ties."""
    dtype = {"cpu": "bfloat16", "reference": "float32"}[kernels]
    runner = engine_of(reference, kernels=kernels, dtype=dtype)
    assert runner.info().same_bits == (kernels == "cpu")
    core, _ = compare(runner, requests_of(reference.prompts, OUTPUT_TOKENS), 0.1)
    assert drafts_of(core)[1] > 0


def test_drafts_come_from_the_outputs_of_the_same_tenant_alone(reference: Reference, runner: Engine) -> None:
    accepted: list[int] = []
    for tenants in (("a", "a"), ("a", "b")):
        first, second = (
            dataclasses.replace(
                in_process.request(name, reference.prompts[0], OUTPUT_TOKENS, temperature=1.3, seed=5), tenant=tenant
            )
            for name, tenant in zip("fs", tenants, strict=True)
        )
        core = Scheduler("orcinus", lookahead=1, prefix_cache=False)
        runner.reset()
        replica = core.join(limits_from_wire(runner.info(), "suffix"))
        for request in (first, second):
            core.add(request, 1)
            finish(runner, core, replica)
        accepted.append(drafts_of(core)[1])
    assert accepted[0] > accepted[1]


def test_request_that_wants_no_drafts_has_none(reference: Reference, runner: Engine) -> None:
    requests = requests_of(reference.prompts, OUTPUT_TOKENS)
    truth, _ = in_process.run(runner, requests, "orcinus", speculate="off")
    without = [dataclasses.replace(r, speculate=False) for r in predicted(requests, truth, 0.0)]
    found, core = in_process.run(runner, without, "orcinus", lookahead=1)
    assert found.tokens == truth.tokens
    assert drafts_of(core) == (0, 0)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_agree_on_which_drafts_count(reference: Reference, processes: Processes, tp: int, pp: int) -> None:
    settings = {"kernels": "cpu", "max_seqs": REQUESTS, "kv_blocks": 256, "block_size": 16}
    with processes.replica(tp, pp, reference.path, **settings) as replica:
        core, _ = compare(
            replica, requests_of(reference.prompts, OUTPUT_TOKENS, temperature=0.7, seed=SEED, logprobs=3), 0.1
        )
        assert drafts_of(core)[1] > 0
        forced = requests_of(reference.prompts, OUTPUT_TOKENS, temperature=0.7, seed=SEED, grammar=FORCED)
        for request in forced:  # nothing is found in the outputs of others
            request.tenant = request.id
        truth, _ = in_process.run(replica, forced, "orcinus", speculate="off")
        found, core = in_process.run(replica, forced, "orcinus", lookahead=1, speculate="suffix")
        assert found.tokens == truth.tokens and not found.errors
        assert drafts_of(core)[1] > 0
        replica.take_masks("few_masks")
        bound = requests_of(reference.prompts, OUTPUT_TOKENS, temperature=0.7, seed=SEED, grammar=WORDS)
        core, _ = compare(replica, bound, 0.1)
    assert drafts_of(core)[1] > 0


def finish(runner: Engine, core: Scheduler, replica: int) -> None:
    """Run until nothing is left."""
    now = 1
    while core.unfinished:
        plan, _ = core.plan(now, replica)
        assert plan is not None
        result = runner.execute(step_to_wire(plan, epoch=1))
        now += 1_000_000
        result.timings.total_ns = 1_000_000
        core.apply(result_from_wire(result, replica), now)


@pytest.mark.parametrize("guess", [100_000, 2**31 - 1])
def test_guess_outside_the_vocabulary_is_wrong_and_nothing_else(
    reference: Reference, runner: Engine, guess: int
) -> None:
    runner.reset()
    driver, prompt = Driver(runner), reference.prompts[0]
    driver.enter(0, prompt, blocks=pack(range(4)))
    first = unpack(driver.step({0: len(prompt)}).tokens).tolist()
    columns = {"chunk_slots": [0], "chunk_starts": [len(prompt)], "chunk_lengths": [3], "chunk_drafts": [2]}
    step = {name: pack(values) for name, values in columns.items()}
    result = driver.engine.execute(
        worker_pb2.Step(epoch=1, id=2, drafts=pack([reference.outputs[0][1], guess]), **step)
    )
    assert unpack(result.token_counts).tolist() == [2]
    assert first + unpack(result.tokens).tolist() == reference.outputs[0][:3]


WRONG = [
    ({"chunk_drafts": pack([1]), "drafts": pack([-2])}, "drafts: -2 is outside 0..2147483647"),
    ({"chunk_drafts": pack([1])}, "drafts: 0 ids for chunks with 1 drafts"),
    ({"drafts": pack([1])}, "chunk_slots, chunk_drafts: columns of 1 and 0 entries"),
    ({"chunk_drafts": pack([2]), "drafts": pack([1, 2]), "chunk_lengths": pack([2])}, "has drafts, and not behind"),
    ({"chunk_drafts": pack([1]), "drafts": pack([1]), "chunk_lengths": pack([1])}, "has drafts, and not behind"),
]


@pytest.mark.parametrize(("fields", "why"), WRONG)
def test_worker_refuses_steps_with_wrong_drafts(
    reference: Reference, runner: Engine, fields: dict[str, bytes], why: str
) -> None:
    runner.reset()
    driver, prompt = Driver(runner), reference.prompts[0]
    driver.enter(0, prompt, blocks=pack(range(4)))
    driver.step({0: len(prompt)})
    step = {"chunk_slots": pack([0]), "chunk_starts": pack([len(prompt)]), "chunk_lengths": pack([2])} | fields
    with pytest.raises(ProtocolError, match=re.escape(why)):
        driver.engine.execute(worker_pb2.Step(epoch=1, id=99, **step))
