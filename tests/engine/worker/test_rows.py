"""The rows of an iteration: their sampling, the order of their masks, and the metrics that sum them up."""

from __future__ import annotations

import numpy as np
import pytest

from protos import worker_pb2
from services.worker.grammar import Question, Turns
from services.worker.metrics import Metrics
from services.worker.sampling import SamplingTable
from services.worker.slots import Chunks
from shared.text.grammar_process import NO_TOKENS
from shared.wire.columns import pack


def rows_of(table: SamplingTable, known: int) -> tuple[float, int, bool, bool]:
    """Return temperature, position and whether slot 1 has bans and a history, in an iteration of slots 0 and 1."""
    slots, prompt = np.array([0, 1], np.int32), np.array([3, 3], np.int32)
    rows = table.rows(slots, np.array([known, known], np.int32), prompt, np.zeros((2, 64), np.int32))
    return float(rows.temperature[1]), int(rows.position[1]), rows.banned is not None, rows.history is not None


def test_rows_follow_the_sequence_that_enters_a_slot() -> None:
    table = SamplingTable(2, vocab=100)
    for slot in (0, 1):
        assert not table.enter(slot, worker_pb2.Sampling(temperature=0.5, top_p=1.0))
    assert [rows_of(table, known) for known in (5, 6)] == [(0.5, 5, False, False), (0.5, 6, False, False)]
    table.enter(1, worker_pb2.Sampling(temperature=2.0, top_p=1.0))
    assert [rows_of(table, known) for known in (7, 8)] == [(2.0, 7, False, False), (2.0, 8, False, False)]


def test_rows_of_min_tokens_lose_their_bans() -> None:
    table = SamplingTable(2, vocab=100)
    stop_ids = np.array([9], np.int32).tobytes()
    table.enter(0, worker_pb2.Sampling(top_p=1.0))
    table.enter(1, worker_pb2.Sampling(top_p=1.0, stop_ids=stop_ids, min_tokens=3))
    assert [rows_of(table, known)[2] for known in (4, 5, 6)] == [True, True, False]


def test_rows_with_penalties_see_new_tokens() -> None:
    table = SamplingTable(2, vocab=100)
    table.enter(0, worker_pb2.Sampling(top_p=1.0))
    table.enter(1, worker_pb2.Sampling(top_p=1.0, presence_penalty=1.0))
    slots, prompt = np.array([0, 1], np.int32), np.array([3, 3], np.int32)
    tokens = np.zeros((2, 64), np.int32)
    histories = [table.rows(slots, np.array([n, n], np.int32), prompt, tokens).history for n in (5, 6)]
    assert [None if history is None else len(history.ids) for history in histories] == [5, 6]


def test_rows_with_a_mask_are_not_kept() -> None:
    table = SamplingTable(2, vocab=64)
    for slot in (0, 1):
        table.enter(slot, worker_pb2.Sampling(top_p=1.0))
    slots = np.array([0, 1], np.int32)
    arguments = slots, slots + 5, slots + 3, np.zeros((2, 64), np.int32)
    for masks in (None, {1: b"\1" * 8}, None, {0: b"\2" * 8}):
        mask_rows = table.rows(*arguments, masks).mask_rows
        assert (None if mask_rows is None else mask_rows.tolist()) == (list(masks) if masks else None)


def test_rows_follow_the_order_of_the_slots() -> None:
    table = SamplingTable(3, vocab=64)
    for slot, temperature in enumerate((0.5, 1.0, 2.0)):
        table.enter(slot, worker_pb2.Sampling(temperature=temperature, top_p=1.0))
    for order in ([0, 1, 2], [2, 0, 1], [2, 0], [1], [0, 1, 2]):
        slots = np.array(order, np.int32)
        rows = table.rows(slots, slots + 5, slots + 3, np.zeros((3, 64), np.int32))
        assert rows.temperature.tolist() == [(0.5, 1.0, 2.0)[slot] for slot in order]
        assert rows.position.tolist() == [slot + 5 for slot in order]


def test_rows_after_clear_are_those_of_the_columns() -> None:
    table = SamplingTable(2, vocab=100)
    for slot in (0, 1):
        table.enter(slot, worker_pb2.Sampling(temperature=0.5, top_p=1.0))
    assert rows_of(table, 5)[0] == 0.5
    table.clear()
    table.temperature[1] = 2.0
    assert rows_of(table, 5)[0] == 2.0


def test_rows_keep_the_log_probabilities_of_their_slots() -> None:
    table = SamplingTable(2, vocab=100)
    table.enter(0, worker_pb2.Sampling(top_p=1.0))
    table.enter(1, worker_pb2.Sampling(top_p=1.0, logprobs=3))
    slots = np.array([0, 1], np.int32)
    for known in (5, 6):
        rows = table.rows(slots, slots + known, slots + 3, np.zeros((2, 64), np.int32))
        assert rows.want_logprob.tolist() == [False, True] and rows.position.tolist() == [known, known + 1]
        assert rows.likely is not None and rows.likely.tolist() == [0, 2]
    table.enter(1, worker_pb2.Sampling(top_p=1.0))
    rows = table.rows(slots, slots + 7, slots + 3, np.zeros((2, 64), np.int32))
    assert rows.likely is None and not rows.want_logprob.any()


def put(turns: Turns, *which: tuple[int, int]) -> list[Question]:
    """Add questions of (tenant, key)."""
    questions = []
    for tenant, key in which:
        questions.append(Question(tenant, key, "", NO_TOKENS))
        turns.put(questions[-1])
    return questions


def order(turns: Turns) -> list[int]:
    keys = []
    while (question := turns.take()) is not None:
        keys.append(question.key)
    return keys


def test_tenants_take_turns_and_sequences_go_by_arrival() -> None:
    turns = Turns()
    put(turns, (7, 1), (7, 2), (7, 3), (7, 4), (3, 5), (9, 6), (3, 7))
    assert order(turns) == [1, 5, 6, 2, 7, 3, 4]


def test_tenant_waits_for_one_question_of_each_other_tenant() -> None:
    """Also when those have more all the time."""
    turns = Turns()
    put(turns, *((1, key) for key in range(100)), *((2, key) for key in range(100, 200)))
    for key in range(500, 520):
        put(turns, (3, key))
        taken = []
        while key not in taken and (question := turns.take()) is not None:
            taken.append(question.key)
            if question.tenant != 3:
                put(turns, (question.tenant, question.key))
        assert len(taken) <= 3


def test_cancelled_question_takes_no_turn() -> None:
    turns = Turns()
    first, second, _, _ = put(turns, (1, 1), (1, 2), (2, 3), (1, 4))
    assert first.masks.cancel() and second.masks.cancel()
    assert order(turns) == [4, 3]
    gone = put(turns, (5, 6))[0]
    assert gone.masks.cancel()
    assert turns.take() is None


def test_taken_question_cannot_be_cancelled() -> None:
    turns = Turns()
    put(turns, (1, 1))
    question = turns.take()
    assert question is not None and not question.masks.cancel()


def test_worker_metrics_add_up_what_steps_took_and_ran() -> None:
    metrics = Metrics()
    metrics.answering(lambda: 17)
    timings = worker_pb2.Timings(
        queued_ns=1_000_000, idle_ns=2_000_000, forward_ns=30_000_000, sample_ns=4_000_000, total_ns=35_000_000
    )
    result = worker_pb2.Result(slots=pack([0, 2]), tokens=pack([9, 9]), timings=timings, swap_out_acks=pack([5, 6, 7]))
    result.late_slots = pack([1])
    lengths = np.array([1, 40, 1], np.int32)
    slots = np.arange(3, dtype=np.int32)
    chunks = Chunks(slots=slots, starts=slots, lengths=lengths, samples=np.array([True, False, True]), late=slots[:0])
    for _ in range(2):
        metrics.step(result, chunks)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"orcinus_worker_{name}", labels)

    assert value("busy_seconds_total") == pytest.approx(0.068)
    assert value("step_phase_seconds_sum", phase="forward") == pytest.approx(0.06)
    assert value("step_phase_seconds_count", phase="idle") == 2
    assert (value("computed_tokens_total", phase="decode"), value("computed_tokens_total", phase="prefill")) == (4, 80)
    assert (value("sampled_tokens_total"), value("step_sequences"), value("last_step")) == (4, 3, 17)
    assert value("late_rows_total") == 2
    assert (value("copied_blocks_total", to="host"), value("copied_blocks_total", to="device")) == (6, 0)
