"""One run of a fleet: arrivals, replicas, failures and an autoscaler on one virtual clock.

`run` is called by `bench/fleet/main.py` and the tests. A request that a failure or a scale-in hits starts anew
elsewhere with the tokens it has, as in the service; none is lost.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.fleet.replica import NEVER, Replica, Requests, Size, StepCost
from bench.fleet.routing import ROUTERS
from bench.fleet.traffic import Traffic

TOLERANCE = 0.1  # a ratio so near to 1 changes nothing


@dataclass(frozen=True, slots=True)
class Rule:
    """Times in s. The defaults are those of the overlay (a test compares)."""

    least: int = 1
    most: int = 8
    polling_s: float = 15.0
    age_s: float = 2.0  # of the oldest request that waits
    sequences: float = 32.0  # that run or wait, for each replica
    up_window_s: float = 30.0
    up_factor: float = 1.0  # so much of what there is may come ...
    up_count: int = 2  # ... or so many
    up_period_s: float = 180.0
    down_window_s: float = 900.0
    down_count: int = 1
    down_period_s: float = 300.0
    startup_s: float = 180.0  # until a new replica serves: not the rule's, the world's


class Scaler:
    """Apply the rule of deploy/kubernetes/overlays/autoscaling as Kubernetes' autoscaler does (autoscaling/v2).

    Two metrics: the age of the queue as a ratio (Value), the sequences as so many a replica (AverageValue). The larger
    count wins, slowed by windows and policies. Called once a poll.
    """

    def __init__(self, rule: Rule, there: int) -> None:
        self.rule = rule
        self._targets: list[tuple[float, int]] = [(0.0, there)]  # time and number of replicas that the metrics ask for
        self._changes: list[tuple[float, int]] = []  # when replicas were added (+) or taken (-)

    def wanted(self, now_s: float, there: int, age_s: float, sequences: int) -> int:
        """Return the number of replicas from now on."""
        rule = self.rule
        ratios = (age_s / rule.age_s, sequences / (rule.sequences * there))
        target = max(there if abs(ratio - 1) <= TOLERANCE else math.ceil(there * ratio) for ratio in ratios)
        target = min(max(target, rule.least), rule.most)
        self._targets.append((now_s, target))
        oldest = now_s - max(rule.up_window_s, rule.down_window_s)
        self._targets = [(at, count) for at, count in self._targets if at >= oldest]
        up = min(count for at, count in self._targets if at >= now_s - rule.up_window_s)
        down = max(count for at, count in self._targets if at >= now_s - rule.down_window_s)
        found = there
        if up > there:
            added = self._changed(now_s, rule.up_period_s, 1)
            before = there - added
            found = min(up, max(math.ceil(before * (1 + rule.up_factor)), before + rule.up_count))
            found = max(found, there)
        elif down < there:
            taken = self._changed(now_s, rule.down_period_s, -1)
            found = min(there, max(down, there - rule.down_count + taken))
        if found != there:
            self._changes.append((now_s, found - there))
        return found

    def _changed(self, now_s: float, period_s: float, sign: int) -> int:
        """Return the number of replicas added or removed within the period."""
        return sum(abs(by) for at, by in self._changes if at > now_s - period_s and by * sign > 0)


S = 1e9
TTFT_S, TBT_S = 2.0, 0.1  # limits of a good answer: docs/simulate.md#json


@dataclass(frozen=True, slots=True)
class Fleet:
    """The settings of a run. speeds: of the replicas, in turn. mtbf_s: of one replica, 0 means that none fails."""

    replicas: int
    routing: str
    size: Size
    cost: StepCost
    speeds: tuple[float, ...] = (1.0,)
    mtbf_s: float = 0.0
    restart_s: float = 120.0
    detect_s: float = 1.0  # until those that a failure hits start elsewhere
    scaler: Rule | None = None
    price_hour: float = 0.0  # of a replica of speed 1; 0: unknown
    seed: int = 0


@dataclass(slots=True)
class Ran:
    """`result` is an entry of the JSON; times per request in s, NaN where there is none."""

    result: dict[str, Any]
    ttft_s: Any
    counts: list[tuple[float, int, float]] = field(default_factory=list)  # (s, replicas, oldest waiting s)


def run(fleet: Fleet, traffic: Traffic, progress: Callable[[int], None] | None = None) -> Ran:
    """Simulate to the end of the last request.

    Raises ValueError for unknown routing or a request that fits no replica.
    """
    if fleet.routing not in ROUTERS:
        raise ValueError(f"no routing {fleet.routing!r}; there are {', '.join(ROUTERS)}")
    return FleetRun(fleet, traffic, progress).go()


class FleetRun:
    def __init__(self, fleet: Fleet, traffic: Traffic, progress: Callable[[int], None] | None) -> None:
        self.fleet, self.traffic, self.progress = fleet, traffic, progress
        self.requests = Requests(
            traffic.prompt.tolist(), traffic.output.tolist(), traffic.group.tolist(), traffic.prefix_tokens
        )
        self.replicas: list[Replica] = []
        self.born: list[float] = []  # ns, when it began to cost
        self.died: list[float] = []
        self.router = ROUTERS[fleet.routing](self.replicas, fleet.seed)
        self.waiting: deque[int] = deque()  # in front of all replicas
        self.events: list[tuple[float, int, int]] = []  # time, replica, its version
        self.others: list[tuple[float, int, str, Any]] = []  # time, order, event, its argument
        self.order = 0
        self.left = len(traffic.prompt)
        self.random = random.Random(fleet.seed + 1)
        self.failures = self.restarted = 0
        self.handled = 0
        self.counts: list[tuple[float, int, float]] = []
        self.scaler = Scaler(fleet.scaler, fleet.replicas) if fleet.scaler else None
        for _ in range(fleet.replicas):
            self._add(0.0, up=True)
        self.router.changed()
        longest = int((traffic.prompt + traffic.output).max())
        if longest > fleet.size.kv_tokens:
            raise ValueError(
                f"a request of {longest:,} tokens does not fit into a replica's {fleet.size.kv_tokens:,} tokens of KV"
            )

    def go(self) -> Ran:
        begun, cpu = time.perf_counter(), time.process_time()
        if self.scaler:
            self._later(self.scaler.rule.polling_s * S, "scale", None)
        arrivals = self.traffic.arrived_ns.tolist()
        arrivals.append(NEVER)
        following, due = 0, arrivals[0]
        events, others = self.events, self.others
        now = 0.0
        while self.left:
            at = events[0][0] if events else NEVER
            other = others[0][0] if others else NEVER
            if due <= at and due <= other:
                now = due
                self._arrive(following, now)
                following += 1
                due = arrivals[following]
            elif at <= other:
                now, number, version = heapq.heappop(events)
                replica = self.replicas[number]
                if version != replica.version:
                    continue
                ended, after = replica.event(now)
                if after < NEVER:
                    heapq.heappush(events, (after, number, replica.version))
                self.router.moved(number)
                self.left -= len(ended)
                while self.waiting and replica.has_room(self.waiting[0]):  # no other replica has room
                    self._hand(replica, now)
            else:
                now, _, event, argument = heapq.heappop(others)
                getattr(self, f"_{event}")(now, argument)
            self.handled += 1
            if self.progress is not None and not self.handled & 0xFFFF:
                self.progress(len(arrivals) - 1 - self.left)
        return self._result(now, time.perf_counter() - begun, time.process_time() - cpu)

    def _arrive(self, index: int, now: float) -> None:
        if self.router.late or not self.router.alive:
            self.waiting.append(index)
            if len(self.waiting) == 1:  # while others wait, no replica has room
                self._from_queue(now)
        else:
            self._give(index, now)

    def _give(self, index: int, now: float) -> None:
        group = self.requests.group[index]
        number = self.router.choose(index, group)
        replica = self.replicas[number]
        self.router.remember(group, number)
        after = replica.take(index, now)
        self.router.moved(number)
        if 0 <= after < NEVER:
            heapq.heappush(self.events, (after, number, replica.version))

    def _from_queue(self, now: float) -> None:
        """Route the requests in front: to replicas with room if they wait for that, else to any live one."""
        if not self.router.late:
            while self.waiting and self.router.alive:
                self._give(self.waiting.popleft(), now)
            return
        while self.waiting and self.router.alive:
            index = self.waiting[0]
            replica = self.replicas[self.router.choose(index, -1)]
            if not replica.has_room(index):
                with_room = [n for n in self.router.alive if self.replicas[n].has_room(index)] if replica.open else []
                if not with_room:
                    return
                replica = min((self.replicas[n] for n in with_room), key=lambda one: one.load / one.speed)
            self._hand(replica, now)

    def _hand(self, replica: Replica, now: float) -> None:
        """Give the first waiting request to this replica."""
        after = replica.take(self.waiting.popleft(), now)
        self.router.moved(replica.number)
        if 0 <= after < NEVER:
            heapq.heappush(self.events, (after, replica.number, replica.version))

    def _later(self, at: float, event: str, argument: Any) -> None:
        self.order += 1
        heapq.heappush(self.others, (at, self.order, event, argument))

    def _add(self, now: float, up: bool) -> None:
        number = len(self.replicas)
        speed = self.fleet.speeds[number % len(self.fleet.speeds)]
        replica = Replica(number, self.requests, self.fleet.size, self.fleet.cost, speed)
        replica.up = up
        self.replicas.append(replica)
        self.born.append(now)
        self.died.append(NEVER)
        if up:
            self._fate(now, number)

    def _fate(self, now: float, number: int) -> None:
        """Draw the time of the replica's failure."""
        if self.fleet.mtbf_s:
            self._later(now + self.random.expovariate(1 / self.fleet.mtbf_s) * S, "fail", number)

    def _fail(self, now: float, number: int) -> None:
        if self.died[number] < NEVER or not self.replicas[number].up:
            return
        self.failures += 1
        self._stop(now, number, self.fleet.detect_s)
        self._later(now + self.fleet.restart_s * S, "ready", number)

    def _stop(self, now: float, number: int, pause_s: float) -> None:
        left = self.replicas[number].stop(now)
        self.restarted += len(left)
        self.router.changed()
        self._later(now + pause_s * S, "again", left)

    def _again(self, now: float, indices: list[int]) -> None:
        """Queue the requests of a lost replica by arrival, before the waiting ones."""
        self.waiting.extendleft(sorted(indices, reverse=True))
        self._from_queue(now)

    def _ready(self, now: float, number: int) -> None:
        if self.died[number] < NEVER:
            return
        self.replicas[number].up = True
        self._fate(now, number)
        self.router.changed()
        self._from_queue(now)

    def _scale(self, now: float, _: Any) -> None:
        if self.scaler is None:
            return
        rule = self.scaler.rule
        there = [n for n in range(len(self.replicas)) if self.died[n] == NEVER]
        up = [self.replicas[n] for n in there if self.replicas[n].up]
        heads = [replica.oldest_waiting for replica in up if replica.queue] + (
            [self.waiting[0]] if self.waiting else []
        )
        age_s = (now - min((self.traffic.arrived_ns[index] for index in heads), default=now)) / S
        sequences = sum(replica.running + len(replica.queue) for replica in up) + len(self.waiting)
        wanted = self.scaler.wanted(now / S, len(there), age_s, sequences)
        for _ in range(wanted - len(there)):
            self._add(now, up=False)
            self._later(now + rule.startup_s * S, "ready", len(self.replicas) - 1)
        for number in sorted(there, reverse=True)[: max(0, len(there) - wanted)]:
            self.died[number] = now
            if self.replicas[number].up:
                self._stop(now, number, 0.0)
        self.counts.append((now / S, wanted, age_s))
        self._later(now + rule.polling_s * S, "scale", None)

    def _result(self, now: float, wall_s: float, cpu_s: float) -> Ran:
        fleet, traffic, requests = self.fleet, self.traffic, self.requests
        arrived = traffic.arrived_ns.astype(np.float64)
        first, end = np.array(requests.first), np.array(requests.end)
        ttft = (first - arrived) / S
        tokens = traffic.output.astype(np.float64)
        tpot = np.where(tokens > 1, (end - first) / S / np.maximum(tokens - 1, 1), 0.0)
        normalized = (end - arrived) / S / tokens
        span = float(now - arrived[0]) / S
        alive_s = [(min(died, now) - born) / S for born, died in zip(self.born, self.died, strict=True)]
        hours = sum(alive_s) / 3600
        computed = [replica.computed / replica.speed for replica in self.replicas]
        good = (ttft <= TTFT_S) & (tpot <= TBT_S)
        result: dict[str, Any] = {
            "routing": fleet.routing,
            "replicas": fleet.replicas,
            "requests": len(arrived),
            "finished": int(np.isfinite(end).sum()),
            "duration_s": round(span, 3),
            "output_tok_s": round(float(tokens.sum()) / span, 1),
            "ttft_ms": _percentiles(ttft * 1000),
            "tpot_ms": _percentiles(tpot[tokens > 1] * 1000),
            "normalized_latency_ms": _percentiles(normalized * 1000),
            "good_share": round(float(good.mean()), 5),
            "device_busy": round(sum(replica.busy_ns for replica in self.replicas) / S / sum(alive_s), 4),
            "imbalance": round(max(computed) / (sum(computed) / len(computed)), 4) if not self.scaler else None,
            "hit_share": round(sum(requests.cached) / max(1, int(traffic.prompt.sum())), 4),
            "failures": self.failures,
            "restarted": self.restarted,
            "replica_hours": round(hours, 4),
            "tokens": int(tokens.sum() + traffic.prompt.sum()),
            "wall_s": round(wall_s, 2),
            "cpu_s": round(cpu_s, 2),
            "requests_per_cpu_s": round(len(arrived) / max(cpu_s, 1e-9)),
        }
        if fleet.price_hour:
            cost = sum(
                each / 3600 * fleet.price_hour * replica.speed
                for each, replica in zip(alive_s, self.replicas, strict=True)
            )
            result["cost"] = round(cost, 2)
            result["cost_per_million_output"] = round(cost / float(tokens.sum()) * 1e6, 4)
            result["cost_per_million_tokens"] = round(cost / result["tokens"] * 1e6, 4)
        return Ran(result, ttft, self.counts)


def _percentiles(values: Any) -> dict[str, float]:
    values = values[np.isfinite(values)]
    if not len(values):
        return {"p50": 0.0, "p99": 0.0}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}
