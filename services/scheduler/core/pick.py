"""Which of the waiting is next for a replica. Called by the admission pass; what a replica may take routing.py says."""

from __future__ import annotations

from services.scheduler.core.apart import Takers
from services.scheduler.core.draft import Draft, Shared
from services.scheduler.core.replica import Replica
from services.scheduler.core.routing import MOST_PASSED
from services.scheduler.core.sequence import Sequence

Head = tuple[Sequence, Takers | None]  # of a queue, and which
LAST = (1 << 62, True, 0, 0)  # behind every rank
LOOK_PAST = 16  # waiting sequences of a queue at most that are for other replicas


class Picker:
    """Looks at the waiting from the head. Those before the chosen stand aside in the draft until the pass ends."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def first(self, replica: Replica, now_ns: int) -> Sequence | None:
        """The head, whoever is to take it; with roles the first of those heads that may enter here."""
        placer, routing = self._shared.placer, self._shared.routing
        if not routing.roles:
            return placer.head(now_ns)
        heads = [placer.head(now_ns, turn) for turn in placer.turns(replica.number)]
        able = [head for head in heads if head is not None and routing.may_enter(replica, head)]
        return min(able, key=lambda head: placer.rank(head, now_ns), default=None)

    def next(self, replica: Replica, draft: Draft, now_ns: int) -> Sequence | None:
        """The first of the waiting that is for this replica: his own among the first LOOK_PAST, else one that has
        waited long enough for another. With roles of several queues, by rank."""
        placer, routing = self._shared.placer, self._shared.routing
        if not routing.chooses:
            return placer.head(now_ns)
        heads = [
            (head, turn) for turn in placer.turns(replica.number) if (head := placer.head(now_ns, turn)) is not None
        ]
        if not heads:
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
        late = next((sequence for sequence in draft.free if sequence.route.passed >= MOST_PASSED), None)
        head = self._best(replica, draft, heads, most, now_ns) if late is None else None
        if head is not None and head.unanswered:
            return head
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

    def _best(self, replica: Replica, draft: Draft, heads: list[Head], most: int, now_ns: int) -> Sequence | None:
        """Of what _walk() finds in the queues with these heads."""
        if len(heads) == 1:
            return self._walk(replica, draft, heads[0][1], most, now_ns)
        best, best_rank = None, LAST
        for rank, turn in sorted((self._shared.placer.rank(head, now_ns), turn) for head, turn in heads):
            if rank >= best_rank:
                break
            found = self._walk(replica, draft, turn, most, now_ns)
            if found is not None and (its := self._shared.placer.rank(found, now_ns)) < best_rank:
                best, best_rank = found, its
        return best

    def _walk(self, replica: Replica, draft: Draft, turn: Takers | None, most: int, now_ns: int) -> Sequence | None:
        """The first of one queue that it should take before those behind it, or that owes it a step; at most so many
        are passed over."""
        placer, routing = self._shared.placer, self._shared.routing
        passed = sum(placer.turn(other) == turn for other in draft.passed)
        head = placer.head(now_ns, turn)
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
            head = placer.head(now_ns, turn)
        return head
