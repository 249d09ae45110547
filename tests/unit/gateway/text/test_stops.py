"""Stop strings against brute force: reading the whole text character by character."""

from __future__ import annotations

import tracemalloc

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.text.stop import StopMatcher
from tests.support.generations import CUTS, rows

LETTERS = st.text(alphabet="ab🐋", max_size=30)
STOPS = st.lists(st.text(alphabet="ab🐋", min_size=1, max_size=5), min_size=1, max_size=4)


def brute_force(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first end at which a stop string ends, the longest of those."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(LETTERS, STOPS, CUTS, st.booleans())
@example("aab", ["ab"], [1, 2], False)
@example("xaaab", ["aab", "ab"], [1, 2, 3], True)
@example("abb", ["abb", "b"], [], False)
@settings(max_examples=120, deadline=None)
def test_stop_matcher_finds_what_brute_force_finds(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    shown = "".join(matcher.feed(piece) for piece in rows(text, cuts))
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == brute_force(text, stops, include)


@given(LETTERS, STOPS, CUTS)
@settings(max_examples=120, deadline=None)
def test_only_the_beginning_of_a_stop_string_is_held(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    fed = shown = ""
    for piece in rows(text, cuts):
        fed += piece
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            return
        held = fed[len(shown) :]
        assert fed.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_no_text_follows_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == "a"
    assert matcher.feed("c") == ""
    assert matcher.flush() == ""


def test_choices_of_a_request_share_the_beginnings_of_its_stop_strings() -> None:
    stops = [chr(ord("a") + number) + "x" * 255 for number in range(16)]
    tracemalloc.start()
    try:
        matchers = [StopMatcher(list(stops)) for _ in range(128)]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 4 << 20, "those of one choice take 0.9 MB"
    assert [matcher.feed("-" + stops[3][:200]) for matcher in matchers] == ["-"] * 128
