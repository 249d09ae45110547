"""Every token once and in order, whatever the stream of tokens goes through: a real gateway, a real Redis."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shared.text.grammars import NOT_FOLLOWED
from shared.text.logprobs import pack_record
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway.clients import posted, raw_post, streamed
from tests.support.gateway.process import GatewayProcess
from tests.support.stand_ins.scripted_scheduler import CANCELLED, ERROR, LENGTH, STOP, Line, ScriptedScheduler
from tests.support.waiting import until

GATEWAY = {"client_buffer_events": 64, "keepalive_s": 0.2}
EOS = 1
FOX = token_ids("The quick brown fox")
VERSION = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def body_of(gateway: GatewayProcess, **fields: object) -> bytes:
    return json.dumps({"model": gateway.name, "prompt": "x", **fields}).encode()


def dead_keys(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> set[str]:
    rows: Any = scheduler.client.xrange(gateway.keys.dead)
    return {fields[b"key"].decode() for _, fields in rows}


def until_idle(gateway: GatewayProcess) -> None:
    until("no request is active", lambda: gateway.metric("orcinus_gateway_active_requests") == 0)


def test_tokens_and_logprobs_come_once_through_gaps_and_duplicates(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    tokens = token_ids("The quick brown fox jumps over")
    values = [-float(index) for index in range(len(tokens))]
    records = [
        pack_record(value, np.array([token]), np.array([value])) for value, token in zip(values, tokens, strict=True)
    ]
    counters = [f"orcinus_gateway_{what}_rows_total" for what in ("duplicate", "refilled")]
    before = [gateway.metric(name) for name in counters]
    stream, claimed = streamed(gateway, scheduler, logprobs=1)
    assert claimed.request.sampling.logprobs == 2
    for _ in range(2):
        scheduler.publish(Line(claimed.id, 0, tokens[:1], logprobs=records[:1]))
    unread = Line(claimed.id, 1, tokens[1:4], logprobs=records[1:4])
    scheduler.publish(unread, checkpoints=[(claimed.id, 0, 0, tokens[:4])], to_stream=False)
    scheduler.publish(Line(claimed.id, 4, tokens[4:5], logprobs=records[4:5]))
    scheduler.publish(Line(claimed.id, 3, tokens[3:], finish=LENGTH, logprobs=records[3:]))
    assert (stream.join().tokens(), stream.reason) == (tokens, "length")
    assert all(gateway.metric(name) > was for name, was in zip(counters, before, strict=True))
    found = [choice["logprobs"] for choice in stream.choices() if choice["logprobs"]]
    assert [value for one in found for value in one["token_logprobs"]] == values
    assert [value for one in found for best in one["top_logprobs"] for value in best.values()] == values
    assert "".join(name for one in found for name in one["tokens"]) == stream.text()


def test_other_tokens_in_the_place_of_delivered_ones_end_the_request(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    """Redis lost its tail, and outside the exact class what is computed again may differ: no answer is half of each."""
    stream, claimed = streamed(gateway, scheduler)
    scheduler.publish(Line(claimed.id, 0, FOX[:3]))
    until("the client has them", lambda: stream.tokens() == FOX[:3])
    scheduler.publish(Line(claimed.id, 1, [FOX[1], FOX[1]]))
    assert ((stream.join().error or {}).get("code"), stream.tokens()) == ("record_lost", FOX[:3])
    scheduler.wait_control("cancel", claimed.id)


def test_gap_waits_for_a_checkpoint_that_comes_later(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    stream, claimed = streamed(gateway, scheduler)
    scheduler.publish(Line(claimed.id, 2, FOX[2:3]))
    scheduler.publish(Line(claimed.id, 3, FOX[3:], finish=LENGTH))
    until("the gateway has read the record", lambda: stream.comments > 2)
    assert not stream.events
    scheduler.publish(checkpoints=[(claimed.id, 0, 0, FOX[:2])])
    assert (stream.join().tokens(), stream.done) == (FOX, True)


def test_end_by_stop_string_waits_while_redis_takes_no_write(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    stream, claimed = streamed(gateway, scheduler, stop=["k br"])
    line = scheduler.batch([Line(claimed.id, 0, token_ids("a quick brown fox"))])
    pipe = scheduler.client.pipeline(transaction=True)  # the row arrives, and from then on nothing is written
    pipe.xadd(gateway.keys.tokens(claimed.request.gateway), {"b": line.SerializeToString()})
    pipe.config_set("maxmemory", 1)
    pipe.execute()
    try:
        until("the text has come", lambda: stream.text() == "a quic")
        comments = stream.comments
        until("the stream is kept alive", lambda: stream.comments > comments + 1)
        assert (stream.reason, stream.done) == (None, False)
    finally:
        scheduler.client.config_set("maxmemory", "64mb")
    stream.join()
    assert (stream.text(), stream.reason, stream.done) == ("a quic", "stop", True)
    assert scheduler.client.hexists(gateway.keys.req(claimed.id), "stop:0")
    gateway.wait_ready()


@pytest.mark.parametrize("last", [EOS, token_ids("fox")[-1]], ids=["EOS", "of the request"])
def test_stop_token_counts_but_is_not_text(gateway: GatewayProcess, scheduler: ScriptedScheduler, last: int) -> None:
    stop_ids = [last] if last != EOS else []
    stream, claimed = streamed(gateway, scheduler, stop_token_ids=stop_ids, stream_options={"include_usage": True})
    sent = [*token_ids("The"), last]
    scheduler.serve(claimed, sent, finish=STOP)
    stream.join()
    assert (stream.text(), stream.reason, stream.tokens()) == ("The", "stop", sent)
    assert stream.events[-1]["usage"]["completion_tokens"] == len(sent)


@pytest.mark.parametrize(
    ("finish", "why", "code", "status"),
    [(ERROR, "the block pool is on fire", "generation_failed", 500), (CANCELLED, "", "cancelled", 409)],
    ids=["error", "cancelled"],
)
def test_failure_is_a_status_or_an_error_event_after_tokens(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, finish: int, why: str, code: str, status: int
) -> None:
    with posted(gateway, {"prompt": "x"}) as answers:
        scheduler.publish(Line(scheduler.claim().id, 0, finish=finish, error=why))
    assert answers[0].status_code == status
    assert answers[0].json()["error"]["message"]
    stream, claimed = streamed(gateway, scheduler)
    scheduler.publish(Line(claimed.id, 0, [50]))
    scheduler.publish(Line(claimed.id, 1, finish=finish, error=why))
    stream.join()
    assert stream.error is not None
    assert (stream.error["code"], why in stream.error["message"], stream.done) == (code, True, False)


def test_grammar_beyond_a_bound_is_a_fault_of_the_request(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    bound = {"prompt": "x", "guided_grammar": 'start: "a"*'}
    said = f"{NOT_FOLLOWED}: too many items"
    why = f"grammar: {said}"  # the scheduler puts the worker's code before its words
    with posted(gateway, bound) as answers:
        scheduler.publish(Line(scheduler.claim().id, 0, finish=ERROR, error=why))
    error = answers[0].json()["error"]
    assert (answers[0].status_code, error["code"], error["param"]) == (400, "invalid_grammar", "guided_grammar")
    assert error["message"] == f"{said}; send a simpler one in guided_grammar"
    stream, claimed = streamed(gateway, scheduler, guided_grammar=bound["guided_grammar"])
    scheduler.publish(Line(claimed.id, 0, [50]))
    scheduler.publish(Line(claimed.id, 1, finish=ERROR, error=why))
    assert stream.join().error == error


def test_pipelined_stream_is_cancelled_when_its_client_leaves(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    with raw_post(gateway, body_of(gateway, stream=True, max_tokens=400)) as connection:
        claimed = scheduler.claim()
        connection.sendall(VERSION)
        until("the answer begins", lambda: connection.recv(1 << 16))
    index = 0

    def cancelled() -> bool:
        nonlocal index
        scheduler.publish(Line(claimed.id, index, [60]))
        index += 1
        return claimed.id in {control.cancel.id for control in scheduler.controls()}

    until("the request is cancelled", cancelled)
    until_idle(gateway)
    assert "a stream failed" not in gateway.log()


@pytest.mark.parametrize(
    ("at_once", "later"), [(b"", b""), (VERSION, b""), (b"", VERSION)], ids=["alone", "at once", "later"]
)
def test_request_without_stream_is_cancelled_when_its_client_leaves(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, at_once: bytes, later: bytes
) -> None:
    """Nothing is written that would show it: the connection has to be read, also where another request is behind."""
    tokens = gateway.metric("orcinus_gateway_output_tokens_total")
    with raw_post(gateway, body_of(gateway), behind=at_once) as connection:
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, [60]))
        until("it waits for the rest", lambda: gateway.metric("orcinus_gateway_output_tokens_total") > tokens)
        connection.sendall(later)
    assert scheduler.wait_control("cancel", claimed.id).cancel.reason


def test_request_that_another_gateway_has_adopted_is_not_cancelled_when_its_client_leaves(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    with raw_post(gateway, body_of(gateway)):
        adopted = scheduler.claim()
        scheduler.client.hset(gateway.keys.req(adopted.id), "gateway", "another")
    with raw_post(gateway, body_of(gateway)):
        own = scheduler.claim()
    cancelled: list[str] = []

    def own_is_cancelled() -> bool:
        cancelled.extend(command.cancel.id for command in scheduler.controls())
        return own.id in cancelled

    until("the command behind it has come", own_is_cancelled)
    assert adopted.id not in cancelled


def test_pipelined_requests_are_answered_in_order(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    """The second comes in pieces, and a third, while the first is answered."""
    tokens = body_of(gateway) + b" " * 200_000
    second = VERSION.replace(b"GET /version", b"POST /tokenize").removesuffix(b"\r\n")
    second += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(tokens)
    behind = second + tokens + VERSION.replace(b"localhost", b"localhost\r\nConnection: close")
    with raw_post(gateway, body_of(gateway)) as connection, ThreadPoolExecutor(1) as other:
        claimed = scheduler.claim()
        pieces = [behind[:20], behind[20:300], behind[300:]]
        sent = other.submit(lambda: list(map(connection.sendall, pieces)))
        scheduler.serve(claimed, [50], finish=STOP)
        answers = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        sent.result()
    places = [answers.find(word) for word in (b'"text_completion"', b'"count"', b'"version"')]
    assert answers.count(b"HTTP/1.1 200") == 3 and places == sorted(places) and places[0] > 0, answers[-500:]


def test_broken_entry_in_the_stream_is_skipped(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    stream, claimed = streamed(gateway, scheduler)
    broken = scheduler.batch([Line(claimed.id, 0, [50])])
    broken.counts = b"\x01"
    broken_sizes = scheduler.batch([Line(claimed.id, 0, [60])])
    broken_sizes.logprob_sizes = b"\x01"
    batches = [{"b": batch.SerializeToString()} for batch in (broken, broken_sizes)]
    for entry in ({"b": b"\xff\xff\xff"}, {"other": b""}, *batches):
        scheduler.client.xadd(gateway.keys.tokens(claimed.request.gateway), entry)
    scheduler.serve(claimed, [50, 51])
    assert stream.join().tokens() == [50, 51]


@pytest.mark.parametrize("token", [-1, 100_000])
def test_token_outside_the_vocabulary_becomes_no_text(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, token: int
) -> None:
    """In an entry it is skipped, and its neighbours come all the same; in the record it ends the request."""
    stream, claimed = streamed(gateway, scheduler)
    other, beside = streamed(gateway, scheduler)
    entry = scheduler.batch([Line(beside.id, 0, [60]), Line(claimed.id, 0, [token], finish=LENGTH)])
    scheduler.client.xadd(gateway.keys.tokens(claimed.request.gateway), {"b": entry.SerializeToString()})
    scheduler.serve(beside, [60, 61])
    assert other.join().tokens() == [60, 61]
    scheduler.publish(Line(claimed.id, 0, [50, token], finish=LENGTH), to_stream=False)
    scheduler.end(claimed, [[50, token]], [LENGTH])
    stream.join()
    assert ((stream.error or {}).get("code"), stream.tokens()) == ("record_lost", [])
    sources = {gateway.keys.tokens(claimed.request.gateway), gateway.keys.out(claimed.id, 0)}
    until("both are in `dead`", lambda: sources <= dead_keys(gateway, scheduler))


@pytest.mark.parametrize(
    ("token", "value", "count"), [(100_000, -0.5, 1), (-2, -0.5, 1), (50, float("nan"), 1), (50, -0.5, 0)]
)
def test_logprobs_that_no_worker_made_end_the_request(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, token: int, value: float, count: int
) -> None:
    stream, claimed = streamed(gateway, scheduler, logprobs=1)
    record = pack_record(value, np.array([token]), np.array([-0.5]))
    scheduler.publish(Line(claimed.id, 0, [50], finish=LENGTH, logprobs=[record] * count))
    scheduler.end(claimed, [[50]], [LENGTH])
    assert (stream.join().error or {}).get("code") == "record_lost"
