"""The planner against brute force: what each row must see is covered exactly once, by kernels that can be launched."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest

from kernels.cuda import calls, residency
from kernels.cuda.calls import ITEM, SLAB, tokens_per_item
from kernels.cuda.planner import (
    DECODE_SPLIT_SLABS,
    PREFILL_SPLIT_SLABS,
    SPLIT_STEP,
    Plan,
    Planner,
    Room,
    Seats,
)
from kernels.ops import Int32

HEAD_DIM = 128


def lengths_of(seed: int, sequences: int, longest: int, decode_share: float) -> tuple[Int32, Int32]:
    """Random (query_start, context)."""
    rng = np.random.default_rng(seed)
    context = (longest ** rng.random(sequences)).astype(np.int32) + 1
    rows = np.where(rng.random(sequences) < decode_share, 1, rng.integers(1, context + 1))
    return np.concatenate([[0], np.cumsum(rows)]).astype(np.int32), context


def items_of(plan: Plan) -> list[tuple[str, dict[str, int]]]:
    found = []
    for kernel, numbers in (("decode", plan.decode), ("prefill", plan.prefill)):
        items: Any = np.ascontiguousarray(numbers).view(ITEM)[:, 0]
        found += [(kernel, {name: int(item[name]) for name in ITEM.names[:6]}) for item in items]
    return found


def planner(processors: int, *shape: int) -> Planner:
    """As on an H100, of a number of multiprocessors."""
    return Planner(Seats(3 * processors, 2 * processors), *shape)


CASES = [
    # processors, KV heads, group, window, sequences, longest context, share of sequences with one row
    (4, 2, 4, 0, 9, 900, 0.5),
    (4, 2, 4, 0, 7, 2500, 0.0),
    (132, 1, 4, 0, 2, 3000, 0.0),
    (132, 8, 4, 0, 5, 6000, 1.0),
    (132, 8, 4, 0, 40, 9000, 0.9),
    (132, 1, 32, 0, 3, 9000, 0.6),
    (8, 8, 1, 0, 6, 3000, 0.5),
    (4, 2, 4, 700, 9, 3000, 0.6),
    (4, 1, 7, 33, 9, 900, 0.5),
    (132, 2, 2, 1, 5, 500, 0.5),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_row_sees_what_it_must_exactly_once(case: tuple[int, ...], seed: int) -> None:
    processors, kv_heads, group, window, sequences, longest, share = case
    query_start, context = lengths_of(seed, sequences, longest, share)
    plan = planner(processors, kv_heads, group, HEAD_DIM, window).plan(query_start, context)
    tile = tokens_per_item(HEAD_DIM, group)
    covered: dict[int, Counter[int]] = {row: Counter() for row in range(query_start[-1])}
    partial_rows: dict[int, list[int]] = {}
    for kernel, item in items_of(plan):
        rows = np.arange(query_start[item["sequence"]], query_start[item["sequence"] + 1])
        assert (kernel == "decode") == (len(rows) == 1)
        assert item["first_token"] % tile == 0
        for i, row in enumerate(rows[item["first_token"] :][:tile].tolist()):
            covered[row].update(range(item["first_slab"], item["end_slab"]))
            if item["partial"] >= 0:
                partial_rows.setdefault(row, []).append(item["partial"] + i * item["splits"])
            else:
                assert item["splits"] == 1
    for sequence, end in enumerate(context.tolist()):
        rows = np.arange(query_start[sequence], query_start[sequence + 1]).tolist()
        for tokens in (rows[first : first + tile] for first in range(0, len(rows), tile)):
            positions = [end - (rows[-1] + 1 - token) for token in tokens]
            first = max(0, positions[0] - window + 1) // SLAB if window else 0
            wanted = {slab: 1 for slab in range(first, positions[-1] // SLAB + 1)}
            assert all(covered[token] == wanted for token in tokens)
    merged = {
        int(row): list(range(start, stop))
        for row, start, stop in zip(plan.rows, plan.starts[:-1], plan.starts[1:], strict=True)
    }
    assert {row: sorted(found) for row, found in partial_rows.items()} == merged
    assert sorted(chain.from_iterable(merged.values())) == list(range(plan.partial_rows))


def test_some_cases_split_and_some_do_not() -> None:
    every = ((case, seed) for case in CASES for seed in (0, 1, 2))
    plans = [planner(*case[:3], HEAD_DIM, case[3]).plan(*lengths_of(seed, *case[4:])) for case, seed in every]
    assert any(len(plan.rows) for plan in plans) and any(not len(plan.rows) for plan in plans)
    assert any(items["splits"] > 1 for plan in plans for kernel, items in items_of(plan) if kernel == "prefill")


@pytest.mark.parametrize("sequences", [1, 2, 8, 100, 256])
@pytest.mark.parametrize(("processors", "kv_heads", "group"), [(4, 2, 4), (132, 8, 4), (132, 1, 16), (132, 32, 1)])
def test_no_decode_needs_more_than_the_bounds(sequences: int, processors: int, kv_heads: int, group: int) -> None:
    made = planner(processors, kv_heads, group, HEAD_DIM)
    bounds = made.bounds(Room(sequences, sequences, 0))
    most = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        longest = int(rng.integers(1, 1 << rng.integers(1, 18)))
        count = sequences if seed % 2 else int(rng.integers(1, sequences + 1))
        context = rng.integers(1, longest + 1, count).astype(np.int32)
        if seed % 3 == 0:  # a few as long as it takes, the others short
            context[count // 8 :] = 1
        plan = made.plan(np.arange(count + 1, dtype=np.int32), context)
        most = max(most, len(plan.decode))
        assert len(plan.decode) <= bounds.decode
        assert len(plan.rows) <= bounds.merged
        assert plan.partial_rows <= bounds.partial_rows
    assert most > bounds.decode / 3 or kv_heads != 8, "the bounds are far from what happens"


@pytest.mark.parametrize("decodes", [0, 1, 20])
@pytest.mark.parametrize("chunks", [[2], [31], [64], [500], [2] * 9, [40, 3, 300]])
def test_no_iteration_has_more_work_than_its_room_allows(chunks: list[int], decodes: int) -> None:
    made = planner(132, 8, 4, HEAD_DIM)
    query_start = np.cumsum([0, *chunks, *[1] * decodes]).astype(np.int32)
    context = np.array([*[40_000] * len(chunks), *[50_000] * decodes], np.int32)
    bounds = made.bounds(Room(int(query_start[-1]), decodes, len(chunks)))
    plan = made.plan(query_start, context)
    assert len(plan.decode) <= bounds.decode and len(plan.prefill) <= bounds.prefill
    assert len(plan.rows) <= bounds.merged and plan.partial_rows <= bounds.partial_rows
    assert decodes or len(chunks) > 1 or plan.partial_rows > bounds.partial_rows / 4, "far from what happens"


@pytest.mark.parametrize("longest", [700, 2000, 30_000])
@pytest.mark.parametrize("seed", range(5))
def test_splits_are_256_tokens_or_more_and_longest_items_first(longest: int, seed: int) -> None:
    plan = planner(132, 4, 8, HEAD_DIM).plan(*lengths_of(seed, 40, longest, 0.6))
    for numbers in (plan.decode, plan.prefill):
        slabs = np.diff(np.ascontiguousarray(numbers)[:, 2:4])[:, 0]
        assert (np.diff(slabs) <= 0).all()
    sizes: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for kernel, item in items_of(plan):
        key = (kernel, item["sequence"], item["first_token"])
        sizes.setdefault(key, []).append((item["first_slab"], item["end_slab"] - item["first_slab"]))
    split = [sorted(found) for found in sizes.values() if len(found) > 1]
    assert split
    for found in split:
        for _, slabs in found[:-1]:
            assert slabs * SLAB >= 256 and slabs * SLAB % 64 == 0


def test_long_sequence_is_split_among_the_whole_device() -> None:
    made = planner(132, 8, 4, HEAD_DIM)
    alone = made.plan(np.arange(2, dtype=np.int32), np.array([32_768], np.int32))
    assert len(alone.decode) * 8 >= 2 * 132
    crowd = made.plan(np.arange(257, dtype=np.int32), np.full(256, 1024, np.int32))
    assert len(crowd.decode) == 256 and not len(crowd.rows)


def test_heads_of_a_wide_group_count_as_work() -> None:
    lengths = (np.arange(2, dtype=np.int32), np.array([100_000], np.int32))
    narrow, wide = (len(planner(132, 8, group, HEAD_DIM).plan(*lengths).decode) for group in (16, 32))
    assert wide < narrow


def test_the_same_lengths_give_the_same_plan_in_any_planner() -> None:
    lengths = lengths_of(5, 50, 20_000, 0.7)
    first, second = (planner(132, 8, 4, HEAD_DIM).plan(*lengths) for _ in range(2))
    for name in ("decode", "prefill", "starts", "rows"):
        assert np.array_equal(getattr(first, name), getattr(second, name))


def test_padding_row_is_no_work() -> None:
    plan = planner(4, 2, 4, HEAD_DIM).plan(np.zeros(1, np.int32), np.zeros(0, np.int32))
    assert not len(plan.decode) and not len(plan.prefill) and not len(plan.rows)
    assert plan.starts.tolist() == [0] and plan.partial_rows == 0


@pytest.mark.parametrize(("sequences", "context"), [(1, 20_000), (2, 9000), (8, 4096), (8, 32_768), (30, 7000)])
def test_few_long_sequences_are_cut_into_a_whole_wave_at_most(sequences: int, context: int) -> None:
    lengths = np.arange(sequences + 1, dtype=np.int32), np.full(sequences, context, np.int32)
    blocks = len(planner(132, 8, 4, HEAD_DIM).plan(*lengths).decode) * 8
    assert 0.55 * 396 < blocks <= 396


CARDS = {
    "A100": ("sm_80", 108),
    "RTX 3090": ("sm_86", 82),
    "L4": ("sm_89", 58),
    "RTX 4090": ("sm_89", 128),
    "H100": ("sm_90", 132),
    "B200": ("sm_100", 148),
    "RTX 5090": ("sm_120", 170),
}


def planner_of(card: str, kv_heads: int, group: int, head_dim: int) -> tuple[Planner, Seats]:
    """As the backend makes it of registers.json and shared memory."""
    arch, processors = CARDS[card]
    blocks = calls.decode_block(calls.BF16, head_dim), calls.prefill_block(calls.BF16, head_dim, arch == "sm_90")
    seats = Seats(*(processors * residency.resident_of(arch, *block) for block in blocks))
    return Planner(seats, kv_heads, group, head_dim), seats


def chunk_and_decodes(tokens: int, context: int, decodes: int) -> tuple[Int32, Int32]:
    """(query_start, context) of a chunk at the end of so much context, and of sequences with as much."""
    query_start = np.cumsum([0, *([tokens] if tokens else []), *[1] * decodes]).astype(np.int32)
    return query_start, np.full(decodes + bool(tokens), context, np.int32)


@pytest.mark.parametrize("head_dim", calls.HEAD_DIMS)
@pytest.mark.parametrize("card", CARDS)
def test_tiles_that_fit_into_one_wave_stay_one_wave(card: str, head_dim: int) -> None:
    """Of decode, of a chunk and of both in one iteration; it ends no later than with whole tiles."""
    made, seats = planner_of(card, 8, 4, head_dim)
    tile = tokens_per_item(head_dim, 4)
    most = Seats(seats.decode // 8, seats.prefill // 8)  # items
    split = 0
    for context in (700, 5000, 32_768, 131_072):
        for tiles in {0, 1, 2, most.prefill // 2, most.prefill - 1, most.prefill}:
            for decodes in {0, 1, 3, most.decode // 2, most.decode - 1, most.decode}:
                plan = made.plan(*chunk_and_decodes(min(tiles * tile - tile // 2, context), context, decodes))
                assert len(plan.decode) <= most.decode and len(plan.prefill) <= most.prefill
                split += len(plan.rows) > 0
    assert split or min(most) < 4


def ends_after(work: Any, seats: int) -> int:
    """Slabs until the last of the items is done, each begun, the longest first, where a seat is free."""
    free = [0] * seats
    for slabs in sorted(work.tolist(), reverse=True):
        heapq.heapreplace(free, free[0] + slabs)
    return max(free)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("seed", range(8))
def test_cutting_never_ends_later_and_not_after_twice_the_mean(card: str, seed: int) -> None:
    """Sequences of any lengths, a long one beside short ones too. Seats count as those of one KV head."""
    made, seats = planner_of(card, 8, 4, HEAD_DIM)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        chunks, decodes = int(rng.integers(0, 4)), int(rng.integers(0, 2 * seats.decode // 8))
        context = (50_000 ** rng.random(chunks + decodes)).astype(np.int32) + 1
        lengths = np.minimum(context, np.where(np.arange(len(context)) < chunks, rng.integers(2, 900), 1))
        query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tiles = Planner(Seats(8, 8), 8, 4, HEAD_DIM).plan(query_start, context)  # one seat: nothing is cut
        assert not len(tiles.rows)
        plan = made.plan(query_start, context)
        for items, whole, count, least in (
            (plan.decode, tiles.decode, seats.decode // 8, DECODE_SPLIT_SLABS),
            (plan.prefill, tiles.prefill, seats.prefill // 8, PREFILL_SPLIT_SLABS),
        ):
            cut, uncut = items[:, 3] - items[:, 2], whole[:, 3] - whole[:, 2]
            assert cut.sum() == uncut.sum()
            mean = -(-int(uncut.sum()) // count)
            ends = ends_after(cut, count)
            assert ends <= ends_after(uncut, count)
            assert len(uncut) > count or ends <= 2 * max(least, mean + SPLIT_STEP)


def test_a_wave_of_almost_equal_tiles_is_not_cut() -> None:
    plan = Planner(Seats(58, 58), 8, 4, HEAD_DIM).plan(np.array([0, 200], np.int32), np.array([32_768], np.int32))
    assert len(plan.prefill) == 7 and not len(plan.rows)


def test_one_long_sequence_beside_short_ones_is_cut_beyond_a_wave() -> None:
    """In one wave it would have the seats that are left: one, for 30 times the work of any other."""
    context = np.full(48, 1000, np.int32)
    context[5] = 30_000
    plan = planner(132, 8, 4, HEAD_DIM).plan(np.arange(49, dtype=np.int32), context)
    assert (np.diff(plan.decode[:, 2:4])[:, 0] * SLAB).max() < 2000
