"""The bench of Redis's own time: its requests go the way of a gateway's, from the queue to their ends."""

from __future__ import annotations

from pathlib import Path

from bench.fleet import redis as bench
from shared.keys import Keys


def test_requests_are_enqueued_claimed_and_ended(tmp_path: Path) -> None:
    with bench.server(tmp_path) as client:
        found = bench.measure(client, iterations=1)
        keys = Keys("bench")
        assert client.hmget(keys.queue, "requests", "tokens", "bytes") == [b"0", b"0", b"0"]
        assert [client.xlen(stream) for stream in keys.request_streams()] == [0, 0, 0, 0]
        states = {client.hget(name, "state") for name in client.scan_iter(keys.req("*"), count=1000)}
    assert states == {b"finished"} and all(found[name] > 0 for name in ("enqueue_request", "claim_request"))
