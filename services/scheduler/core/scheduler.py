"""The scheduler's heart: requests in, steps out, results in, outcomes out.

Called by the scheduler service, the tests and the simulator. It holds no clock, no socket and no thread; every time is
the caller's, in nanoseconds of one clock (NewRequest.arrived_ns and deadline_ns are of the same clock).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import numpy as np

from services.scheduler.core.invariants import check_records, check_replicas
from services.scheduler.core.kv.prefix_index import Hasher
from services.scheduler.core.outcome import Names, OutcomeBuilder
from services.scheduler.core.placement.router import Router
from services.scheduler.core.planner import Planner
from services.scheduler.core.policy.base import Policy
from services.scheduler.core.policy.presets import parse
from services.scheduler.core.replica import AdmissionMemo, Replica
from services.scheduler.core.results import Results
from services.scheduler.core.sequence import PrefixState, Record, Sequence, State
from services.scheduler.core.speculation.texts import History
from services.scheduler.core.state import MAX_AHEAD, SchedulerState
from services.scheduler.core.stats import FirstTokens, figures, of_replica
from services.scheduler.core.types import (
    CLASS_COUNT,
    EMPTY,
    MAX_STOP_IDS,
    Finish,
    FinishedRequest,
    Int32,
    Limits,
    NewRequest,
    Outcome,
    StepPlan,
    StepResult,
)  # fmt: skip
from services.scheduler.core.waiting import WaitingQueue


class Scheduler:
    """Schedules requests over replicas.

    max_seqs: sequences that run at most on a replica (0: its slots); microbatches (0: the replica's stages), lookahead
    and ahead_ns (0: lookahead alone counts): docs/protocol.md#steps; affinity: what a cached token counts when replicas
    are chosen (Routing); step_tokens: token budget of a step (0: the policy's); prefix_cache: share and keep prefixes
    (None: as the policy does); a sequence's checkpoint is due every `checkpoint_tokens` tokens or `checkpoint_ns` (0
    tokens: not while it runs), when it loses its slot, and at its end.
    """

    def __init__(
        self,
        policy: str | Policy = "orcinus",
        *,
        max_seqs: int = 0,
        microbatches: int = 1,
        lookahead: int = 1,
        ahead_ns: int = 0,
        step_tokens: int = 0,
        prefix_cache: bool | None = None,
        checkpoint_tokens: int = 32,
        checkpoint_ns: int = 1_000_000_000,
        affinity: float = 1.0,
    ) -> None:
        self.policy = parse(policy) if isinstance(policy, str) else policy
        self.microbatches, self.lookahead = microbatches, lookahead
        self._prefix_cache = self.policy.prefix_cache if prefix_cache is None else prefix_cache
        self._hasher: Hasher | None = None
        self._checkpoint_tokens = checkpoint_tokens
        self._next_policy: Policy | None = None
        self.replicas: list[Replica] = []
        self.records: dict[str, Record] = {}  # of all requests, by id; not to be changed from outside
        self._parked_records: dict[str, Record] = {}  # of which something was set aside by park()
        self._names = Names()
        self.waiting = WaitingQueue(self.policy.order)
        self._state = SchedulerState(self.policy, self.waiting, max_seqs, lookahead, ahead_ns, step_tokens)
        self.router = Router(self._state, affinity)
        self._planner = Planner(self._state, self.router)
        self._results = Results(self, self.router, self.waiting, self._names, checkpoint_tokens, checkpoint_ns)
        self._deadlines: list[tuple[int, int, Record]] = []
        self._pending_outcome = OutcomeBuilder()  # known in calls that return no Outcome; goes out with the next one
        self._history = History()
        self._sequences = 0
        self._lengths: Mapping[int, list[int]] = {}  # of the last policy that forecast
        self._finish_counts = dict.fromkeys(Finish, 0)
        self._past_moved_blocks = self._past_hit_tokens = 0  # blocks swapped and tokens hit on replicas that are gone
        self._resuming_tokens: dict[Sequence, int] = {}  # sequences without the KV that they had -> its tokens

    def join(self, limits: Limits) -> int:
        """Add a replica with empty slots and blocks; return its number, that of a lost one if there is one.

        A sequence that waits and can run on no replica ends with an error in the next Outcome.
        """
        keepers = {replica.number for replica in self.router.placement.keepers}
        gone = (r.number for r in self.replicas if not r.alive and r.number not in keepers)
        number = next(gone, len(self.replicas))
        others = any(r.prefix_cache is not None for r in self.alive)
        if self._prefix_cache and not others and (self._hasher is None or self._hasher.block_size != limits.block_size):
            self._hasher = Hasher(limits.block_size)
            for record in self.records.values():
                for sequence in record.sequences:
                    sequence.prefix.keys = []
        # One size of blocks has keys: a replica with another size shares no prefixes.
        hasher = self._hasher if self._hasher is not None and self._hasher.block_size == limits.block_size else None
        microbatches = self.microbatches or limits.stages
        replica = Replica(number, limits, hasher, *self.policy.parts_of(number), self._history, microbatches)
        replica.table.stagger = max(self._checkpoint_tokens, 1)
        self.replicas[number : number + 1] = [replica]
        self.router.add_replica(replica, self.alive)
        for sequence in [*self.waiting, *self.waiting.held_sequences.values()]:
            finish, error = self.router.examine(sequence)
            if finish is not Finish.RUNNING:
                self._drop(sequence, finish, error, self._pending_outcome)
        self._hold_stranded()
        return number

    def stranded_requests(self) -> dict[str, str]:
        """Return the identity (Limits.identity) that each request with tokens waits for, by request.

        Without a replica none does, unless other shards have workers, all of another identity (`served_elsewhere`).
        """
        requests = [sequence.record.request for sequence in self.waiting.held_sequences.values()]
        return {request.id: request.identity for request in requests}

    def served_elsewhere(self, identities: frozenset[str]) -> None:
        """Take the identities of other shards' workers, one of them empty where it is not known.

        Without a replica here requests of other identities than these are stranded.
        """
        if self.router.placement.elsewhere != identities:
            self.router.placement.elsewhere = identities
            self._hold_stranded()

    def runs(self, request_id: str) -> bool:
        """Return whether a sequence of a request has a slot."""
        record = self.records.get(request_id)
        return record is not None and any(sequence.state is State.RUNNING for sequence in record.sequences)

    def identity(self, request_id: str) -> str:
        """Return the identity (Limits.identity) with which alone a request may go on; empty if any will do."""
        record = self.records.get(request_id)
        return record.request.identity if record is not None and record.has_tokens else ""

    def lose(self, replica: int, now_ns: int) -> None:
        """Take a replica out: its sequences wait again with the tokens applied so far; its steps are forgotten.

        Swapped KV goes with the worker, except what it has kept (`keep_kv`): other replicas read that as a peer's until
        no sequence needs it. What it was loading from the host tier of another replica is still there; what another one
        was loading from its tier may be anything. Step ids begin anew when it joins again, so the caller passes on no
        answer of the Run that was lost.
        """
        lost = self.replicas[replica]
        self._past_moved_blocks += lost.transfers.swapped_blocks
        self._past_hit_tokens += lost.prefix_cache.hit_tokens if lost.prefix_cache is not None else 0
        lost.alive = False
        lost.inflight.clear()
        lost.inflight_of.clear()
        for departed in [gone for each in lost.departures.values() for gone in each]:
            departed.sequence.unanswered_steps = 0
        lost.departures.clear()
        self.waiting.changes += 1  # sequences that owed it a step may enter now
        for slot in np.flatnonzero(lost.table.active).tolist():
            load = lost.transfers.from_peer(slot)
            sequence = lost.release(slot)
            sequence.unanswered_steps = 0
            if load is not None:
                load.tier = None  # the sequence has its references again
                sequence.saved_kv, sequence.lost_tokens = load.saved_kv, 0
            self._note_resuming(sequence)
            self.waiting.requeue(sequence, now_ns, self._pending_outcome)
        lost.departures.clear()
        lost.transfers.let_go()
        for other in self.alive if not lost.kept_blocks.size else ():
            other.peers.remove(lost)
            for slot in other.transfers.abandon(lost.number):
                self.waiting.requeue(other.release(slot), now_ns, self._pending_outcome)
        for sequence in [s for record in self.records.values() for s in record.sequences]:
            if sequence.saved_at(lost.number) and not lost.has_kept(sequence):
                sequence.lost_tokens = sequence.computed_tokens
                self._note_resuming(sequence)
                if sequence.state is State.WAITING:
                    self.waiting.lose_saved(sequence, now_ns)
                else:
                    sequence.saved_kv = None
        for sequence in lost.handovers + (lost.prefix_cache.ready if lost.prefix_cache is not None else []):
            self.waiting.put_back(sequence, now_ns)
        lost.handovers.clear()
        lost.freed_slots.clear()
        if lost.kept_blocks.size:
            self.router.end_keeping(lost, self.alive)
        elif lost.is_keeping:
            self.router.placement.keepers.remove(lost)
        self.router.update_replicas(self.alive)
        self._hold_stranded()

    @property
    def kept_tiers(self) -> list[str]:
        """The host tiers of replicas that keep KV, until they are forgotten (Limits.host_tier)."""
        return [replica.limits.host_tier for replica in self.router.placement.keepers]

    def needed_tiers(self) -> list[str]:
        """Forget the host tiers that no sequence needs any more, and return the others: what a new worker is told."""
        self.router.forget_keepers()
        return self.kept_tiers

    def can_keep_kv(self, replica: int) -> bool:
        """Return whether `keep_kv` has KV of a replica to keep."""
        keeper = self.replicas[replica]
        return keeper.limits.keeps and bool(keeper.host.total and (keeper.table.count or keeper.host.referenced))

    def keep_kv(self, replica: int, now_ns: int) -> tuple[StepPlan | None, Outcome]:
        """Return the last step of a replica with a worker that leaves, or None where no KV is kept.

        It swaps out what runs, as far as the host tier goes, and asks the worker to keep that. Call it once, when no
        step of the replica is in flight; lose the replica when the step is answered, and plan no other one for it.
        Nothing is kept while another replica loads from the tier: the worker would take the blocks away meanwhile.
        """
        out, keeper = self.collector(), self.replicas[replica]
        if any(other.transfers.held_of(keeper.host) for other in self.alive):
            return None, out.build()
        self.router.begin_keeping(keeper)
        for sequence in keeper.swap_all():
            self._note_resuming(sequence)
            self.waiting.requeue(sequence, now_ns, out)
        sequences = [s for record in self.records.values() for s in record.sequences if s.saved_at(replica)]
        sequences.sort(key=lambda sequence: (sequence.priority, sequence.number))
        kept = [sequence.saved_kv.blocks for sequence in sequences if sequence.saved_kv is not None]
        for sequence in sequences:
            self._note_resuming(sequence)
        return self._planner.last_step(keeper, np.concatenate([EMPTY, *kept]), now_ns), out.build()

    def confine(self, request_ids: Iterable[str]) -> None:
        """Confine requests to one replica, the dock: they run there only, and no other sequence enters it.

        The dock is the next replica that joins and fits most of them, or that of assign_dock(). It stays the dock until
        it is lost or fits none of the confined sequences that are left.
        """
        self.router.confine({name: self.records[name] for name in request_ids if name in self.records})

    def assign_dock(self, now_ns: int) -> None:
        """Make the replica that fits most confined sequences the dock, and empty it, if one is needed."""
        if (chosen := self.router.assign_dock()) is not None:
            self._empty(chosen, now_ns)

    def add(self, request: NewRequest, now_ns: int) -> Outcome:
        """Add a request, with the outputs it has already after a restart. One that can never run ends at once.

        Raises ValueError for an id that is there already, no prompt, a class outside 0..3 or too many stop ids.
        """
        if request.id in self.records:
            raise ValueError(f"request {request.id} is held already")
        if not 0 <= request.priority < CLASS_COUNT:
            raise ValueError(f"priority {request.priority} is not 0..{CLASS_COUNT - 1}")
        if not request.prompts or request.n < 1:
            raise ValueError(f"{len(request.prompts)} prompts, n = {request.n}; both must be at least 1")
        if request.stop_ids.size > MAX_STOP_IDS:
            raise ValueError(f"{request.stop_ids.size} stop ids; at most {MAX_STOP_IDS}")
        record = Record(
            request, self._names.take(request.gateway), self._names.take(request.tenant), request.arrived_ns or now_ns
        )
        self.records[request.id] = record
        hasher = self._hasher
        for number, prompt in enumerate(request.prompts):
            keys = hasher.keys(prompt, request.salt) if hasher else []  # here, as it is no part of an iteration
            for choice in range(number * request.n, (number + 1) * request.n):
                outputs = request.outputs[choice] if request.outputs else EMPTY
                sequence = Sequence(record, choice, self._sequences, prompt, outputs, prefix=PrefixState(keys))
                if request.scored_tokens is not None and choice == number * request.n:
                    sequence.scored_tokens = request.scored_tokens[number]
                record.sequences.append(sequence)
                self._sequences += 1
                if outputs.size:
                    self._resuming_tokens[sequence] = sequence.known_tokens - 1
        record.unfinished_sequences = len(record.sequences)
        out = self.collector()
        self.router.expire(now_ns)
        for sequence in list(record.sequences):
            sequence.checkpointed_tokens = (
                request.checkpointed_tokens[sequence.choice] if request.checkpointed_tokens else sequence.outputs.size
            )
            out.checkpoint(sequence)
            self._take_in(sequence, now_ns, out)
        if request.deadline_ns and record.unfinished_sequences:
            heapq.heappush(self._deadlines, (request.deadline_ns, record.sequences[0].number, record))
        return out.build()

    def cancel(self, request_id: str, now_ns: int, finish: Finish = Finish.CANCELLED, error: str = "") -> Outcome:
        """End what still runs or waits of a request; slots and blocks are free for the next step. Any moment."""
        out = self.collector()
        if record := self.records.get(request_id):
            self._end_all(record, finish, error, out)
        return out.build()

    def stop(self, request_id: str, choice: int, at_token: int, now_ns: int) -> Outcome:
        """End a sequence as STOP with its first `at_token` outputs: the gateway found a stop string.

        A sequence without as many, as where Redis lost tokens that the gateway has read, goes on: publish.lua applies
        the stop at its end.
        """
        out = self.collector()
        record = self.records.get(request_id)
        if record is None or not 0 <= choice < len(record.sequences):
            return out.build()
        sequence = record.sequences[choice]
        held = self.outputs(request_id, choice)
        if sequence.state is not State.ENDED and held is not None and at_token <= held.size:
            self.withdraw(sequence)
            sequence.outputs = sequence.outputs[: max(at_token, 0)]
            sequence.checkpointed_tokens = min(sequence.checkpointed_tokens, sequence.outputs.size)
            self.on_complete(sequence)
            out.row(sequence, Finish.STOP)
            self.end(sequence, Finish.STOP, "", out)
        return out.build()

    def release(self, request_id: str, begun: bool = False) -> bool:
        """Forget a request, without its end. Return False if it has begun; with `begun` it is checkpointed instead."""
        record = self.records.get(request_id)
        if record is None:
            return False
        has_begun = record.has_started or record.request.has_begun or any(s.outputs.size for s in record.sequences)
        if has_begun and not begun:
            return False
        for sequence in record.sequences:
            if sequence.state is State.RUNNING:
                self._results.checkpoint(self.replicas[sequence.replica], sequence.slot, self._pending_outcome)
            self.withdraw(sequence)
        record.unfinished_sequences = 0
        self._forget(record)
        return True

    def outputs(self, request_id: str, choice: int) -> Int32 | None:
        """Return the tokens that a choice of an unfinished request has; None if there is no such request."""
        record = self.records.get(request_id)
        for sequence in record.sequences if record else ():
            if sequence.choice == choice:
                running = sequence.slot >= 0
                return self.replicas[sequence.replica].table.outputs(sequence.slot) if running else sequence.outputs
        return None

    def checkpoint(self) -> Outcome:
        """Checkpoint all that the running sequences have and no checkpoint has carried: before a clean stop."""
        out = self.collector()
        for replica in self.replicas:
            for slot in np.flatnonzero(replica.table.active).tolist():
                self._results.checkpoint(replica, slot, out)
        return out.build()

    def park(self, request_id: str) -> None:
        """Let a request have no further step until resume(). What runs gives up slot and blocks, of both tiers.

        What is in flight for it still counts. A sequence that is loading its KV runs on, so the caller asks again.
        """
        if record := self.records.get(request_id):
            self._parked_records[request_id] = record
            for sequence in record.sequences:
                if sequence.state is State.RUNNING and not self.replicas[sequence.replica].transfers.loads(
                    sequence.slot
                ):
                    self.replicas[sequence.replica].release(sequence.slot)
                    sequence.state = State.PARKED
                    self._pending_outcome.checkpoint(sequence)
                elif sequence.state is State.WAITING:
                    sequence.state = State.PARKED
                    self.waiting.drop(sequence)
                    self._evict(sequence)

    def resume(self, request_id: str, now_ns: int) -> None:
        """Let what was parked of a request wait again, in its old place."""
        if record := self._parked_records.pop(request_id, None):
            for sequence in list(record.sequences):
                if sequence.state is State.PARKED:
                    self._take_in(sequence, now_ns, self._pending_outcome)

    def adopt(self, request_id: str, gateway: str) -> None:
        """Send the rows of a request to `gateway` from now on; what the former one got is in the next checkpoint."""
        if record := self.records.get(request_id):
            old, record.gateway = record.gateway, self._names.take(gateway)
            self._names.give(old)
            record.request.gateway = gateway
            for sequence in (s for s in record.sequences if s.state is State.RUNNING):
                replica = self.replicas[sequence.replica]
                replica.table.redirect(sequence.slot, record.gateway)
                self._results.checkpoint(replica, sequence.slot, self._pending_outcome)

    def plan(self, now_ns: int, replica: int = 0) -> tuple[StepPlan | None, Outcome | None]:
        """Return the next step of `replica`, or None when nothing can run or enough is in flight; and what became known
        meanwhile: passed deadlines, requests that started, checkpoints of the preempted."""
        out = self.collector()
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            self._end_all(heapq.heappop(self._deadlines)[2], Finish.DEADLINE, "", out)
        self._change_policy(now_ns)
        self.router.forget_keepers()
        here = replica < len(self.replicas) and self.replicas[replica].alive
        step = self._planner.plan(self.replicas[replica], now_ns, out) if here else None
        return step, out.build() if out else None

    def apply(self, result: StepResult, now_ns: int) -> Outcome:
        """Apply a worker's result. One that is not in flight is dropped; one of a step that failed as a whole changes
        nothing: the caller loses the replica."""
        replica = self.replicas[result.replica]
        step = replica.inflight.get(result.id)
        if step is None or result.error:
            return Outcome()
        return self._results.apply(replica, step, result, now_ns)

    def switch(self, policy: str) -> None:
        """Change the policy as soon as nothing runs: what runs goes to its end, what waits goes on waiting.

        The name of the policy in force undoes an earlier call. Prefix caching stays. Raises ValueError for an unknown
        policy.
        """
        self._next_policy = None if (chosen := parse(policy)).name == self.policy.name else chosen
        self.router.close(self._next_policy is not None)

    def lengths(self) -> Mapping[int, list[int]]:
        """Return the output lengths from which memory is forecast, by group: what restore_lengths() takes."""
        return self.policy.memory.snapshot() or self._lengths

    def restore_lengths(self, lengths: Mapping[int, list[int]]) -> None:
        """Forecast from the lengths() of an earlier scheduler. Before the first request.

        Raises ValueError for what lengths() cannot have returned.
        """
        self.policy.memory.restore(lengths)
        self._lengths = lengths

    # -- statistics

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is in flight, and plan() has nothing left to report."""
        return not self.records and not self._pending_outcome and not any(r.inflight for r in self.replicas)

    @property
    def alive(self) -> list[Replica]:
        """Replicas that are there."""
        return [replica for replica in self.replicas if replica.alive]

    @property
    def unfinished_count(self) -> int:
        return len(self.records)

    @property
    def waiting_count(self) -> int:
        return len(self.waiting)

    def look_again_ns(self, replica: int) -> int:
        """Return from when `replica` may take a waiting sequence that is held for another now; 0 if there is none."""
        memo = self.replicas[replica].memo
        return memo.none_until_ns if memo.none_at == self.waiting.changes else 0

    def predicted_ttft_ns(self, priority: int = CLASS_COUNT - 1) -> int:
        """Return the predicted time to first token of a request of that class that comes now; 0 before any step."""
        return self.first_tokens().until_next_ns(priority)

    def first_tokens(self) -> FirstTokens:
        """Return what predicts the first tokens of requests that are added next, before anything else is called."""
        return FirstTokens(self._state, self.router.for_prompts, bool(self.router.placement.prefill_sources))

    def stats(self) -> dict[str, float | int]:
        """Return the statistics (docs/operations.md#stats) that need neither clock nor I/O."""
        fields = figures(self._state, self.router, self.alive, self.records.values(), self._parked_records.values())
        self._resuming_tokens = {s: tokens for s, tokens in self._resuming_tokens.items() if self._resumes(s, tokens)}
        return fields | {
            "resuming": len(self._resuming_tokens),
            "swapped_blocks": fields["swapped_blocks"] + self._past_moved_blocks,
            "prefix_hit_tokens": fields["prefix_hit_tokens"] + self._past_hit_tokens,
            "finished": self._finish_counts[Finish.STOP] + self._finish_counts[Finish.LENGTH],
            "cancelled": self._finish_counts[Finish.CANCELLED] + self._finish_counts[Finish.DEADLINE],
            "failed": self._finish_counts[Finish.ERROR],
            "tokens_total": self._results.tokens_total,
            "drafted_tokens": self._history.drafted_tokens,
            "accepted_tokens": self._history.accepted_tokens,
        }

    def replica_stats(self, number: int) -> dict[str, int]:
        return of_replica(self._state, self.router, self.replicas[number])

    @property
    def _most_ahead(self) -> int:
        """Return how many steps of a sequence may be in flight when the next one is planned."""
        return max(self.lookahead, MAX_AHEAD - 1) if self._state.ahead_ns and self.lookahead else self.lookahead

    def check(self) -> None:
        """Raise RuntimeError when an invariant of docs/protocol.md#steps is broken."""
        self.waiting.check()
        if len(self._deadlines) > 2 * len(self.records) + 64:
            raise RuntimeError(f"{len(self._deadlines)} deadlines are kept for {len(self.records)} requests")
        check_replicas(self.alive, self.router.placement.keepers, self.records.values(), self._most_ahead)
        waits = len(self.waiting) + len(self.waiting.held_sequences)
        check_records(list(self.records.values()), sum(r.table.count for r in self.replicas), waits)

    # -- ends; also called by Results

    def collector(self) -> OutcomeBuilder:
        """Return the builder of the next Outcome, with what had to wait for one."""
        out, self._pending_outcome = self._pending_outcome, OutcomeBuilder()
        return out

    def on_complete(self, sequence: Sequence) -> None:
        """Learn from an output that ended by itself or at a stop string: its length, and drafts for its tenant."""
        self.policy.memory.on_finish(sequence.prompt.size, sequence.outputs.size, sequence.record.request.max_tokens)
        if any(replica.speculation.possible for replica in self.replicas):
            self._history.add(sequence.record.request, sequence.outputs)

    def end(self, sequence: Sequence, finish: Finish, error: str, out: OutcomeBuilder) -> None:
        """End a sequence that holds nothing any more; with its last sequence the request ends."""
        sequence.state, sequence.finish = State.ENDED, finish
        out.checkpoint(sequence)
        record = sequence.record
        record.error = record.error or error
        record.unfinished_sequences -= 1
        if record.unfinished_sequences:
            return
        finishes = [s.finish for s in record.sequences]
        self._finish_counts[max(finishes)] += 1
        outputs = [s.outputs for s in record.sequences]
        out.ended_requests.append(FinishedRequest(record.request, outputs, finishes, record.error))
        self._forget(record)

    def _note_resuming(self, sequence: Sequence) -> None:
        """Note how many tokens of KV a sequence lost with its replica, or has left there: the most that it ever had."""
        if tokens := sequence.computed_tokens or sequence.lost_tokens:
            self._resuming_tokens[sequence] = max(tokens, self._resuming_tokens.get(sequence, 0))

    def _resumes(self, sequence: Sequence, tokens: int) -> bool:
        """Return whether a sequence has not yet recomputed or loaded the KV that it had on its replica. tokens: as many
        as it had."""
        if sequence.state is State.RUNNING:
            return bool(self.replicas[sequence.replica].table.planned_tokens[sequence.slot] < tokens)
        return sequence.state is State.WAITING

    def _forget(self, record: Record) -> None:
        del self.records[record.request.id]
        self._parked_records.pop(record.request.id, None)
        for sequence in record.sequences if self._resuming_tokens else ():
            self._resuming_tokens.pop(sequence, None)
        record.sequences.clear()  # they refer to the record: the garbage collector alone would free them
        self._names.give(record.gateway)
        self._names.give(record.tenant)
        if len(self._deadlines) > 2 * len(self.records) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].unfinished_sequences]
            heapq.heapify(self._deadlines)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of its slot or the waiting queue, to end it. Its unanswered results will be dropped."""
        before, sequence.state = sequence.state, State.ENDED
        if before is State.RUNNING:
            replica = self.replicas[sequence.replica]
            if replica.speculation.possible:
                replica.speculation.on_end(sequence.slot)
            replica.release(sequence.slot)
        elif before is State.WAITING:
            self.waiting.drop(sequence)
        self._evict(sequence)

    def _empty(self, dock: Replica, now_ns: int) -> None:
        """Let what runs on the dock wait again, except confined requests and sequences that load their KV."""
        confined = {id(record) for record in self.router.placement.quarantined_records.values()}
        for slot in np.flatnonzero(dock.table.active).tolist():
            if id(dock.table.sequence[slot].record) not in confined and not dock.transfers.loads(slot):
                self.waiting.requeue(dock.release(slot), now_ns, self._pending_outcome)

    def _evict(self, sequence: Sequence) -> None:
        """Give up the KV of a sequence in a host tier, if it has any there."""
        if sequence.saved_kv is not None:
            self.replicas[sequence.saved_kv.replica].evict(sequence)

    def _drop(self, sequence: Sequence, finish: Finish, error: str, out: OutcomeBuilder) -> None:
        self.withdraw(sequence)
        out.row(sequence, finish, error)
        self.end(sequence, finish, error, out)

    def _end_all(self, record: Record, finish: Finish, error: str, out: OutcomeBuilder) -> None:
        for sequence in record.sequences:
            if sequence.state is not State.ENDED:
                self._drop(sequence, finish, error, out)

    def _change_policy(self, now_ns: int) -> None:
        """Let the next policy take over if nothing runs and nothing is in flight."""
        policy = self._next_policy
        if policy is None or any(r.table.count or r.inflight for r in self.replicas if r.alive):
            return
        self._lengths = self.lengths()  # for a policy that forecasts again, later
        policy.memory.restore(self._lengths)
        self.policy = self._state.policy = policy
        self._next_policy = None
        self.waiting.rebuild(policy.order, now_ns)
        self.router.close(False)
        for replica in self.replicas:
            replica.memo, replica.beneficiary = AdmissionMemo(), None
            replica.memory, replica.tokens = policy.parts_of(replica.number)

    def _hold_stranded(self) -> None:
        """Hold the waiting sequences with tokens of another identity than that of all replicas; release the others.

        They would stand at the head of a queue, and hide from a replica what it may run.
        """
        strands = self.router.placement.strands
        for sequence in [held for held in self.waiting.held_sequences.values() if not strands(held)]:
            self.waiting.release(sequence, 0)
        for sequence in [waits for waits in self.waiting if strands(waits)]:
            self.waiting.hold(sequence)

    def _take_in(self, sequence: Sequence, now_ns: int, out: OutcomeBuilder) -> None:
        """Let a new sequence wait, unless it has ended before (restart), is complete, or can never run."""
        request = sequence.record.request
        before = request.finishes[sequence.choice] if request.finishes else Finish.RUNNING
        if before is not Finish.RUNNING:
            self.end(sequence, before, "", out)
            return
        finish, error = self.router.examine(sequence)
        if finish is Finish.RUNNING:
            self.waiting.push(sequence, now_ns)
            if self.router.placement.strands(sequence):
                self.waiting.hold(sequence)
            return
        out.row(sequence, finish, error)
        self.end(sequence, finish, error, out)
