"""Statistics of a core: counts for the dashboards, and the predicted time to first token behind the gateway's 429.

Called by Scheduler about once a second. The fields: docs/operations.md#stats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from services.scheduler.core.placement.router import Router
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Record, State
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.table import DECODING
from services.scheduler.core.types import CLASS_COUNT, CLASS_NAMES, Priority


def figures(
    state: SchedulerState, router: Router, alive: list[Replica], records: Iterable[Record], parked: Collection[Record]
) -> dict[str, float | int]:
    """Return the fields that follow from the waiting queue and the replicas.

    records: all there are, as they came; parked: those of them that are parked.
    """
    oldest = first_arrivals(state, records)
    counters, waiting = state.counters, state.waiting
    return {
        "iteration": counters.iteration,
        "running": sum(r.table.count for r in alive),
        "waiting": len(waiting),
        "swapped": waiting.swapped,
        "parked": sum(s.state is State.PARKED for record in parked for s in record.sequences),
        **{f"waiting_{name}": waiting.counts[i] for i, name in enumerate(CLASS_NAMES)},
        **{f"oldest_ns_{name}": oldest[i] for i, name in enumerate(CLASS_NAMES)},
        "step_tokens": sum(r.last.tokens for r in alive),
        "step_decode": sum(r.last.decode for r in alive),
        "step_prefill": sum(r.last.prefill for r in alive),
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
        "handed_over": counters.handed,
        "handed_over_blocks": counters.handed_blocks,
        "not_handed_over": counters.not_handed,
        "queued_tokens": waiting.tokens + sum(under_way(state, r, Priority.LOW) for r in alive),
        **{
            f"queued_tokens_{name}": before(state, waiting.class_tokens, i) + sum(under_way(state, r, i) for r in alive)
            for i, name in enumerate(CLASS_NAMES)
        },
        **{f"behind_{name}": behind(state, router, router.for_prompts, i) for i, name in enumerate(CLASS_NAMES)},
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
        "step_tokens": replica.last.tokens,
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
        if not record.started and record.request.priority in missing:
            if not any(sequence.state is State.WAITING for sequence in record.sequences):
                continue
            missing.remove(record.request.priority)
            oldest[record.request.priority] = record.arrived_ns
    return oldest


def before(state: SchedulerState, by_class: list[int], priority: int) -> int:
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
    owed = (table.known - table.planned - 1).clip(min=0)
    return int(owed[table.priority <= first].sum())


def urgent(state: SchedulerState, priority: int) -> bool:
    """Return whether a request of that class may take slots from running ones of lower classes."""
    return state.policy.relief.takes and priority <= Priority.HIGH


def behind(state: SchedulerState, router: Router, replicas: list[Replica], priority: int) -> int:
    """Return how many of the waiting need a slot that is given up by itself before such a request can have one.

    For the urgent, slots of running sequences of lower classes are as good as free. replicas: those that compute
    prompts. Where other replicas load what they have computed, a sequence that waits for that takes no slot of theirs.
    """
    queue = state.waiting
    ahead = before(state, queue.counts, priority)
    if router.placement.feeding:
        ahead -= before(state, queue.swapped_counts, priority)
    if urgent(state, priority):
        for table in [replica.table for replica in replicas]:
            ahead -= int((table.active & ~table.pinned & (table.priority >= Priority.NORMAL)).sum())
    return max(ahead, 0)


def ttft_ns(state: SchedulerState, replicas: list[Replica], priority: int) -> int:
    """Return the ns until all prompt tokens that wait before a request of that class, or are under way, have run beside
    the present decodes, and one step more; 0 while no replica has answered a step.

    Full steps are asked of the model only where there is work for them: it has seen none where prompts are short.
    """
    rest = float(before(state, state.waiting.class_tokens, priority))
    steps = []  # of each replica: prompt tokens of a full step, its decodes, their context
    for replica in replicas:
        if not replica.model.observed:
            continue
        table, high = replica.table, replica.table.high
        owed = table.known[:high] - table.planned[:high]
        decodes = table.phase[:high] == DECODING
        first = priority if urgent(state, priority) else Priority.LOW
        rest += float(owed[~decodes & (table.priority[:high] <= first)].clip(min=0).sum())
        running = int(decodes.sum())
        max_tokens = max(replica.tokens.max_tokens(replica, state.step_tokens), running + 1)
        steps.append((replica.model, max_tokens - running, running, int(table.planned[:high][decodes].sum())))
    room = sum(chunk for _, chunk, _, _ in steps)
    if not room:
        return 0
    part = min(1.0, rest / room)
    rate, step_ns, more_ns = 0.0, 0.0, 0.0
    for model, chunk, running, context in steps:
        chunk = max(1, round(chunk * part))
        took = model.predict(chunk + running, context, chunk * chunk / 2)
        rate += chunk / max(took, 1.0)
        step_ns = max(step_ns, took)
        more_ns = max(more_ns, model.predict(running + 1, context))
    return int((rest / rate if part == 1.0 else step_ns) + more_ns)
