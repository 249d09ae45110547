"""How many tokens may one iteration run? Never more than the worker takes in one step."""

from __future__ import annotations

from services.scheduler.core.replica import Replica


class Unlimited:
    """As many as the worker takes (Orca has no token budget)."""

    def budget(self, replica: Replica, step_tokens: int) -> int:
        return min(step_tokens or replica.limits.max_step_tokens, replica.limits.max_step_tokens)


class Fixed:
    """A fixed budget that decodes count against (Sarathi: B = n_decode + n_prefill)."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def budget(self, replica: Replica, step_tokens: int) -> int:
        return min(step_tokens or self._tokens, replica.limits.max_step_tokens)
