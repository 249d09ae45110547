"""Transfers of KV blocks between the device and the host tier, or from the host tiers of peers, of one Run.

The thread that submits steps begins them, the thread that finishes a step acknowledges them; they complete in the order
in which they began. Blocks that outlived their worker are compared with their digests in a thread beside these two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.ops import Cache, Int32, Pending
from services.worker.kv.peers import OWN_TIER, Peers, Tier


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """int32 columns of a Result, the peers that blocks came from, why what came from each may be wrong (Tier.fault),
    whether its number means another tier or none by now, and the ns that the copies took; 0 without any."""

    out_gpu: bytes = b""
    in_host: bytes = b""
    peers: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()  # empty texts where it is right
    replaced: tuple[bool, ...] = ()
    ns: int = 0


NONE = Acknowledged()


@dataclass(frozen=True, slots=True)
class _Begun:
    step: int
    out_gpu: bytes
    in_host: bytes
    pending: list[Pending[int]]
    reads: dict[int, tuple[Tier, Int32] | None]  # by peer, the tiers that stay mapped meanwhile, and their blocks
    faults: dict[int, Future[str]] = field(default_factory=dict)  # by peer, of blocks that are compared meanwhile

    def is_complete(self) -> bool:
        """Return whether the copies are complete and their blocks compared with their digests, which this begins."""
        if not all(pending.ready() for pending in self.pending):
            return False
        for number, read in self.reads.items():
            if number not in self.faults and read is not None and read[0].has_digests(read[1]):
                self.faults[number] = _start_comparing(*read)
        return all(fault.done() for fault in self.faults.values())

    def wait_faults(self) -> Iterator[str]:
        """Yield why what was copied from each peer may be wrong. For complete copies: a tier that still has its Run had
        it while they were made."""
        for number, read in self.reads.items():
            if number in self.faults:
                yield self.faults[number].result()
            else:
                yield "" if read is None else read[0].fault(read[1], torch.get_num_threads())


class KVTransfers:
    """The transfers of one Run that are not acknowledged yet, in order."""

    def __init__(self, cache: Cache, peers: Peers) -> None:
        self.peers = peers
        self._cache = cache
        self._in_flight: deque[_Begun] = deque()
        self._last: Pending[int] | None = None

    def begin(self, step: int, out_gpu: Int32, out_host: Int32, in_host: Int32, in_gpu: Int32, in_peers: Int32) -> None:
        """Begin the copies of one step: `out_gpu` to `out_host`, then `in_host` to `in_gpu`.

        in_peers: the peer of each `in_host` block, OWN_TIER for this worker's tier; empty means OWN_TIER for all.
        """
        pending: list[Pending[int]] = []
        reads: dict[int, tuple[Tier, Int32] | None] = {}
        if out_gpu.size:
            pending.append(self._cache.start_copy_out(out_gpu, out_host))
        if in_host.size and not in_peers.size:
            pending.append(self._cache.start_copy_in(in_host, in_gpu))
        for number in np.unique(in_peers).tolist():
            rows, memory = in_peers == number, None
            if number != OWN_TIER:
                tier = self.peers.tier(number)
                reads[number], memory = (tier, in_host[rows]), tier.memory
            pending.append(self._cache.start_copy_in(in_host[rows], in_gpu[rows], memory))
        if pending:
            self._last = pending[-1]
            self._in_flight.append(_Begun(step, out_gpu.tobytes(), in_host.tobytes(), pending, reads))

    def acknowledge(self, step: int, wait: bool) -> Acknowledged:
        """Return the transfers up to `step` that are complete and not acknowledged yet; with `wait`, wait for all."""
        if not self._in_flight:
            return NONE
        complete: list[_Begun] = []
        while self._in_flight and self._in_flight[0].step <= step:
            if not wait and not self._in_flight[0].is_complete():
                break
            complete.append(self._in_flight.popleft())
        if not complete:
            return NONE
        ns = max(1, sum(pending.wait() for one in complete for pending in one.pending))
        reads = [read for one in complete for read in one.reads.items()]
        return Acknowledged(
            out_gpu=b"".join(one.out_gpu for one in complete),
            in_host=b"".join(one.in_host for one in complete),
            peers=tuple(number for number, _ in reads),
            faults=tuple(fault for one in complete for fault in one.wait_faults()),
            replaced=tuple(read is None or not self.peers.has(number, read[0]) for number, read in reads),
            ns=ns,
        )

    def release_peers(self) -> None:
        """Unmap the host tiers of peers once nothing is read from them any more."""
        self.peers.forget()
        self.drain()
        for begun in list(self._in_flight):  # those that no Result will acknowledge
            begun.reads.update(dict.fromkeys(begun.reads))

    def drain(self) -> None:
        """Return when no copy runs any more, acknowledged or not."""
        if self._last is not None:
            self._last.wait()


def _start_comparing(tier: Tier, blocks: Int32) -> Future[str]:
    """Begin `tier.fault`, which may take long, in a thread of its own."""
    pool = ThreadPoolExecutor(1, "compare-kv")
    future = pool.submit(tier.fault, blocks)
    pool.shutdown(wait=False)  # the thread ends behind it
    return future
