"""One chaos run: an undisturbed round, load and faults together, rest, and what the checker says of it all.

Used by `orcinus chaos`, by the soak (tests/chaos/soak/__main__.py) and by tests/chaos.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from shared.tasks import end
from tests.chaos.harness.batches import Batches
from tests.chaos.harness.checker import (
    VIOLATIONS,
    Violation,
    agrees,
    check_epochs,
    check_exits,
    check_names,
    check_rest,
    check_told,
)
from tests.chaos.harness.client import Sessions, session
from tests.chaos.harness.clock import Deadline
from tests.chaos.harness.faults import AT_ONCE, KINDS, Faults
from tests.chaos.harness.history import DONE, SLOW, History, Injected, Outcome, Plan, Rest
from tests.chaos.harness.load import (
    GRAMMAR,
    PREDICTED,
    Load,
    Template,
    grammars,
    templates,
    undisturbed,
    with_prediction,
    with_stop,
)
from tests.chaos.harness.pauses import Gap, Refills, gaps, longest, read_refills
from tests.chaos.harness.rest import epochs, said, settled, unfinished
from tests.chaos.harness.target.stack import ChaosStack, NotReadyError, RunningStack, Stack, until

SEED = 20261120
"""Seed of the long run with the committed result; the test is its beginning."""
RECORD_S = 40.0
"""After its client has everything, a request's record must say the same within this time."""
LEAVE_S = 10.0
"""A living gateway cancels what its client left within this time."""
SETTLE_S = 20.0
SLOTS = 16
BLOCKS_A_SLOT = 25
"""Too few for what a slot may need, so that sequences are preempted."""
SETTINGS = {
    "device": "cpu", "dtype": "float32", "kernels": "cpu", "deterministic": "true", "threads": 1,
    "watchdog_s": 3, "step_timeout_s": 8, "keepalive_s": 1, "drain_s": 0.5, "client_buffer_events": 64,
}  # fmt: skip
"""Exact class: equal to the bit however batches are made up. A gateway tells streams once a second that it lives."""

TENANTS = ("chaos-first-tenant", "chaos-second-tenant")
"""API keys of a mixed run."""
MIXED_S = 120.0
"""By then each grammar, a batch and a request of each tenant have ended."""

Beside = Callable[[ChaosStack], Coroutine[Any, Any, None]]


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
    kinds: Sequence[str] = tuple(KINDS)  # of faults; none: load alone
    at_once: int = AT_ONCE  # faults
    slots: int = SLOTS
    templates: int | None = None  # only so many
    record_s: float = RECORD_S
    settle_s: float = SETTLE_S
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by role, in place of the services
    is_mixed: bool = False  # adds grammars, a second tenant, and batches, one at a time


@dataclass(slots=True)
class Result:
    """Of a run: what happened and what was wrong with it. Histories that are right have lost their events."""

    histories: list[History]
    outcomes: dict[str, Outcome]
    faults: list[Injected]
    before: Rest
    after: Rest
    exits: dict[str, list[int]]
    violations: list[Violation]
    pauses: dict[str, dict[str, float]]
    abandoned: int = 0  # requests of dead gateways that no client knew or wanted, cancelled at the end
    batches: int = 0
    batch_lines: int = 0

    def figures(self) -> dict[str, Any]:
        """The object that `orcinus chaos --json` prints."""
        kinds = Counter(violation.kind for violation in self.violations)
        plans = Counter(history.plan for history in self.histories if history.accepted)
        return {
            "requests": sum(history.accepted for history in self.histories),
            "finished": sum(history.end == DONE for history in self.histories),
            "refused": sum(not history.accepted for history in self.histories),
            "cut": sum(history.end == SLOW for history in self.histories),
            **{kind: kinds[kind] for kind in VIOLATIONS},
            "faults": dict(sorted(Counter(fault.kind for fault in self.faults).items())),
            "clients": {plan: plans[plan] for plan in get_args(Plan)},
            "reconnects": sum(max(0, len(history.connections) - 1) for history in self.histories),
            "accepted_drafts": sum(
                connection.accepted_drafts for history in self.histories for connection in history.connections
            ),
            "abandoned": self.abandoned,
            **self.pauses,
        }


async def chaos(
    directory: Path, scenario: Scenario, say: Callable[[str], None], beside: Beside | None = None
) -> Result:
    """Runs it on a stack of its own, with `beside` while there is load. Raises NotReadyError when the stack does not
    start or does not come back from a fault."""
    settings = {**SETTINGS, "max_seqs": scenario.slots, "kv_blocks": scenario.slots * BLOCKS_A_SLOT}
    if scenario.is_mixed:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "keys").write_text("\n".join(TENANTS))
        # The record of a batch stays, and counts as a file.
        settings |= {"api_key_file": directory / "keys", "files_dir": directory / "files", "tenant_files": 1 << 20}
    async with ChaosStack(directory, scenario.model, scenario.programs, **settings) as stack:
        return await _run(stack, scenario, say, beside, True, TENANTS if scenario.is_mixed else ("",))


async def chaos_here(stack: RunningStack, scenario: Scenario, say: Callable[[str], None], key: str) -> Result:
    """Runs it on the stack that runs here. key: of its API, or empty. Raises NotReadyError as `chaos` does."""
    async with stack:
        async with session(key=key) as asking, asking.get(f"{stack.urls[0]}/v1/models") as reply:
            if reply.status in (401, 403):
                had = "refuses the key of ORCINUS_API_KEY" if key else "wants a key"
                raise NotReadyError(f"{stack.urls[0]} {had} ({reply.status}); set ORCINUS_API_KEY to a valid one")
        return await _run(stack, scenario, say, None, False, (key,))


async def _run(
    stack: Stack, scenario: Scenario, say: Callable[[str], None], beside: Any, exact: bool, keys: Sequence[str]
) -> Result:
    async with contextlib.AsyncExitStack() as opened:
        tenants = []
        for key in keys:
            made = (session(key=key), session(narrow=True, key=key))
            tenants.append(Sessions(*[await opened.enter_async_context(each) for each in made]))
        run = _Run(stack, tenants, scenario, say, exact)
        await run.undisturbed()
        async with _beside(beside, stack):
            await run.disturbed()
        await run.finish_records()
    return await run.result()


@contextlib.asynccontextmanager
async def _beside(what: Beside | None, stack: Any) -> AsyncIterator[None]:
    if what is None:
        yield
        return
    task = asyncio.create_task(what(stack))
    try:
        yield
        if task.done():
            await task  # it ended too early: it says why
    finally:
        await end(task)


class _Run:
    """The stages, in their order."""

    def __init__(
        self,
        stack: Stack,
        tenants: Sequence[Sessions],
        scenario: Scenario,
        say: Callable[[str], None],
        exact: bool,
    ) -> None:
        """exact: every run of a template must be equal to its undisturbed run."""
        self._exact = exact
        self._stack, self._tenants, self._scenario, self._say = stack, tenants, scenario, say
        self._outcomes: dict[str, Outcome] = {}
        self._templates: list[Template] = []
        self._recording: dict[int, asyncio.Task[None]] = {}
        self._histories: list[History] = []
        self._gaps: list[Gap] = []
        self._before: Rest | None = None
        self._faults = Faults(stack, scenario.seed, scenario.kinds, scenario.at_once, say)
        self._abandoned = 0
        self._violations: list[Violation] = []
        self._batches = Batches(tenants, stack.urls, self._templates, self._outcomes, scenario.seed)

    async def undisturbed(self) -> None:
        """What each template gives, and what the stack holds at rest."""
        begun = time.monotonic()
        for template in templates(self._stack.name, self._scenario.tokens, self._scenario.seed):
            if self._scenario.templates is not None and len(self._templates) >= self._scenario.templates:
                break
            await self._learn(template)
            outcome = self._outcomes[template.name]
            if template.name == PREDICTED:
                predicted = with_prediction(template, outcome)
                self._templates.append(predicted)
                self._outcomes[predicted.name] = outcome
            stopped = with_stop(template, outcome)
            if stopped is not None and template.choices <= 2:
                await self._learn(stopped)
        for template in grammars(self._stack.name, self._scenario.seed) if self._scenario.is_mixed else ():
            await self._learn(template)
        self._before = await settled(self._stack, self._scenario.settle_s)
        self._say(f"{len(self._templates)} templates undisturbed in {time.monotonic() - begun:.1f} s")

    async def _learn(self, template: Template) -> None:
        self._templates.append(template)
        self._say(f"undisturbed run of template {len(self._templates)}: {template.name}")
        self._outcomes[template.name] = await undisturbed(self._tenants[0].usual, self._stack.urls, template)

    async def disturbed(self) -> None:
        """Load, and faults while it lasts; then everything goes to its end."""
        scenario = self._scenario
        load = Load(self._tenants, self._stack.urls, self._templates, scenario.seed)
        self._histories = load.histories
        loading = asyncio.create_task(self._load(load))
        try:
            await self._faults.run(scenario.gap_s, scenario.faults, time.monotonic() + scenario.seconds)
            if scenario.is_mixed:
                await until("grammars, batches and both tenants have come up", partial(self._has_all, loading), MIXED_S)
            self._say(f"{len(self._faults.injected)} faults, {len(load.histories)} requests; waiting for their ends")
            load.stop()
            await loading
        finally:
            await end(loading)

    async def _load(self, load: Load) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(self._scenario.clients, self._ended))
            if self._scenario.is_mixed:
                group.create_task(self._batches.run(load))

    async def _has_all(self, loading: asyncio.Task[None]) -> bool:
        """Return whether each grammar, a batch and a request of each tenant have ended."""
        if loading.done():
            await loading  # it says why
        done = [history for history in self._histories if history.end == DONE]
        bound = {name for name in self._outcomes if name.startswith(GRAMMAR)}
        of_all = len({history.tenant for history in done}) == len(self._tenants)
        return of_all and bound <= {history.template for history in done} and self._batches.count > 0

    def _ended(self, history: History) -> None:
        """Follows a request's record until it says what the client was told."""
        self._gaps += gaps(history, self._faults.injected)
        if history.accepted:
            self._recording[history.number] = asyncio.create_task(self._follow(history))
        else:
            self._judge(history)

    async def _follow(self, history: History) -> None:
        while not agrees(history):
            history.record = await self._stack.hash(self._stack.keys.req(history.request)) or history.record
            await asyncio.sleep(0.25)
        await self._ask_as_each_tenant(history)
        del self._recording[history.number]
        self._judge(history)

    async def _ask_as_each_tenant(self, history: History) -> None:
        """Check that of several tenants only the request's own can ask for it."""
        for number, tenant in enumerate(self._tenants if len(self._tenants) > 1 else ()):
            right = 200 if number == history.tenant else 404
            async with tenant.usual.get(f"{self._stack.urls[0]}/v1/requests/{history.request}") as answer:
                if answer.status != right:
                    text = f"{answer.status} for tenant {number}, it is of tenant {history.tenant}"
                    self._violations.append(Violation("leaked", history.request, text))

    def _judge(self, history: History) -> None:
        found = check_told(history, self._outcomes[history.template] if self._exact else None)
        self._violations += found
        if not found:
            history.forget_events()

    async def finish_records(self) -> None:
        """Wait for the records. Cancel what belonged to a dead gateway and no client comes back for."""
        await self._records([history for history in self._histories if self._comes_back(history)])
        wanted = {history.request for history in self._histories if self._comes_back(history)}
        left = await self._left(wanted)
        for request, gateway in left.items():
            if self._lives(gateway):
                self._violations.append(Violation("leaked", request, f"goes on at {gateway}, though its client left"))
        self._abandoned = len(left)
        for request in left:
            await until(f"{request} is cancelled", partial(self._cancel, request), RECORD_S)
        await self._records(self._histories)

    async def _records(self, histories: Sequence[History]) -> None:
        """Until the records of these requests say what their clients were told, or it is late."""
        numbers = {history.number for history in histories}

        async def agree() -> bool:
            return not numbers & self._recording.keys()

        with contextlib.suppress(NotReadyError):
            await until("records say what clients were told", agree, self._scenario.record_s)
        for number in numbers & self._recording.keys():
            self._recording.pop(number).cancel()
            self._judge(self._histories[number])

    async def _left(self, wanted: set[str]) -> dict[str, str]:
        """Return requests without a client, and their gateways: a living gateway cancels such within LEAVE_S."""
        deadline = Deadline(LEAVE_S)
        while True:
            found = {request: gateway for request, gateway in await unfinished(self._stack) if request not in wanted}
            if deadline.passed() or not any(map(self._lives, found.values())):
                return found
            await asyncio.sleep(0.25)

    def _lives(self, gateway: str) -> bool:
        """Is this gateway's process (its id holds the pid) one of those that run?"""
        return int(gateway.rsplit("-", 2)[1]) in {self._stack.processes[name].pid for name in self._stack.gateways}

    @staticmethod
    def _comes_back(history: History) -> bool:
        return history.accepted and history.plan != "leave"

    async def _cancel(self, request: str) -> bool:
        """Whether it is; to all tenants but its own there is no such request."""
        statuses = []
        for tenant in self._tenants:
            async with tenant.usual.delete(f"{self._stack.urls[0]}/v1/requests/{request}") as answer:
                statuses.append(answer.status)
        return 503 not in statuses

    async def result(self) -> Result:
        """The stack at rest, once clients hold no connection any more, and everything judged."""
        after = await settled(self._stack, self._scenario.settle_s)
        before = self._before or after
        violations = [*self._violations, *self._batches.violations]
        violations += [*check_names(self._histories), *check_rest(before, after)]
        for witness, seen in (await epochs(self._stack)).items():
            violations += check_epochs(witness, seen)
        exits = {name: process.exits for name, process in self._stack.processes.items()}
        violations += check_exits(exits, said(self._stack))
        log = self._stack.step_log
        refills = Refills([]) if log is None else read_refills(log)
        return Result(
            self._histories, self._outcomes, self._faults.injected, before, after, exits, violations,
            longest(self._gaps, refills), self._abandoned, self._batches.count, self._batches.lines,
        )  # fmt: skip
