"""Which of the waiting is next for a replica. Called by the admission pass; what a replica may take routing.py says."""

from __future__ import annotations

from services.scheduler.core.draft import Draft, Shared
from services.scheduler.core.replica import Replica
from services.scheduler.core.routing import MOST_PASSED
from services.scheduler.core.sequence import Sequence

LOOK_PAST = 16  # waiting sequences at most that are for other replicas


class Picker:
    """Looks at the waiting from the head. Those before the chosen stand aside in the draft until the pass ends."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def first(self, replica: Replica, now_ns: int) -> Sequence | None:
        """The head of the queue that the replica looks at first, whoever is to take it."""
        return self._shared.placer.head(now_ns, self._shared.routing.turns(replica)[0])

    def next(self, replica: Replica, draft: Draft, now_ns: int) -> Sequence | None:
        """The first of the waiting that is for this replica: his own among the first LOOK_PAST, else one that has
        waited long enough for another. With roles of either queue, first of the one that is its role's."""
        placer, routing = self._shared.placer, self._shared.routing
        if not routing.chooses:
            return placer.head(now_ns)
        turns = [swapped for swapped in routing.turns(replica) if placer.head(now_ns, swapped) is not None]
        if not turns:
            return None
        if draft.chosen is not None:
            return draft.chosen
        changes, until_ns = replica.nobody
        if changes == placer.changes and now_ns < until_ns:
            return None
        on_dock = bool(routing.confined) and routing.dock == replica.number
        if on_dock and not routing.waiting_on_dock():
            return None
        most = len(placer) if on_dock else LOOK_PAST
        late = next((sequence for sequence in draft.free if sequence.passed >= MOST_PASSED), None)
        head = None
        for swapped in turns if late is None else ():
            head = self._walk(replica, draft, swapped, most, now_ns)
            if head is not None:
                if head.unanswered:
                    return head
                break
        if late is not None or (head is None and draft.free):
            head = late or draft.free[0]
            draft.free.remove(head)
            draft.passed.remove(head)
            placer.put_back([head], now_ns)
        elif head is None:
            owing = any(sequence.unanswered for sequence in draft.passed)
            moments = [routing.since(replica, sequence, now_ns) for sequence in draft.passed if not owing]
            replica.nobody = (placer.changes, min(moments, default=now_ns))
        draft.chosen = head
        return head

    def _walk(self, replica: Replica, draft: Draft, swapped: bool, most: int, now_ns: int) -> Sequence | None:
        """The first of one queue that it should take before those behind it, or that owes it a step; at most so many
        are passed over."""
        placer, routing = self._shared.placer, self._shared.routing
        passed = sum(not routing.roles or other.swapped == swapped for other in draft.passed)
        head = placer.head(now_ns, swapped)
        while head is not None and not routing.own(replica, head, now_ns):
            if head.unanswered and head.replica == replica.number:
                return head
            if passed >= most:
                return None
            if routing.takes(replica, head, now_ns):
                draft.free.append(head)
            placer.pass_over(head)
            draft.passed.append(head)
            passed += 1
            head = placer.head(now_ns, swapped)
        return head
