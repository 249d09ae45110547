"""Statistics of a core: counts for the dashboards, and the predicted time to first token behind the gateway's 429.

Called by Scheduler about once a second. The fields: docs/operations.md#stats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from services.scheduler.core.placement.router import Router
from services.scheduler.core.policy.step_time import StepTime
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Record, State
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.table import DECODING
from services.scheduler.core.types import CLASS_COUNT, CLASS_NAMES, NewRequest, Priority


def figures(
    state: SchedulerState, router: Router, alive: list[Replica], records: Iterable[Record], parked: Collection[Record]
) -> dict[str, float | int]:
    """Return the fields that follow from the waiting queue and the replicas.

    records: all there are, as they came; parked: those of them that are parked.
    """
    oldest = first_arrivals(state, records)
    first_tokens = FirstTokens(state, router.for_prompts, bool(router.placement.prefill_sources))
    counters, waiting = state.counters, state.waiting
    return {
        "iteration": counters.iteration,
        "running": sum(r.table.count for r in alive),
        "waiting": len(waiting),
        "swapped": waiting.swapped_count,
        "parked": sum(s.state is State.PARKED for record in parked for s in record.sequences),
        **{f"waiting_{name}": waiting.counts[i] for i, name in enumerate(CLASS_NAMES)},
        **{f"oldest_ns_{name}": oldest[i] for i, name in enumerate(CLASS_NAMES)},
        "step_tokens": sum(r.last_step.tokens for r in alive),
        "step_decode": sum(r.last_step.decode for r in alive),
        "step_prefill": sum(r.last_step.prefill for r in alive),
        "blocks_total": sum(r.pool.total for r in alive),
        "blocks_free": sum(r.pool.free for r in alive),
        "blocks_cached": sum(r.pool.cached for r in alive),
        "blocks_draining": sum(r.pool.draining for r in alive),
        "host_blocks_total": sum(r.host.total for r in alive),
        "host_blocks_free": sum(r.host.available for r in alive),
        "prefix_hit_tokens": sum(r.prefix_cache.hit_tokens for r in alive if r.prefix_cache is not None),
        "preemptions": counters.preemptions,
        "recomputed_tokens": counters.recomputed_tokens,
        "swapped_blocks": sum(r.transfers.swapped_blocks for r in alive),
        "handed_over": counters.handovers,
        "handed_over_blocks": counters.handed_blocks,
        "not_handed_over": counters.not_handed,
        "queued_tokens": waiting.tokens + sum(under_way(state, r, Priority.LOW) for r in alive),
        **{
            f"queued_tokens_{name}": sum_before(state, waiting.class_tokens, i)
            + sum(under_way(state, r, i) for r in alive)
            for i, name in enumerate(CLASS_NAMES)
        },
        **{f"behind_{name}": first_tokens.behind(i) for i, name in enumerate(CLASS_NAMES)},
        "workers": len(alive),
    }


def of_replica(state: SchedulerState, router: Router, replica: Replica) -> dict[str, int]:
    """Return what one replica has and does now, and its prefix cache hits since it joined."""
    return {
        "number": replica.number,
        "dock": int(replica.number == router.placement.dock),
        "slots": state.max_running(replica),
        "running": replica.table.count,
        "loading": len(replica.transfers.slots()),
        "in_flight": len(replica.inflight),
        "step_tokens": replica.last_step.tokens,
        "blocks_total": replica.pool.total,
        "blocks_free": replica.pool.free,
        "blocks_cached": replica.pool.cached,
        "blocks_draining": replica.pool.draining,
        "host_blocks_total": replica.host.total,
        "host_blocks_free": replica.host.free,
        "host_blocks_cached": replica.host.cached,
        "swapped_blocks": replica.transfers.swapped_blocks,
        "prefix_hit_tokens": replica.prefix_cache.hit_tokens if replica.prefix_cache is not None else 0,
    }


def first_arrivals(state: SchedulerState, records: Iterable[Record]) -> list[int]:
    """Return for each class [4] the arrival of the first request that waits and never ran, in ns; 0 means none.

    Requests come to the core in the order of their class's stream, so that few records are looked at.
    """
    oldest, counts = [0] * CLASS_COUNT, state.waiting.counts
    missing = {priority for priority, count in enumerate(counts) if count}
    for record in records:
        if not missing:
            break
        if not record.has_started and record.request.priority in missing:
            if not any(sequence.state is State.WAITING for sequence in record.sequences):
                continue
            missing.remove(record.request.priority)
            oldest[record.request.priority] = record.arrived_ns
    return oldest


def sum_before(state: SchedulerState, by_class: list[int], priority: int) -> int:
    """Return the sum of figures of the waiting [4] over the classes before a request of that class that comes now.

    Classes that waiting has lifted are not looked at.
    """
    return sum(by_class[: priority + 1] if state.policy.order.by_class else by_class)


def under_way(state: SchedulerState, replica: Replica, priority: int) -> int:
    """Return the tokens of running prompts, all but the last of each, that go before those of such a request.

    Where the urgent may take slots (Preemption.takes) their prompts go before running ones of lower classes.
    """
    table = replica.table
    first = priority if urgent(state, priority) else Priority.LOW
    owed = (table.known_tokens - table.planned_tokens - 1).clip(min=0)
    return int(owed[table.priority <= first].sum())


def urgent(state: SchedulerState, priority: int) -> bool:
    """Return whether a request of that class may take slots from running ones of lower classes."""
    return state.policy.relief.takes and priority <= Priority.HIGH


@dataclass(frozen=True, slots=True)
class FullStep:
    """One replica's largest step: `chunk` prompt tokens beside the decodes that run now."""

    model: StepTime
    chunk: int
    decodes: int
    context: int  # sum over the decodes
    in_flight_ns: float  # until the steps that were sent are answered

    def ns(self, chunk: int) -> float:
        """Return the predicted time of a step with `chunk` prompt tokens."""
        return self.model.predict(chunk + self.decodes, self.context, chunk * chunk / 2)


class FirstTokens:
    """Predicts the first tokens of requests that come at one moment, from one look at the replicas.

    Between its calls requests may be added to the waiting queue; nothing else may change.
    """

    def __init__(self, state: SchedulerState, replicas: list[Replica], feeding: bool) -> None:
        """replicas: those that compute prompts. feeding: whether other replicas load what these have computed."""
        self._state = state
        self._replicas = replicas
        self._prefill_sources = feeding
        self._looks: dict[int, tuple[float, list[FullStep]]] = {}  # by the last class that goes before
        self._lower_slots = -1  # of running sequences that an urgent request may take; -1: not counted yet

    def wait_ns(self, request: NewRequest, now_ns: int, waited_ns: int, starts_s: float) -> int:
        """Return the ns until a request that is added next has its first token; 0 while no replica has been timed.

        It waits until all prompt tokens before it, those under way and its own are computed beside the present decodes;
        or, if that takes longer, until the sequences before it have slots and memory. An order that serves requests in
        time first serves this one in time or behind them all; the former is expected.

        waited_ns: since its arrival. starts_s: sequences that start a second while others wait; 0 if none waits.
        """
        tokens, priority = int(request.prompts[0].size), request.priority
        rest, steps = self._look(priority)
        if not steps:
            return 0
        wait_ns = computing_ns(rest + tokens, steps, tokens)
        if starts_s:
            wait_ns = max(wait_ns, int(1e9 * self.behind(priority) / starts_s))
        left_ns = self._state.policy.order.in_time_ns(request, tokens, now_ns) - waited_ns
        return min(wait_ns, left_ns + computing_ns(tokens, steps, tokens)) if left_ns > 0 else wait_ns

    def until_next_ns(self, priority: int) -> int:
        """Return the ns until all prompt tokens that wait before a request of that class, or are under way, have run
        beside the present decodes, and one step more; 0 while no replica has answered a step.
        """
        rest, steps = self._look(priority)
        if not steps:
            return 0
        took_ns, next_ns = pace(rest, steps)
        return int(took_ns + next_ns)

    def behind(self, priority: int) -> int:
        """Return how many of the waiting need a slot that is given up by itself before such a request can have one.

        For the urgent, slots of running sequences of lower classes are as good as free. Where other replicas load what
        these have computed, a sequence that waits for that takes no slot of theirs.
        """
        state, queue = self._state, self._state.waiting
        ahead = sum_before(state, queue.counts, priority)
        if self._prefill_sources:
            ahead -= sum_before(state, queue.swapped_counts, priority)
        if urgent(state, priority):
            if self._lower_slots < 0:
                tables = [replica.table for replica in self._replicas]
                lower = [table.active & ~table.is_pinned & (table.priority >= Priority.NORMAL) for table in tables]
                self._lower_slots = sum(int(slots.sum()) for slots in lower)
            ahead -= self._lower_slots
        return max(ahead, 0)

    def _look(self, priority: int) -> tuple[float, list[FullStep]]:
        """Return the prompt tokens before such a request, and the full step of each replica that has been timed."""
        state = self._state
        first = priority if urgent(state, priority) else Priority.LOW
        if first not in self._looks:
            timed = [replica for replica in self._replicas if replica.model.observations]
            owed = sum(prompt_tokens_left(replica, first) for replica in timed)
            self._looks[first] = float(owed), [full_step(replica, state.step_tokens) for replica in timed]
        owed_tokens, steps = self._looks[first]
        return sum_before(state, state.waiting.class_tokens, priority) + owed_tokens, steps


def prompt_tokens_left(replica: Replica, first: int) -> int:
    """Return the tokens left of the running prompts of class `first` and better ones."""
    table, high = replica.table, replica.table.high
    owed = table.known_tokens[:high] - table.planned_tokens[:high]
    prompts = (table.phase[:high] != DECODING) & (table.priority[:high] <= first)
    return int(owed[prompts].clip(min=0).sum())


def full_step(replica: Replica, step_tokens: int) -> FullStep:
    """Return the largest step of a replica that has been timed. step_tokens: its token budget; 0 uses the policy's."""
    model, table, high = replica.model, replica.table, replica.table.high
    decodes = table.phase[:high] == DECODING
    running = int(decodes.sum())
    max_tokens = max(replica.tokens.max_tokens(replica, step_tokens), running + 1)
    sent = replica.inflight.values()
    sent_ns = [model.predict(step.tokens, step.decode_context, step.prefill_context) for step in sent]
    in_flight_ns = sum(sent_ns) - sent_ns[0] / 2 if sent_ns else 0.0  # the first has run for half its time, on average
    return FullStep(model, max_tokens - running, running, int(table.planned_tokens[:high][decodes].sum()), in_flight_ns)


def computing_ns(rest: float, steps: list[FullStep], prompt_tokens: int) -> int:
    """Return the ns until the replicas have computed `rest` prompt tokens, behind the steps in flight.

    prompt_tokens: of these, the tokens of one prompt, which one replica computes.
    """
    took_ns, _ = pace(rest, steps, prompt_tokens)
    if prompt_tokens > min(step.chunk for step in steps):
        took_ns = max(took_ns, min(prompt_tokens / step.chunk * step.ns(step.chunk) for step in steps))
    return int(min(step.in_flight_ns for step in steps) + took_ns)


def pace(rest: float, steps: list[FullStep], prompt_tokens: int = 0) -> tuple[float, float]:
    """Return the ns in which the replicas compute `rest` prompt tokens, and those of one step more.

    Full steps are asked of the model only where there is work for them: it has seen none where prompts are short.
    prompt_tokens: of these, the tokens of one prompt: they are computed on one replica.
    """
    part = min(1.0, rest / sum(step.chunk for step in steps))
    rate, step_ns, next_ns = 0.0, 0.0, 0.0
    for step in steps:
        chunk = max(1, round(step.chunk * part), min(prompt_tokens, step.chunk))
        took = step.ns(chunk)
        rate += chunk / max(took, 1.0)
        step_ns = max(step_ns, took)
        next_ns = max(next_ns, step.model.predict(step.decodes + 1, step.context))
    return (rest / rate if part == 1.0 else step_ns), next_ns
