"""One iteration in its passes: guard service levels, run what is running (decodes first), then admit; then the step.

Called by Core.plan. (Retiring the finished is apply()'s part.) The passes are in guard.py, decode.py, prompts.py and
admit.py.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from services.scheduler.core.admit import Admission
from services.scheduler.core.decode import Decoding
from services.scheduler.core.draft import Draft, Shared
from services.scheduler.core.guard import Guard
from services.scheduler.core.outcome import Collector
from services.scheduler.core.peers import NO_NEWS, told
from services.scheduler.core.prompts import LOWEST, Prompts
from services.scheduler.core.replica import InFlight, Last, Replica
from services.scheduler.core.roles import HandOver
from services.scheduler.core.table import Bool
from services.scheduler.core.types import EMPTY, PREFILL, Int32, StepPlan

Integer = TypeVar("Integer", np.int32, np.intp)
COLD_SHARE = 64  # a step copies at most 1 / 64 of the pool's blocks to the host before they are evicted,
COLD_BLOCKS = 32  # or so many, or a quarter of a small pool


class Passes:
    """Plans steps for any replica with one policy and one Placer."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._guard = Guard(shared)
        self._hand_over = HandOver(shared)
        self._decoding = Decoding(shared)
        self._prompts = Prompts(shared)
        self._admission = Admission(shared, self._guard, self._prompts)
        self._ones: Int32 = np.ones(0, np.int32)
        self._true: Bool = np.ones(0, np.bool_)

    def iterate(self, replica: Replica, now_ns: int, known: Collector) -> StepPlan | None:
        """The next step of `replica`, or None: nothing can run, or as much is in flight as may be."""
        shared = self._shared
        for microbatch in self._open(replica):
            while True:
                seats = shared.seats(replica, replica.table.count)
                draft = Draft(microbatch, seats, replica.tokens.max_tokens(replica, shared.step_tokens))
                if replica.table.limited:
                    self._guard.protect(replica, draft, now_ns, known)
                if len(shared.placer):
                    shared.policy.order.keep_slots(replica.table, shared.most(replica), len(shared.placer))
                    self._admission.make_room(replica, draft, now_ns, known)
                self._admission.enter_loaded(replica, draft)
                if replica.limits.role == PREFILL:
                    self._hand_over.plan(replica, now_ns, known)
                self._decoding.plan(replica, draft, now_ns, known)
                urgent = self._admission.urgent(replica, now_ns)
                self._prompts.prefill(replica, draft, now_ns, 0, urgent)
                self._admission.admit(replica, draft, now_ns, known)
                if urgent < LOWEST:
                    self._prompts.prefill(replica, draft, now_ns, urgent + 1, LOWEST)
                if not draft.empty or draft.enters or replica.transfers.pending or replica.peers.news:
                    return self._seal(replica, draft, now_ns)
                if not draft.preempted:  # else: all who were to run have yielded; those who kept memory run now
                    break
        return None

    def _open(self, replica: Replica) -> list[int]:
        """Microbatches that may be planned again, the one with least in flight and planned longest ago first."""
        shared, inflight, last = self._shared, replica.inflight_of, replica.last_planned
        if replica.microbatches == 1:
            return [0] if inflight.get(0, 0) <= shared.lookahead else []
        free = [m for m in range(replica.microbatches) if inflight.get(m, 0) <= shared.lookahead]
        return sorted(free, key=lambda m: (inflight.get(m, 0), last.get(m, 0)))

    def _seal(self, replica: Replica, draft: Draft, now_ns: int) -> StepPlan:
        """The draft as a StepPlan, in flight from now on."""
        shared = self._shared
        decodes = draft.slots.size
        if self._ones.size < decodes:
            self._ones, self._true = np.ones(2 * decodes, np.int32), np.ones(2 * decodes, np.bool_)
        slots, starts = draft.slots, draft.starts
        table = replica.table
        lengths, samples = self._ones[:decodes], self._true[:decodes]
        sampled, ends = slots, EMPTY
        if draft.chunk_slots:
            ends = _join(draft.chunk_starts) + _join(draft.chunk_lengths)
            slots = np.concatenate([slots, *draft.chunk_slots])
            starts = np.concatenate([starts, *draft.chunk_starts])
            lengths = np.concatenate([lengths, *draft.chunk_lengths])
            samples = np.concatenate([samples, *draft.chunk_samples])
            sampled = slots[samples]
        wire = table.wire(slots)
        if replica.sharing is not None and replica.host.total:
            self._save_cold(replica)
        out_gpu, out_host, in_host, in_gpu, in_peers = replica.transfers.columns()
        news = replica.peers.take_news() if replica.peers.news else NO_NEWS
        step = InFlight(
            replica.next_step, draft.microbatch, replica.table.roster, slots, sampled,
            wire if sampled is slots else wire[samples], decodes, ends,
            decodes + draft.prefill, draft.context, draft.prefill_context, out_gpu.size + in_host.size, news,
        )  # fmt: skip
        freed, replica.freed = replica.freed, []
        replica.sent(step)
        shared.counters.iteration += 1
        replica.memory.stepped(replica, draft.preempted)
        if shared.policy.order.counts:
            shared.policy.order.served(table.tenant[slots], table.priority[slots], lengths)
        replica.last = Last(step.tokens, decodes, draft.prefill)
        return StepPlan(
            id=step.id,
            replica=replica.number,
            free_slots=np.array(freed, np.int32) if freed else EMPTY,
            swap_out_gpu=out_gpu,
            swap_out_host=out_host,
            swap_in_host=in_host,
            swap_in_gpu=in_gpu,
            enters=draft.enters,
            append_slots=_join(draft.append_slots).astype(np.int32) if draft.append_slots else EMPTY,
            append_blocks=_join(draft.append_blocks) if draft.append_blocks else EMPTY,
            chunk_slots=wire,
            chunk_starts=starts,
            chunk_lengths=lengths,
            samples=samples,
            microbatch=draft.microbatch,
            decode_tokens=decodes,
            prefill_tokens=draft.prefill,
            peers=told(news) if news else [],
            swap_in_peers=in_peers,
        )

    @staticmethod
    def _save_cold(replica: Replica) -> None:
        """When few blocks are free, the coldest of the cached ones that were of use to anybody go to the host tier
        instead of being forgotten."""
        pool, total = replica.pool, replica.pool.total
        share = max(total // COLD_SHARE, min(COLD_BLOCKS, total // 4), 1)
        if pool.free >= share or not pool.cached or replica.transfers.pending:
            return
        cold = pool.coldest(share)
        cold = cold[pool.reused(cold)]
        if cold.size and cold.size <= replica.host.available and replica.available >= cold.size:
            replica.transfers.keep(cold)


def _join(columns: list[npt.NDArray[Integer]]) -> npt.NDArray[Integer]:
    """One column of several."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)
