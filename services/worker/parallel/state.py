"""The ranks of one replica: tensor parallel inside a stage, stages one after another, and what they say to each other.

Rank = stage * tp + tp_rank. Rank 0 is the leader: it answers the scheduler. The first rank of the last stage samples.
Steps come to every rank in the same order (never through here), so all ranks make the same calls in the same order;
the order of sends and receives between two ranks is the order of the steps. Whatever a call raises is a RankError.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shared.errors import ConfigurationError, RankError

ROWS, TOKENS, COPIES = 1, 2, 3
"""Tags of what goes between two ranks: rows of a stage, sampled tokens, copies that are complete. A stream each."""

SENT = 256
"""Messages that have no receiver yet; one more waits for the oldest. More than those of all steps in flight."""

TEXT_BYTES = 256


class ParallelState:
    """One rank's place among tp * pp, and its connections. A ParallelState() is alone: calls do nothing or fail."""

    _store: dist.Store  # these three by `join`
    _timeout: timedelta
    _host: str

    def __init__(self, tp: int = 1, pp: int = 1, rank: int = 0) -> None:
        """Use `join` for more than one rank. Raise ConfigurationError."""
        if tp < 1 or pp < 1 or not 0 <= rank < tp * pp:
            raise ConfigurationError(f"rank {rank} of --tp {tp} x --pp {pp}: ranks are 0..{tp * pp - 1}")
        self.tp, self.pp, self.rank, self.size = tp, pp, rank, tp * pp
        self.stage, self.tp_rank = divmod(rank, tp)
        self.sampler = (pp - 1) * tp
        self.ranks_here = 1  # of this replica on this host, which share its memory
        self._exact = False
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._sent_rows: deque[tuple[dist.Work, Tensor]] = deque()
        self._everyone: Any = None  # between hosts' memories
        self._stage_group: Any = None  # between the devices of a stage; None: tp is 1
        self._rows: Any = None  # between the devices of two stages

    @classmethod
    def join(
        cls, tp: int, pp: int, rank: int, store: dist.Store, timeout_s: float, host: str = "127.0.0.1"
    ) -> ParallelState:
        """Meet the other ranks through `store`; return when all are there.

        timeout_s: what the others may take for any one call before this rank gives up, and for coming here.
        host: the address of this machine at which the other ranks reach this one. Raise RankError.
        """
        parallel = cls(tp, pp, rank)
        if parallel.size == 1:
            return parallel
        parallel._store, parallel._timeout, parallel._host = store, timedelta(seconds=timeout_s), host
        with _together("meeting the other ranks"):
            parallel._everyone = parallel._gloo("everyone", rank, parallel.size)
            hosts = parallel.texts(socket.gethostname())
        parallel.ranks_here = hosts.count(hosts[rank])
        return parallel

    def connect(self, device: torch.device, exact: bool = False) -> None:
        """Join the devices of all ranks: before the first call below that takes a tensor of the model.

        exact: a sum does not depend on where in its tensor a number stands. Costs tp times the memory.
        """
        self._exact = exact and self.tp > 2  # two numbers have one sum
        if self.size == 1:
            return
        with _together("connecting the devices"):
            make = self._nccl if device.type == "cuda" else self._gloo
            if self.tp > 1:
                self._stage_group = make(f"stage-{self.stage}", self.tp_rank, self.tp)
            if self.pp > 1:
                self._rows = make("rows", self.rank, self.size) if device.type == "cuda" else self._everyone

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def samples(self) -> bool:
        """Return whether this rank draws the tokens."""
        return self.rank == self.sampler

    @property
    def first(self) -> bool:
        """Return whether this rank's stage embeds the tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Return whether this rank's stage computes the logits."""
        return self.stage == self.pp - 1

    def all_reduce(self, x: Tensor) -> None:
        """Replace x by its sum over the stage: in place, the same numbers on all of its ranks."""
        if self._stage_group is None or not x.numel():
            return
        with _together("a sum over the stage"):
            if not self._exact:
                self._stage_group.allreduce([x]).wait()
                return
            parts = [torch.empty_like(x) for _ in range(self.tp)]
            self._stage_group.allgather([parts], [x]).wait()
            x.copy_(parts[0])
            for part in parts[1:]:
                x += part

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Return every tp rank's x, of one shape, at the first of the stage; None at the others."""
        if self._stage_group is None:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.tp)] if self.tp_rank == 0 else []
        if x.numel():
            options = dist.GatherOptions()
            options.rootRank = 0
            with _together("collecting the logits"):
                self._stage_group.gather([parts] if parts else [], [x], options).wait()
        return parts or None

    def send_rows(self, x: Tensor) -> None:
        """Send x to the next stage; wait only while that is more than two steps a stage behind.

        x may be overwritten at once.
        """
        self._send(self._rows, x.clone(), self.rank + self.tp, ROWS, self._sent_rows, 2 * self.pp)

    def receive_rows(self, x: Tensor) -> None:
        """Fill x with what the stage before this one has sent."""
        with _together("the rows of the stage before this one"):
            self._rows.recv([x], self.rank - self.tp, ROWS).wait()

    def send(self, message: Tensor, to: int, tag: int) -> None:
        """Send a message in host memory without waiting; the caller must not change it afterwards."""
        self._send(self._everyone, message, to, tag, self._sends, SENT)

    def receive(self, message: Tensor, sender: int, tag: int) -> dist.Work:
        """Begin to receive into `message`, as long as what is sent; `finish_receive` takes the result, once."""
        with _together(f"a message of rank {sender}"):
            work: dist.Work = self._everyone.recv([message], sender, tag)
            return work

    def finish_receive(self, work: dist.Work) -> None:
        """Return when it has been received."""
        with _together("a message of another rank"):
            work.wait()

    def least(self, numbers: list[int]) -> list[int]:
        """Return the smallest of all ranks' first, second, ... number."""
        if self.size == 1:
            return numbers
        smallest = torch.tensor(numbers, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        with _together("agreeing on sizes"):
            self._everyone.allreduce([smallest], options).wait()
        return [int(number) for number in smallest.tolist()]

    def texts(self, text: str) -> list[str]:
        """Return every rank's text, in the order of ranks; cut to TEXT_BYTES."""
        if self.size == 1:
            return [text]
        mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        data = text.encode()[:TEXT_BYTES]
        mine[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with _together("asking the other ranks"):
            self._everyone.allgather([parts], [mine]).wait()
        return [bytes(one.numpy().tobytes()).rstrip(b"\0").decode(errors="replace") for one in parts]

    def demand_same(self, text: str) -> None:
        """Raise ConfigurationError where another rank has another text."""
        said = self.texts(text)
        for rank, other in enumerate(said):
            if other != said[0]:
                raise ConfigurationError(
                    f"rank {rank} of the replica has {other!r} and rank 0 {said[0]!r}; start all ranks with one model "
                    "and the same settings"
                )

    def close(self) -> None:
        """Leave when the others have taken what was sent to them, or are gone; their next call fails."""
        for sent in (self._sent_rows, self._sends):
            with suppress(RuntimeError):
                while sent:
                    sent.popleft()[0].wait()
        self._stage_group = self._rows = self._everyone = None

    def _send(self, group: Any, x: Tensor, to: int, tag: int, sent: deque[tuple[dist.Work, Tensor]], most: int) -> None:
        """Send x; `sent` keeps what is on its way: `most` at a time."""
        with _together(f"what is sent to rank {to}"):
            if len(sent) >= most:
                sent.popleft()[0].wait()
            sent.append((group.send([x], to, tag), x))

    def _gloo(self, name: str, rank: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub leaves it out
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = self._timeout
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, size, options)

    def _nccl(self, name: str, rank: int, size: int) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(dist.PrefixStore(name, self._store), rank, size, options)


def own_gpu(local_rank: int, visible: str | None) -> str:
    """Return the GPU of this host's rank of that number, as CUDA_VISIBLE_DEVICES names it; empty if there is none.

    visible: that variable before, of all ranks here.
    """
    if visible is None:
        return str(local_rank)
    every = visible.split(",")
    return every[local_rank] if local_rank < len(every) else ""


@contextmanager
def _together(what: str) -> Iterator[None]:
    """Raise RankError for what torch raises when another rank is gone or late."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"{what}: {error}") from error
