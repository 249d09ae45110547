"""From rows of tokens to text: the same however the rows were cut, and what brute force says."""

from __future__ import annotations

import asyncio
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protos import queue_pb2
from services.gateway.delivery import stream as stream_module
from services.gateway.delivery.stream import AT_ONCE, ChoiceText, Generation, Offer, RequestStream, Row
from services.gateway.errors import HANDED_OVER, TAKEN_OVER, ApiError, handed_over, taken_over
from services.gateway.openai.answers import EventWriter
from services.gateway.text.stop import StopMatcher
from tests.support.gateway.generations import CUTS, Recorded, generation, model, rows, spec


def test_usage_counts_cached_tokens_of_each_prompts_first_choice() -> None:
    running, stream, _ = generation(spec(prompts=[[50] * 9, [50] * 5], n=2, stop_ids=[]))
    for choice, cached in enumerate([4, 8, 0, 4]):
        stream.offer(Row(choice, [50], 2, cached_tokens=cached), 0)
    asyncio.run(running.next(0.0))
    assert running.usage.body()["prompt_tokens_details"] == {"cached_tokens": 4}


def test_guesses_of_rows_that_overlap_count_once() -> None:
    stream = RequestStream("r", 1)
    for first, count in [(0, 4), (1, 4), (3, 5), (8, 2)]:  # 10 tokens in all: of the 2nd row 1 is new, of the 3rd 3
        assert stream.offer(Row(0, [50] * count, drafts=4), first) is Offer.TAKEN
    assert (stream.received_tokens, stream.accepted_drafts, stream.rejected_drafts) == ([10], 3 + 0 + 2 + 1, 1 + 3)


def test_stop_string_before_min_tokens_ends_nothing() -> None:
    tokens = model().encode("a.b.c")
    first_dot = next(n for n in range(1, 9) if "." in model().text.decode(tokens[:n]))
    choice = ChoiceText(spec(stop=["."], min_tokens=first_dot), model(), [50])
    shown = "".join(choice.feed([token], None)[0] for token in tokens if choice.finish_reason is None)
    assert (shown, choice.finish_reason) == ("a.b", "stop")


@pytest.mark.parametrize(("finish", "told"), [(0, True), (1, False), (2, True), (4, True)])
def test_stop_string_in_the_last_row_is_sent_unless_stopped(finish: int, told: bool) -> None:
    running, stream, commands = generation(spec(stop=["fox"]))
    tokens = model().encode("a fox")
    stream.offer(Row(0, tokens, finish=finish), 0)
    deltas = asyncio.run(running.next())
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("a ", "stop")]
    assert commands.stops == ([(0, len(tokens))] if told else [])


@pytest.mark.parametrize("logprobs", [None, 20])
def test_a_long_answer_is_taken_in_parts_between_turns_of_the_loop(logprobs: int | None) -> None:
    wanted = 0 if logprobs is None else logprobs + 1
    request = spec(n=2, logprobs=logprobs, sampling=queue_pb2.Sampling(logprobs=wanted), stop_ids=[])
    tokens, size = [2 + at % 300 for at in range(3 * AT_ONCE + 7)], request.record_bytes
    records = np.arange(len(tokens) * size // 4, dtype="<i4").tobytes()

    async def read() -> tuple[list[list[Row]], int]:
        stream = RequestStream(request.id, 2, record_bytes=size)
        for choice in range(2):
            stream.offer(Row(choice, tokens, 2, logprobs=records), 0)
        taken: list[list[Row]] = []
        turns = 0

        async def take() -> None:
            while sum(row.finish != 0 for rows in taken for row in rows) < 2:
                taken.append(await stream.take())

        working = asyncio.create_task(take())
        while not working.done():
            turns += 1
            await asyncio.sleep(0)
        await working
        return taken, turns

    taken, turns = asyncio.run(read())
    most = AT_ONCE // (21 if logprobs else 1)
    assert all(sum(len(row.tokens) for row in rows) <= most for rows in taken)
    assert turns >= len(taken) > 2 * len(tokens) // most
    for choice in range(2):
        parts = [row for rows in taken for row in rows if row.choice == choice]
        assert [token for row in parts for token in row.tokens] == tokens
        assert b"".join(row.logprobs for row in parts) == records
        assert [row.finish for row in parts] == [0] * (len(parts) - 1) + [2]


def test_rows_beyond_a_part_count_for_the_bound_of_a_slow_client() -> None:
    size, bound, per_turn = 168, 1024, 1000
    most = AT_ONCE // (1 + size // stream_module.RECORD_BYTES)

    async def read() -> tuple[int, list[Row]]:
        stream = RequestStream("r", 1, max_rows=bound, record_bytes=size)
        offered, taken = 0, list[Row]()
        for turn in range(3):
            for _ in range(per_turn):
                if stream.offer(Row(0, [5], logprobs=bytes(size)), offered) is Offer.OVERFLOW:
                    return turn, taken
                offered += 1
            taken += await stream.take()
        return 3, taken

    turns, taken = asyncio.run(read())
    assert (turns, len(taken)) == (1, most)


def test_finished_request_is_closed_once_without_a_cancel() -> None:
    running, stream, commands = generation(spec())
    stream.offer(Row(0, [60], finish=2), 0)
    asyncio.run(running.next())
    running.close()
    running.close()
    assert commands.closed == [""]


def test_rows_after_a_stop_string_are_late() -> None:
    running, stream, commands = generation(spec(stop=["fox"], n=2))
    tokens = model().encode("a fox")
    stream.offer(Row(0, tokens), 0)
    asyncio.run(running.next())
    assert commands.stops == [(0, len(tokens))]
    assert stream.offer(Row(0, [60], finish=3), len(tokens)) is Offer.LATE
    assert not running.is_done
    stream.offer(Row(1, [60], finish=2), 0)
    asyncio.run(running.next())
    assert running.is_done


def found_while_redis_is_away() -> tuple[Generation, Recorded]:
    running, stream, commands = generation(spec(stop=["fox"]))
    commands.away = True
    stream.offer(Row(0, model().encode("a fox"), finish=2), 0)
    return running, commands


async def test_stop_is_delivered_after_its_text_once_redis_has_it() -> None:
    running, commands = found_while_redis_is_away()
    (delta,) = await running.next()
    assert (delta.text, delta.finish_reason, running.is_done) == ("a ", None, False)
    assert await running.next(0.001) == []
    commands.unwritten[0]()
    (end,) = await running.next()
    assert (end.text, end.token_ids, end.finish_reason, running.is_done) == ("", [], "stop", True)


async def test_stop_is_delivered_late_when_redis_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "HELD_FINISH_S", 0.001)
    running, _ = found_while_redis_is_away()
    told = [*await running.next(), *await running.next()]
    assert [delta.finish_reason for delta in told] == [None, "stop"]
    running.close()


async def test_client_that_leaves_before_a_held_finish_cancels() -> None:
    running, commands = found_while_redis_is_away()
    await running.next()
    running.close()
    commands.unwritten[0]()
    assert commands.closed == ["the client left"]


def test_finish_that_the_client_has_is_not_repeated() -> None:
    tokens = model().encode("a fox")
    running, stream, commands = generation(spec(stop=["fox"]), had=f"cmpl-1:{len(tokens) + 1}")
    stream.offer(Row(0, tokens), 0)
    assert asyncio.run(running.next()) == []
    assert (commands.stops, running.is_done) == ([(0, len(tokens))], True)


def test_error_row_fails_the_request_after_its_tokens() -> None:
    running, stream, _ = generation(spec(n=2))
    stream.offer(Row(0, [60]), 0)
    stream.offer(Row(1, [], finish=5, error="burnt"), 7)
    assert [delta.token_ids for delta in asyncio.run(running.next())] == [[60]], "what came before the error is told"
    with pytest.raises(ApiError, match="burnt"):
        asyncio.run(running.next())
    assert running.failure is not None


@pytest.mark.parametrize(
    ("error", "is_stream", "message", "code", "is_cancelled"),
    [
        (ApiError(503, "too slow", code="overloaded"), True, "too slow", "overloaded", True),
        (handed_over("cmpl-1"), True, "cmpl-1/stream", HANDED_OVER, False),
        (handed_over("cmpl-1"), False, "is cancelled; send it again", "shutting_down", True),
        (taken_over(), True, "another connection", TAKEN_OVER, False),
    ],
    ids=["failed", "handed over", "in one piece, not handed over", "taken over"],
)
def test_generation_cancels_its_request_unless_another_gateway_continues(
    error: ApiError, is_stream: bool, message: str, code: str, is_cancelled: bool
) -> None:
    running, stream, commands = generation(spec(stream=is_stream))
    stream.fail(error, is_cut=True)
    with pytest.raises(ApiError, match=message) as caught:
        asyncio.run(running.next())
    running.close()
    assert caught.value.code == code
    assert commands.closed == [caught.value.message if is_cancelled else ""]


@pytest.mark.parametrize(("error", "cancel_reason"), [(None, "the client left"), (handed_over("cmpl-1"), "")])
def test_client_that_leaves_cancels_its_request_unless_handed_over(error: ApiError | None, cancel_reason: str) -> None:
    running, stream, commands = generation(spec())
    if error is not None:
        stream.fail(error, is_cut=True)
    running.close()
    assert commands.closed == [cancel_reason]


def test_event_id_counts_the_tokens_up_to_that_event() -> None:
    running, stream, _ = generation(spec(n=2, return_token_ids=True))
    writer = EventWriter(running, "fp")
    stream.offer(Row(0, [60, 61]), 0)
    stream.offer(Row(1, [62], finish=2), 0)
    events = writer.events(asyncio.run(running.next())).decode().split("\n\n")
    assert [event.partition("\n")[0] for event in events[:-1]] == [
        "id: cmpl-1:1.-2", "id: cmpl-1:1.1", "id: cmpl-1:1.2"
    ]  # fmt: skip
    assert '"token_ids":[60,61]' in events[0]


def test_stream_takes_each_token_once() -> None:
    stream = RequestStream("r", 1)
    assert stream.offer(Row(0, [1, 2]), 0) is Offer.TAKEN
    assert stream.offer(Row(0, [1, 2]), 0) is Offer.DUPLICATE
    assert stream.offer(Row(0, [2, 3]), 1) is Offer.TAKEN
    for first, others in ((0, [1, 9]), (1, [2, 9, 4]), (2, [9, 4, 5])):
        assert stream.offer(Row(0, others), first) is Offer.OTHER_TOKENS
    assert stream.offer(Row(0, [9]), 5) is Offer.GAP
    assert stream.offer(Row(0, [], finish=1), 3) is Offer.TAKEN
    assert stream.offer(Row(0, [4], finish=1), 3) is Offer.LATE
    assert stream.offer(Row(7, [4]), 0) is Offer.LATE
    taken = asyncio.run(stream.take())
    assert [token for row in taken for token in row.tokens] == [1, 2, 3]
    assert stream.is_done


def test_bounded_stream_overflows_until_it_is_read() -> None:
    stream = RequestStream("r", 1, max_rows=2)
    outcomes = [stream.offer(Row(0, [index]), index) for index in range(3)]
    assert outcomes == [Offer.TAKEN, Offer.TAKEN, Offer.OVERFLOW]
    asyncio.run(stream.take())
    assert stream.offer(Row(0, [2]), 2) is Offer.TAKEN


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_rows_in_any_order_give_the_sequence(data: st.DataObject) -> None:
    tokens = list(range(100, 100 + data.draw(st.integers(1, 20))))
    stream, got = RequestStream("r", 1), []
    for _ in range(40):
        first = data.draw(st.integers(0, len(tokens)))
        row = Row(0, tokens[first : first + data.draw(st.integers(0, 6))])
        if stream.offer(row, first) is Offer.GAP:
            stream.put_aside(row, first)
        for item in stream.take_ahead():
            if stream.offer(item.row, item.first_index) is Offer.GAP:
                stream.put_aside(item.row, item.first_index)
    stream.offer(Row(0, tokens, finish=1), 0)
    got = [token for row in asyncio.run(stream.take()) for token in row.tokens]
    assert got == tokens
    assert stream.is_done


def test_failed_stream_raises_and_takes_no_more() -> None:
    stream = RequestStream("r", 1)
    stream.offer(Row(0, [1]), 0)
    stream.fail(ApiError(503, "why"))
    stream.fail(ApiError(503, "later"))
    with pytest.raises(ApiError, match="why"):
        asyncio.run(stream.take())
    assert stream.offer(Row(0, [2]), 1) is Offer.LATE


def test_stop_string_may_end_in_half_a_character() -> None:
    """The first byte of one is all that came: what it is shows only at the end."""
    half = [next(token for token in range(400) if model().text.piece(token) == b"\xc3")]
    choice = ChoiceText(spec(stop=["a\ufffd"]), model(), [50])
    assert choice.feed([*model().encode("xa"), *half], "length") == ("x", [*model().encode("xa"), *half], True)
    assert choice.finish_reason == "stop"


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
    if matcher.matched_stop is None:
        shown += matcher.flush()
    assert (shown, matcher.matched_stop) == brute_force(text, stops, include)


@given(LETTERS, STOPS, CUTS)
@settings(max_examples=120, deadline=None)
def test_only_the_beginning_of_a_stop_string_is_held(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    fed = shown = ""
    for piece in rows(text, cuts):
        fed += piece
        shown += matcher.feed(piece)
        if matcher.matched_stop is not None:
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
