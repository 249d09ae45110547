"""Build an Outcome: whole columns for the rows of a step, single rows for sequences that end otherwise.

Used by Scheduler. In steady decode only the columns are there and nothing loops over sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.scheduler.core.sequence import Record, Sequence
from services.scheduler.core.table import DeliveryRows, ones, ramp
from services.scheduler.core.types import EMPTY, Finish, FinishedRequest, Int32, Outcome, Records


class Names:
    """Gateways and tenants as small integers; a number is used again when nothing refers to it any more."""

    def __init__(self) -> None:
        self.array: npt.NDArray[np.object_] = np.full(16, None, object)
        self._numbers: dict[str, int] = {}
        self._uses: list[int] = []
        self._free: list[int] = []

    def take(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._free.pop() if self._free else len(self._uses)
            if number == len(self._uses):
                self._uses.append(0)
                if number == self.array.size:
                    self.array = np.concatenate([self.array, np.full(number, None, object)])
            self._numbers[name] = number
            self.array[number] = name
        self._uses[number] += 1
        return number

    def give(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._numbers[self.array[number]]
            self._free.append(number)


@dataclass(slots=True)
class Columns:
    """The rows of one step in the order of `delivery`."""

    delivery: DeliveryRows
    first_indices: Int32
    tokens: Int32
    counts: Int32 | None  # tokens of each row; None: one
    drafts: Int32 | None  # guesses in the step of each row; None: no guess
    cached_tokens: dict[int, int]  # as of Outcome
    finish: npt.NDArray[np.uint8]
    waits_ns: npt.NDArray[np.int64]
    logprobs: Records | None


@dataclass(slots=True)
class Row:
    """A single row: a sequence that ended without a token, or got one without a slot."""

    record: Record
    choice: int
    first_index: int
    token: int | None
    logprobs: bytes  # the token's record; empty where none was asked for
    finish: Finish
    error: str
    wait_ns: int = -1
    cached_tokens: int = 0  # as of Outcome


@dataclass(slots=True)
class OutcomeBuilder:
    """What one call makes known, collected until build()."""

    rows: list[Row] = field(default_factory=list)
    checkpoints: list[tuple[str, int, int, Int32]] = field(default_factory=list)
    prompt_logprobs: list[tuple[str, int, int, int, bytes]] = field(default_factory=list)
    started_ids: list[str] = field(default_factory=list)
    identities: dict[str, str] = field(default_factory=dict)
    lost_peers: list[int] = field(default_factory=list)
    ended_requests: list[FinishedRequest] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.rows
            or self.checkpoints
            or self.prompt_logprobs
            or self.started_ids
            or self.identities
            or self.ended_requests
        )

    def row(self, sequence: Sequence, finish: Finish, error: str = "") -> None:
        """Add the end of `sequence` without a further token; its index is that of the token it would have got."""
        self.rows.append(Row(sequence.record, sequence.choice, sequence.outputs.size, None, b"", finish, error))

    def add_departed(self, sequence: Sequence, token: int, logprobs: bytes, wait_ns: int) -> None:
        """Add `token`, in the outputs already, of a step sent before `sequence` lost its slot."""
        first = sequence.outputs.size - 1
        cached = 0 if first else max(sequence.cached_tokens, 0)
        record, finish = sequence.record, sequence.finish
        self.rows.append(Row(record, sequence.choice, first, token, logprobs, finish, "", wait_ns, cached))

    def checkpoint(self, sequence: Sequence) -> None:
        """Checkpoint all of a sequence without a slot that no checkpoint has carried yet."""
        if sequence.outputs.size > sequence.checkpointed_tokens:
            tokens = sequence.outputs[sequence.checkpointed_tokens :]
            self.checkpoints.append((sequence.record.request.id, sequence.choice, sequence.checkpointed_tokens, tokens))
            sequence.checkpointed_tokens = sequence.outputs.size

    def build(self, columns: Columns | None = None) -> Outcome:
        """Return the Outcome, rows sorted by gateway. Lists of a steady step are shared by Outcomes: read only."""
        if columns is None:
            outcome = Outcome()
        else:  # all columns are given here: the defaults are not made
            delivery = columns.delivery
            outcome = Outcome(
                requests=delivery.requests,
                gateways=delivery.gateways,
                choices=delivery.choices,
                first_indices=columns.first_indices,
                counts=ones(columns.first_indices.size) if columns.counts is None else columns.counts,
                tokens=columns.tokens,
                logprobs=columns.logprobs,
                drafts=EMPTY if columns.drafts is None else columns.drafts,
                waits_ns=columns.waits_ns,
                finish=columns.finish,
                cached_tokens=columns.cached_tokens,
            )
        outcome.checkpoints, outcome.prompt_logprobs = self.checkpoints, self.prompt_logprobs
        outcome.started_ids, outcome.ended_requests = self.started_ids, self.ended_requests
        outcome.identities, outcome.lost_peers = self.identities, self.lost_peers
        if self.rows:
            self._merge(outcome)
        return outcome

    def _merge(self, outcome: Outcome) -> None:
        """Add the single rows and sort again."""
        rows = self.rows
        base = len(outcome.requests)
        requests = outcome.requests + [row.record.request for row in rows]
        gateways = outcome.gateways + [row.record.request.gateway for row in rows]
        order = sorted(range(len(requests)), key=gateways.__getitem__)
        got = [row for row in rows if row.token is not None]
        counts = np.concatenate([outcome.counts, np.array([row.token is not None for row in rows], np.int32)])
        at = np.cumsum(counts) - counts  # where a row's token stands
        which = ramp(at[order], counts[order])
        tokens = np.concatenate([outcome.tokens, np.array([row.token for row in got], np.int32)])
        if outcome.logprobs is not None or any(row.logprobs for row in got):
            logprobs = outcome.logprobs if outcome.logprobs is not None else np.full(outcome.tokens.size, b"", object)
            outcome.logprobs = np.concatenate([logprobs, np.array([row.logprobs for row in got], object)])[which]
        outcome.choices = np.concatenate([outcome.choices, np.array([row.choice for row in rows], np.int32)])[order]
        if outcome.drafts.size:
            outcome.drafts = np.concatenate([outcome.drafts, np.zeros(len(rows), np.int32)])[order]
        outcome.first_indices = np.concatenate(
            [outcome.first_indices, np.array([row.first_index for row in rows], np.int32)]
        )[order]
        outcome.finish = np.concatenate([outcome.finish, np.array([row.finish for row in rows], np.uint8)])[order]
        outcome.waits_ns = np.concatenate([outcome.waits_ns, np.array([row.wait_ns for row in rows], np.int64)])[order]
        outcome.counts, outcome.tokens = counts[order], tokens[which]
        outcome.requests, outcome.gateways = [requests[i] for i in order], [gateways[i] for i in order]
        cached = outcome.cached_tokens | {
            base + i: row.cached_tokens for i, row in enumerate(rows) if row.cached_tokens
        }
        outcome.cached_tokens = {row: cached[i] for row, i in enumerate(order) if i in cached}
        outcome.errors = {
            row: rows[i - base].error for row, i in enumerate(order) if i >= base and rows[i - base].error
        }
