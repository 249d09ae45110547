"""The rows of an iteration have the sampling of the sequences that its slots hold then."""

from __future__ import annotations

import numpy as np

from protos import worker_pb2
from services.worker.sampling import SamplingTable


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
    found = [table.rows(slots, np.array([n, n], np.int32), prompt, np.zeros((2, 64), np.int32)).history for n in (5, 6)]
    assert [None if history is None else len(history.ids) for history in found] == [5, 6]


def test_rows_with_a_mask_are_not_kept() -> None:
    table = SamplingTable(2, vocab=64)
    for slot in (0, 1):
        table.enter(slot, worker_pb2.Sampling(top_p=1.0))
    slots = np.array([0, 1], np.int32)
    arguments = slots, slots + 5, slots + 3, np.zeros((2, 64), np.int32)
    for masks in (None, {1: b"\1" * 8}, None, {0: b"\2" * 8}):
        found = table.rows(*arguments, masks).mask_rows
        assert (None if found is None else found.tolist()) == (list(masks) if masks else None)
