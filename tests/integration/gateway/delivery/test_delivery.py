"""Every token once and in order, whatever the stream of tokens goes through: a real gateway, a real Redis."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from shared.grammars import NOT_FOLLOWED
from shared.logprobs import pack_record
from tests.support.gateway_clients import Stream, posted, raw_post
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.scripted_scheduler import CANCELLED, DEADLINE, ERROR, LENGTH, STOP, Line, ScriptedScheduler
from tests.support.stack import RedisServer
from tests.support.waiting import until

EOS = 1


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer
) -> Iterator[GatewayProcess]:
    with running_gateway(
        tmp_path_factory.mktemp("gateway"), model, redis_server, client_buffer_events=64, keepalive_s=0.2
    ) as running:
        yield running


@pytest.fixture
def scheduler(gateway: GatewayProcess, redis_server: RedisServer) -> ScriptedScheduler:
    leading = ScriptedScheduler(redis_server.client, gateway.keys).lead()
    gateway.wait_ready()
    return leading


def test_tokens_arrive_in_order_with_their_ids(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    text = "The quick brown fox 🐋 jumps"
    tokens = tokenizer.encode(text).ids
    stream = Stream(gateway, temperature=0)
    claimed = scheduler.claim()
    assert claimed.prompts == [tokenizer.encode("The").ids]
    scheduler.serve(claimed, tokens)
    stream.join()
    assert (stream.tokens(), stream.text(), stream.reason, stream.done) == (tokens, text, "length", True)
    assert stream.ids[-2:] == [f"{claimed.id}:{len(tokens)}", f"{claimed.id}:{len(tokens) + 1}"]
    assert all("\ufffd" not in choice["text"] for choice in stream.choices())


def test_rows_sent_twice_are_dropped(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("The quick brown fox").ids
    before = gateway.metric("orcinus_gateway_duplicate_rows_total")
    stream = Stream(gateway)
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, tokens[:2]))
    scheduler.publish(Line(claimed.id, 0, tokens[:2]))
    scheduler.publish(Line(claimed.id, 1, tokens[1:4]))  # half of it is new
    scheduler.publish(Line(claimed.id, 4, tokens[4:], finish=LENGTH))
    scheduler.end(claimed, [tokens], [LENGTH])
    stream.join()
    assert stream.tokens() == tokens
    assert gateway.metric("orcinus_gateway_duplicate_rows_total") == before + 1


def test_a_gap_is_filled_from_the_record(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("The quick brown fox jumps").ids
    before = gateway.metric("orcinus_gateway_refilled_rows_total")
    stream = Stream(gateway)
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, tokens[:1]))
    scheduler.publish(checkpoints=[(claimed.id, 0, 0, tokens[:4])])
    scheduler.publish(Line(claimed.id, 4, tokens[4:], finish=LENGTH))
    stream.join()
    assert (stream.tokens(), stream.reason) == (tokens, "length")
    assert gateway.metric("orcinus_gateway_refilled_rows_total") > before


def test_log_probabilities_stay_with_their_tokens_through_gaps_and_rows_sent_twice(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("The quick brown fox jumps over").ids
    values = [-float(index) for index in range(len(tokens))]
    records = [
        pack_record(value, np.array([token]), np.array([value])) for value, token in zip(values, tokens, strict=True)
    ]
    stream = Stream(gateway, logprobs=1)
    claimed = scheduler.claim()
    assert claimed.request.sampling.logprobs == 2
    scheduler.publish(Line(claimed.id, 0, tokens[:1], logprobs=records[:1]))
    unread = Line(claimed.id, 1, tokens[1:4], logprobs=records[1:4])
    scheduler.publish(unread, checkpoints=[(claimed.id, 0, 0, tokens[:4])], to_stream=False)
    scheduler.publish(Line(claimed.id, 4, tokens[4:5], logprobs=records[4:5]))
    scheduler.publish(Line(claimed.id, 3, tokens[3:], finish=LENGTH, logprobs=records[3:]))
    stream.join()
    told = [choice["logprobs"] for choice in stream.choices() if choice["logprobs"]]
    assert [value for one in told for value in one["token_logprobs"]] == values
    assert [value for one in told for best in one["top_logprobs"] for value in best.values()] == values
    assert "".join(name for one in told for name in one["tokens"]) == stream.text()


def test_a_gap_whose_tokens_are_checkpointed_later_is_waited_for(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("The quick brown fox").ids
    stream = Stream(gateway)
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 2, tokens[2:3]))
    scheduler.publish(Line(claimed.id, 3, tokens[3:], finish=LENGTH))
    until("the gateway has asked for the record", lambda: stream.comments > 2)
    assert not stream.events
    scheduler.publish(checkpoints=[(claimed.id, 0, 0, tokens[:2])])
    stream.join()
    assert (stream.tokens(), stream.done) == (tokens, True)


def test_a_request_whose_stream_was_trimmed_unread_is_served_from_its_record(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("The quick brown fox").ids
    stream = Stream(gateway)
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, tokens[:1]))
    scheduler.end(claimed, [tokens], [LENGTH])
    stream.join()
    assert (stream.tokens(), stream.reason) == (tokens, "length")


def test_a_stop_string_across_tokens_cuts_the_text_and_stops_the_sequence(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("a quick brown fox").ids
    needed = next(n for n in range(len(tokens)) if "k br" in tokenizer.decode(tokens[:n]))
    stream = Stream(gateway, stop=["k br", "zzz"])
    claimed = scheduler.claim()
    for index, token in enumerate(tokens):
        scheduler.publish(Line(claimed.id, index, [token]))
    stream.join()
    assert (stream.text(), stream.reason) == ("a quic", "stop")
    assert stream.tokens() == tokens[:needed]
    stop = scheduler.wait_control("stop", claimed.id).stop
    assert (stop.choice, stop.at_token) == (0, needed)


def test_the_end_by_a_stop_string_waits_for_a_redis_that_takes_no_write(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    stream = Stream(gateway, stop=["k br"])
    claimed = scheduler.claim()
    line = scheduler.batch([Line(claimed.id, 0, tokenizer.encode("a quick brown fox").ids)])
    pipe = scheduler.client.pipeline(transaction=True)  # the row arrives, and from then on nothing is written
    pipe.xadd(gateway.keys.tokens(claimed.request.gateway), {"b": line.SerializeToString()})
    pipe.config_set("maxmemory", 1)
    pipe.execute()
    try:
        until("the text is told", lambda: stream.text() == "a quic")
        comments = stream.comments
        until("the stream is kept alive", lambda: stream.comments > comments + 1)
        assert (stream.reason, stream.done) == (None, False)
    finally:
        scheduler.client.config_set("maxmemory", "64mb")
    stream.join()
    assert (stream.text(), stream.reason, stream.done) == ("a quic", "stop", True)
    assert scheduler.client.hexists(gateway.keys.req(claimed.id), "stop:0")
    gateway.wait_ready()


def test_each_choice_ends_by_itself(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("one. two").ids
    stream = Stream(gateway, n=2, stop=".", stream_options={"include_usage": True})
    claimed = scheduler.claim()
    for index, token in enumerate(tokens):
        scheduler.publish(Line(claimed.id, index, [token], choice=0))
    other = tokenizer.encode("other").ids
    scheduler.publish(Line(claimed.id, 0, other, choice=1, finish=LENGTH))
    stream.join()
    assert (stream.text(0), stream.choices(0)[-1]["finish_reason"]) == ("one", "stop")
    assert (stream.text(1), stream.choices(1)[-1]["finish_reason"]) == ("other", "length")
    kept = len(stream.tokens(0))
    assert stream.events[-1]["choices"] == []
    assert stream.events[-1]["usage"]["completion_tokens"] == kept + len(other)
    assert all(event["usage"] is None for event in stream.events[:-1])


def test_a_stop_token_counts_but_is_not_text(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    word = tokenizer.encode("fox").ids
    for stop_ids, last in (([], EOS), ([word[-1]], word[-1])):
        stream = Stream(gateway, stop_token_ids=stop_ids, stream_options={"include_usage": True})
        claimed = scheduler.claim()
        sent = [*tokenizer.encode("The").ids, last]
        scheduler.serve(claimed, sent, finish=STOP)
        stream.join()
        assert (stream.text(), stream.reason) == ("The", "stop")
        assert stream.tokens() == sent
        assert stream.events[-1]["usage"]["completion_tokens"] == len(sent)


@pytest.mark.parametrize(
    ("finish", "error", "code"),
    [(ERROR, "the block pool is on fire", "generation_failed"), (CANCELLED, "", "cancelled")],
)
def test_a_failure_after_the_first_byte_is_an_error_event_and_the_end(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, finish: int, error: str, code: str
) -> None:
    stream = Stream(gateway)
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, [50]))
    scheduler.publish(Line(claimed.id, 1, finish=finish, error=error))
    stream.join()
    assert stream.error is not None
    assert stream.error["code"] == code
    assert error in stream.error["message"]
    assert not stream.done


@pytest.mark.parametrize(("finish", "status"), [(ERROR, 500), (CANCELLED, 409)])
def test_a_failure_of_a_whole_answer_has_its_status(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, finish: int, status: int
) -> None:
    with posted(gateway, {"prompt": "x"}) as answers:
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, finish=finish, error="why" if finish == ERROR else ""))
    assert answers[0].status_code == status
    assert answers[0].json()["error"]["message"]


def test_a_grammar_that_broke_a_bound_on_the_way_is_the_requests_fault(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    bound = {"prompt": "x", "guided_grammar": 'start: "a"*'}
    why = f"{NOT_FOLLOWED}: too many items"
    with posted(gateway, bound) as answers:
        scheduler.publish(Line(scheduler.claim().id, 0, finish=ERROR, error=why))
    error = answers[0].json()["error"]
    assert (answers[0].status_code, error["code"], error["param"]) == (400, "invalid_grammar", "guided_grammar")
    assert error["message"] == f"{why}; send a simpler one in guided_grammar"
    stream = Stream(gateway, guided_grammar=bound["guided_grammar"])
    claimed = scheduler.claim()
    scheduler.publish(Line(claimed.id, 0, [50]))
    scheduler.publish(Line(claimed.id, 1, finish=ERROR, error=why))
    stream.join()
    assert stream.error == error


def test_a_deadline_has_its_own_reason(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    with posted(gateway, {"prompt": "x", "deadline_ms": 5}) as answers:
        claimed = scheduler.claim()
        assert claimed.request.deadline_ms == 5
        scheduler.serve(claimed, [50], finish=DEADLINE)
    assert answers[0].json()["choices"][0]["finish_reason"] == "deadline"


def test_a_client_that_leaves_a_stream_is_cancelled(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    with httpx.stream(
        "POST", gateway.url + "/v1/completions", json={"model": gateway.name, "prompt": "x", "stream": True}, timeout=30
    ):
        claimed = scheduler.claim()
    scheduler.wait_control("cancel", claimed.id)
    until("nothing is active", lambda: gateway.metric("orcinus_gateway_active_requests") == 0)


def test_a_client_that_leaves_is_cancelled_also_where_it_has_sent_its_next_request_already(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    body = json.dumps({"model": gateway.name, "prompt": "x", "stream": True, "max_tokens": 400}).encode()
    with raw_post(gateway, body) as connection:
        claimed = scheduler.claim()
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        until("the answer begins", lambda: connection.recv(1 << 16))
    index = 0

    def cancelled() -> bool:
        nonlocal index
        scheduler.publish(Line(claimed.id, index, [60]))
        index += 1
        return claimed.id in {control.cancel.id for control in scheduler.controls()}

    until("the request is cancelled", cancelled)
    until("nothing is active", lambda: gateway.metric("orcinus_gateway_active_requests") == 0)
    assert "a stream failed" not in gateway.log()


def test_a_client_that_leaves_while_waiting_for_a_whole_answer_is_cancelled(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    body = json.dumps({"model": gateway.name, "prompt": "x"}).encode()
    with raw_post(gateway, body):
        claimed = scheduler.claim()
    assert scheduler.wait_control("cancel", claimed.id).cancel.reason


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_a_client_that_leaves_a_whole_answer_is_cancelled_also_where_it_has_sent_its_next_request_already(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, later: bool
) -> None:
    """Nothing is written that would show it: the connection has to be read, whatever is behind."""
    body = json.dumps({"model": gateway.name, "prompt": "x"}).encode()
    behind = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    told = gateway.metric("orcinus_gateway_output_tokens_total")
    with raw_post(gateway, body, behind=b"" if later else behind) as connection:
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, [60]))
        until("it waits for the rest", lambda: gateway.metric("orcinus_gateway_output_tokens_total") > told)
        if later:
            connection.sendall(behind)
    assert scheduler.wait_control("cancel", claimed.id).cancel.reason


def test_requests_that_are_sent_before_the_answers_have_come_are_answered_in_their_order(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    """The second in pieces, and a third, while the first is answered."""
    body = json.dumps({"model": gateway.name, "prompt": "x"}).encode()
    tokens = json.dumps({"model": gateway.name, "prompt": "y"}).encode() + b" " * 200_000
    second = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    behind = second % len(tokens) + tokens + b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with raw_post(gateway, body) as connection, ThreadPoolExecutor(1) as other:
        claimed = scheduler.claim()
        pieces = [behind[:20], behind[20:300], behind[300:]]
        sent = other.submit(lambda: [connection.sendall(piece) for piece in pieces])
        scheduler.serve(claimed, [50], finish=STOP)
        answers = b""
        while data := connection.recv(1 << 16):
            answers += data
        sent.result()
    places = [answers.find(word) for word in (b'"text_completion"', b'"count"', b'"version"')]
    assert answers.count(b"HTTP/1.1 200") == 3 and places == sorted(places) and places[0] > 0, answers[-500:]


def test_keep_alive_comments_come_while_nothing_else_does(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    stream = Stream(gateway)
    claimed = scheduler.claim()
    until("two comments", lambda: stream.comments >= 2)
    scheduler.serve(claimed, [50])
    assert stream.join().done


def test_a_broken_entry_in_the_stream_is_skipped(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    stream = Stream(gateway)
    claimed = scheduler.claim()
    key = gateway.keys.tokens(claimed.request.gateway)
    scheduler.client.xadd(key, {"b": b"\xff\xff\xff"})
    scheduler.client.xadd(key, {"other": b""})
    broken = scheduler.batch([Line(claimed.id, 0, [50])])
    broken.counts = b"\x01"
    scheduler.client.xadd(key, {"b": broken.SerializeToString()})
    scheduler.serve(claimed, [50, 51])
    assert stream.join().tokens() == [50, 51]


def test_a_request_finished_while_the_gateway_slept_is_not_lost(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, redis_server: RedisServer
) -> None:
    stream = Stream(gateway)
    claimed = scheduler.claim()
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGSTOP)
    try:
        scheduler.publish(Line(claimed.id, 0, [50, 51]))
        redis_server.client.delete(gateway.keys.tokens(claimed.request.gateway))
        scheduler.publish(Line(claimed.id, 2, [52], finish=LENGTH))
        scheduler.end(claimed, [[50, 51, 52]], [LENGTH])
    finally:
        gateway.process.send_signal(signal.SIGCONT)
    assert stream.join().tokens() == [50, 51, 52]
