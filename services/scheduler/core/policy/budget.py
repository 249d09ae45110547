"""Token budgets: how many tokens one iteration may run, at most the worker's max_step_tokens."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.policy.base import Budget, ReplicaView
from services.scheduler.core.table import PREFILLING
from services.scheduler.core.types import PREFILL, Rows

TBT_NS = 100_000_000  # TBT target of a request that gives no limit
ALIGN = 64  # tokens; prompt parts of EmaBudget are multiples of it, and the least that a starved prompt gets


class Unlimited(Budget):
    """As many tokens as the worker takes (Orca has no token budget)."""

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
    """As many tokens as the mean time per token allows under the tightest TBT limit of the decodes (N ms, or 100, where
    no decode has one), the prompts' part rounded down to a multiple of 64.

    The dynamic budget of Sarathi's facts sheet. Before any measurement prompts get 256 tokens. A step without decodes
    takes as many tokens as the worker does.
    """

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
    """As many tokens as the step-time model allows under the tightest TBT limit of the decodes (N ms, or 100, for
    decodes without one), times a safety factor.

    Only limits that requests give can leave prompts fewer than 64 tokens; the default target cannot. The budget is 512
    tokens until the model has seen 16 steps. A step without decodes takes as many tokens as the worker does.

    On a prefill replica a step without decodes takes at most half of the tightest limit: a sequence that is handed over
    waits for the end of the step beside which its KV is copied out.
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
            # When all steps were of one size the model cannot tell the time of one token, but the mean can.
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
        """Return the prompt tokens that fit beside the decodes within `limit_ns` times the safety factor.

        decodes: how many. context: sum of their context lengths. depth: tokens before the prompt's chunk.
        """
        largest = replica.model.largest(limit_ns * self._safety, decodes, context, depth)
        return max(largest - decodes, 0)


class Starved:
    """Gives prompts 64 tokens after 16 steps in a row in which a latency limit left them none.

    A limit that cannot be met would otherwise keep prompts out for ever.
    """

    patience = 16  # steps

    def __init__(self) -> None:
        self._steps = 0

    def feed(self, tokens: int) -> int:
        """Return the prompt tokens of a step for which the limit leaves `tokens`."""
        self._steps = 0 if tokens else self._steps + 1
        if self._steps > self.patience:
            self._steps = 0
            return ALIGN
        return tokens


def at_most(replica: ReplicaView, tokens: int) -> int:
    """Return `tokens`, but at most what the worker takes in a step; 0 means that maximum."""
    limit = replica.limits.max_step_tokens
    return min(tokens or limit, limit)


def tightest(replica: ReplicaView, decodes: Rows) -> int:
    """Return the least TBT limit (ns) of the rows `decodes`; 0 if none has one."""
    table = replica.table
    if not table.limited:
        return 0
    limits = table.tbt_slo_ns[table.rows(decodes)]
    given = limits[limits > 0]
    return int(given.min()) if given.size else 0


def deepest(replica: ReplicaView) -> int:
    """Return the largest number of tokens planned already of a prompt that still prefills; 0 without prompts."""
    table, high = replica.table, replica.table.high
    prefills = table.phase[:high] == PREFILLING
    return int(table.planned[:high][prefills].max()) if np.count_nonzero(prefills) else 0
