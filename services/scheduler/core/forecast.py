"""When would a request that comes now get its first token? What the gateway's 429 goes by.

Called by Core.predicted_ttft_ns, about once a second. Source: DESIGN.md, section 4, the step-time model.
"""

from __future__ import annotations

from services.scheduler.core.draft import Shared
from services.scheduler.core.replica import Replica


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
