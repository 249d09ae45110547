"""The requests of a run as columns: times, lengths, classes and limits.

Pure given a seed. Built by arrivals.py, the studies of `bench` and the tests. engine.py makes each request when it
arrives, so memory holds only the prompts of requests in the system.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.scheduler.core.types import EMPTY, Int32, NewRequest

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
STOP_ID = 1
PLAIN_ID = 0  # sampled by the device until the end of a request
PATH: Int32 = np.arange(3 << 29, (3 << 29) + 16, dtype=np.int32)  # what a device with drafts samples, again and again
ODD_IDS = 2**31 - 1  # sampled where a draft is to be wrong: this one, then the one below, and so on
ODD_COUNT = 1 << 20
PREDICTION: Int32 = np.tile(PATH, 8)
_FIRST_PROMPT_ID = 2
_SPREAD, _PROMPT_IDS = 2_654_435_761, 1 << 30  # odd, so request -> first token is one to one below 2^30 requests
_STOPS: Int32 = np.array([STOP_ID], np.int32)


def _none() -> Int64:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class Workload:
    """Columns [requests], in order of arrival. An empty optional column stands for its default.

    arrived_ns counts from the start of the run. `output` is the true length, which only the device knows; `max_tokens`
    is the client's bound. ttft_slo_ns, tbt_slo_ns, deadline_ns (after the arrival): 0 means no limit.
    """

    arrived_ns: Int64
    prompt: Int64
    output: Int64
    max_tokens: Int64 = field(default_factory=_none)  # default: output
    priority: Int64 = field(default_factory=_none)  # default: 2, normal
    ttft_slo_ns: Int64 = field(default_factory=_none)
    tbt_slo_ns: Int64 = field(default_factory=_none)
    deadline_ns: Int64 = field(default_factory=_none)
    group: Int64 = field(default_factory=_none)  # number of the shared prefix; -1 means none
    tenant: Int64 = field(default_factory=_none)  # default: one tenant
    prefix_tokens: int = 0  # of a shared prefix; counted in `prompt`
    acceptance: Float64 = field(default_factory=lambda: np.zeros(0))  # chance of a draft; empty: no speculation

    def __post_init__(self) -> None:
        n = len(self.arrived_ns)
        defaults = {
            "max_tokens": self.output,
            "priority": 2,
            "ttft_slo_ns": 0,
            "tbt_slo_ns": 0,
            "deadline_ns": 0,
            "group": -1,
            "tenant": 0,
        }
        for name, value in defaults.items():
            if not len(getattr(self, name)):
                column = value.copy() if isinstance(value, np.ndarray) else np.full(n, value, np.int64)
                setattr(self, name, column)
        for name in ("prompt", "output", *defaults):
            if len(getattr(self, name)) != n:
                raise ValueError(f"column {name} has {len(getattr(self, name))} entries, arrived_ns has {n}")
        if len(self.acceptance) not in (0, n):
            raise ValueError(f"column acceptance has {len(self.acceptance)} entries, arrived_ns has {n}")
        if n and (np.diff(self.arrived_ns) < 0).any():
            raise ValueError("arrived_ns must not fall")
        if n and min(self.prompt.min(), self.output.min(), (self.max_tokens - self.output).min() + 1) < 1:
            raise ValueError("prompt and output must be at least 1 token, max_tokens at least output")

    def __len__(self) -> int:
        return len(self.arrived_ns)

    @property
    def longest(self) -> int:
        """Return the largest sum of prompt and max_tokens."""
        return int((self.prompt + self.max_tokens).max())

    def head_hash(self, i: int) -> int:
        """Return the hash for routing by prefix: equal within a group, unique to a request without a group."""
        group = int(self.group[i])
        return _mix(group if group >= 0 else len(self) + i)

    def request(self, i: int, start_ns: int) -> NewRequest:
        """Return request i as the service passes it to the core, with payload i. Prompts of a group share tokens."""
        first = _FIRST_PROMPT_ID + i * _SPREAD % _PROMPT_IDS
        prompt = np.arange(first, first + int(self.prompt[i]), dtype=np.int32)
        if (group := int(self.group[i])) >= 0:
            shared = min(self.prefix_tokens, prompt.size - 1)
            prompt[:shared] = np.arange(shared, dtype=np.int32) + (_PROMPT_IDS + group * _SPREAD % _PROMPT_IDS // 2)
        arrived, deadline = start_ns + int(self.arrived_ns[i]), int(self.deadline_ns[i])
        return NewRequest(
            id=str(i),
            prompts=[prompt],
            max_tokens=int(self.max_tokens[i]),
            stop_ids=_STOPS,
            priority=int(self.priority[i]),
            arrived_ns=arrived,
            deadline_ns=arrived + deadline if deadline else 0,
            ttft_slo_ns=int(self.ttft_slo_ns[i]),
            tbt_slo_ns=int(self.tbt_slo_ns[i]),
            tenant=str(self.tenant[i]),
            payload=i,
            prediction=PREDICTION if self.acceptance.size else EMPTY,
        )


def _mix(value: int) -> int:
    """Return a 32-bit hash that spreads neighbours (Knuth's multiplicative hash, twice)."""
    value = (value + 1) * _SPREAD & 0xFFFFFFFF
    return ((value ^ value >> 15) * _SPREAD & 0xFFFFFFFF) ^ value >> 13


def all_at_once(prompt: list[int], output: list[int], max_tokens: list[int] | None = None) -> Workload:
    """Return a workload of requests that all arrive at the start."""
    bounds = np.array(max_tokens, np.int64) if max_tokens else _none()
    return Workload(
        np.zeros(len(prompt), np.int64), np.array(prompt, np.int64), np.array(output, np.int64), max_tokens=bounds
    )
