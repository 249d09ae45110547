"""What followed the last tokens where they stood before, compared with a search by brute force."""

from __future__ import annotations

import random

import numpy as np
import pytest

from services.scheduler.core.ngrams import (
    FOLLOWS,
    GAP,
    MARGIN,
    MAX_MATCH,
    MAX_PLACES,
    MIN_MATCH,
    NgramIndex,
    room_for_texts,
)
from services.scheduler.core.types import Int32

SEED = 20261125
WIDTH = 200


def tails(texts: list[list[int]]) -> Int32:
    """The last tokens of texts, the last first."""
    found = np.full((len(texts), MAX_MATCH), GAP, np.int32)
    for row, text in enumerate(texts):
        last = text[::-1][:MAX_MATCH]
        found[row, : len(last)] = last
    return found


def places_by_hand(text: list[int], tail: list[int]) -> dict[int, int]:
    """Where the tail stands in a text with something behind it, and how many tokens match, by brute force."""
    places = {}
    for at in range(len(text) - 1):
        length = 0
        while length < min(at + 1, len(tail), MAX_MATCH) and text[at - length] == tail[-1 - length]:
            length += 1
        if length >= MIN_MATCH:
            places[at] = length
    return places


@pytest.mark.parametrize("seed", range(24))
def test_places_of_texts_that_grow_are_those_of_brute_force(seed: int) -> None:
    rng = random.Random(SEED + seed)
    count, kinds = 5, rng.choice([2, 3, 30])
    tokens = room_for_texts(count, WIDTH)
    index, texts = NgramIndex(tokens, count, WIDTH), [[rng.randrange(kinds)] for _ in range(count)]
    while max(map(len, texts)) < WIDTH - 40:
        for row, text in enumerate(texts):
            text += [rng.randrange(kinds) for _ in range(rng.choice([0, 1, 2, 5, 38]))]
            tokens[MARGIN + row * WIDTH : MARGIN + row * WIDTH + len(text)] = text
        rows = np.array(sorted(rng.sample(range(count), rng.randrange(1, count + 1))))
        asked = [texts[row] for row in rows.tolist()]
        sizes = np.array([len(text) for text in asked])
        index.extend(rows, sizes - 1)
        assert np.array_equal(index.tails(rows, sizes), tails(asked))
        found = index.find(rows, tails(asked))
        follows, shares, counts = index.follow(found, sizes[found.rows], repeats=True)
        assert (counts == FOLLOWS).all()
        by_row = {row: number for number, row in enumerate(found.rows.tolist())}
        for row, text in enumerate(asked):
            places = places_by_hand(text, text)
            if kinds == 30 or not places:  # with few kinds of tokens there are more places than are kept
                assert (row in by_row) == bool(places)
            if row not in by_row:
                continue
            number = by_row[row]
            known = {
                end - 1: length
                for end, length in zip(found.ends[:, number].tolist(), found.lengths[:, number].tolist(), strict=True)
                if length >= MIN_MATCH
            }
            assert known.items() <= places.items()
            assert len(known) == len(places) or kinds < 30
            assert found.longest[number] == max(known.values())
            votes = [at for at, length in known.items() if 2 * length >= max(known.values())]
            paths = [[text[at + 1 + ahead % (len(text) - 1 - at)] for ahead in range(FOLLOWS)] for at in votes]
            path = follows[number].tolist()
            assert path in paths
            for ahead in range(FOLLOWS):
                share = sum(other[: ahead + 1] == path[: ahead + 1] for other in paths) / len(paths)
                assert np.exp(shares[number, ahead]) == pytest.approx(share)


def one_text(*tokens: int) -> tuple[NgramIndex, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """An index of one text and its size."""
    text = room_for_texts(1, WIDTH)
    text[MARGIN : MARGIN + len(tokens)] = tokens
    index, sizes = NgramIndex(text, 1, WIDTH), np.array([len(tokens)])
    index.extend(np.array([0]), sizes - 1)
    return index, sizes


def follow(index: NgramIndex, sizes: np.ndarray[tuple[int], np.dtype[np.int64]], *tail: int) -> list[int]:
    """What followed, as far as any place agrees."""
    found = index.find(np.array([0]), tails([list(tail)]))
    assert found.rows.size == 1
    follows, shares, counts = index.follow(found, sizes, repeats=False)
    assert (shares[0] > -np.inf).sum() == counts[0]
    behind: list[int] = follows[0, : counts[0]].tolist()
    return behind


@pytest.mark.parametrize(
    ("text", "tail", "found"),
    [
        ((1, 2, 3, 4, 5, GAP, 7, 8, 9, 10, GAP), (1, 2, 3), [4, 5]),
        ((1, 2, 3, 5, GAP, 1, 2, 3, 6, GAP, 1, 2, 3, 6, GAP, 1, 2, 3, 7, GAP), (1, 2, 3), [6]),
        ((1, 2, 3, 5, GAP, 1, 2, 3, 7, GAP), (1, 2, 3), [7]),
        ((9, 2, 3, 4, 5, GAP, 8, 2, 3, 4, 5, GAP, 6, 5, 6, 7, 1, 2, 3, 4, 50, GAP), (6, 5, 6, 7, 1, 2, 3, 4), [50]),
    ],
    ids=["up to the gap", "the most frequent", "of equal ones the latest", "no match of less than half"],
)
def test_what_followed_is_that_of_the_best_places(
    text: tuple[int, ...], tail: tuple[int, ...], found: list[int]
) -> None:
    assert follow(*one_text(*text), *tail) == found


def test_only_the_latest_places_are_kept() -> None:
    text = [token for last in range(20, 40) for token in (1, 2, 3, last, GAP)]
    index, _ = one_text(*text)
    found = index.find(np.array([0]), tails([[1, 2, 3]]))
    assert found.ends[:, 0].tolist() == [5 * number + 3 for number in range(19, 19 - MAX_PLACES, -1)]


def test_cleared_text_is_not_found() -> None:
    index, sizes = one_text(1, 2, 3, 4)
    index.clear(np.array([0]))
    assert not index.find(np.array([0]), tails([[1, 2, 3]])).rows.size
    index.extend(np.array([0]), sizes - 1)
    assert index.find(np.array([0]), tails([[1, 2, 3]])).rows.size
