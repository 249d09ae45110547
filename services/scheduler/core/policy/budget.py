"""How many tokens one iteration may run; never more than the worker takes in one step."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.policy.base import Budget, ReplicaView
from services.scheduler.core.types import PREFILL, Rows

TBT_NS = 100_000_000  # target of those who give no limit
ALIGN = 64


class Unlimited(Budget):
    """As many as the worker takes (Orca has no token budget)."""

    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        return at_most(replica, step_tokens)

    def budget(self, replica: ReplicaView, decodes: Rows, now_ns: int, step_tokens: int, depth: int = 0) -> int:
        return at_most(replica, step_tokens)


class Fixed(Budget):
    """A fixed budget that decodes count against (Sarathi: B = n_decode + n_prefill)."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        return at_most(replica, step_tokens or self._tokens)

    def budget(self, replica: ReplicaView, decodes: Rows, now_ns: int, step_tokens: int, depth: int = 0) -> int:
        return at_most(replica, step_tokens or self._tokens)


class EmaBudget(Budget):
    """The dynamic budget of Sarathi's facts sheet: what the mean time per token lets through under the tightest TBT
    limit of the decodes (N ms, or 100, where none gives one), the prompts' part floored to 64 tokens; 256 of them
    before any measurement."""

    def __init__(self, tbt_ns: int = TBT_NS) -> None:
        self._tbt_ns = tbt_ns
        self._starved = Starved()

    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        return at_most(replica, step_tokens)

    def budget(self, replica: ReplicaView, decodes: Rows, now_ns: int, step_tokens: int, depth: int = 0) -> int:
        most, count = at_most(replica, step_tokens), decodes.size
        if not count:
            return most
        limit_ns = tightest(replica, decodes) or self._tbt_ns
        prompts = replica.token_time.budget(limit_ns, most, count, ALIGN)
        return min(count + self._starved.feed(prompts), most)

    def for_replica(self) -> EmaBudget:
        return EmaBudget(self._tbt_ns)


class ModelBudget(Budget):
    """As many as the step-time model lets through under the tightest TBT limit of the decodes (N ms, or 100, for those
    who give none), with a factor for what it gets wrong. For the sake of a limit that nobody gave prompts never get
    less than 64 tokens. Fixed(512) until the model has seen 16 steps.

    Where prompts are handed over a step takes half of that limit: whose KV is copied out beside it waits for its end.
    """

    def __init__(self, tbt_ns: int = TBT_NS, safety: float = 0.85) -> None:
        self._tbt_ns, self._safety = tbt_ns, safety
        self._starved = Starved()

    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        return at_most(replica, step_tokens)

    def budget(self, replica: ReplicaView, decodes: Rows, now_ns: int, step_tokens: int, depth: int = 0) -> int:
        most, count, table = at_most(replica, step_tokens), decodes.size, replica.table
        if not count and replica.limits.role != PREFILL:
            return most
        if replica.model.observed < 16:
            return min(max(512, count), most)
        if not count:
            limits = table.tbt_slo_ns[: table.high]
            target_ns = int(np.where(limits > 0, limits, self._tbt_ns).min(initial=self._tbt_ns)) // 2
            prompts = self._fits(replica, target_ns, 0, 0, max(depth, deepest(replica)))
            # Where all steps have been of one size the model cannot tell what a token takes; the mean can.
            prompts = min(prompts, replica.token_time.budget(int(target_ns * self._safety), most, 0, ALIGN))
            return min(max(prompts, ALIGN), most)
        rows, target_ns = table.rows(decodes), self._tbt_ns
        context = int(table.planned[rows].sum())
        if table.limited:
            limits = table.tbt_slo_ns[rows]
            target_ns = int(np.where(limits > 0, limits, self._tbt_ns).min())
        depth = max(depth, deepest(replica))
        prompts = self._fits(replica, target_ns, count, context, depth)
        if prompts < ALIGN:
            strict_ns = tightest(replica, decodes)
            prompts = min(self._fits(replica, strict_ns, count, context, depth), ALIGN) if strict_ns else ALIGN
        return min(count + self._starved.feed(prompts), most)

    def for_replica(self) -> ModelBudget:
        return ModelBudget(self._tbt_ns, self._safety)

    def _fits(self, replica: ReplicaView, limit_ns: int, decodes: int, context: int, depth: int) -> int:
        """Tokens of prompts beside the decodes."""
        largest = replica.model.largest(limit_ns * self._safety, decodes, context, depth)
        return max(largest - decodes, 0)


class Starved:
    """Prompts get 64 tokens after 16 steps in which a limit left them nothing: a limit that cannot be kept anyway must
    not keep them out for ever."""

    patience = 16

    def __init__(self) -> None:
        self._steps = 0

    def feed(self, tokens: int) -> int:
        """Tokens for prompts in a step that has `tokens` for them."""
        self._steps = 0 if tokens else self._steps + 1
        if self._steps > self.patience:
            self._steps = 0
            return ALIGN
        return tokens


def at_most(replica: ReplicaView, tokens: int) -> int:
    """`tokens` (0: as many as there may be), at most those that the worker takes."""
    most = replica.limits.max_step_tokens
    return min(tokens or most, most)


def tightest(replica: ReplicaView, decodes: Rows) -> int:
    """ns, the least TBT limit of these slots; 0 if none has one."""
    table = replica.table
    if not table.limited:
        return 0
    limits = table.tbt_slo_ns[table.rows(decodes)]
    given = limits[limits > 0]
    return int(given.min()) if given.size else 0


def deepest(replica: ReplicaView) -> int:
    """Tokens before the next chunk of the prompt that is furthest, of those that prefill."""
    table, high = replica.table, replica.table.high
    prefills = table.known[:high] - table.planned[:high] > 1
    return int(table.planned[:high][prefills].max()) if np.count_nonzero(prefills) else 0
