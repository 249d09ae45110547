"""Traces of gateway and scheduler at an OTLP/HTTP collector: one trace, and no word of a prompt in it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from protos import queue_pb2
from services.scheduler.core.types import Finish, FinishedRequest, NewRequest
from services.scheduler.tracing import Spans, Timeline
from shared.settings import SchedulerSettings
from tests.support import http_server
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway.process import led_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import Claimed, answering
from tests.support.waiting import until

SECRET = "the quick brown fox"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"


class Handler(http_server.Handler):
    server: Collector

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            self.server.bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
        self.reply(200, {})


class Collector(http_server.HttpServer):
    """Keeps what is posted to /v1/traces."""

    handler = Handler

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[bytes] = []

    def spans(self) -> list[tuple[str, Span]]:
        """(service, span)"""
        found = []
        for body in list(self.bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = attributes(resource.resource)["service.name"]
                found += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return found


def attributes(of: Any) -> dict[str, Any]:
    found = {}
    for each in of.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def scheduler_spans(collector: Collector, traceparent: str) -> None:
    """Send the scheduler's spans of a request that came with `traceparent`."""
    settings = SchedulerSettings(otlp_endpoint=collector.url, served_model_name="tiny")
    spans = Spans(settings, "scheduler-1")
    now = time.monotonic_ns()
    wire = queue_pb2.Request(traceparent=traceparent)
    request = NewRequest("r", [np.arange(7, dtype=np.int32)], 9, arrived_ns=now - 4_000_000_000, payload=wire)
    finished = FinishedRequest(request, [np.arange(3, dtype=np.int32)], [Finish.STOP])
    spans.add(finished, Timeline(now - 3_000_000_000, now - 2_000_000_000, now))
    spans.close()


def test_request_is_one_trace_from_client_to_scheduler(
    collector: Collector, tmp_path: Path, model: Path, redis_server: RedisServer
) -> None:
    parents: list[str] = []

    def answer(claimed: Claimed) -> list[int]:
        parents.append(claimed.request.traceparent)
        return token_ids("four words are here")

    led = led_gateway(tmp_path, model, redis_server, otlp_endpoint=collector.url)
    with led as (gateway, scheduler), answering(scheduler, answer):
        body = {"prompt": SECRET, "max_tokens": 64, "temperature": 0.5}
        response = gateway.post("/v1/completions", body, headers={"traceparent": SAMPLED})
        assert response.status_code == 200
        until("the gateway's span has come", collector.spans)
    (at_gateway,) = [span for service, span in collector.spans() if service == "orcinus-gateway"]
    assert (at_gateway.trace_id.hex(), at_gateway.parent_span_id.hex()) == (TRACE, PARENT)
    assert parents == [f"00-{TRACE}-{at_gateway.span_id.hex()}-01"], "that the scheduler gets"
    found = attributes(at_gateway)
    usage = response.json()["usage"]
    assert (at_gateway.name, at_gateway.kind) == (f"text_completion {gateway.name}", Span.SPAN_KIND_SERVER)
    expected = {
        "gen_ai.request.model": gateway.name, "gen_ai.request.max_tokens": 64, "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": [response.json()["choices"][0]["finish_reason"]],
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert [event.name for event in at_gateway.events] == ["first_token"]

    scheduler_spans(collector, parents[0])
    phases = {span.name: span for service, span in collector.spans() if service == "orcinus-scheduler"}
    assert list(phases) == ["queue", "prefill", "decode"]
    for span in phases.values():
        assert (span.trace_id, span.parent_span_id) == (at_gateway.trace_id, at_gateway.span_id)
    seconds = {name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for name, span in phases.items()}
    assert seconds == {"queue": 1.0, "prefill": 1.0, "decode": 2.0}
    assert attributes(phases["prefill"])["gen_ai.usage.input_tokens"] == 7
    assert attributes(phases["decode"])["gen_ai.usage.output_tokens"] == 3
    sent = b"".join(collector.bodies)
    for word in (*SECRET.split(), "four", "words"):
        assert word.encode() not in sent, word


@pytest.mark.parametrize("traceparent", ["", f"00-{TRACE}-{PARENT}-00"], ids=["none", "not sampled"])
def test_request_without_a_sampled_trace_leaves_no_span(collector: Collector, traceparent: str) -> None:
    scheduler_spans(collector, traceparent)
    assert collector.spans() == []


def test_silent_collector_delays_nothing() -> None:
    silent = Collector()  # listens, and never answers
    begun = threading.Thread(target=scheduler_spans, args=(silent, SAMPLED), daemon=True)
    begun.start()
    begun.join(60)
    assert not begun.is_alive()
    silent.server_close()
