"""The leader's end of the other ranks of its replica: each Step goes to them before it starts here (PROTOCOL, 3).

Control is gRPC alone and never waits: a Step lies in a bounded queue for each rank, as the same bytes for all. What
comes back says that a rank lives, how long it computed, and how many of its copies between the tiers are complete. A
rank that is lost is the end of the replica: whatever others wait for it in a collective cannot go on.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping

import grpc

from protos import worker_pb2
from services.worker.watchdog import end_process
from shared.channels import channel
from shared.errors import ConfigurationError

log = logging.getLogger("orcinus.worker")

FOLLOW = "/orcinus.worker.v1.Rank/Follow"
QUEUED_STEPS = 64
STOP_S = 5.0
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
    """One rank: what is to be sent to it, and what it has said of steps that were."""

    def __init__(self, rank: int, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.rank = rank
        self.address = address
        self.steps: queue.Queue[bytes | None] = queue.Queue(QUEUED_STEPS)
        self.unanswered: deque[object] = deque()  # the Run of each forwarded step
        self.swapped_out = self.swapped_in = 0  # copies of the current Run that are complete
        self.ready = threading.Event()
        self.info = worker_pb2.WorkerInfo()
        self.thread: threading.Thread | None = None
        self.channel = channel(address, credentials, OPTIONS)
        call = self.channel.stream_stream(
            FOLLOW, request_serializer=bytes, response_deserializer=worker_pb2.Followed.FromString
        )
        self.call = call(iter(self.steps.get, None), wait_for_ready=True)


class Ranks:
    """`connect` when this rank has loaded, `forward` and `settle` from the pipeline's threads, at the end `stop`."""

    def __init__(
        self,
        addresses: Mapping[int, str],
        credentials: grpc.ChannelCredentials | None = None,
        busy: Callable[[int, float], None] = lambda rank, seconds: None,
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        """addresses: host:port of each rank but this one. `busy` gets the seconds that a rank computed, step by step;
        `on_lost` the line for the log when one is lost."""
        self._ranks = [_Rank(rank, address, credentials) for rank, address in sorted(addresses.items())]
        self._busy, self._on_lost = busy, on_lost
        self._changed = threading.Condition()  # around all that follows
        self._stopping = False
        self._begin(None)

    def connect(self, info: worker_pb2.WorkerInfo, timeout_s: float) -> None:
        """Returns when every rank has loaded and is ready to follow.

        Raises ConfigurationError where one has another model or other settings than this one's `info`.
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
                        f"rank {rank.rank} has {name} {theirs} and rank 0 {ours}: all ranks need one model and one set "
                        "of settings"
                    )

    def forward(self, run: object, step: worker_pb2.Step) -> None:
        """Called before `step`, which may carry hello and then begins `run`, is started here. Waits only where a rank
        takes no steps at all, which the watchdog of the step ends."""
        data = step.SerializeToString()
        with self._changed:
            if step.HasField("hello"):
                self._begin(run)
                self._changed.notify_all()
            else:
                for rank in self._ranks:
                    rank.unanswered.append(run)
        for rank in self._ranks:
            rank.steps.put(data)

    def settle(self, run: object, result: worker_pb2.Result, wait: bool) -> None:
        """Takes the acknowledgements of copies from `result`, and puts into it those that every rank has completed;
        with `wait` all of them."""
        with self._changed:
            if run is not self._run:
                return  # nobody reads the results of a Run that was replaced
            if result.swap_out_acks or result.swap_in_acks:
                self._held_out += result.swap_out_acks
                self._held_in += result.swap_in_acks
                self._held_ns += result.timings.swap_ns
                result.swap_out_acks = result.swap_in_acks = b""
                result.timings.swap_ns = 0
            if wait:
                self._changed.wait_for(lambda: run is not self._run or self._complete() == self._held())
            out, back = self._complete()
            if not (out or back) or run is not self._run:
                return
            result.swap_out_acks, self._held_out = self._held_out[: 4 * out], self._held_out[4 * out :]
            result.swap_in_acks, self._held_in = self._held_in[: 4 * back], self._held_in[4 * back :]
            result.timings.swap_ns, self._held_ns = self._held_ns, 0
            self._released_out += out
            self._released_in += back

    def stop(self) -> None:
        """Tells the ranks that no step follows, and waits until they have finished theirs; STOP_S each at most."""
        self._stopping = True
        for rank in self._ranks:
            with contextlib.suppress(queue.Full):
                rank.steps.put(None, timeout=STOP_S)
        for rank in self._ranks:
            if rank.thread is not None:
                rank.thread.join(STOP_S)
            rank.call.cancel()
            rank.channel.close()

    def _begin(self, run: object) -> None:
        """No copy of the new Run is known."""
        self._run = run  # and not its epoch, which the one before may have had
        for rank in self._ranks:
            rank.swapped_out = rank.swapped_in = 0
        self._held_out = self._held_in = b""
        self._held_ns = 0
        self._released_out = self._released_in = 0

    def _held(self) -> tuple[int, int]:
        """Copies to the host and back that this rank has completed and no result has told."""
        return len(self._held_out) // 4, len(self._held_in) // 4

    def _complete(self) -> tuple[int, int]:
        """How many of those, from the first on, every other rank has completed."""
        out, back = self._held()
        return (
            min(out, *(rank.swapped_out - self._released_out for rank in self._ranks)),
            min(back, *(rank.swapped_in - self._released_in for rank in self._ranks)),
        )

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
        with self._changed:
            if rank.unanswered.popleft() is self._run:
                rank.swapped_out += followed.swapped_out
                rank.swapped_in += followed.swapped_in
                self._changed.notify_all()
