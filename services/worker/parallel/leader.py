"""Forward each Step from the leader to the other ranks of its replica before it starts here (docs/protocol.md#steps).

Control is gRPC alone and never waits: a Step lies in a bounded queue for each rank, as the same bytes for all. What
comes back says that a rank lives, and how long it computed. A rank that is lost is the end of the replica: whatever
others wait for it in a collective cannot go on.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping

import grpc

from protos import worker_pb2
from services.worker.watchdog import end_process
from shared.errors import ConfigurationError
from shared.security.channels import channel

log = logging.getLogger("orcinus.worker")

FOLLOW = "/orcinus.worker.v1.Rank/Follow"
METADATA_KEY = "orcinus-rank-token-bin"
"""Of Follow: its value is the secret that all ranks of the replica have."""
QUEUED_STEPS = 64
STOP_S = 5.0
END = worker_pb2.Step(end=True).SerializeToString()
OPTIONS = [
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what grpcio acts on
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
SAME = ("model_hash", "dtype", "backend", "block_size", "gpu_blocks", "host_blocks", "max_seqs", "max_model_len")
"""What the ranks of a replica must have in common: the leader's Describe speaks for all of them."""


class _Rank:
    """One rank: what is to be sent to it, and whether it is there."""

    def __init__(self, rank: int, address: str, token: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.rank = rank
        self.address = address
        self.steps: queue.Queue[bytes | None] = queue.Queue(QUEUED_STEPS)
        self.ready = threading.Event()
        self.info = worker_pb2.WorkerInfo()
        self.thread: threading.Thread | None = None
        self.channel = channel(address, credentials, OPTIONS)
        call = self.channel.stream_stream(
            FOLLOW, request_serializer=bytes, response_deserializer=worker_pb2.Followed.FromString
        )
        self.call = call(iter(self.steps.get, None), wait_for_ready=True, metadata=((METADATA_KEY, token.encode()),))


class Ranks:
    """`connect` when this rank has loaded, `forward` from the thread that submits, at the end `stop`."""

    def __init__(
        self,
        addresses: Mapping[int, str],
        token: str,
        credentials: grpc.ChannelCredentials | None = None,
        busy: Callable[[int, float], None] = lambda rank, seconds: None,
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        """Prepare the calls.

        addresses: host:port of each rank but this one. token: that all ranks of the replica have; empty where there is
        mutual TLS alone. `busy` gets the seconds that a rank computed, step by step; `on_lost` the line for the log
        when one is lost."""
        self._ranks = [_Rank(rank, address, token, credentials) for rank, address in sorted(addresses.items())]
        self._busy, self._on_lost = busy, on_lost
        self._stopping = False

    def connect(self, info: worker_pb2.WorkerInfo, timeout_s: float) -> None:
        """Return when every rank has loaded and is ready to follow.

        Raise ConfigurationError where one has another model or other settings than this one's `info`.
        """
        for rank in self._ranks:
            rank.thread = threading.Thread(target=self._read, args=(rank,), name=f"rank-{rank.rank}", daemon=True)
            rank.thread.start()
        for rank in self._ranks:
            if not rank.ready.wait(timeout_s):
                self._on_lost(f"rank {rank.rank} at {rank.address} was not ready to follow within {timeout_s:.0f} s")
            for name in SAME:
                ours, theirs = getattr(info, name), getattr(rank.info, name)
                if ours != theirs:
                    raise ConfigurationError(
                        f"rank {rank.rank} has {name} {theirs} and rank 0 {ours}; give all ranks one model and one "
                        "set of settings"
                    )

    def forward(self, step: worker_pb2.Step) -> None:
        """Send a step, which may carry hello, before it is started here.

        Wait only while a rank takes no steps at all, which the watchdog of the step ends.
        """
        data = step.SerializeToString()
        for rank in self._ranks:
            rank.steps.put(data)

    def stop(self) -> None:
        """Tell the ranks that no step follows, and wait until they have finished theirs; STOP_S each at most."""
        self._stopping = True
        for rank in self._ranks:
            with contextlib.suppress(queue.Full):
                rank.steps.put(END, timeout=STOP_S)
                rank.steps.put(None, timeout=STOP_S)
        for rank in self._ranks:
            if rank.thread is not None:
                rank.thread.join(STOP_S)
            rank.call.cancel()
            rank.channel.close()

    def _read(self, rank: _Rank) -> None:
        why = "it ended its stream"
        try:
            for followed in rank.call:
                if followed.HasField("ready"):
                    rank.info = followed.ready
                    rank.ready.set()
                else:
                    self._heard(rank, followed)
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}"
        if not self._stopping:
            self._on_lost(f"rank {rank.rank} at {rank.address} is lost ({why}): the replica ends itself")

    def _heard(self, rank: _Rank, followed: worker_pb2.Followed) -> None:
        if followed.error:
            log.error("rank %d, step %d of epoch %d: %s", rank.rank, followed.id, followed.epoch, followed.error)
        self._busy(rank.rank, followed.busy_ns / 1e9)
