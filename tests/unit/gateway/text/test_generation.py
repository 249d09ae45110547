"""From rows of tokens to text: the same however the rows were cut, and what brute force says."""

from __future__ import annotations

import asyncio
import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import queue_pb2
from services.gateway.delivery import stream as stream_module
from services.gateway.delivery.stream import ChoiceText, Generation, Offer, Position, RequestStream, Row
from services.gateway.errors import ApiError, handed_over, taken_over
from services.gateway.metrics import Metrics
from services.gateway.openai.answers import EventWriter
from services.gateway.request import GenerationSpec
from services.gateway.text.tokenizer import ModelText
from tests.support.tokenizers import write_model

EOS = 1


@functools.cache
def model() -> ModelText:
    with tempfile.TemporaryDirectory() as directory:
        return ModelText(write_model(Path(directory) / "m"))


def spec(**changes: Any) -> GenerationSpec:
    fields = {
        "id": "cmpl-1", "endpoint": "completions", "model": "m", "created": 1, "prompts": [[50]], "prompt_texts": [],
        "n": 1, "max_tokens": 100, "min_tokens": 0, "stop": [], "stop_ids": [EOS], "sampling": queue_pb2.Sampling(),
        "priority": "normal", "stream": True, "include_usage": False, "echo": False, "return_token_ids": False,
        "include_stop_str_in_output": False, "skip_special_tokens": True,
    } | changes  # fmt: skip
    return GenerationSpec(**fields)


TOKENS = st.lists(st.integers(4, 399), max_size=25)
TEXTS = st.text(alphabet="the quickfox.🐋é", max_size=25)
CUTS = st.lists(st.integers(0, 30), max_size=8)


def rows(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    return [tokens[a:b] for a, b in itertools.pairwise(places)]


def fed(pieces: list[list[int]], request: GenerationSpec) -> tuple[str, list[int], str | None, list[str]]:
    """Text, counted tokens, reason, and the text after each piece."""
    choice = ChoiceText(request, model(), [50])
    text, counted, after = "", [], []
    for index, piece in enumerate(pieces):
        if choice.finish_reason is None:
            new, used, _ = choice.feed(piece, "length" if index == len(pieces) - 1 else None)
            text += new
            counted += used
        after.append(text)
    return text, counted, choice.finish_reason, after


@given(TEXTS, CUTS, st.lists(st.sampled_from([".", "fox", "qu", "k 🐋", "e"]), max_size=3), st.integers(0, 6))
@settings(max_examples=300, deadline=None)
def test_the_cutting_into_rows_changes_nothing(text: str, cuts: list[int], stop: list[str], least: int) -> None:
    tokens = model().encode(text)
    request = spec(stop=stop, min_tokens=least)
    singly = fed([[token] for token in tokens] or [[]], request)
    assert fed(rows(tokens, cuts) or [[]], request)[:3] == singly[:3]


@given(TOKENS, TOKENS)
@settings(max_examples=200, deadline=None)
def test_text_after_a_token_does_not_depend_on_later_tokens(tokens: list[int], others: list[int]) -> None:
    request = spec(stop=["e", "qu"])
    common = [[token] for token in tokens]
    a, b = fed([*common, others, []], request)[3], fed([*common, [], []], request)[3]
    assert a[: len(tokens)] == b[: len(tokens)]


@given(TEXTS, st.sampled_from([".", "fox", "quick", "🐋", "the "]))
@settings(max_examples=200, deadline=None)
def test_a_stop_string_needs_the_fewest_tokens_that_hold_it(text: str, stop: str) -> None:
    tokens = model().encode(text)
    shown, counted, reason, _ = fed([[token] for token in tokens] or [[]], spec(stop=[stop]))
    at = text.find(stop)
    if at < 0:
        assert (shown, counted, reason) == (text, tokens, "length")
        return
    needed = next(n for n in range(1, len(tokens) + 1) if stop in model().text.decode(tokens[:n]))
    assert (shown, counted, reason) == (text[:at], tokens[:needed], "stop")


def test_a_stop_string_before_min_tokens_ends_nothing() -> None:
    tokens = model().encode("a.b.c")
    first_dot = next(n for n in range(1, 9) if "." in model().text.decode(tokens[:n]))
    shown, _, reason, _ = fed([[token] for token in tokens], spec(stop=["."], min_tokens=first_dot))
    assert (shown, reason) == ("a.b", "stop")


def test_include_stop_str_in_output_keeps_it() -> None:
    assert fed([model().encode("one. two")], spec(stop=["."], include_stop_str_in_output=True))[0] == "one."


class Recorded:
    """Commands that a generation gave."""

    def __init__(self) -> None:
        self.stops: list[tuple[int, int]] = []
        self.closed: list[str] = []
        self.away = False
        self.unwritten: list[Callable[[], None]] = []

    def stop_choice(self, request_id: str, choice: int, at_token: int, written: Callable[[], None]) -> None:
        self.stops.append((choice, at_token))
        if self.away:
            self.unwritten.append(written)
        else:
            written()

    def close(self, request_id: str, cancel_reason: str = "") -> None:
        self.closed.append(cancel_reason)


def generation(**changes: Any) -> tuple[Generation, RequestStream, Recorded]:
    request = spec(**changes)
    stream, commands = RequestStream(request.id, request.choices), Recorded()
    return Generation(request, model(), stream, commands, Metrics(), 0.0), stream, commands


@pytest.mark.parametrize(("finish", "told"), [(0, True), (1, False), (2, True), (4, True)])
def test_a_stop_string_in_the_last_row_is_told_unless_it_ended_as_a_stop(finish: int, told: bool) -> None:
    running, stream, commands = generation(stop=["fox"])
    tokens = model().encode("a fox")
    stream.offer(Row(0, tokens, finish=finish), 0)
    deltas = asyncio.run(running.next())
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("a ", "stop")]
    assert commands.stops == ([(0, len(tokens))] if told else [])


def test_a_finished_request_is_closed_without_a_cancel_and_once() -> None:
    running, stream, commands = generation()
    stream.offer(Row(0, [60], finish=2), 0)
    asyncio.run(running.next())
    running.close()
    running.close()
    assert commands.closed == [""]


def test_an_unfinished_request_is_cancelled_with_the_reason() -> None:
    left, _, commands = generation()
    left.close()
    assert commands.closed == ["the client left"]
    failed, stream, commands = generation()
    stream.fail(ApiError(503, "too slow"))
    with pytest.raises(ApiError):
        asyncio.run(failed.next())
    failed.close()
    assert commands.closed == ["too slow"]


def test_rows_of_a_choice_after_its_stop_string_are_late() -> None:
    running, stream, commands = generation(stop=["fox"], n=2)
    tokens = model().encode("a fox")
    stream.offer(Row(0, tokens), 0)
    asyncio.run(running.next())
    assert commands.stops == [(0, len(tokens))]
    assert stream.offer(Row(0, [60], finish=3), len(tokens)) is Offer.LATE
    assert not running.done
    stream.offer(Row(1, [60], finish=2), 0)
    asyncio.run(running.next())
    assert running.done


def found_while_redis_is_away() -> tuple[Generation, Recorded]:
    running, stream, commands = generation(stop=["fox"])
    commands.away = True
    stream.offer(Row(0, model().encode("a fox"), finish=2), 0)
    return running, commands


def test_the_end_by_a_stop_string_is_told_once_redis_has_it_and_its_text_before() -> None:
    async def scenario() -> None:
        running, commands = found_while_redis_is_away()
        (delta,) = await running.next()
        assert (delta.text, delta.finish_reason, running.done) == ("a ", None, False)
        assert await running.next(0.001) == []
        commands.unwritten[0]()
        (end,) = await running.next()
        assert (end.text, end.token_ids, end.finish_reason, running.done) == ("", [], "stop", True)

    asyncio.run(scenario())


def test_an_end_that_redis_does_not_take_is_told_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "HELD_FINISH_S", 0.001)

    async def scenario() -> None:
        running, _ = found_while_redis_is_away()
        told = [*await running.next(), *await running.next()]
        assert [delta.finish_reason for delta in told] == [None, "stop"]
        running.close()

    asyncio.run(scenario())


def test_a_client_that_leaves_before_the_end_was_told_cancels() -> None:
    async def scenario() -> None:
        running, commands = found_while_redis_is_away()
        await running.next()
        running.close()
        commands.unwritten[0]()
        assert commands.closed == ["the client left"]

    asyncio.run(scenario())


def test_an_end_that_the_client_has_is_not_told_again_when_its_stop_is_written() -> None:
    request = spec(stop=["fox"])
    tokens = model().encode("a fox")
    stream, commands = RequestStream(request.id, 1), Recorded()
    had = Position([len(tokens) + 1])
    running = Generation(request, model(), stream, commands, Metrics(), 0.0, had)
    stream.offer(Row(0, tokens), 0)
    assert asyncio.run(running.next()) == []
    assert (commands.stops, running.done) == ([(0, len(tokens))], True)


def test_an_error_row_ends_everything_as_an_error() -> None:
    running, stream, _ = generation(n=2)
    stream.offer(Row(0, [60]), 0)
    stream.offer(Row(1, [], finish=5, error="burnt"), 7)
    assert [delta.token_ids for delta in asyncio.run(running.next())] == [[60]], "what came before the error is told"
    with pytest.raises(ApiError, match="burnt"):
        asyncio.run(running.next())
    assert running.failure is not None


def failing(error: ApiError, **changes: Any) -> tuple[Generation, Recorded]:
    running, stream, commands = generation(**changes)
    stream.fail(error, cut=True)
    return running, commands


def test_a_stream_that_is_handed_over_is_not_cancelled_even_if_its_client_leaves_in_that_moment() -> None:
    told, commands = failing(handed_over("cmpl-1"))
    with pytest.raises(ApiError, match="cmpl-1/stream"):
        asyncio.run(told.next())
    told.close()
    left, others = failing(handed_over("cmpl-1"))
    left.close()
    assert commands.closed == others.closed == [""]


def test_an_answer_in_one_piece_that_cannot_be_handed_over_says_that_it_is_cancelled() -> None:
    running, commands = failing(handed_over("cmpl-1"), stream=False)
    with pytest.raises(ApiError, match="is cancelled; send it again") as caught:
        asyncio.run(running.next())
    running.close()
    assert caught.value.code == "shutting_down"
    assert commands.closed == [caught.value.message]


def test_a_connection_that_another_took_over_cancels_nothing() -> None:
    running, commands = failing(taken_over())
    with pytest.raises(ApiError):
        asyncio.run(running.next())
    running.close()
    assert commands.closed == [""]


def test_an_events_id_says_what_is_had_with_it_and_nothing_of_the_events_behind_it() -> None:
    running, stream, _ = generation(n=2, return_token_ids=True)
    writer = EventWriter(running, "fp")
    stream.offer(Row(0, [60, 61]), 0)
    stream.offer(Row(1, [62], finish=2), 0)
    events = writer.events(asyncio.run(running.next())).decode().split("\n\n")
    assert [event.partition("\n")[0] for event in events[:-1]] == [
        "id: cmpl-1:1.-2", "id: cmpl-1:1.1", "id: cmpl-1:1.2"
    ]  # fmt: skip
    assert '"token_ids":[60,61]' in events[0]


# The mailbox


def test_a_mailbox_takes_each_token_once() -> None:
    stream = RequestStream("r", 1)
    assert stream.offer(Row(0, [1, 2]), 0) is Offer.TAKEN
    assert stream.offer(Row(0, [1, 2]), 0) is Offer.DUPLICATE
    assert stream.offer(Row(0, [2, 3]), 1) is Offer.TAKEN
    assert stream.offer(Row(0, [9]), 5) is Offer.GAP
    assert stream.offer(Row(0, [], finish=1), 3) is Offer.TAKEN
    assert stream.offer(Row(0, [4], finish=1), 3) is Offer.LATE
    assert stream.offer(Row(7, [4]), 0) is Offer.LATE
    taken = asyncio.run(stream.take())
    assert [token for row in taken for token in row.tokens] == [1, 2, 3]
    assert stream.done


def test_a_bounded_mailbox_overflows_and_an_emptied_one_does_not() -> None:
    stream = RequestStream("r", 1, bound=2)
    outcomes = [stream.offer(Row(0, [index]), index) for index in range(3)]
    assert outcomes == [Offer.TAKEN, Offer.TAKEN, Offer.OVERFLOW]
    asyncio.run(stream.take())
    assert stream.offer(Row(0, [2]), 2) is Offer.TAKEN


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_order_and_repetition_of_rows_gives_the_sequence(data: st.DataObject) -> None:
    tokens = list(range(100, 100 + data.draw(st.integers(1, 20))))
    stream, got = RequestStream("r", 1), []
    for _ in range(40):
        first = data.draw(st.integers(0, len(tokens)))
        row = Row(0, tokens[first : first + data.draw(st.integers(0, 6))])
        if stream.offer(row, first) is Offer.GAP:
            stream.put_aside(row, first)
        for item in stream.take_ahead():
            if stream.offer(item.row, item.first) is Offer.GAP:
                stream.put_aside(item.row, item.first)
    stream.offer(Row(0, tokens, finish=1), 0)
    got = [token for row in asyncio.run(stream.take()) for token in row.tokens]
    assert got == tokens
    assert stream.done


def test_a_failed_mailbox_raises_and_takes_no_more() -> None:
    stream = RequestStream("r", 1)
    stream.offer(Row(0, [1]), 0)
    stream.fail(ApiError(503, "why"))
    stream.fail(ApiError(503, "later"))
    with pytest.raises(ApiError, match="why"):
        asyncio.run(stream.take())
    assert stream.offer(Row(0, [2]), 1) is Offer.LATE


def test_a_stop_string_may_end_in_the_mark_of_half_a_character() -> None:
    """The first byte of one is all that came: what it is shows only at the end."""
    half = [next(token for token in range(400) if model().text.piece(token) == b"\xc3")]
    choice = ChoiceText(spec(stop=["a\ufffd"]), model(), [50])
    assert choice.feed([*model().encode("xa"), *half], "length") == ("x", [*model().encode("xa"), *half], True)
    assert choice.finish_reason == "stop"
