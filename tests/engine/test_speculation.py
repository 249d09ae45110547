"""With drafts every token, record and end is that without them: any sampling, preemption, model, format and engine.

The client's prediction is the true output with some tokens changed, so that of most drafts some are right and some not.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from bench.engine.ranks import Replica
from protos import worker_pb2
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import NewRequest
from services.scheduler.workers.wire import limits_from_wire, result_from_wire, step_to_wire
from services.worker.engine import Engine
from shared.errors import ProtocolError
from shared.wire.columns import pack, unpack
from tests.engine.driver import Driver, make_engine, requests_of, tokens_of
from tests.engine.ranks import Processes, few_masks
from tests.support import in_process
from tests.support.checkpoints.models import Reference
from tests.support.in_process import Recorded

REQUESTS = 32
OUTPUT_TOKENS = 24
WORDS = LLMatcher.grammar_from_regex("([a-m]{2,5} ){20}")
FORCED = LLMatcher.grammar_from_regex("abcdefghijk[l-z]mnopqrstuv[a-z]")
SEED = 20261124
MODEL = {"requests": REQUESTS, "prompt_tokens": (2, 40), "output_tokens": 40, "hidden_size": 32, "seed": SEED}
SWAP, RECOMPUTE, AMPLE = "orcinus:memory=watermark,relief=newest-swap", "sarathi", "orcinus"
SMALL_POOL = 256  # tokens


@pytest.fixture(autouse=True)
def drafts_whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.core.speculation.drafts.MIN_GAIN", 0.0)


def settings_of(pool_tokens: int = 4096, **settings: Any) -> dict[str, Any]:
    lengths = {"max_seqs": REQUESTS, "max_input_tokens": 64, "max_output_tokens": 64, "max_step_tokens": 512}
    given = {"kernels": "cpu", "host_blocks": 64, "block_size": 16, "kv_blocks": pool_tokens // 16}
    return given | lengths | settings


def engine_of(reference: Reference, pool_tokens: int = 4096, **settings: Any) -> Engine:
    return make_engine(reference.path, **settings_of(pool_tokens, **settings))


@pytest.fixture(scope="module")
def runner(reference: Reference) -> Engine:
    return engine_of(reference)


@pytest.fixture(scope="module")
def small_pool(reference: Reference) -> Engine:
    return engine_of(reference, SMALL_POOL)


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"logprobs": 4},
    {"logprobs": 2, "top_k": 30, "repetition_penalty": 1.1},
)
TEMPERATURES = (0.0, 0.7, 1.3)


def mixed(prompts: Sequence[list[int]]) -> list[NewRequest]:
    """Return requests of every kind: 30 of them are the product of samplings, temperatures and one or three choices;
    every fourth may end early, at one of several stop ids behind 0, 5 or 10 tokens."""
    made = []
    for at, prompt in enumerate(prompts):
        sampling = SAMPLINGS[at % len(SAMPLINGS)] | {"temperature": TEMPERATURES[at % len(TEMPERATURES)], "seed": at}
        request = in_process.request(f"r{at}", prompt, OUTPUT_TOKENS, n=1 + 2 * (at % 2), **sampling)
        if at % 4 == 3:
            request.stop_ids, request.min_tokens = np.arange(at % 16, 256, 16, np.int32), 5 * (at % 3)
            request.payload.stop_token_ids, request.payload.min_tokens = pack(request.stop_ids), request.min_tokens
        made.append(request)
    return made


def predicted(requests: list[NewRequest], truth: Recorded, wrong: float) -> list[NewRequest]:
    """The same requests with their true outputs as predictions, of which a share `wrong` of the tokens is changed."""
    rng = np.random.default_rng(SEED)
    made = []
    for request in requests:
        pieces = []
        for choice in range(request.n):
            output = np.array(truth.tokens[request.id, choice], np.int32)
            changed = rng.random(output.size) < wrong
            pieces += [request.prompts[0][-3:], np.where(changed, (output + 1) % 256, output).astype(np.int32)]
        made.append(dataclasses.replace(request, prediction=np.concatenate(pieces)))
    return made


def without_drafts(engine: Any, requests: list[NewRequest]) -> Recorded:
    """Return what the requests give where nothing is drafted."""
    truth, core = in_process.run(engine, requests, AMPLE, speculate="off")
    assert not truth.errors and drafts_of(core) == (0, 0)
    return truth


def compare(
    engines: Any, requests: list[NewRequest], truth: Recorded, wrong: float = 0.1, **settings: Any
) -> Scheduler:
    """Run with drafts; demand the tokens, records and ends of the truth, and that some drafts were right."""
    settings = {"policy": AMPLE, "lookahead": 1} | settings
    found, core = in_process.run(engines, predicted(requests, truth, wrong), speculate="suffix", **settings)
    assert not found.errors
    assert found.tokens == truth.tokens, settings
    assert found.finish == truth.finish, settings
    assert records_of(found) == records_of(truth), settings
    drafted, accepted = drafts_of(core)
    assert 0 < accepted <= drafted and (accepted < drafted or not wrong)
    return core


def records_of(recorded: Recorded) -> dict[tuple[str, int], bytes]:
    """Return log-probabilities without the empty records that a choice without them has beside one with them."""
    return {choice: records for choice, records in recorded.logprobs.items() if records}


def drafts_of(core: Scheduler) -> tuple[int, int]:
    stats = core.stats()
    return int(stats["drafted_tokens"]), int(stats["accepted_tokens"])


@pytest.fixture(scope="module")
def truth(reference: Reference, runner: Engine) -> Recorded:
    """What `mixed` gives without drafts: of the greedy ones without penalties and stops what transformers gives."""
    requests = mixed(reference.prompts)
    found = without_drafts(runner, requests)
    for at in (0, 12, 18, 30):
        for choice in range(requests[at].n):
            assert found.tokens[f"r{at}", choice] == reference.outputs[at][:OUTPUT_TOKENS]
    assert len({len(tokens) for tokens in found.tokens.values()}) > 5, "the stops end nothing"
    return found


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_mixed_requests_keep_tokens_records_and_ends(
    reference: Reference, runner: Engine, truth: Recorded, wrong: float
) -> None:
    compare(runner, mixed(reference.prompts), truth, wrong)


@pytest.mark.parametrize(
    ("policy", "microbatches", "lookahead"),
    [(SWAP, 1, 0), (SWAP, 1, 1), (SWAP, 2, 2), (SWAP, 3, 1), (RECOMPUTE, 1, 2), (RECOMPUTE, 2, 1), (RECOMPUTE, 3, 0)],
)
def test_preempted_and_overlapped_sequences_keep_their_tokens(
    reference: Reference, small_pool: Engine, truth: Recorded, policy: str, microbatches: int, lookahead: int
) -> None:
    settings = {"policy": policy, "microbatches": microbatches, "lookahead": lookahead}
    stats = compare(small_pool, mixed(reference.prompts), truth, **settings).stats()
    assert stats["swapped_blocks" if policy == SWAP else "recomputed_tokens"] > 0, "the pool is too large"


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "gpt_oss": {"sliding_window": 11},
    "gemma2": {"sliding_window": 11, "final_logit_softcapping": 12.0},
    "bloom": {},
}
FORMATS: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "bfloat16"},
    {"quantize": "int8"},
    {"quantize": "int4"},
    {"kv_dtype": "int8"},
    {"kv_dtype": "fp8"},
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_format_takes_drafts_when_it_is_swapped(models: Callable[..., Reference], family: str) -> None:
    found = models(kind=family, requests=12, prompt_tokens=(2, 40), output_tokens=1, **FAMILIES[family])
    for stored in FORMATS:
        engine = engine_of(found, 128, **stored)
        assert engine.info().same_bits
        requests = mixed(found.prompts)
        core = compare(engine, requests, without_drafts(engine, requests), policy=SWAP, microbatches=2)
        assert core.stats()["swapped_blocks"] > 0, stored


def test_sequence_takes_drafts_where_it_is_handed_over_to(
    reference: Reference, truth: Recorded, tmp_path: Path
) -> None:
    roles = ("prefill", "decode")
    pair = [engine_of(reference, kv_share_dir=tmp_path / "kv", worker_role=role) for role in roles]
    core = compare(pair, mixed(reference.prompts), truth)
    assert core.stats()["handed_over"] > 0


def test_reference_kernels_take_drafts_and_give_transformers_tokens(reference: Reference) -> None:
    """Greedy, as they may sum differently in another batch; the outputs have no near ties."""
    engine = engine_of(reference, kernels="reference")
    assert not engine.info().same_bits
    requests = requests_of(reference.prompts[:12], OUTPUT_TOKENS)
    found = without_drafts(engine, requests)
    assert tokens_of(found) == [output[:OUTPUT_TOKENS] for output in reference.outputs[:12]]
    compare(engine, requests, found)


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


def test_request_that_wants_no_drafts_has_none(reference: Reference, runner: Engine, truth: Recorded) -> None:
    requests = predicted(mixed(reference.prompts), truth, 0.0)
    found, core = in_process.run(runner, [dataclasses.replace(r, speculate=False) for r in requests], AMPLE)
    assert found.tokens == truth.tokens
    assert drafts_of(core) == (0, 0)


@pytest.mark.parametrize(
    ("tp", "pp", "schedules"),
    [(2, 1, ((2, 0), (1, 2))), (1, 2, ((2, 1), (3, 0), (2, 2))), (2, 2, ((3, 1),))],
    ids=["tp 2", "pp 2", "tp 2 pp 2"],
)
def test_ranks_agree_on_which_drafts_count(
    reference: Reference, processes: Processes, tp: int, pp: int, schedules: Sequence[tuple[int, int]]
) -> None:
    """schedules: microbatches and lookahead."""
    settings = settings_of(SMALL_POOL, max_seqs=16)
    del settings["max_step_tokens"]
    with processes.replica(tp, pp, reference.path, **settings) as replica:
        requests = mixed(reference.prompts[:16])
        truth = without_drafts(replica, requests)
        for microbatches, lookahead in schedules:
            core = compare(replica, requests, truth, policy=SWAP, microbatches=microbatches, lookahead=lookahead)
            assert core.stats()["swapped_blocks"] > 0, "the pool is too large"
        check_grammars(replica, reference.prompts[:8])


def check_grammars(replica: Replica, prompts: Sequence[list[int]]) -> None:
    """Demand the same tokens with drafts that grammars force, and where there are fewer masks than drafts."""
    sampling = {"temperature": 0.7, "seed": SEED}
    forced = requests_of(prompts, OUTPUT_TOKENS, **sampling, grammar=FORCED)
    for request in forced:  # nothing is found in the outputs of others
        request.tenant = request.id
    truth = without_drafts(replica, forced)
    found, core = in_process.run(replica, forced, AMPLE, lookahead=1, speculate="suffix")
    assert found.tokens == truth.tokens and not found.errors
    assert drafts_of(core)[1] > 0
    replica.everywhere(few_masks)
    bound = requests_of(prompts, OUTPUT_TOKENS, **sampling, grammar=WORDS)
    compare(replica, bound, without_drafts(replica, bound))


def finish(runner: Engine, core: Scheduler, replica: int) -> None:
    """Run until nothing is left."""
    now = 1
    while core.unfinished_count:
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
    (
        {"chunk_drafts": pack([65]), "drafts": pack([1] * 65), "chunk_lengths": pack([66])},
        "drafts: the step has 65, this worker takes at most 64; plan as many as max_drafts",
    ),
]


@pytest.mark.parametrize(("fields", "why"), WRONG)
def test_worker_refuses_steps_with_wrong_drafts(
    reference: Reference, runner: Engine, fields: dict[str, bytes], why: str
) -> None:
    runner.reset()
    driver, prompt = Driver(runner), reference.prompts[0]
    driver.enter(0, prompt, blocks=pack(range(8)))
    driver.step({0: len(prompt)})
    step = {"chunk_slots": pack([0]), "chunk_starts": pack([len(prompt)]), "chunk_lengths": pack([2])} | fields
    with pytest.raises(ProtocolError, match=re.escape(why)):
        driver.engine.execute(worker_pb2.Step(epoch=1, id=99, **step))
