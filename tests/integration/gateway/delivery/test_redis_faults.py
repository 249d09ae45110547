"""A gateway whose Redis goes away: clients of running streams see a pause, new ones a 503, nothing is lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shared.keys import Keys
from tests.support.gateway_clients import Stream, raw_post
from tests.support.gateway_process import running_gateway
from tests.support.scripted_scheduler import LENGTH, Line, ScriptedScheduler
from tests.support.stack import RedisServer
from tests.support.tokenizers import byte_level, write_model
from tests.support.waiting import until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


def test_streams_go_on_after_redis_was_killed_and_restarted(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("The quick brown fox jumps over the lazy dog").ids
    with (
        RedisServer(tmp_path / "redis", "--appendfsync", "always") as server,
        running_gateway(tmp_path, model, server) as own,
    ):
        scheduler = ScriptedScheduler(server.client, own.keys).lead()
        own.wait_ready()
        stream = Stream(own)
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, tokens[:3]))
        until("the first tokens arrived", lambda: len(stream.tokens()) == 3)
        server.stop(signal.SIGKILL)
        until("the gateway is not ready", lambda: own.status("/health/ready") == 503)
        refused = own.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert own.status("/health/live") == 200
        server.start()
        scheduler.publish(Line(claimed.id, 3, tokens[3:], finish=LENGTH))
        stream.join()
        assert stream.tokens() == tokens
        own.wait_ready()
        again = Stream(own)
        scheduler.serve(scheduler.claim(), tokens)
        assert again.join().tokens() == tokens


def test_a_cancel_that_redis_missed_is_sent_when_it_is_back(tmp_path: Path, model: Path) -> None:
    with (
        RedisServer(tmp_path / "redis", "--appendfsync", "always") as server,
        running_gateway(tmp_path, model, server) as own,
    ):
        scheduler = ScriptedScheduler(server.client, own.keys).lead()
        own.wait_ready()
        body = json.dumps({"model": own.name, "prompt": "x", "stream": True}).encode()
        with raw_post(own, body):
            claimed = scheduler.claim()
            server.stop(signal.SIGKILL)
            until("the gateway is not ready", lambda: own.status("/health/ready") == 503)
        until("the request is forgotten", lambda: own.metric("orcinus_gateway_active_requests") == 0)
        server.start()
        scheduler.wait_control("cancel", claimed.id)


def test_a_redis_that_refuses_writes_costs_503s_and_no_task(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("The quick brown fox").ids
    with RedisServer(tmp_path / "redis") as server, running_gateway(tmp_path, model, server) as own:
        scheduler = ScriptedScheduler(server.client, own.keys).lead()
        own.wait_ready()
        body = json.dumps({"model": own.name, "prompt": "x", "stream": True}).encode()
        with raw_post(own, body):
            claimed = scheduler.claim()
            server.client.config_set("min-replicas-to-write", 1)
            until("the gateway is not ready", lambda: own.status("/health/ready") == 503)
        refused = own.post("/v1/completions", {"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "redis_refused")
        assert int(refused.headers["retry-after"]) >= 1
        until("the cancel was refused", lambda: "refused by Redis" in own.log())
        server.client.config_set("min-replicas-to-write", 0)
        own.wait_ready()
        scheduler.wait_control("cancel", claimed.id)
        again = Stream(own)
        scheduler.serve(scheduler.claim(), tokens)
        assert again.join().tokens() == tokens


def test_a_reader_that_gets_error_replies_reads_on(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("The quick brown fox").ids
    with RedisServer(tmp_path / "redis") as server, running_gateway(tmp_path, model, server) as own:
        scheduler = ScriptedScheduler(server.client, own.keys).lead()
        own.wait_ready()
        stream = Stream(own)
        claimed = scheduler.claim()
        server.client.execute_command("ACL", "SETUSER", "default", "-xread", "-hgetall")
        until("the gateway is not ready", lambda: own.status("/health/ready") == 503)
        until("the reader was refused", lambda: "to read tokens" in own.log())
        scheduler.serve(claimed, tokens)
        server.client.execute_command("ACL", "SETUSER", "default", "+@all")
        assert stream.join().tokens() == tokens
        own.wait_ready()


def test_a_gateway_that_may_nothing_at_its_start_waits(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("The quick").ids
    with RedisServer(tmp_path / "redis") as server:
        scheduler = ScriptedScheduler(server.client, Keys(model.name)).lead()
        server.client.execute_command("ACL", "SETUSER", "default", "-ping", "-xread", "-info")
        with running_gateway(tmp_path, model, server) as own:
            until("the reader was refused", lambda: "to read tokens" in own.log())
            assert own.post("/v1/completions", {"prompt": "x"}).status_code == 503
            server.client.execute_command("ACL", "SETUSER", "default", "+@all")
            own.wait_ready()
            stream = Stream(own)
            scheduler.serve(scheduler.claim(), tokens)
            assert stream.join().tokens() == tokens
