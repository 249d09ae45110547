"""Run the shipped scheduler core over a workload on a virtual clock: the one event loop of every simulation.

`simulate` is called by `orcinus simulate`, by the tests and by the studies of `bench`. The core is the scheduler's own,
unmodified; only the devices and the time are simulated. Either one core drives all replicas and routes by itself
(`routing="scheduler"`), as a shard does, or each replica has a core of its own behind a front router of routing.py.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.scheduler.core.policy.base import Batching, Policy
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import EMPTY, Limits, Outcome, StepPlan, StepResult
from services.simulator.device.clock import StepClock
from services.simulator.device.device import Device, DraftingDevice
from services.simulator.metrics import Recorder, figures
from services.simulator.policies.article import BLOCK_SIZE, Settings
from services.simulator.policies.parts import parse
from services.simulator.policies.replica import RULES, ArticleReplica
from services.simulator.routing import ROUTERS, SCHEDULER
from services.simulator.workload.workload import Int64, Workload

START_NS = 1_000_000_000  # the core takes an arrival of 0 for "now"
TICK_NS = 1_000_000  # between two plans of a core with requests, nothing in flight and no step
MAX_TICKS = 120_000
MAX_DRAFTS = 64  # of a step, as a worker takes them
MAX_LOOK_AHEAD_NS = 10_000_000_000  # a core that may plan again later than this is woken by another event
MAX_SAMPLES = 1_024
_NEVER = 1 << 62
_STEP_ENDS, _PLAN_AGAIN = 0, 1  # kinds of events, in the order in which those of one moment are handled
Observer = Callable[[int, Scheduler, StepPlan], None]  # now_ns, the core right after planning, the step


class Stuck(RuntimeError):  # noqa: N818 - says what happened to the core
    """A core holds requests, nothing is in flight, and it plans nothing for MAX_TICKS."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Size and settings of every replica.

    step_tokens 0 and lookahead None use the policy's own. roles: the role of each replica (empty: all compute prompts
    and decode); share_host_tiers: replicas of one core can read each other's host tier. Both, and affinity (the weight
    of a cached token, see Routing), need the routing "scheduler".
    """

    blocks: int
    max_seqs: int = 256
    block_size: int = 16
    host_blocks: int = 0
    max_step_tokens: int = 8192
    step_tokens: int = 0
    microbatches: int = 1
    lookahead: int | None = None
    replicas: int = 1
    routing: str = "round-robin"
    host_us: float = 300.0  # time of the scheduler for one step; the step does not start before
    block_bytes: int = 0
    swap_bytes_s: float = 25e9  # PCIe of an A100, by its data sheet
    seed: int = 0
    affinity: float = 1.0
    roles: tuple[str, ...] = ()
    share_host_tiers: bool = False


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
    """What came out.

    result: one entry of the JSON's results. seen: columns with one entry a request. stats: the statistics of each core.
    devices: one a replica.
    """

    result: dict[str, Any]
    seen: Recorder
    samples: list[Sample]
    stats: list[dict[str, float | int]]
    devices: list[Device]


class Samples:
    """States over the time of a run: at most MAX_SAMPLES, evenly spaced; every second one goes where there are more."""

    def __init__(self) -> None:
        self.kept: list[Sample] = []
        self.next_ns = START_NS
        self._every_ns = TICK_NS * 100

    def add(self, now_ns: int, running: int, waiting: int, slots: float, blocks: float) -> None:
        self.kept.append(Sample((now_ns - START_NS) / 1e9, running, waiting, slots, blocks))
        if len(self.kept) >= MAX_SAMPLES:
            del self.kept[::2]
            self._every_ns *= 2
        self.next_ns = now_ns + self._every_ns


class Shard:
    """A core with the devices of its replicas, and the time of the process that plans for them."""

    def __init__(
        self, policy: str | Policy, setup: Setup, workload: Workload, clock: StepClock, first: int, replicas: int
    ) -> None:
        """first: the number of its first replica among those of the run."""
        policy = named(policy) if isinstance(policy, str) else policy
        lookahead = policy.lookahead if setup.lookahead is None else setup.lookahead
        self.core = Scheduler(
            policy,
            max_seqs=setup.max_seqs,
            microbatches=setup.microbatches,
            lookahead=lookahead,
            step_tokens=setup.step_tokens,
            checkpoint_tokens=0,  # nothing crashes here
            affinity=setup.affinity,
        )
        batch = self.core.policy.batch
        self.at_end = batch.at_end
        block_ns = setup.block_bytes / setup.swap_bytes_s * 1e9
        self.devices: list[Device] = []
        for number in range(replicas):
            self.core.join(_limits(setup, workload, number))
            self.devices.append(_device(setup, workload, clock, batch, block_ns, first + number))
        self.first = first
        self.max_in_flight = setup.microbatches * (lookahead + 1)  # of each replica
        self.host_ns, self.host_free_ns = int(setup.host_us * 1000), 0
        self.ticks = 0  # in a row
        self.events_due = 0  # pending _PLAN_AGAIN
        self._answers = [StepResult(0, number, EMPTY, EMPTY) for number in range(replicas)]

    @property
    def several(self) -> bool:
        """Return whether the core routes among several replicas."""
        return len(self.devices) > 1

    def answer(self, number: int, now_ns: int) -> tuple[Outcome, Int64 | None]:
        """Give the result of a replica's oldest step to the core; return the outcome and, where they are known, the
        cells of its rows."""
        device = self.devices[number]
        ticket = device.queue.popleft()
        answer = self._answers[number]  # the same object each time: the core keeps none
        answer.id, answer.slots, answer.tokens, answer.step_ns = (
            ticket.id,
            ticket.slots,
            ticket.tokens,
            ticket.duration_ns,
        )
        answer.token_counts = ticket.counts
        answer.swap_out_acks, answer.swap_in_acks = ticket.swap_out, ticket.swap_in
        answer.swap_ns, answer.peer_acks = ticket.swap_ns, ticket.peers
        # With several replicas a plan for one may take rows from another.
        cells = ticket.cells if not self.several and ticket.id >= device.undisturbed else None
        return self.core.apply(answer, now_ns), cells


def _device(
    setup: Setup, workload: Workload, clock: StepClock, batch: Batching, block_ns: float, number: int
) -> Device:
    """Return the device of a replica. Raises ValueError for drafts in batches that take none."""
    slots, output, stages = setup.max_seqs, workload.output, setup.microbatches
    if not workload.acceptance.size:
        return Device(slots, clock, output, stages, batch.is_padded, batch.at_end, block_ns)
    if batch.is_padded or batch.at_end:
        raise ValueError("acceptance: this policy's batches have no drafts; drop --acceptance or choose another policy")
    return DraftingDevice(slots, clock, output, stages, block_ns, workload.acceptance, setup.seed + number)


def _limits(setup: Setup, workload: Workload, number: int) -> Limits:
    """Return the size of one replica of a core."""
    return Limits(
        slots=setup.max_seqs,
        blocks=setup.blocks,
        block_size=setup.block_size,
        max_model_len=workload.longest,
        max_step_tokens=setup.max_step_tokens,
        host_blocks=setup.host_blocks,
        block_bytes=setup.block_bytes,
        role=setup.roles[number] if setup.roles else "",
        host_tier=f"folder/{number}" if setup.share_host_tiers else "",
        kv_format="simulated" if setup.share_host_tiers else "",
        max_drafts=MAX_DRAFTS if workload.acceptance.size else 0,
    )


def named(policy: str) -> Policy:
    """Return a fresh policy, by a preset's name or with parts replaced; also those that only the simulator knows.

    Raises ValueError for an unknown name, and for the article's program, which is none of parts.
    """
    return parse(policy)


def check_name(policy: str) -> None:
    """Raise ValueError for a policy that `simulate` does not know."""
    if policy not in RULES:
        named(policy)


def simulate(
    policy: str | Policy,
    workload: Workload,
    setup: Setup,
    clock: StepClock,
    *,
    observer: Observer | None = None,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Run `workload` to its end and return what the clients saw. Deterministic but for wall_s.

    policy: a preset's name, that of the article's program, or with one core a Policy. Raises ValueError for an unknown
    policy or routing and for a setup that needs another routing; Stuck when a core plans nothing any more.
    """
    _check(policy, workload, setup)
    begun = time.perf_counter()
    if isinstance(policy, str) and policy in RULES:
        return _simulate_article(policy, workload, setup, clock, progress, begun)
    loop = _Loop(policy, workload, setup, clock, observer, progress)
    loop.run()
    stats = [shard.core.stats() for shard in loop.shards]
    devices = [device for shard in loop.shards for device in shard.devices]
    computed = sum(device.tokens for device in devices)
    counts = {
        "preemptions": sum(int(s["preemptions"]) for s in stats),
        "recomputed_tokens": sum(int(s["recomputed_tokens"]) for s in stats),
        "swapped_blocks": sum(int(s["swapped_blocks"]) for s in stats),
        "swapped_bytes": sum(int(s["swapped_blocks"]) for s in stats) * setup.block_bytes,
        "prefix_hit_tokens": sum(int(s.get("prefix_hit_tokens", 0)) for s in stats),
        "padding": round(sum(device.padding for device in devices) / max(computed, 1), 5),
        "computed_tokens": computed,
        "iterations": sum(int(s["iteration"]) for s in stats),
        "drafted_tokens": sum(int(s["drafted_tokens"]) for s in stats),
        "accepted_tokens": sum(int(s["accepted_tokens"]) for s in stats),
    }
    name = policy if isinstance(policy, str) else policy.name
    busy_ns = sum(device.busy_ns for device in devices) / setup.replicas
    result = _result(name, workload, loop.seen, counts, busy_ns, begun)
    return Run(result, loop.seen, loop.samples.kept, stats, devices)


def _result(
    policy: str, workload: Workload, seen: Recorder, counts: dict[str, int | float], busy_ns: float, begun: float
) -> dict[str, Any]:
    """Return one entry of the JSON's results. busy_ns: of a replica on average. begun: time.perf_counter()."""
    result = {"policy": policy, **figures(workload, seen, START_NS), **counts}
    result["device_busy"] = round(busy_ns / max(result["duration_s"] * 1e9, 1), 4)
    result["wall_s"] = round(time.perf_counter() - begun, 3)
    return result


def _simulate_article(
    policy: str, workload: Workload, setup: Setup, clock: StepClock, progress: Callable[[int], None] | None,
    begun: float,
) -> Run:  # fmt: skip
    """Run the article's program, which plans by itself. begun: time.perf_counter()."""
    seen, samples = Recorder(workload, START_NS, 2 * setup.max_seqs, at_end=False), Samples()
    defaults = Settings()
    settings = Settings(
        batch_tokens=min(setup.step_tokens or defaults.batch_tokens, setup.max_step_tokens),
        batch_requests=min(defaults.batch_requests, setup.max_seqs),
        blocks=setup.blocks,
    )
    replica = ArticleReplica(settings, RULES[policy], workload, clock, START_NS)
    arrivals = [*(workload.arrived_ns + START_NS).tolist(), _NEVER]
    following, now, host_ns = 0, START_NS, int(setup.host_us * 1000)
    while seen.ended < len(workload):
        while arrivals[following] <= now:
            replica.add(following)
            following += 1
        duration = replica.plan(now)
        if not duration:
            now = arrivals[following]
            continue
        if now >= samples.next_ns:
            slots = replica.running / setup.max_seqs
            samples.add(now, replica.running, replica.waiting, slots, replica.blocks_used)
        now += host_ns + duration
        outcome = replica.complete(now)
        seen.take(outcome, now, np.array([seen.cell(request.payload) for request in outcome.requests], np.int64))
        if progress is not None:
            progress(seen.ended)
    return Run(_result(policy, workload, seen, replica.counts, replica.busy_ns, begun), seen, samples.kept, [], [])


def _check(policy: str | Policy, workload: Workload, setup: Setup) -> None:
    """Raise ValueError for what cannot be simulated."""
    routings = (*ROUTERS, SCHEDULER)
    if setup.routing not in routings:
        raise ValueError(f"routing: unknown {setup.routing!r}; there are {', '.join(routings)}")
    if setup.routing != SCHEDULER:
        if not isinstance(policy, str) and setup.replicas > 1:
            raise ValueError("policy: parts may learn, so several cores need it by name; give a preset's name")
        if setup.roles or setup.share_host_tiers or setup.affinity != 1.0:
            raise ValueError(f"roles, shared host tiers and affinity need one core; use the routing {SCHEDULER}")
    if setup.roles and len(setup.roles) != setup.replicas:
        raise ValueError(f"roles: {len(setup.roles)} for {setup.replicas} replicas; give one for each")
    if not len(workload):
        raise ValueError("workload: no request; give at least one")
    if isinstance(policy, str) and policy in RULES:
        _check_article(policy, workload, setup)


def _check_article(policy: str, workload: Workload, setup: Setup) -> None:
    """Raise ValueError for what the article's program has no notion of, and for a request that would wait for ever."""
    wrong = {
        f"{setup.replicas} replicas, and the program has one; give 1": setup.replicas > 1,
        f"{setup.microbatches} microbatches, and the program has one; give 1": setup.microbatches > 1,
        f"lookahead {setup.lookahead}, and the program plans no step ahead; give 0": bool(setup.lookahead),
        f"blocks of {setup.block_size} tokens, and the program's have {BLOCK_SIZE}; give {BLOCK_SIZE}": setup.block_size
        != BLOCK_SIZE,
        "the program has no deadlines; drop them": bool(workload.deadline_ns.any()),
        "the program has no drafts; drop the acceptance": bool(workload.acceptance.size),
    }
    if problem := next((text for text, holds in wrong.items() if holds), ""):
        raise ValueError(f"policy {policy}: {problem}, or compare iteration-level instead")
    needed = -(-workload.longest // BLOCK_SIZE)
    if needed > setup.blocks:
        raise ValueError(
            f"policy {policy}: a request of {workload.longest:,} tokens needs {needed:,} of {setup.blocks:,} blocks "
            "and would wait for ever; give more blocks, or shorter requests"
        )


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
        per_shard = setup.replicas if setup.routing == SCHEDULER else 1
        self.shards = [
            Shard(policy, setup, workload, clock, first, per_shard) for first in range(0, setup.replicas, per_shard)
        ]
        self._per_shard = per_shard
        self._at_end = self.shards[0].at_end
        self.seen = Recorder(workload, START_NS, 2 * setup.max_seqs * setup.replicas, self._at_end)
        self.samples = Samples()
        self._workload, self._setup = workload, setup
        self._observer, self._progress = observer, progress
        self._router = ROUTERS[setup.routing](setup.seed) if len(self.shards) > 1 else None
        self._load = [0] * len(self.shards)
        self._events: list[tuple[int, int, int]] = []  # ns, kind, replica among all of the run

    def run(self) -> None:
        """Run until everything has ended. Raises OverflowError when times leave 64 bits."""
        workload, shards, events, seen = self._workload, self.shards, self._events, self.seen
        arrivals = (workload.arrived_ns + START_NS).tolist()
        arrivals.append(_NEVER)
        following = 0
        due = arrivals[0]
        for shard in shards:
            if shard.several:
                self._fill(shard, START_NS)  # replicas learn of their peers before anything arrives
        while True:
            now = events[0][0] if events else _NEVER
            if due <= now:
                if due == _NEVER:
                    if events:
                        raise OverflowError(f"a step ends after {_NEVER / 1e9:.1e} s of simulated time")
                    return
                now = due
                touched: dict[int, None] = {}
                while due == now:
                    touched[self._arrive(following, now)] = None
                    following += 1
                    due = arrivals[following]
                for number in touched:
                    self._fill(shards[number], now)
                continue
            _, kind, replica = heapq.heappop(events)
            number, local = divmod(replica, self._per_shard)
            shard = shards[number]
            if kind == _STEP_ENDS:
                outcome, cells = shard.answer(local, now)
                seen.take(outcome, now, cells)
                if outcome.ended_requests:
                    self._ended(outcome, number, now)
            else:
                shard.events_due -= 1
            if now >= self.samples.next_ns:
                self._sample(now)
            self._fill(shard, now)

    def _arrive(self, index: int, now_ns: int) -> int:
        """Hand a request to a core; return the number of its shard."""
        workload = self._workload
        number = self._router.choose(self._load, workload.head_hash(index)) if self._router is not None else 0
        self._load[number] += int(workload.prompt[index] + workload.max_tokens[index])
        self.seen.replica[index] = self.shards[number].first
        outcome = self.shards[number].core.add(workload.request(index, START_NS), now_ns)
        if outcome.ended_requests or outcome.requests:
            self._take_outcome(outcome, number, now_ns)
        return number

    def _fill(self, shard: Shard, now_ns: int) -> None:
        """Plan for every replica of the shard as far ahead as the core lets."""
        core, busy = shard.core, False
        for local, device in enumerate(shard.devices):
            queue = device.queue
            while len(queue) < shard.max_in_flight:
                plan, outcome = core.plan(now_ns, local)
                if outcome is not None and (outcome.ended_requests or outcome.requests):
                    self._take_outcome(outcome, shard.first // self._per_shard, now_ns)
                if plan is None:
                    device.disturbed()  # it may have preempted all the same
                    break
                self._send(shard, local, plan, now_ns)
            busy = busy or bool(queue)
            if shard.several and now_ns < (again_ns := core.look_again_ns(local)) < now_ns + MAX_LOOK_AHEAD_NS:
                self._plan_again(shard, local, again_ns)
        if not busy and core.unfinished_count and not shard.events_due:
            shard.ticks += 1
            if shard.ticks > MAX_TICKS:
                raise Stuck(
                    f"policy {core.policy.name} holds {core.unfinished_count} requests and planned nothing for "
                    f"{MAX_TICKS * TICK_NS / 1e9:.0f} s of simulated time"
                )
            self._plan_again(shard, 0, now_ns + TICK_NS)

    def _send(self, shard: Shard, local: int, plan: StepPlan, now_ns: int) -> None:
        """Give a step to a device, and note when it ends."""
        planned = (now_ns if now_ns > shard.host_free_ns else shard.host_free_ns) + shard.host_ns
        shard.host_free_ns = planned
        shard.ticks = 0
        replica = shard.first + local
        if shard.several:
            for enter in plan.enters:
                self.seen.replica[enter.request.payload] = replica
        ticket = shard.devices[local].send(plan, planned, self.seen.cell)
        heapq.heappush(self._events, (ticket.end_ns, _STEP_ENDS, replica))
        if self._observer is not None:
            self._observer(now_ns, shard.core, plan)

    def _plan_again(self, shard: Shard, local: int, at_ns: int) -> None:
        shard.events_due += 1
        heapq.heappush(self._events, (at_ns, _PLAN_AGAIN, shard.first + local))

    def _take_outcome(self, outcome: Outcome, number: int, now_ns: int) -> None:
        """Record an outcome that no step's answer gave."""
        self.seen.take(outcome, now_ns, None)
        self._ended(outcome, number, now_ns)

    def _ended(self, outcome: Outcome, number: int, now_ns: int) -> None:
        ended = [done.request.payload for done in outcome.ended_requests]
        for index in ended:
            self._load[number] -= int(self._workload.prompt[index] + self._workload.max_tokens[index])
        if self._at_end:
            shard = self.shards[number]
            for local, device in enumerate(shard.devices):
                if device.batch_ended(ended):
                    self.seen.flush(shard.first + local, now_ns)
        if self._progress is not None:
            self._progress(self.seen.ended)

    def _sample(self, now_ns: int) -> None:
        cores = [shard.core for shard in self.shards]
        replicas = [replica for core in cores for replica in core.replicas]
        running = sum(replica.table.count for replica in replicas)
        waiting = sum(core.waiting_count for core in cores)
        free = sum(replica.pool.free + replica.pool.cached for replica in replicas)
        total = sum(replica.pool.total for replica in replicas)
        slots = running / (self._setup.max_seqs * len(replicas))
        self.samples.add(now_ns, running, waiting, slots, 1 - free / max(total, 1))
