"""Token budgets: how many tokens one iteration may run, at most the worker's max_step_tokens."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.policy.base import Budget, ReplicaView
from services.scheduler.core.policy.step_time import FIRST_TOKENS
from services.scheduler.core.table import PREFILLING, Bool
from services.scheduler.core.types import PREFILL, Priority, Rows

TBT_NS = 100_000_000  # TBT target of a request that gives no limit
TTFT_WEIGHT = 0.25  # of 0.1, 0.25 and 0.5 the best on the cells of the grid that tuning may see
FLAT = 0.06  # delays that differ by less than this share count as equal, and fewer steps are taken
LOW_TIMES = 2  # class low makes a step at most so many times as long as the decodes of better classes do
LATELY = 256  # steps of class low alone, from which on no better class is expected
MEMORY = 8192  # steps over which ModelBudget averages
ALIGN = 64  # tokens; prompt parts of EmaBudget are multiples of it, and the least that a starved prompt gets


class Unlimited(Budget):
    """As many tokens as the worker takes (Orca has no token budget)."""

    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        return at_most(replica, step_tokens)

    def budget(
        self, replica: ReplicaView, decodes: Rows, now_ns: int, step_tokens: int, depth: int = 0, waiting: int = 0,
        waiting_tokens: int = 0,
    ) -> int:  # fmt: skip
        return at_most(replica, step_tokens)


class Fixed(Budget):
    """A fixed budget that decodes count against (Sarathi: B = n_decode + n_prefill)."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        return at_most(replica, step_tokens or self._tokens)

    def budget(
        self, replica: ReplicaView, decodes: Rows, now_ns: int, step_tokens: int, depth: int = 0, waiting: int = 0,
        waiting_tokens: int = 0,
    ) -> int:  # fmt: skip
        return at_most(replica, step_tokens or self._tokens)


class EmaBudget(Budget):
    """As many tokens as the mean time per token allows under the tightest TBT limit of the decodes (N ms, or 100, where
    no decode has one), the prompts' part rounded down to a multiple of 64.

    The dynamic budget of Sarathi's facts sheet. Before any measurement prompts get 256 tokens. A step without decodes
    takes as many tokens as the worker does.
    """

    def __init__(self, tbt_ns: int = TBT_NS) -> None:
        self._tbt_ns = tbt_ns
        self._starvation = Starvation()

    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        return at_most(replica, step_tokens)

    def budget(
        self, replica: ReplicaView, decodes: Rows, now_ns: int, step_tokens: int, depth: int = 0, waiting: int = 0,
        waiting_tokens: int = 0,
    ) -> int:  # fmt: skip
        most, count = at_most(replica, step_tokens), decodes.size
        if not count:
            return most
        limit_ns = tightest(replica, decodes) or self._tbt_ns
        prompts = replica.token_time.budget(limit_ns, most, count, ALIGN)
        return min(count + self._starvation.feed(prompts), most)

    def for_replica(self) -> EmaBudget:
        return EmaBudget(self._tbt_ns)


class ModelBudget(Budget):
    """Prompts get at least the share of a step's time that they have of the requests; TBT limits bound it, and N ms.

    Near that size one more prompt token costs the decodes as much time as it saves the prompts.

    A step of time t(n) with n prompt tokens delays D decodes by t(n); each of W prompts that wait or are computed gets
    through n tokens in that time, so a prompt of P tokens takes P * t(n) / n. The mean end-to-end time, with N steps of
    decoding a request, is least where P * t(n) / n + N * t(n) is; with D / W = N * n / P (Little's law) that is where

        n * t'(n) / t(n) = W / (W + D):

    prompts get the share of a step's time that they have of the requests. Few waiting prompts fill a step as far as
    tokens are nearly free, a long queue fills it whole. t is the step-time model.

    The mean hardly changes near its least value, the time to first token does. So what is made small is the mean
    end-to-end time times the time to first token to the power w (TTFT_WEIGHT). That multiplies W by
    1 + w * (W + D) / W, as the two times are as W + D to W, and the share s becomes (s + w) / (1 + w).

    Where fewer than one prompt is present on average, a decode takes most steps without prompts anyway, and is delayed
    by what a step takes longer with them. Then the present prompts take the number of steps that delays all requests
    least (_fewer_steps), and of numbers that delay them by 6 % more at most (FLAT) the smallest.

    Requests of class low count for nothing while one of a better class runs: their decodes (low_decodes) and prompts
    make a step at most LOW_TIMES as long as the other decodes alone. Where better classes were there lately, a step of
    class low alone takes at most LOW_TIMES as long as its decodes: a request that comes meanwhile waits for its end.

    TBT limits bound the step: those that requests declare, and `tbt_ns` (N ms; 0 means none) for decodes without one. A
    bound is met with the 0.99 quantile of the model's error, and with 5 % to spare. Under a declared limit a step has
    at most 512 tokens until 16 steps with prompts were timed, then at most a quarter more than the largest that was.
    Only declared limits can leave prompts fewer than 64 tokens, and better classes those of class low. The budget is
    512 tokens until the model has seen 16 steps. A step without decodes takes as many tokens as the worker does.

    On a prefill replica a step without decodes takes at most half of the tightest limit (100 ms where none is
    declared): a sequence that is handed over waits for the end of the step beside which its KV is copied out.
    """

    def __init__(self, tbt_ns: int = 0) -> None:
        self._tbt_ns = tbt_ns
        self._presence = Presence()
        self._steps_of_low = LATELY  # in a row without a better class
        self._starvation = Starvation()

    def max_tokens(self, replica: ReplicaView, step_tokens: int) -> int:
        return at_most(replica, step_tokens)

    def budget(
        self, replica: ReplicaView, decodes: Rows, now_ns: int, step_tokens: int, depth: int = 0, waiting: int = 0,
        waiting_tokens: int = 0,
    ) -> int:  # fmt: skip
        most, count, table = at_most(replica, step_tokens), decodes.size, replica.table
        low_yields = table.low_rows > 0 and table.low_yields
        prefilling: Bool = table.phase[: table.high] == PREFILLING
        if low_yields:
            prefilling &= table.priority[: table.high] < Priority.LOW
        computed = int(np.count_nonzero(prefilling))
        prompts = waiting + computed
        self._presence.prompts = prompts
        if not count and replica.limits.role != PREFILL:
            return most
        if replica.model.observations < 16:
            return min(max(FIRST_TOKENS, count), most)
        rest = waiting_tokens
        if computed:
            planned = table.planned_tokens[: table.high][prefilling]
            depth = max(depth, int(planned.max()))
            rest += int((table.known_tokens[: table.high][prefilling] - planned).sum())
        if not count:
            default_ns = self._tbt_ns or TBT_NS
            limits = table.tbt_slo_ns[: table.high]
            target_ns = int(np.where(limits > 0, limits, default_ns).min(initial=default_ns)) // 2
            # When all steps were of one size the model cannot tell the time of one token, but the mean can.
            by_mean = replica.token_time.budget(replica.model.target_ns(target_ns), most, 0, ALIGN)
            return min(max(min(self._fits(replica, target_ns, 0, 0, depth), by_mean), ALIGN), most)
        context, others = int(table.planned_tokens[table.rows(decodes)].sum()), decodes
        if low_yields:
            others = decodes[table.priority[decodes] < Priority.LOW]
        share = (prompts / max(prompts + others.size, 1) + TTFT_WEIGHT) / (1.0 + TTFT_WEIGHT)
        tokens = max(replica.model.balanced_tokens(share, count, context, depth), ALIGN)
        if rest > tokens:
            tokens = self._fewer_steps(replica, rest, tokens, prompts, others.size, count, context)
        if low_yields or (table.low_rows and self._steps_of_low < LATELY):
            low_ns = LOW_TIMES * replica.model.predict(others.size, int(table.planned_tokens[others].sum()))
            low_tokens = replica.model.largest(low_ns, count, context, depth)
            tokens = min(tokens, max(rest, low_tokens) if low_yields else max(low_tokens, ALIGN))
        if self._tbt_ns:
            tokens = min(tokens, max(self._fits(replica, self._tbt_ns, count, context, depth), ALIGN))
        if strict_ns := tightest(replica, decodes):
            trusted = max(replica.model.trusted_tokens - count, ALIGN)
            tokens = min(tokens, trusted, self._fits(replica, strict_ns, count, context, depth))
        return min(count + self._starvation.feed(tokens), most)

    def on_step(self, replica: ReplicaView, decodes: int, tokens: int, entered: int) -> None:
        self._presence.add(replica.model.predict(tokens), decodes, entered)
        self._steps_of_low = 0 if replica.table.low_yields else self._steps_of_low + 1

    def low_decodes(self, replica: ReplicaView, others: Rows, low: Rows) -> int:
        """Let the decodes of class low take at most as long as those of better classes do alone."""
        model, planned = replica.model, replica.table.planned_tokens
        if not others.size or not low.size or model.observations < 16:
            return low.size
        context, mean_context = int(planned[others].sum()), float(planned[low].mean())
        most_ns = LOW_TIMES * model.predict(others.size, context)
        fit, more = 1, low.size
        while fit < more:
            middle = -(-(fit + more) // 2)
            if model.predict(others.size + middle, context + int(middle * mean_context)) <= most_ns:
                fit = middle
            else:
                more = middle - 1
        return fit

    def for_replica(self) -> ModelBudget:
        return ModelBudget(self._tbt_ns)

    def _fewer_steps(
        self, replica: ReplicaView, rest: int, tokens: int, prompts: int, delayed: int, decodes: int, context: int
    ) -> int:
        """Return the tokens of a step when `rest` prompt tokens of `prompts` requests take the best number of steps.

        delayed: decodes that count, of `decodes`. docs/policies.md#how-orcinus-sizes-a-step has the formula. Tried are
        rest / tokens steps, half as many, a quarter, down to one. A step takes at most twice the tokens of the largest
        one that was timed: beyond that the model only guesses.
        """
        model = replica.model
        rest_ns = rest / tokens * model.predict(decodes + tokens, context)
        weight, per_ns = self._presence.weights(rest_ns, prompts, delayed)
        if self._presence.is_crowded:
            return tokens
        without_ns = model.predict(decodes, context)

        def delay(steps: int, chunk: int) -> float:
            ns = model.predict(decodes + chunk, context, chunk * rest / 2)
            waits = (prompts + 1) / 2 + per_ns * ns / 2  # present, and that come during a step
            return steps * (weight * waits * ns + delayed * (ns - without_ns))

        least, steps = delay(-(-rest // tokens), tokens), rest // tokens
        while steps:
            chunk = -(-rest // steps)
            if decodes + chunk > 2 * model.largest_seen:
                break
            total = delay(steps, chunk)
            if total <= (1.0 + FLAT) * least:
                tokens = chunk
            least, steps = min(least, total), steps // 2
        return tokens

    def _fits(self, replica: ReplicaView, limit_ns: int, decodes: int, context: int, depth: int) -> int:
        """Return the prompt tokens that fit beside the decodes within `limit_ns`.

        decodes: how many. context: sum of their context lengths. depth: tokens before the prompt's chunk.
        """
        return replica.model.largest(replica.model.target_ns(limit_ns), decodes, context, depth)


class Presence:
    """How many requests are present on average over the latest MEMORY steps: prompts, and decodes."""

    def __init__(self) -> None:
        self.prompts = 0  # that wait or are computed in the step that is planned
        self._ns = self._prompts_ns = self._decodes_ns = self._entries = 0.0

    def add(self, step_ns: float, decodes: int, entered: int) -> None:
        """Count a step: its predicted time, its decodes, and the requests that enter."""
        keep = 1.0 - 1.0 / MEMORY
        self._ns = keep * self._ns + step_ns
        self._prompts_ns = keep * self._prompts_ns + self.prompts * step_ns
        self._decodes_ns = keep * self._decodes_ns + decodes * step_ns
        self._entries = keep * self._entries + entered
        self.prompts = 0

    @property
    def is_crowded(self) -> bool:
        """Whether on average a prompt or more waits or is computed: prompts are in nearly all steps."""
        return self._prompts_ns >= self._ns

    def weights(self, rest_ns: float, prompts: int, decodes: int) -> tuple[float, float]:
        """Return what a ns of a prompt's delay counts where one of a decode's counts 1, and the requests that come in
        a ns.

        rest_ns: time that the present prompts take. By Little's law the mean end-to-end time is to the time to first
        token as all requests are to the prompts, the present ones included.
        """
        prompts_ns = max(self._prompts_ns + rest_ns * (prompts + 1) / 2, 1.0)  # a poor fit may say that steps are free
        ratio = 1.0 + (self._decodes_ns + rest_ns * decodes) / prompts_ns
        return 1.0 + TTFT_WEIGHT * ratio, self._entries / self._ns if self._ns else 0.0


class Starvation:
    """Gives prompts 64 tokens after 16 steps in a row in which a bound left them none.

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
    if not table.tbt_rows:
        return 0
    limits = table.tbt_slo_ns[table.rows(decodes)]
    given = limits[limits > 0]
    return int(given.min()) if given.size else 0
