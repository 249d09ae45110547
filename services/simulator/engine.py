"""The event loop: arrivals, steps and answers of any number of replicas on one virtual clock.

`simulate` runs a policy over a workload; everything else in this package prepares its arguments or shows its result.
Every replica is a Core of its own, the scheduler's, unmodified; only the device and the time are not real.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.scheduler.core import presets
from services.scheduler.core.core import Core
from services.scheduler.core.policy import Policy
from services.scheduler.core.types import EMPTY, Limits, Outcome, StepPlan, StepResult
from services.simulator.clock import StepClock
from services.simulator.device import Device
from services.simulator.metrics import Recorder, figures
from services.simulator.routing import ROUTERS
from services.simulator.workload import Int64, Workload

START_NS = 1_000_000_000  # the core takes an arrival of 0 for "now"
TICK_NS = 1_000_000  # how often a core that waits for time to pass is asked again
MOST_TICKS = 120_000
SAMPLES = 1_024
_NEVER = 1 << 62
Observer = Callable[[int, Core, StepPlan], None]  # now_ns, the core right after planning, the step


class Stuck(RuntimeError):  # noqa: N818 - says what happened to the core
    """A core holds requests, nothing is in flight, and it plans nothing however long one waits."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Size and settings of every replica. 0 for step_tokens: the policy's own."""

    blocks: int
    max_seqs: int = 256
    block_size: int = 16
    host_blocks: int = 0
    max_step_tokens: int = 8192
    step_tokens: int = 0
    microbatches: int = 1
    lookahead: int | None = None  # None: the policy's own
    replicas: int = 1
    routing: str = "round-robin"
    host_us: float = 300.0  # the scheduler's own time for an iteration; no step starts before its plan is made
    block_bytes: int = 0
    swap_bytes_s: float = 25e9  # PCIe of an A100, by the facts sheet
    seed: int = 0


@dataclass(slots=True)
class Sample:
    """State of all replicas at one moment, for the pictures."""

    time_s: float
    running: int
    waiting: int
    slots: float  # share in use, 0 to 1
    blocks: float


@dataclass(slots=True)
class Run:
    """What came out: `result` is one entry of the JSON's results; `seen` has the columns per request."""

    result: dict[str, Any]
    seen: Recorder
    samples: list[Sample]


class Server:
    """One replica: its core, its device, and the scheduler's own time."""

    def __init__(self, policy: str | Policy, setup: Setup, workload: Workload, clock: StepClock) -> None:
        policy = named(policy) if isinstance(policy, str) else policy
        lookahead = policy.lookahead if setup.lookahead is None else setup.lookahead
        self.core = Core(
            policy,
            max_seqs=setup.max_seqs,
            microbatches=setup.microbatches,
            lookahead=lookahead,
            step_tokens=setup.step_tokens,
            checkpoint_tokens=0,  # nothing crashes here
        )
        limits = Limits(
            slots=setup.max_seqs,
            blocks=setup.blocks,
            block_size=setup.block_size,
            max_model_len=workload.longest,
            max_step_tokens=setup.max_step_tokens,
            host_blocks=setup.host_blocks,
            block_bytes=setup.block_bytes,
        )
        self.core.join(limits)
        batch = self.core.policy.batch
        self.padded, self.at_end = batch.padded, batch.at_end
        block_ns = setup.block_bytes / setup.swap_bytes_s * 1e9
        self.device = Device(
            setup.max_seqs, clock, workload.output, setup.microbatches, self.padded, self.at_end, block_ns
        )
        self.cap = setup.microbatches * (lookahead + 1)
        self.host_ns, self.host_free_ns = int(setup.host_us * 1000), 0
        self.ticks = 0
        self._answer = StepResult(0, 0, EMPTY, EMPTY)

    def answer(self, now_ns: int) -> tuple[Outcome, Int64 | None]:
        """The oldest step's Result goes to the core; the Outcome, and the cells of its rows where they are known."""
        ticket = self.device.queue.popleft()
        answer = self._answer  # the same object each time: the core keeps none
        answer.id, answer.slots, answer.tokens, answer.step_ns = (
            ticket.id,
            ticket.slots,
            ticket.tokens,
            ticket.duration_ns,
        )
        answer.swap_out_acks, answer.swap_in_acks = ticket.swap_out, ticket.swap_in
        answer.swap_ns = ticket.swap_ns
        cells = ticket.cells if ticket.id >= self.device.undisturbed else None
        return self.core.apply(answer, now_ns), cells


def named(policy: str) -> Policy:
    """A fresh policy, by a preset's name or with parts replaced. Raises ValueError for a name that means none."""
    return presets.parse(policy)


def simulate(
    policy: str | Policy,
    workload: Workload,
    setup: Setup,
    clock: StepClock,
    *,
    observer: Observer | None = None,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Runs `workload` to its end and returns what the clients saw.

    `policy`: a preset's name, or with one replica a Policy. Deterministic but for wall_s. Raises ValueError for an
    unknown policy or routing, Stuck when the core does.
    """
    if setup.routing not in ROUTERS:
        raise ValueError(f"no routing {setup.routing!r}; there are {', '.join(ROUTERS)}")
    if not isinstance(policy, str) and setup.replicas > 1:
        raise ValueError("parts may learn, so several replicas need the policy by name")
    if not len(workload):
        raise ValueError("the workload has no request")
    begun = time.perf_counter()
    loop = _Loop(policy, workload, setup, clock, observer, progress)
    loop.run()
    stats = [server.core.stats() for server in loop.servers]
    devices = [server.device for server in loop.servers]
    computed = sum(device.tokens for device in devices)
    result = {
        "policy": policy if isinstance(policy, str) else policy.name,
        **figures(workload, loop.seen, START_NS),
        "preemptions": sum(int(s["preemptions"]) for s in stats),
        "recomputed_tokens": sum(int(s["recomputed_tokens"]) for s in stats),
        "swapped_blocks": sum(int(s["swapped_blocks"]) for s in stats),
        "swapped_bytes": sum(int(s["swapped_blocks"]) for s in stats) * setup.block_bytes,
        "prefix_hit_tokens": sum(int(s.get("prefix_hit_tokens", 0)) for s in stats),
        "padding": round(sum(device.padding for device in devices) / max(computed, 1), 5),
        "computed_tokens": computed,
        "iterations": sum(int(s["iteration"]) for s in stats),
    }
    span_ns = result["duration_s"] * 1e9 * setup.replicas
    result["device_busy"] = round(sum(device.busy_ns for device in devices) / max(span_ns, 1), 4)
    result["wall_s"] = round(time.perf_counter() - begun, 3)
    return Run(result, loop.seen, loop.samples)


class _Loop:
    """The state of one simulate()."""

    def __init__(
        self,
        policy: str | Policy,
        workload: Workload,
        setup: Setup,
        clock: StepClock,
        observer: Observer | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.servers = [Server(policy, setup, workload, clock) for _ in range(setup.replicas)]
        self._at_end = self.servers[0].at_end
        self.seen = Recorder(workload, START_NS, 2 * setup.max_seqs * setup.replicas, self._at_end)
        self.samples: list[Sample] = []
        self._workload, self._setup = workload, setup
        self._observer, self._progress = observer, progress
        self._router = ROUTERS[setup.routing](setup.seed)
        self._load = [0] * setup.replicas
        self._events: list[tuple[int, int]] = []  # end of a step, or a tick, of a replica
        self._every_ns = TICK_NS * 100
        self._next_sample = START_NS

    def run(self) -> None:
        """Until everything has ended. Raises OverflowError when times leave 64 bits."""
        workload, servers, events, seen = self._workload, self.servers, self._events, self.seen
        arrivals = (workload.arrived_ns + START_NS).tolist()
        arrivals.append(_NEVER)
        following = 0
        due = arrivals[0]
        while True:
            now = events[0][0] if events else _NEVER
            if due <= now:
                if due == _NEVER:
                    if events:
                        raise OverflowError(f"a step ends after {_NEVER / 1e9:.1e} s of simulated time")
                    return
                now = due
                touched = set()
                while due == now:
                    touched.add(self._arrive(following, now))
                    following += 1
                    due = arrivals[following]
                for replica in touched:
                    if len(servers[replica].device.queue) < servers[replica].cap:
                        self._fill(replica, now)
                continue
            replica = heapq.heappop(events)[1]
            server = servers[replica]
            queue = server.device.queue
            if queue and queue[0].end_ns == now:
                outcome, cells = server.answer(now)
                seen.take(outcome, now, cells)
                if outcome.ended:
                    self._ended(outcome, replica, now)
            if now >= self._next_sample:
                self._sample(now)
            self._fill(replica, now)

    def _arrive(self, index: int, now_ns: int) -> int:
        """Hands a request to a replica; returns which."""
        workload = self._workload
        replica = self._router.choose(self._load, workload.head_hash(index)) if len(self.servers) > 1 else 0
        self._load[replica] += int(workload.prompt[index] + workload.max_tokens[index])
        self.seen.replica[index] = replica
        outcome = self.servers[replica].core.add(workload.request(index, START_NS), now_ns)
        if outcome.ended or outcome.requests:
            self._known(outcome, replica, now_ns)
        return replica

    def _fill(self, replica: int, now_ns: int) -> None:
        """Plans as far ahead as the core lets."""
        server = self.servers[replica]
        core, device = server.core, server.device
        queue = device.queue
        while len(queue) < server.cap:
            plan, outcome = core.plan(now_ns)
            if outcome is not None and (outcome.ended or outcome.requests):
                self._known(outcome, replica, now_ns)
            if plan is None:
                device.disturbed()  # it may have preempted all the same
                break
            planned = (now_ns if now_ns > server.host_free_ns else server.host_free_ns) + server.host_ns
            server.host_free_ns = planned
            server.ticks = 0
            heapq.heappush(self._events, (device.send(plan, planned, self.seen.cell).end_ns, replica))
            if self._observer is not None:
                self._observer(now_ns, core, plan)
        if not queue and core.unfinished:
            server.ticks += 1
            if server.ticks > MOST_TICKS:
                raise Stuck(
                    f"policy {core.policy.name} holds {core.unfinished} requests and planned nothing for "
                    f"{MOST_TICKS * TICK_NS / 1e9:.0f} s of simulated time"
                )
            heapq.heappush(self._events, (now_ns + TICK_NS, replica))

    def _known(self, outcome: Outcome, replica: int, now_ns: int) -> None:
        """An Outcome that no step's answer gave."""
        self.seen.take(outcome, now_ns, None)
        self._ended(outcome, replica, now_ns)

    def _ended(self, outcome: Outcome, replica: int, now_ns: int) -> None:
        ended = [done.request.payload for done in outcome.ended]
        for index in ended:
            self._load[replica] -= int(self._workload.prompt[index] + self._workload.max_tokens[index])
        if self._at_end and self.servers[replica].device.batch_ended(ended):
            self.seen.flush(replica, now_ns)
        if self._progress is not None:
            self._progress(self.seen.ended)

    def _sample(self, now_ns: int) -> None:
        """Keeps at most SAMPLES moments, evenly spaced: when there are more, every second one goes."""
        cores = [server.core for server in self.servers]
        replicas = [replica for core in cores for replica in core.replicas]
        running = sum(replica.table.count for replica in replicas)
        waiting = sum(core.waiting_count for core in cores)
        free = sum(replica.pool.free + replica.pool.cached for replica in replicas)
        total = sum(replica.pool.total for replica in replicas)
        slots = running / (self._setup.max_seqs * len(cores))
        self.samples.append(Sample((now_ns - START_NS) / 1e9, running, waiting, slots, 1 - free / max(total, 1)))
        if len(self.samples) >= SAMPLES:
            del self.samples[::2]
            self._every_ns *= 2
        self._next_sample = now_ns + self._every_ns
