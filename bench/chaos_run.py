"""One chaos run: an undisturbed round, load and faults together, rest, and what the checker says of it all.

Used by `orcinus chaos` and by tests/faults/test_chaos.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from bench.chaos_checker import Violation, agrees, check, check_epochs, check_rest
from bench.chaos_faults import Faults
from bench.chaos_history import DONE, History, Injected, Outcome, Rest
from bench.chaos_load import Load, Template, templates, undisturbed, with_stop
from bench.chaos_rest import epochs, settled, unfinished
from bench.chaos_stack import GATEWAYS, ChaosStack, until

RECORD_S = 40.0
"""After its client has everything, a request's record must say the same within this time."""
SETTLE_S = 40.0
LEAVE_S = 10.0
SEVERAL = "several"
SETTINGS = {
    "device": "cpu", "dtype": "float32", "kernels": "cpu", "deterministic": "true", "threads": 1, "max_seqs": 16,
    "kv_blocks": 400, "watchdog_s": 3, "keepalive_s": 1, "drain_s": 0.5,
}  # fmt: skip
"""Exact class: equal to the bit however batches are made up. A gateway tells streams once a second that it lives."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to run. The schedule of load and faults follows from the seed; its course does not, as time is real."""

    model: Path
    seed: int
    seconds: float  # of load and faults
    faults: int  # at most
    gap_s: float  # between two faults, on average
    clients: int
    tokens: int = 240  # the longest output
    requests: int = 1 << 30  # at most


@dataclass(slots=True)
class Result:
    """Of a run: what happened and what was wrong with it."""

    histories: list[History]
    outcomes: dict[str, Outcome]
    faults: list[Injected]
    before: Rest
    after: Rest
    exits: dict[str, list[int]]
    violations: list[Violation] = field(default_factory=list)
    abandoned: int = 0  # requests of dead gateways that no client knew or wanted, cancelled at the end

    def figures(self) -> dict[str, Any]:
        """The object that `orcinus chaos --json` prints."""
        kinds = Counter(violation.kind for violation in self.violations)
        plans = Counter(history.plan for history in self.histories if history.accepted)
        return {
            "requests": sum(history.accepted for history in self.histories),
            "finished": sum(history.end == DONE for history in self.histories),
            "refused": sum(not history.accepted for history in self.histories),
            **{kind: kinds[kind] for kind in ("lost", "doubled", "diverged", "leaked", "fenced")},
            "faults": dict(sorted(Counter(fault.kind for fault in self.faults).items())),
            "clients": {plan: plans[plan] for plan in ("stay", "return", "leave", "cancel")},
            "reconnects": sum(max(0, len(history.connections) - 1) for history in self.histories),
            "abandoned": self.abandoned,
            "longest_pause_s": pauses(self.histories, self.faults),
        }


def pauses(histories: list[History], faults: list[Injected]) -> dict[str, float]:
    """By kind of fault, the longest time between two tokens of a stream that the fault fell into; `several` where more
    than one did."""
    longest: dict[str, float] = {}
    for history in histories:
        times = [event.at_s for event in history.events() if event.token_ids and event.position is not None]
        for begin, end in pairwise(times):
            hit = [fault.kind for fault in faults if begin < fault.over_s and end > fault.at_s]
            if hit:
                name = hit[0] if len(hit) == 1 else SEVERAL
                longest[name] = round(max(longest.get(name, 0.0), end - begin), 3)
    return dict(sorted(longest.items()))


async def chaos(directory: Path, scenario: Scenario, say: Callable[[str], None]) -> Result:
    """Runs it. Raises NotReadyError when the stack does not start or does not come back from a fault."""
    async with ChaosStack(directory, scenario.model, **SETTINGS) as stack:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=3, sock_read=60)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # gateways come and go
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            run = _Run(stack, session, scenario, say)
            await run.undisturbed()
            await run.disturbed()
        return await run.result()


class _Run:
    """The stages, in their order."""

    def __init__(
        self, stack: ChaosStack, session: aiohttp.ClientSession, scenario: Scenario, say: Callable[[str], None]
    ) -> None:
        self._stack, self._session, self._scenario, self._say = stack, session, scenario, say
        self._outcomes: dict[str, Outcome] = {}
        self._templates: list[Template] = []
        self._recording: dict[int, asyncio.Task[None]] = {}
        self._histories: list[History] = []
        self._before: Rest | None = None
        self._faults = Faults(stack, scenario.seed)
        self._abandoned = 0
        self._violations: list[Violation] = []

    async def undisturbed(self) -> None:
        """What each template gives, and what the stack holds at rest."""
        begun = time.monotonic()
        for template in templates(self._stack.name, self._scenario.tokens, self._scenario.seed):
            await self._learn(template)
            stopped = with_stop(template, self._outcomes[template.name])
            if stopped is not None and template.choices <= 2:
                await self._learn(stopped)
        self._before = await settled(self._stack, SETTLE_S)
        self._say(f"{len(self._templates)} templates undisturbed in {time.monotonic() - begun:.1f} s")

    async def _learn(self, template: Template) -> None:
        self._templates.append(template)
        self._outcomes[template.name] = await undisturbed(self._session, self._stack.urls, template)

    async def disturbed(self) -> None:
        """Load, and faults while it lasts; then everything goes to its end."""
        scenario = self._scenario
        load = Load(self._session, self._stack.urls, self._templates, scenario.seed, scenario.requests)
        loading = asyncio.create_task(load.run(scenario.clients, self._record))
        try:
            await self._faults.run(scenario.gap_s, scenario.faults, time.monotonic() + scenario.seconds)
            self._say(f"{len(self._faults.injected)} faults, {len(load.histories)} requests; waiting for their ends")
            load.stop()
            await loading
        finally:
            loading.cancel()
        self._histories = load.histories
        await self._finish_records()

    def _record(self, history: History) -> None:
        """Follows a request's record until it says what the client was told."""
        if history.accepted:
            self._recording[history.number] = asyncio.create_task(self._follow(history))

    async def _follow(self, history: History) -> None:
        while not agrees(history):
            history.record = await self._stack.hash(self._stack.keys.req(history.request)) or history.record
            await asyncio.sleep(0.25)

    async def _finish_records(self) -> None:
        """Waits for the records. What belonged to a gateway that died, and nobody comes back for, is cancelled."""
        kept = [self._recording[history.number] for history in self._histories if self._comes_back(history)]
        if kept:
            await asyncio.wait(kept, timeout=RECORD_S)
        wanted = {history.request for history in self._histories if self._comes_back(history)}
        left = await self._left(wanted)
        for request, gateway in left.items():
            if self._lives(gateway):
                self._violations.append(Violation("leaked", request, f"goes on at {gateway}, though its client left"))
        self._abandoned = len(left)
        for request in left:
            await until(f"{request} is cancelled", lambda request=request: self._cancel(request), RECORD_S)
        if self._recording:
            _, late = await asyncio.wait(self._recording.values(), timeout=RECORD_S)
            for task in late:
                task.cancel()

    async def _left(self, wanted: set[str]) -> dict[str, str]:
        """Requests that go on for nobody, with who delivers them: a gateway that lives cancels such within LEAVE_S."""
        end = time.monotonic() + LEAVE_S
        while True:
            found = {request: gateway for request, gateway in await unfinished(self._stack) if request not in wanted}
            if time.monotonic() > end or not any(map(self._lives, found.values())):
                return found
            await asyncio.sleep(0.25)

    def _lives(self, gateway: str) -> bool:
        """Is this gateway's process (its id holds the pid) one of those that run?"""
        return int(gateway.rsplit("-", 2)[1]) in {self._stack.processes[name].pid for name in GATEWAYS}

    @staticmethod
    def _comes_back(history: History) -> bool:
        return history.accepted and history.plan != "leave"

    async def _cancel(self, request: str) -> bool:
        async with self._session.delete(f"{self._stack.urls[0]}/v1/requests/{request}") as answer:
            return answer.status != 503

    async def result(self) -> Result:
        """The stack at rest, once clients hold no connection any more, and everything judged."""
        after = await settled(self._stack, SETTLE_S)
        before = self._before or after
        violations = [*self._violations, *check(self._histories, self._outcomes), *check_rest(before, after)]
        for witness, seen in (await epochs(self._stack)).items():
            violations += check_epochs(witness, seen)
        exits = {name: process.exits for name, process in self._stack.processes.items()}
        return Result(
            self._histories, self._outcomes, self._faults.injected, before, after, exits, violations, self._abandoned
        )
