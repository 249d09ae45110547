"""What one rank draws and every rank has to know: the tokens of each step, in one message of the rank that samples.

Every rank knows how long the message of a step is: from which slots sample and what their sequences asked for. So the
others begin to receive it when they submit the step, and wait for it when a token of it is needed.
"""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import torch
from torch import Tensor

from kernels.ops import STATUS_FINE, AnyOps, Batch, Likely, Sampled
from kernels.pending import Pending
from services.worker.in_flight import Flight
from services.worker.models.shard import Shard
from services.worker.parallel.state import COPIES, DRAWS, Mesh
from shared.errors import MeshError

WHY_BYTES = 256
"""Of what is said about a grammar that could not be followed."""


class Heard(Pending[Sampled]):
    """A step's message, on its way to a rank that does not sample."""

    def __init__(self, mesh: Mesh, flight: Flight, serial: int) -> None:
        """Begins to receive. The flight gets what is more than Sampled holds."""
        self._mesh, self._flight, self._serial = mesh, flight, serial
        self._lock = threading.Lock()
        self._layout = _layout(flight)
        self._message = torch.empty(self._layout.itemsize, dtype=torch.uint8)
        self._work = mesh.receive(self._message, mesh.sampler, DRAWS)
        self._sampled: Sampled | None = None

    def ready(self) -> bool:
        return self._sampled is not None

    def wait(self) -> Sampled:
        """The tokens. Raises MeshError."""
        with self._lock:
            if self._sampled is None:
                self._mesh.arrived(self._work)
                self._flight.arrived_ns = time.monotonic_ns()
                self._sampled = self._read()
            return self._sampled

    def _read(self) -> Sampled:
        found = self._message.numpy().view(self._layout)[0]
        if found["serial"] != self._serial:
            raise MeshError(f"the draw of step {found['serial']} has come where that of {self._serial} was expected")
        names = self._layout.names or ()
        if "why" in names:
            texts = enumerate(found["why"].tolist())
            self._flight.why = {row: text.decode(errors="replace") for row, text in texts if text}
        likely = None
        if "likely_ids" in names:
            likely = Likely(torch.from_numpy(found["likely_ids"]), torch.from_numpy(found["likely_logprobs"]))
        return Sampled(
            tokens=torch.from_numpy(found["tokens"].astype(np.int64)),
            status=torch.from_numpy(found["status"]),
            logprobs=torch.from_numpy(found["logprobs"]) if "logprobs" in names else None,
            likely=likely,
        )


class Draws:
    """One rank's side of it, by the thread that submits; `copied` by the one that finishes."""

    def __init__(self, mesh: Mesh, shard: Shard) -> None:
        self._mesh, self._shard = mesh, shard
        self._serial = 0  # steps that computed something

    def rows_of(self, batch: Batch) -> Batch:
        """The batch with tokens as rows of this rank's embedding; those of other ranks become the row of zeros."""
        vocab, rows = self._shard.vocab, self._shard.vocab_rows
        if self._mesh.tp == 1:
            return batch
        inside = (batch.tokens >= vocab.start) & (batch.tokens < vocab.stop)
        local = np.where(inside, batch.tokens - vocab.start, rows - 1).astype(np.int32)
        return dataclasses.replace(batch, tokens=local)

    def whole(self, logits: Tensor, ops: AnyOps, vocab: int) -> Tensor:
        """[R, vocab] at the rank that samples, of all the ranks' part of it; means nothing at the others."""
        if not self._mesh.last or self._mesh.tp == 1:
            return logits
        parts: list[Tensor] = []
        ops.exchange(logits, lambda mine: parts.extend(self._mesh.gather(mine) or []))
        if not parts:
            return logits
        return torch.cat([part[:, : self._shard.vocab_rows - 1] for part in parts], dim=1)[:, :vocab].contiguous()

    def hear(self, flight: Flight) -> Heard:
        """Begins to receive what is drawn for this flight, which is the next that computes something."""
        self._serial += 1
        return Heard(self._mesh, flight, self._serial)

    def tell(self, flight: Flight) -> None:
        """Sends what was drawn for this flight to the other ranks."""
        self._serial += 1
        layout = _layout(flight)
        message = np.zeros(1, layout)
        made, names = message[0], layout.names or ()
        made["serial"] = self._serial
        if flight.sampled is not None:
            sampled = flight.sampled.wait()
            made["tokens"], made["status"] = sampled.tokens.cpu().numpy(), sampled.status.cpu().numpy()
            if "logprobs" in names and sampled.logprobs is not None:
                made["logprobs"] = sampled.logprobs.cpu().numpy()
            if "likely_ids" in names and sampled.likely is not None:
                made["likely_ids"] = sampled.likely.ids.cpu().numpy()
                made["likely_logprobs"] = sampled.likely.logprobs.cpu().numpy()
            if "why" in names:
                for row in np.flatnonzero(np.isin(flight.sampling, list(flight.failed))).tolist():
                    made["why"][row] = flight.failed[int(flight.sampling[row])][1].encode()[:WHY_BYTES]
                    made["status"][row] = STATUS_FINE
        sent = torch.from_numpy(message.view(np.uint8))
        for rank in range(self._mesh.size):
            if rank != self._mesh.rank:
                self._mesh.send(sent, rank, DRAWS)

    def copied(self, flight: Flight) -> None:
        """This rank's copies of a flight are complete; at the leader returns when those of all ranks are."""
        mesh = self._mesh
        said = torch.tensor([flight.id], dtype=torch.int64)
        if not mesh.is_leader:
            mesh.send(said, 0, COPIES)
            return
        for rank in range(1, mesh.size):
            heard = torch.empty_like(said)
            mesh.arrived(mesh.receive(heard, rank, COPIES))
            if int(heard[0]) != flight.id:
                raise MeshError(f"rank {rank} has copied for step {int(heard[0])}, not for {flight.id}")


def _layout(flight: Flight) -> np.dtype[np.void]:
    """Of the message, which is the same at every rank."""
    rows, wanted = len(flight.sampling), flight.logprobs
    fields: list[tuple[str, str, tuple[int, ...]]] = [
        ("serial", "<i8", ()),
        ("tokens", "<i4", (rows,)),
        ("status", "<i4", (rows,)),
    ]
    if wanted.any():
        fields.append(("logprobs", "<f4", (rows,)))
        if (most := int(wanted.max()) - 1) > 0:
            fields.append(("likely_ids", "<i4", (rows, most)))
            fields.append(("likely_logprobs", "<f4", (rows, most)))
    if flight.has_grammars:
        fields.append(("why", f"S{WHY_BYTES}", (rows,)))
    return np.dtype(fields)
