"""How fast one worker goes: what its answers showed since the last report. Pure."""

from __future__ import annotations


class Pace:
    """Fed by a Drive with each answer, emptied by each report."""

    __slots__ = ("_idle_ns", "_step_ns", "_steps", "_tokens")

    def __init__(self) -> None:
        self._steps = self._step_ns = self._idle_ns = self._tokens = 0

    def answered(self, step_ns: int, idle_ns: int, tokens: int) -> None:
        """A step ran for so long, after the device had waited for so long, and sampled so many tokens."""
        self._steps += 1
        self._step_ns += step_ns
        self._idle_ns += idle_ns
        self._tokens += tokens

    def take(self, seconds: float) -> dict[str, float]:
        """Tokens a second, a step's mean time, the share of the time without one. `seconds`: since the last call."""
        busy_ns = self._idle_ns + self._step_ns
        found = {
            "tok_s": round(self._tokens / max(seconds, 1e-9), 1),
            "step_ms": round(self._step_ns / max(self._steps, 1) / 1e6, 3),
            "idle_pct": round(100 * self._idle_ns / max(busy_ns, 1), 2),
        }
        self._steps = self._step_ns = self._idle_ns = self._tokens = 0
        return found
