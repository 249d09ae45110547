"""What a core tells of itself: counts for the dashboards, and the time to first token that the gateway's 429 goes by.

Called by Core about once a second. Sources: PROTOCOL.md, section 5; DESIGN.md, section 4, the step-time model.
"""

from __future__ import annotations

from services.scheduler.core.draft import Shared
from services.scheduler.core.placer import CLASSES
from services.scheduler.core.replica import Replica


def figures(shared: Shared, alive: list[Replica], parked: int) -> dict[str, float | int]:
    """The fields that follow from the waiting and the replicas."""
    counters, placer = shared.counters, shared.placer
    rest = sum(int((r.table.known - r.table.planned - 1).clip(min=0).sum()) for r in alive)
    return {
        "iteration": counters.iteration,
        "running": sum(r.table.count for r in alive),
        "waiting": len(placer),
        "swapped": placer.swapped,
        "parked": parked,
        **{f"waiting_{name}": placer.counts[i] for i, name in enumerate(CLASSES)},
        "step_tokens": sum(r.last.tokens for r in alive),
        "step_decode": sum(r.last.decode for r in alive),
        "step_prefill": sum(r.last.prefill for r in alive),
        "blocks_total": sum(r.pool.total for r in alive),
        "blocks_free": sum(r.pool.free for r in alive),
        "blocks_cached": sum(r.pool.cached for r in alive),
        "blocks_draining": sum(r.pool.draining for r in alive),
        "host_blocks_total": sum(r.host.total for r in alive),
        "host_blocks_free": sum(r.host.available for r in alive),
        "prefix_hit_tokens": sum(r.sharing.hit_tokens for r in alive if r.sharing is not None),
        "preemptions": counters.preemptions,
        "recomputed_tokens": counters.recomputed_tokens,
        "swapped_blocks": sum(r.transfers.swapped_blocks for r in alive),
        "queued_tokens": placer.tokens + rest,
        "workers": len(alive),
    }


def ttft_ns(shared: Shared, replicas: list[Replica]) -> int:
    """ns until all prompt tokens that wait or are under way have run, at the pace of the present steps, and one step
    more; 0 while no replica has answered a step."""
    rate, step_ns, rest = 0.0, 0.0, float(shared.placer.tokens)
    for replica in replicas:
        if not replica.model.observed:
            continue
        table, high = replica.table, replica.table.high
        owed = table.known[:high] - table.planned[:high]
        decodes = owed == 1
        rest += float((owed[~decodes]).clip(min=0).sum())
        running = int(decodes.sum())
        tokens = max(shared.policy.tokens.most(replica, shared.step_tokens), running + 1)
        context = int(table.planned[:high][decodes].sum())
        chunk = tokens - running
        took = replica.model.predict(tokens, context, chunk * chunk / 2)
        rate += chunk / max(took, 1.0)
        step_ns = max(step_ns, took)
    return int(rest / rate + step_ns) if rate else 0
