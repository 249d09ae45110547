"""Steps that break worker.proto are refused with what was wrong; what is wrong with one sequence fails it alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protos import worker_pb2
from services.worker.engine import Engine
from shared.errors import ProtocolError
from shared.wire.columns import pack, pack_float, unpack
from tests.engine.driver import Driver, make_engine
from tests.support.checkpoints.models import VOCAB, Reference

MODEL = {"seed": 5, "requests": 3, "prompt_tokens": (5, 30), "max_position_embeddings": 64}

PROMPT = list(range(10))


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Engine:
    return make_engine(reference.path, host_blocks=4, max_step_tokens=60)


@pytest.fixture
def driver(engine: Engine) -> Driver:
    """Slot 1 holds a sequence of 10 tokens of which 10 are computed, and one that was sampled."""
    engine.reset()
    driver = Driver(engine)
    driver.enter(1, PROMPT, blocks=pack([7, 3, 5]))
    driver.step({1: 64})
    return driver


def enter(slot: int = 2, tokens: Any = PROMPT, prompt: int = 10, **fields: Any) -> dict[str, Any]:
    fields.setdefault("blocks", pack([9, 10, 11]))
    made = worker_pb2.Enter(slot=slot, tokens=pack(tokens), prompt_tokens=prompt, **fields)
    return {"enters": [made]}


def columns(slots: list[int], starts: list[int], lengths: list[int]) -> dict[str, bytes]:
    return {"chunk_slots": pack(slots), "chunk_starts": pack(starts), "chunk_lengths": pack(lengths)}


def chunk(slot: int, start: int, length: int) -> dict[str, bytes]:
    return columns([slot], [start], [length])


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"free_slots": pack([0])}, "free_slots: slot 0 holds no sequence"),
    ({"free_slots": pack([1, 1])}, "freed twice"),
    ({"free_slots": pack([8])}, r"free_slots: 8 is outside 0\.\.7"),
    ({"free_slots": pack([-1])}, "free_slots: -1 is outside"),
    ({"free_slots": b"abc"}, "3 bytes are no int32 column"),
    ({"free_slots": pack([1]), **chunk(1, 10, 1)}, "chunk_slots: slot 1 holds no sequence"),
    (enter(slot=1), "slot 1 still holds a sequence"),
    (enter(slot=8), "slot 8 is outside"),
    (enter(blocks=pack([9, 128])), r"blocks of slot 2: 128 is outside 0\.\.127"),
    (enter(blocks=pack(list(range(17)))), "has 17 blocks, at most 16"),
    (enter(tokens=[]), "has 0 tokens"),
    (enter(tokens=[1] * 65, prompt=65), "has 65 tokens"),
    (enter(prompt=11), "11 of them prompt"),
    (enter(prompt=0), "0 of them prompt"),
    (enter(computed=10), "10 computed of 10 tokens"),
    (enter(computed=9, blocks=pack([9, 10])), "9 computed of 10 tokens in 2 blocks"),
    ({"append_slots": pack([0]), "append_blocks": pack([20])}, "append_slots: slot 0 holds no sequence"),
    ({"append_slots": pack([1]), "append_blocks": pack([])}, "columns of 1 and 0"),
    ({"append_slots": pack([1]), "append_blocks": pack([128])}, "append_blocks: 128 is outside"),
    ({"append_slots": pack([1] * 14), "append_blocks": pack([20] * 14)}, "more than 16 blocks"),
    (chunk(0, 0, 1), "chunk_slots: slot 0 holds no sequence"),
    (chunk(1, 10, 0), "is empty"),
    (chunk(1, 10, -1), "chunk_lengths: -1 is outside"),
    (chunk(1, 11, 1), "gap behind the computed tokens"),
    (chunk(1, 10, 2), "passes the known tokens"),
    ({**chunk(1, 10, 1), "chunk_lengths": pack([1, 1])}, "columns of 1 and 2"),
    (columns([1, 1], [0, 10], [10, 1]), "two chunks in one step"),
    ({**enter(blocks=pack([9])), **chunk(2, 0, 10)}, "passes the blocks of the slot"),
    ({**enter(tokens=[1] * 64, prompt=3, blocks=pack(list(range(16)))), **chunk(2, 0, 64)}, "past the context"),
    ({**enter(tokens=[1] * 61, prompt=3, blocks=pack(range(16))), **chunk(2, 0, 61)}, "61 tokens, this worker takes"),
    ({"swap_out_gpu": pack([128]), "swap_out_host": pack([0])}, "swap_out_gpu: 128 is outside"),
    ({"swap_out_gpu": pack([0]), "swap_out_host": pack([4])}, "swap_out_host: 4 is outside"),
    ({"swap_out_gpu": pack([0, 1]), "swap_out_host": pack([0])}, "columns of 2 and 1"),
    ({"swap_in_host": pack([0]), "swap_in_gpu": pack([1, 2])}, "columns of 1 and 2"),
    ({"hello": worker_pb2.Hello(shard="s")}, "hello"),
]


@pytest.mark.parametrize(("step", "words"), BROKEN, ids=[words[:40] for _, words in BROKEN])
def test_step_that_breaks_the_contract_is_refused_with_the_reason(
    driver: Driver, step: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProtocolError, match=words):
        driver.engine.execute(worker_pb2.Step(epoch=1, id=2, **step))


def test_swapping_without_a_host_tier_is_refused(reference: Reference) -> None:
    engine = make_engine(reference.path)
    with pytest.raises(ProtocolError, match="no host blocks"):
        engine.execute(worker_pb2.Step(id=1, swap_out_gpu=pack([0]), swap_out_host=pack([0])))


def test_slot_freed_and_entered_in_one_step_runs_new_sequence(driver: Driver, reference: Reference) -> None:
    driver.free(1)
    driver.enter(1, reference.prompts[0])
    assert driver.run(1, 24) == reference.outputs[0]


def test_appended_blocks_of_a_slot_keep_their_order(driver: Driver) -> None:
    driver.enter(2, PROMPT, blocks=pack([9]))
    driver.step({}, append_slots=pack([2, 1, 2]), append_blocks=pack([20, 21, 22]))
    tables = driver.engine.slots.tables
    assert (tables[1, :4].tolist(), tables[2, :3].tolist()) == ([7, 3, 5, 21], [9, 20, 22])


def test_chunk_that_stops_short_of_last_known_token_samples_nothing(driver: Driver) -> None:
    driver.enter(2, PROMPT)
    result = driver.step({2: 9})
    assert not result.slots and not result.tokens
    result = driver.step({2: 1, 1: 1})
    assert unpack(result.slots).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"tokens": [1, VOCAB, 2]}, "invalid_token", "token 320 is outside"),
        ({"tokens": [1, -5, 2]}, "invalid_token", "token -5 is outside"),
        ({"sampling": {"temperature": float("nan")}}, "invalid_sampling", "temperature is not finite"),
        ({"sampling": {"temperature": -1}}, "invalid_sampling", "negative"),
        ({"sampling": {"top_p": 1.5}}, "invalid_sampling", "top_p 1.5"),
        ({"sampling": {"banned_ids": pack([320])}}, "invalid_sampling", "banned_ids: 320"),
        ({"sampling": {"bias_ids": pack([1]), "bias_values": b""}}, "invalid_sampling", "1 bias_ids"),
        ({"sampling": {"bias_ids": pack([1]), "bias_values": pack_float([np.inf])}}, "invalid_sampling", "not finite"),
        ({"sampling": {"logprobs": 22}}, "invalid_sampling", "at most 20"),
        ({"sampling": {"grammar": "none at all"}}, "grammar", "cannot be followed"),
        ({"sampling": {"banned_ids": pack(range(VOCAB))}}, "nothing_allowed", "no token to choose"),
    ],
)
def test_sequence_that_cannot_run_fails_alone_until_it_is_freed(
    driver: Driver, reference: Reference, fields: dict[str, Any], code: str, words: str
) -> None:
    driver.enter(0, reference.prompts[0])
    sampling = worker_pb2.Sampling(**fields.get("sampling", {}))
    driver.enter(2, fields.get("tokens", PROMPT), sampling=sampling)
    for _ in range(2):  # the next step was already on its way
        result = driver.step({2: 10, 0: 64})
        driver.computed[2] = 0
        assert [(error.slot, error.code) for error in result.errors] == [(2, code)]
        assert words in result.errors[0].message
        assert unpack(result.slots).tolist() == [0]
    driver.free(2)
    driver.enter(2, reference.prompts[1])
    for _ in range(24):
        assert not driver.step({0: 64, 2: 64}).errors
    assert driver.outputs[0][:24] == reference.outputs[0]
    assert driver.outputs[2] == reference.outputs[1]


def test_logits_that_are_not_finite_fail_their_sequence_alone(driver: Driver, reference: Reference) -> None:
    driver.enter(0, reference.prompts[0])
    driver.enter(2, PROMPT)
    embedding = driver.engine.decoder.embed_tokens.weight
    outside = next(t for t in range(VOCAB) if t not in PROMPT + reference.prompts[0] + reference.outputs[0])
    driver.enter(3, [1, 2, outside])
    kept = embedding[outside].clone()
    embedding[outside] = float("nan")
    try:
        result = driver.step({2: 64, 3: 64, 0: 64})
        assert [(error.slot, error.code) for error in result.errors] == [(3, "nan_logits")]
        assert unpack(result.slots).tolist() == [2, 0]
    finally:
        embedding[outside] = kept
    # Its blocks go to a sequence that does not fill them: what was left there must not be read.
    driver.free(3)
    driver.enter(4, reference.prompts[1], blocks=pack(driver.blocks(3)))
    while len(driver.outputs[4]) < 24:
        driver.step({0: 64, 4: 64})
    assert driver.outputs[0][:24] == reference.outputs[0]
    assert driver.outputs[4] == reference.outputs[1]


def test_stop_ids_are_banned_until_enough_tokens_were_produced(driver: Driver, reference: Reference) -> None:
    prompt, output = reference.prompts[0], reference.outputs[0]
    stop = output[3]
    sampling = worker_pb2.Sampling(stop_ids=pack([stop]), min_tokens=4)
    driver.enter(2, prompt, sampling=sampling)
    found = driver.run(2, 4)
    assert found[:3] == output[:3] and found[3] != stop and stop not in found
    driver.enter(3, prompt, sampling=worker_pb2.Sampling(stop_ids=pack([stop]), min_tokens=3))
    assert driver.run(3, 4) == output[:4]
    # After a preemption the outputs it came back with count.
    for slot, least, expected in ((4, 4, found[3]), (5, 3, stop)):
        sampling.min_tokens = least
        driver.enter(slot, prompt + output[:3], prompt=len(prompt), sampling=sampling)
        assert driver.run(slot, 4)[3] == expected


def test_bias_and_penalties_reach_the_sampler(driver: Driver) -> None:
    driver.enter(2, PROMPT, sampling=worker_pb2.Sampling(bias_ids=pack([200]), bias_values=pack_float([1e4])))
    assert driver.run(2, 3) == [200, 200, 200]
    pushed = worker_pb2.Sampling(
        bias_ids=pack([200, 201]), bias_values=pack_float([10000.0, 9750.0]), frequency_penalty=500.0
    )
    driver.enter(3, PROMPT, sampling=pushed)
    assert driver.run(3, 4) == [200, 201, 200, 201]
