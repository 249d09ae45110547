"""Send the sampled tokens of each step from the rank that samples to every other rank, in one message a step.

Every rank knows how long the message of a step is: from the slots that sample and the sampling of their sequences. So
the other ranks begin to receive it when they submit the step, and wait for it when a token of it is needed.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from kernels.ops import STATUS_FINE, Likely, Pending, Sampled, Scored
from services.worker.in_flight import UNMASKED, InFlightStep
from services.worker.kv.transfers import Acknowledged
from services.worker.parallel.state import COPIES, TOKENS, ParallelState
from shared.errors import RankError
from shared.text.grammar_process import MAX_FORCED

REASON_BYTES = 256
"""Of the message why a grammar cannot be followed."""
NONE = -1
"""Behind the forced tokens of a row."""


class ReceivedTokens(Pending[Sampled]):
    """A step's message on its way to a rank that does not sample."""

    def __init__(self, parallel: ParallelState, inflight: InFlightStep, serial: int) -> None:
        """Begin to receive. `inflight` gets late rows and grammar errors, which Sampled does not hold."""
        self._parallel, self._inflight, self._serial = parallel, inflight, serial
        self._lock = threading.Lock()
        self._layout = _layout(inflight)
        self._message = torch.empty(self._layout.itemsize, dtype=torch.uint8)
        self._work = parallel.receive(self._message, parallel.sampler, TOKENS)
        self._sampled: Sampled | None = None

    def ready(self) -> bool:
        return self._sampled is not None

    def wait(self) -> Sampled:
        """Return the tokens. Raise RankError."""
        with self._lock:
            if self._sampled is None:
                self._parallel.finish_receive(self._work)
                self._inflight.arrived_ns = time.monotonic_ns()
                self._sampled = self._read()
            return self._sampled

    def _read(self) -> Sampled:
        message = self._message.numpy().view(self._layout)[0]
        if message["serial"] != self._serial:
            raise RankError(f"tokens of step {message['serial']} arrived where those of {self._serial} were expected")
        names = self._layout.names or ()
        if "grammar_errors" in names:
            texts = enumerate(message["grammar_errors"].tolist())
            self._inflight.grammar_errors = {row: text.decode(errors="replace") for row, text in texts if text}
            self._inflight.late_rows = message["late"].copy()
            forced = ((row, ids[: ids.index(NONE)]) for row, ids in enumerate(message["forced"].tolist()))
            self._inflight.forced = {row: ids for row, ids in forced if ids}
        if "score_logprobs" in names:
            self._inflight.scores = _scores(message, names)
        if "vectors" in names:
            self._inflight.vectors = message["vectors"].copy()
        likely = None
        if "likely_ids" in names:
            likely = Likely(torch.from_numpy(message["likely_ids"]), torch.from_numpy(message["likely_logprobs"]))
        return Sampled(
            tokens=message["tokens"].astype(np.int64),
            status=message["status"],
            logprobs=message["logprobs"] if "logprobs" in names else None,
            likely=likely,
        )


class TokenBroadcast:
    """One rank's side. The thread that submits steps calls `receive` and `send`; the thread that finishes them calls
    `confirm_copies`."""

    def __init__(self, parallel: ParallelState) -> None:
        self._parallel = parallel
        self._serial = 0  # steps that computed something

    def receive(self, inflight: InFlightStep) -> ReceivedTokens:
        """Begin to receive the tokens of this step, the next one that computes something."""
        self._serial += 1
        return ReceivedTokens(self._parallel, inflight, self._serial)

    def send(self, inflight: InFlightStep) -> None:
        """Send the sampled tokens of this step to the other ranks."""
        self._serial += 1
        layout = _layout(inflight)
        message = np.zeros(1, layout)
        record, names = message[0], layout.names or ()
        record["serial"] = self._serial
        if inflight.sampled is not None:
            sampled = inflight.sampled.wait()
            record["tokens"], record["status"] = sampled.tokens, sampled.status
            record["tokens"][inflight.unmasked] = UNMASKED
            if "logprobs" in names and sampled.logprobs is not None:
                record["logprobs"] = sampled.logprobs
            if "likely_ids" in names and sampled.likely is not None:
                record["likely_ids"] = sampled.likely.ids.cpu().numpy()
                record["likely_logprobs"] = sampled.likely.logprobs.cpu().numpy()
            if "grammar_errors" in names:
                for row in np.flatnonzero(np.isin(inflight.sampling, list(inflight.failed))).tolist():
                    error = inflight.failed[int(inflight.sampling[row])][1]
                    record["grammar_errors"][row] = error.encode()[:REASON_BYTES]
                    record["status"][row] = STATUS_FINE
                record["late"] = np.isin(inflight.sampling, inflight.late)
                record["forced"] = NONE
                for row, forced in inflight.forced.items():
                    record["forced"][row, : len(forced)] = forced
        if (scores := inflight.scores) is not None:
            for name in ("logprobs", "ranks", "status", "ids", "best"):
                if f"score_{name}" in names:
                    record[f"score_{name}"] = getattr(scores, name)
        if "vectors" in names and inflight.vectors is not None:
            record["vectors"] = inflight.vectors
        sent = torch.from_numpy(message.view(np.uint8))
        for rank in range(self._parallel.size):
            if rank != self._parallel.rank:
                self._parallel.send(sent, rank, TOKENS)

    def confirm_copies(self, inflight: InFlightStep, copied: Acknowledged) -> tuple[bool, ...]:
        """Say that this rank's transfers of a step are complete, and which of their peers had a fault; at the leader,
        return when those of all ranks are, with those that had one for one of them."""
        parallel = self._parallel
        confirmed = torch.tensor([inflight.id, *map(bool, copied.faults)], dtype=torch.int64)
        if not parallel.is_leader:
            parallel.send(confirmed, 0, COPIES)
            return tuple(map(bool, copied.faults))
        replaced = confirmed[1:].bool()
        for rank in range(1, parallel.size):
            received = torch.empty_like(confirmed)
            parallel.finish_receive(parallel.receive(received, rank, COPIES))
            if int(received[0]) != inflight.id:
                raise RankError(f"rank {rank} has copied for step {int(received[0])}, not for {inflight.id}")
            replaced |= received[1:].bool()
        return tuple(replaced.tolist())


def _scores(message: np.void, names: tuple[str, ...]) -> Scored:
    """Return what a message tells of prompt tokens."""
    logprobs = message["score_logprobs"].copy()
    has_likely = "score_ids" in names
    none = np.zeros((logprobs.size, 0))
    return Scored(
        logprobs=logprobs,
        ranks=message["score_ranks"].copy(),
        status=message["score_status"].copy(),
        ids=message["score_ids"].copy() if has_likely else none.astype(np.int32),
        best=message["score_best"].copy() if has_likely else none.astype(np.float32),
    )


def _layout(inflight: InFlightStep) -> np.dtype[np.void]:
    """Return the layout of a step's message, the same at every rank."""
    rows, wanted = len(inflight.sampling), inflight.logprobs
    fields: list[tuple[str, str, tuple[int, ...]]] = [
        ("serial", "<i8", ()),
        ("tokens", "<i4", (rows,)),
        ("status", "<i4", (rows,)),
    ]
    if wanted.any():
        fields.append(("logprobs", "<f4", (rows,)))
        if (likely := int(wanted.max()) - 1) > 0:
            fields.append(("likely_ids", "<i4", (rows, likely)))
            fields.append(("likely_logprobs", "<f4", (rows, likely)))
    if (scoring := inflight.scoring) is not None:
        tokens, likely = len(scoring.tokens), scoring.likely
        fields += [("score_logprobs", "<f4", (tokens,)), ("score_ranks", "<i4", (tokens,))]
        fields.append(("score_status", "<i4", (tokens,)))
        if likely:
            fields += [("score_ids", "<i4", (tokens, likely)), ("score_best", "<f4", (tokens, likely))]
    if pooled := len(inflight.pooled):
        fields.append(("vectors", "<f4", (pooled, inflight.vector_size)))
    if inflight.has_grammars:
        fields += [("grammar_errors", f"S{REASON_BYTES}", (rows,)), ("late", "?", (rows,))]
        fields.append(("forced", "<i4", (rows, MAX_FORCED + 1)))
    return np.dtype(fields)
