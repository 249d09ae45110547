"""Steps that are given to the device before the one before them is finished: the same tokens, errors and acks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from protos import worker_pb2
from services.worker.engine import Engine
from services.worker.slots import SlotTable
from shared.text.logprobs import unpack_records
from shared.wire.columns import pack, unpack
from tests.engine.driver import Ahead, entering, make_engine
from tests.engine.late_engine import make_late_engine
from tests.support import in_process
from tests.support.checkpoints.models import VOCAB, Reference
from tests.support.shared_prefixes import POLICY_MODEL, Load, shared_prefixes

SMALL = {"kv_blocks": 26, "max_seqs": 16, "max_input_tokens": 48, "max_output_tokens": 16, "max_step_tokens": 512}
"""A pool in which policies have to preempt."""
MODEL = {"seed": 3, "requests": 4, "prompt_tokens": (12, 40)}


@pytest.fixture(scope="module")
def shared(models: Callable[..., Reference]) -> Reference:
    return models(**POLICY_MODEL)


@pytest.fixture(scope="module")
def load(shared: Reference) -> Load:
    return shared_prefixes(shared)


@pytest.fixture(scope="module")
def crowded(shared: Reference) -> Engine:
    return make_late_engine(shared.path, seed=5, host_blocks=32, **SMALL)


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Engine:
    return make_late_engine(reference.path, host_blocks=16)


@pytest.mark.parametrize(("policy", "lookahead"), [("sarathi", 1), ("vllm", 2), ("orcinus:memory=watermark", 1)])
def test_preempting_and_swapping_beside_steps_in_flight_gives_references_tokens(
    crowded: Engine, load: Load, policy: str, lookahead: int
) -> None:
    recorded, core = in_process.run(crowded, load.requests(), policy, lookahead=lookahead)
    load.check(recorded)
    stats = core.stats()
    assert stats["preemptions"] > 0
    assert policy == "sarathi" or stats["swapped_blocks"] > 0
    assert stats["blocks_draining"] == 0


def test_overlapping_draws_with_seeds_and_penalties_equal_waiting_ones(reference: Reference, engine: Engine) -> None:
    """Penalties read the last token, which the host does not know yet."""

    def requests() -> list[Any]:
        return [
            in_process.request(f"r{i}", prompt, 24, temperature=0.9 * (i % 3), seed=40 + i, repetition_penalty=1.5,
                               frequency_penalty=2.0 * (i % 2), top_k=30, logprobs=i % 3 + i % 2)
            for i, prompt in enumerate(reference.prompts)
        ]  # fmt: skip

    calm = make_engine(reference.path, host_blocks=16)
    assert engine.overlaps and not calm.overlaps
    waits, _ = in_process.run(calm, requests(), "orcinus", lookahead=1)
    late, _ = in_process.run(engine, requests(), "orcinus", lookahead=1)
    assert late.tokens == waits.tokens
    for i in range(len(reference.prompts)):
        wanted = i % 3 + i % 2  # not all ask, and for different numbers
        told, expected = (unpack_records(one.logprobs.get((f"r{i}", 0), b""), wanted) for one in (late, waits))
        assert len(told) == len(expected) == 24 * (wanted > 0)
        assert [one.sampled_logprob for one in told] == pytest.approx(
            [one.sampled_logprob for one in expected], abs=1e-4
        )
        assert [best for one in told for best, _ in one.best] == [best for one in expected for best, _ in one.best]
    assert [late.tokens[f"r{i}", 0] for i in range(4)] != reference.outputs


def test_token_is_named_by_its_slot_until_it_comes() -> None:
    table = SlotTable(max_seqs=3, max_model_len=16, block_size=4, blocks=8, host_blocks=0, vocab=VOCAB)
    table.known[:], table.active[:] = 5, True
    slots = np.array([2, 0], np.int32)
    places = table.known[slots]
    table.expect(slots, places)
    assert table.known.tolist() == [6, 5, 6]
    assert table.tokens[:, 5].tolist() == [~0, 0, ~2]
    table.record(slots, places, np.array([71, 72], np.int32))
    assert table.tokens[:, 5].tolist() == [72, 0, 71]
    before, unused = table.departures, cast(Any, None)
    table.apply(worker_pb2.Step(free_slots=pack([2])), unused)
    assert table.departures > before and table.generation.tolist() == [0, 0, 1]


def test_slot_reused_before_its_last_token_keeps_the_new_sequence(engine: Engine, reference: Reference) -> None:
    old, new = reference.prompts[0][:12], reference.prompts[1]
    ahead = Ahead(engine)
    ahead.finish(ahead.submit({0: (0, 12)}, enters=[entering(0, old)]))
    last = ahead.submit({0: (12, 1)})
    # Place 13 of the slot belonged to the token of `last`; it holds a token of the new prompt now.
    assert len(new) > 14
    in_flight = [ahead.submit({0: (0, 4)}, free_slots=pack([0]), enters=[entering(0, new)])]
    told = ahead.finish(last)
    assert unpack(told.slots).tolist() == [0]
    assert engine.slots.tokens[0, : len(new)].tolist() == new
    assert ahead.finish(in_flight[0]).slots == b""
    ahead.outputs.clear()
    in_flight = [ahead.submit({0: (4, len(new) - 4)})]
    for place in range(len(new), len(new) + 10):
        in_flight.append(ahead.submit({0: (place, 1)}))
        ahead.finish(in_flight.pop(0))
    ahead.finish(in_flight.pop())
    assert ahead.outputs[0] == reference.outputs[1][:11]


@pytest.fixture
def poison(engine: Engine, reference: Reference) -> Iterator[int]:
    """A token after which the model gives NaN."""
    embedding = engine.decoder.embed_tokens.weight
    used = {token for tokens in reference.prompts + reference.outputs for token in tokens}
    token = next(t for t in range(VOCAB) if t not in used)
    kept = embedding[token].clone()
    embedding[token] = float("nan")
    yield token
    embedding[token] = kept


def test_failed_sequence_fails_in_the_next_step_too(engine: Engine, reference: Reference, poison: int) -> None:
    good, other = reference.prompts[0], reference.prompts[1]
    ahead = Ahead(engine)
    size = len(good)
    first = ahead.submit({0: (0, size), 1: (0, 3)}, enters=[entering(0, good), entering(1, [1, 2, poison])])
    second = ahead.submit({1: (3, 1), 0: (size, 1)})
    for inflight in (first, second):
        result = ahead.finish(inflight)
        assert [(error.slot, error.code) for error in result.errors] == [(1, "nan_logits")]
        assert unpack(result.slots).tolist() == [0]
    third = ahead.submit({1: (4, 1), 0: (size + 1, 1)})  # on its way before the scheduler read of the error
    fourth = ahead.submit({1: (0, len(other)), 0: (size + 2, 1)}, free_slots=pack([1]), enters=[entering(1, other)])
    assert [error.slot for error in ahead.finish(third).errors] == [1]
    assert not ahead.finish(fourth).errors
    assert ahead.outputs == {0: reference.outputs[0][:4], 1: reference.outputs[1][:1]}


@pytest.mark.parametrize(
    ("sampling", "code"),
    [
        # The ban is for one token: the second draw would be fine.
        (worker_pb2.Sampling(stop_ids=pack(range(VOCAB)), min_tokens=1), "nothing_allowed"),
        (worker_pb2.Sampling(grammar="none at all"), "grammar"),
    ],
)
def test_failed_draw_is_reported_again_by_the_step_in_flight(
    engine: Engine, reference: Reference, sampling: worker_pb2.Sampling, code: str
) -> None:
    prompt = reference.prompts[0]
    size, ahead = len(prompt), Ahead(engine)
    enters = [entering(1, prompt, sampling=sampling), entering(0, prompt)]
    in_flight = [ahead.submit({1: (0, size), 0: (0, size)}, enters=enters), ahead.submit({0: (size, 1), 1: (size, 1)})]
    for inflight in in_flight:
        result = ahead.finish(inflight)
        assert [(error.slot, error.code) for error in result.errors] == [(1, code)]
    assert ahead.outputs == {0: reference.outputs[0][:2]}


def test_late_failure_does_not_touch_the_slots_new_sequence(engine: Engine, reference: Reference, poison: int) -> None:
    ahead = Ahead(engine)
    first = ahead.submit({1: (0, 3)}, enters=[entering(1, [1, 2, poison])])
    new = reference.prompts[1]
    second = ahead.submit({1: (0, len(new))}, free_slots=pack([1]), enters=[entering(1, new)])
    assert [(error.slot, error.code) for error in ahead.finish(first).errors] == [(1, "nan_logits")]
    assert not ahead.finish(second).errors
    third = ahead.submit({1: (len(new), 1)})
    assert not ahead.finish(third).errors
    assert ahead.outputs == {1: reference.outputs[1][:2]}


def test_a_reset_with_steps_in_flight_leaves_nothing_of_them(engine: Engine, reference: Reference) -> None:
    old, new = reference.prompts[0][:12], reference.prompts[1]
    ahead = Ahead(engine)
    copies = {"swap_out_gpu": pack([90]), "swap_out_host": pack([3]), "swap_in_host": pack([3])}
    in_flight = [
        ahead.submit({0: (0, 12)}, enters=[entering(0, old)], **copies, swap_in_gpu=pack([1])),
        ahead.submit({0: (12, 1)}),
    ]
    after = Ahead(engine)  # resets
    begun = after.submit({0: (0, len(new))}, enters=[entering(0, new)])
    block = engine.read_block(1)
    assert block.any()
    for inflight in in_flight:  # as the server does: they are waited for and not read
        ahead.finish(inflight)
    assert engine.slots.tokens[0, : len(new)].tolist() == new
    assert after.finish(begun).swap_out_acks == b"", "these are of another Run"
    assert torch.equal(engine.read_block(1), block), "a copy of the Run before went on"
    for place in range(len(new), len(new) + 5):
        after.finish(after.submit({0: (place, 1)}))
    assert after.outputs[0] == reference.outputs[1][:6]


def test_copies_are_acknowledged_once_in_order_when_complete(engine: Engine, reference: Reference) -> None:
    prompt = reference.prompts[0]
    ahead = Ahead(engine)
    ahead.finish(ahead.submit({0: (0, len(prompt))}, enters=[entering(0, prompt)]))
    acks: list[tuple[list[int], list[int], int]] = []

    def note(result: worker_pb2.Result) -> None:
        timings = result.timings
        acks.append((unpack(result.swap_out_acks).tolist(), unpack(result.swap_in_acks).tolist(), timings.swap_ns))

    out = ahead.submit({0: (len(prompt), 1)}, swap_out_gpu=pack([1, 0]), swap_out_host=pack([5, 6]))
    in_ = ahead.submit({}, swap_in_host=pack([5]), swap_in_gpu=pack([80]))
    engine.cache.copies[0].patience = 1
    note(ahead.finish(out, more=True))
    last = ahead.submit({0: (len(prompt) + 1, 1)})
    note(ahead.finish(in_, more=False))
    note(ahead.finish(last))
    assert acks == [([], [], 0), ([1, 0], [5], 2000), ([], [], 0)]
    same = engine.read_block(80), engine.read_block(1)
    assert torch.equal(*same) and same[0].any()


def test_step_that_only_copies_waits_when_nothing_follows(engine: Engine) -> None:
    ahead = Ahead(engine)
    for host in range(6):  # whatever the patience of the copy
        inflight = ahead.submit({}, swap_out_gpu=pack([host]), swap_out_host=pack([host]))
        assert unpack(ahead.finish(inflight).swap_out_acks).tolist() == [host]


def test_timings_are_the_devices_and_idle_is_between_flights(
    engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0

    def later(ns: int) -> int:
        nonlocal clock
        clock += ns
        return clock

    prepare = engine.ops.prepare
    monkeypatch.setattr(engine.ops, "mark", lambda: later(1))
    monkeypatch.setattr(engine.ops, "prepare", lambda *given: (later(100), prepare(*given))[1])
    monkeypatch.setattr(engine, "compiled", lambda given, run=engine.compiled: (later(30), run(given))[1])
    sample = engine.ops.sample_later
    monkeypatch.setattr(engine.ops, "sample_later", lambda *given: (later(9), sample(*given))[1])
    prompt = reference.prompts[0]
    ahead = Ahead(engine)
    in_flight = [ahead.submit({0: (0, len(prompt))}, enters=[entering(0, prompt)]), ahead.submit({0: (len(prompt), 1)})]
    results = [ahead.finish(in_flight[0])]
    in_flight.append(ahead.submit({0: (len(prompt) + 1, 1)}))
    results += [ahead.finish(inflight) for inflight in in_flight[1:]]
    names = ("idle_ns", "forward_ns", "sample_ns", "total_ns")
    found = [tuple(getattr(result.timings, name) for name in names) for result in results]
    assert found == [(0, 31, 10, 41)] + [(102, 31, 10, 41)] * 2, "what the host prepares is no step of the device's"
