"""A worker in plain Python and a driver around a Scheduler, for the tests: brute force, nothing shared with the core.

The worker applies Step columns in worker.proto's order to its own tables. Its "KV" of position p is a hash of tokens
0..p and its "samples" are a hash of all tokens, so a block used by two or freed early shows as a wrong value, and
outputs must equal `answer()` whatever the policy, chunking, lookahead or preemption.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from services.scheduler.core.policy.presets import DELAY_NS
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Enter, Finish, Limits, NewRequest, Outcome, StepPlan, StepResult

VOCAB = 23
MASK = (1 << 61) - 1
MS = 1_000_000
STEP_NS = 10 * MS
HOUR_NS = 3_600_000 * MS
GARBAGE = -1
Kv = dict[tuple[int, int], int]  # block, offset -> what stands there
TAKEN_OVER = (-1, -1)  # is there in a host tier that another Run has


def chain(h: int, token: int) -> int:
    return (h * 1_000_003 + token * 7919 + 12345) & MASK


def sample(h: int, seed: int) -> int:
    return ((h ^ (h >> 17)) * 2_654_435_761 + seed * 977) % 1_000_003 % VOCAB


def answer(request: NewRequest, choice: int, max_model_len: int) -> tuple[list[int], Finish]:
    """What a sequence must produce, computed directly."""
    tokens = [int(t) for t in request.prompts[choice // request.n]]
    prompt, h = len(tokens), 0
    if request.max_tokens == 0:
        return [], Finish.LENGTH
    for token in tokens:
        h = chain(h, token)
    while True:
        token = sample(h, request.payload + choice)
        tokens.append(token)
        h = chain(h, token)
        count = len(tokens) - prompt
        if count >= request.min_tokens and token in request.stop_ids.tolist():
            return tokens[prompt:], Finish.STOP
        if count >= request.max_tokens or len(tokens) >= max_model_len:
            return tokens[prompt:], Finish.LENGTH


@dataclass
class Row:
    seed: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)  # of tokens 0..p
    failed: bool = False
    adapter: bytes = b""
    late: bool = False  # its last token was not sampled


class TwinWorker:
    """One in-order engine. Raises AssertionError on a step that a real one could not run."""

    def __init__(self, limits: Limits, tiers: dict[str, Kv]) -> None:
        """tiers: by name the host tiers of all workers, which is what they share."""
        self.limits, self.tiers = limits, tiers
        self.shared: set[int] = set()
        self.rows: dict[int, Row] = {}
        self.kv: Kv = {}
        self.queue: deque[StepPlan] = deque()
        self.last_id = 0
        self.fail_next: set[int] = set()  # positions among the next step's chunks
        self.late_next: set[int] = set()  # the same
        self.host: Kv = {}
        if limits.host_tier:
            tiers[limits.host_tier] = self.host
        self.mapped: dict[int, Kv] = {}  # of other workers, by number
        self.unmappable: set[str] = set()  # tiers that cannot be mapped
        self.adapters: dict[int, bytes] = {}  # by number
        self.unloadable: set[bytes] = set()  # adapters that cannot be loaded
        # last step by which it is done, direction, from, to, the host tier and its peer
        self.copies: deque[tuple[int, str, int, int, Kv, int]] = deque()
        self.taken_over = False  # another scheduler has it and its tier; this one has not heard of that
        self.lag = 0  # steps by which copies may lag, as long as there are steps to come
        self.keeps_most = 1 << 30  # blocks of its host tier that may outlive it
        self.forces = False  # it tells guesses: now and then, and now and then a wrong one

    def run(self) -> StepResult:
        """Runs the oldest queued step."""
        step, limits = self.queue.popleft(), self.limits
        assert step.id == self.last_id + 1, "ids are 1, 2, 3, ... within a run"
        self.last_id = step.id
        for slot in step.free_slots.tolist():
            del self.rows[slot]
        acks, loaded = self._map(step), self._load(step)
        self._order_copies(step)
        for enter in step.enters:
            self._enter(enter)
        for slot, block in zip(step.append_slots.tolist(), step.append_blocks.tolist(), strict=True):
            assert 0 <= block < limits.blocks
            self.rows[slot].blocks.append(block)
        held = Counter(b for row in self.rows.values() for b in row.blocks)
        self.shared = {block for block, count in held.items() if count > 1}
        assert int(step.chunk_lengths.sum()) <= limits.max_step_tokens
        assert np.unique(step.chunk_slots).size == step.chunk_slots.size
        slots, tokens, counts, errors, late = [], [], [], [], []
        drafts = step.drafts.tolist()
        assert len(drafts) <= limits.max_drafts
        chunks = zip(
            step.chunk_slots.tolist(),
            step.chunk_starts.tolist(),
            step.chunk_lengths.tolist(),
            step.samples.tolist(),
            step.chunk_drafts.tolist() or [0] * step.samples.size,
            strict=True,
        )
        for i, (slot, start, length, samples, drafted) in enumerate(chunks):
            guesses, drafts = drafts[:drafted], drafts[drafted:]
            if self.rows[slot].failed or i in self.fail_next:  # failed: in a step sent before the scheduler knew
                self.rows[slot].failed = True
                errors.append((slot, "nan_logits", "the logits are not finite"))
                continue
            if self.rows[slot].late and not guesses and start + length > len(self.rows[slot].tokens):
                late.append(slot)  # in a step sent before the scheduler knew
                continue
            self.rows[slot].late = samples and i in self.late_next
            drawn = self._chunk(self.rows[slot], start, length, guesses, self.rows[slot].late)
            if self.rows[slot].late:
                late.append(slot)
                continue
            assert bool(drawn) == samples
            if drawn:
                slots.append(slot)
                tokens += drawn
                counts.append(len(drawn))
        self.fail_next, self.late_next = set(), set()
        result = StepResult(step.id, step.replica, np.array(slots, np.int32), np.array(tokens, np.int32), errors=errors)
        result.token_counts = np.array(counts, np.int32) if step.drafts.size else None
        result.late = np.array(late, np.int32)
        result.forced_tokens = self._forced(slots) if self.forces else None
        result.swap_out_acks, result.swap_in_acks, result.stale_peers = self._copy(step.id)
        result.peer_acks, result.adapter_acks = np.array(acks, np.int32), np.array(loaded, np.int32)
        result.kept_blocks = self._keep(step)
        result.step_ns = 5 * MS + int(step.chunk_lengths.sum()) * MS // 20
        return result

    def _forced(self, slots: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        told, counts, tokens = [], [], []
        for slot in slots:
            row = self.rows[slot]
            h = 0
            for token in row.tokens:
                h = chain(h, token)
            if h % 3 == 0:
                continue
            count = 1 + h % 18
            told.append(slot)
            counts.append(count)
            for at in range(count):
                token = sample(h, row.seed)
                h = chain(h, token)
                tokens.append(token if h % 11 or not at else (token + 1) % VOCAB)
        return (np.array(told), np.array(counts), np.array(tokens)) if told else None

    def spoil(self) -> None:
        """Give the tier to another Run: a late reader there gets anything, and sees that."""
        for place in self.host:
            self.host[place] = GARBAGE
        self.host[TAKEN_OVER] = 1

    def _keep(self, step: StepPlan) -> int:
        """All but the blocks that it keeps is gone from its host tier."""
        if not step.keep.size:
            return 0
        assert not self.copies and not step.chunk_slots.size and not self.queue and not self.rows
        assert np.unique(step.keep).size == step.keep.size
        kept = set(step.keep[: self.keeps_most].tolist())
        for place in [place for place in self.host if place[0] not in kept]:
            self.host[place] = GARBAGE
        return len(kept)

    def _map(self, step: StepPlan) -> list[int]:
        for peer in step.peers:
            self.mapped.pop(peer.number, None)
            if peer.host_tier and peer.host_tier not in self.unmappable:
                assert peer.host_tier != self.limits.host_tier, "a worker is no peer of itself"
                self.mapped[peer.number] = self.tiers[peer.host_tier]
        return [peer.number for peer in step.peers if peer.number in self.mapped]

    def _load(self, step: StepPlan) -> list[int]:
        for adapter in step.adapters:
            assert 1 <= adapter.number <= self.limits.max_loras
            old = self.adapters.get(adapter.number)
            assert all(row.adapter != old for row in self.rows.values()) or old is None, "a row has the adapter"
            self.adapters[adapter.number] = adapter.digest
        return [adapter.number for adapter in step.adapters if adapter.digest not in self.unloadable]

    def _order_copies(self, step: StepPlan) -> None:
        peers = step.swap_in_peers.tolist() or [-1] * step.swap_in_host.size
        pairs = [
            ("out", step.swap_out_gpu, step.swap_out_host, [-1] * step.swap_out_gpu.size),
            ("in", step.swap_in_host, step.swap_in_gpu, peers),
        ]
        for direction, sources, targets, owners in pairs:
            assert sources.size == targets.size
            for source, target, peer in zip(sources.tolist(), targets.tolist(), owners, strict=True):
                tier = self.host if peer < 0 else self.mapped[peer]
                self.copies.append((step.id + self.lag, direction, source, target, tier, peer))

    def _copy(self, step_id: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies happen as late as they may, so that a block that is used too early shows."""
        acks: dict[str, list[int]] = {"out": [], "in": []}
        stale = set()
        while self.copies and (self.copies[0][0] <= step_id or not self.queue):
            _, direction, source, target, tier, peer = self.copies.popleft()
            if tier.get(TAKEN_OVER):
                stale.add(peer)
            here, there = (self.kv, tier) if direction == "out" else (tier, self.kv)
            for offset in range(self.limits.block_size):
                there.pop((target, offset), None)
                if (source, offset) in here:
                    there[target, offset] = here[source, offset]
            acks[direction].append(source)
        return np.array(acks["out"], np.int32), np.array(acks["in"], np.int32), np.array(sorted(stale), np.int32)

    def _enter(self, enter: Enter) -> None:
        assert enter.slot not in self.rows and 0 <= enter.slot < self.limits.slots
        assert (
            enter.computed_tokens < enter.tokens.size
            and enter.computed_tokens <= enter.blocks.size * self.limits.block_size
        )
        assert enter.prompt_tokens == enter.request.prompts[enter.choice // enter.request.n].size
        row = Row(enter.request.payload + enter.choice, enter.tokens.tolist(), enter.blocks.tolist())
        row.adapter = self.adapters[enter.adapter] if enter.adapter else b""
        assert row.adapter == enter.request.adapter, "another adapter"
        row.failed = row.adapter in self.unloadable
        for token in row.tokens[: enter.computed_tokens]:
            row.hashes.append(chain(row.hashes[-1] if row.hashes else 0, token))
        self.rows[enter.slot] = row

    def _chunk(self, row: Row, start: int, length: int, guesses: list[int], late: bool) -> list[int]:
        """Runs a chunk; returns the tokens that count. Nothing of a wrong guess may be read later."""
        size, first = self.limits.block_size, len(row.tokens)
        row.tokens = row.tokens + guesses
        known = len(row.tokens)
        assert length > len(guesses) and start + length <= known, "a chunk runs unknown tokens"
        assert start + length == known or not guesses, "guesses that are not at the end"
        assert known < self.limits.max_model_len, "a step past the context"
        while len(row.hashes) < start + length:
            row.hashes.append(chain(row.hashes[-1] if row.hashes else 0, row.tokens[len(row.hashes)]))
        for p in range(start + length):
            place = (row.blocks[p // size], p % size)
            if p < start:
                assert self.kv.get(place) == row.hashes[p], f"position {p} reads KV that is not its own"
            else:
                same = self.kv.get(place) == row.hashes[p]  # a late row's last block may be shared by now
                assert place[0] not in self.shared or same, "writes into a block that another one reads"
                self.kv[place] = row.hashes[p]
        if late:
            row.tokens, row.hashes = row.tokens[:first], row.hashes[:first]
            row.blocks = row.blocks[: -(-first // size)] if guesses else row.blocks
        if start + length < known or late:
            return []
        drawn = [sample(h, row.seed) for h in row.hashes[first - 1 :]]
        right = next((i for i, (a, b) in enumerate(zip(drawn, guesses, strict=False)) if a != b), len(guesses))
        row.tokens = row.tokens[:first] + drawn[: right + 1]
        row.hashes = row.hashes[: len(row.tokens) - 1]
        if guesses:
            row.blocks = row.blocks[: -(-(len(row.tokens) - 1) // size)]
        return drawn[: right + 1]


class House:
    """A Scheduler with twin workers, and a reader that checks every Outcome as gateway and record keeper would."""

    def __init__(self, core: Scheduler, limits: Limits, lag: int = 0) -> None:
        self.core, self.now, self.lag = core, 1_000 * MS, lag
        self.limits: dict[int, Limits] = {}
        self.workers: dict[int, TwinWorker] = {}
        self.requests: dict[str, NewRequest] = {}
        self.published: dict[tuple[str, int], list[int]] = {}
        self.records: dict[tuple[str, int], list[int]] = {}
        self.over: dict[tuple[str, int], Finish] = {}
        self.stopped: dict[tuple[str, int], int] = {}
        self.ended: dict[str, list[Finish]] = {}
        self.errors: dict[str, str] = {}
        self.started: list[str] = []
        self.heard: dict[tuple[str, int], int] = {}  # when the last token came; at first the arrival
        self.cached: dict[tuple[str, int], int] = {}  # tokens with KV when its worker first heard of it
        self.names: dict[int, str] = {}  # of slots, as far as chunks() saw the steps
        self.tiers: dict[str, Kv] = {}
        self.most = 0
        self.join(limits)

    def join(self, limits: Limits) -> int:
        if limits.host_tier:  # in that folder, with a name that was never there
            limits = replace(limits, host_tier=f"{limits.host_tier.partition('/')[0]}/{len(self.tiers)}")
        number = self.core.join(limits)
        self.limits[number], self.workers[number] = limits, TwinWorker(limits, self.tiers)
        self.workers[number].lag = self.lag
        self.most = max(self.most, limits.max_model_len)
        return number

    def lose(self, replica: int = 0) -> None:
        self.core.lose(replica, self.now)
        self.workers.pop(replica).spoil()

    def leave(self, replica: int = 0) -> StepPlan | None:
        """Let a worker drain: its steps are answered, it keeps its KV and ends. Return its last step."""
        worker = self.workers[replica]
        while worker.queue:
            self.answer(replica)
        step = None
        if self.core.can_keep_kv(replica):
            step, outcome = self.core.keep_kv(replica, self.now)
            self.take(outcome)
            if step is not None:
                worker.queue.append(step)
                self.answer(replica)
        self.core.check()
        self.core.lose(replica, self.now)
        self.core.check()
        del self.workers[replica]
        return step

    def take_over(self, replica: int) -> None:
        """Give the worker to another scheduler. The core hears nothing more, and of that when it is lost."""
        self.workers[replica].taken_over = True
        self.workers[replica].spoil()

    def add(self, request: NewRequest) -> None:
        self.requests[request.id] = request
        for choice in range(len(request.prompts) * request.n):
            known = [int(t) for t in request.outputs[choice]] if request.outputs else []
            self.heard[request.id, choice] = request.arrived_ns or self.now
            self.published[request.id, choice], self.records[request.id, choice] = list(known), list(known)
        self.take(self.core.add(request, self.now))

    def add_all(self, *rows: tuple[Any, ...], seed: int | None = None, **more: Any) -> None:
        """Add requests of (name, tokens of prompt, max_tokens[, seed]); without a seed the last letter is the seed."""
        for name, prompt, max_tokens, *own in rows:
            seeds = [*own, *([] if seed is None else [seed]), ord(name[-1])]
            self.add(request(name, prompt, max_tokens, seed=seeds[0], **more))

    def add_many(self, count: int, prompt: int, max_tokens: int, name: str = "r", seed: int = 0, **more: Any) -> None:
        """Add requests of one size, called `name` and a number, which also counts their seeds up."""
        self.add_all(*((f"{name}{i}", prompt, max_tokens, seed + i) for i in range(count)), **more)

    def plan(self, replica: int = 0) -> StepPlan | None:
        step, outcome = self.core.plan(self.now, replica)
        if outcome is not None:
            self.take(outcome)
        if step is not None:
            for enter in step.enters:
                self.cached.setdefault((enter.request.id, enter.choice), enter.computed_tokens)
            self.workers[replica].queue.append(step)
        return step

    def chunks(self, step: StepPlan | None) -> dict[str, tuple[int, int]]:
        """Return the (start, length) of each chunk by the request's name."""
        assert step is not None, "nothing was planned"
        for slot in step.free_slots.tolist():
            self.names.pop(slot)
        self.names |= {enter.slot: enter.request.id for enter in step.enters}
        columns = (step.chunk_slots.tolist(), step.chunk_starts.tolist(), step.chunk_lengths.tolist())
        return {self.names[slot]: (start, length) for slot, start, length in zip(*columns, strict=True)}

    def plan_named(self) -> dict[str, tuple[int, int]]:
        return self.chunks(self.plan())

    def step(self) -> dict[str, tuple[int, int]]:
        """Plan one step, run it, answer it; return its chunks."""
        named = self.plan_named()
        self.answer()
        self.core.check()
        self.now += STEP_NS
        return named

    def answer(self, replica: int = 0) -> Outcome | None:
        worker = self.workers.get(replica)
        if worker is None or not worker.queue or worker.taken_over:
            return None
        outcome = self.core.apply(worker.run(), self.now)
        self.take(outcome)
        return outcome

    def stop(self, request_id: str, choice: int, at_token: int) -> None:
        outcome = self.core.stop(request_id, choice, at_token, self.now)
        rows = zip(outcome.requests, outcome.choices.tolist(), outcome.finish.tolist(), strict=True)
        if (request_id, choice, Finish.STOP) in [(r.id, c, f) for r, c, f in rows]:
            self.stopped[request_id, choice] = at_token
        self.take(outcome)

    def take(self, outcome: Outcome) -> None:
        """Every token once and in order; rows of a gateway together; ends exactly once."""
        rows = len(outcome.requests)
        assert {len(outcome.gateways), outcome.choices.size, outcome.first_indices.size, outcome.counts.size} == {rows}
        assert outcome.waits_ns.size == outcome.finish.size == rows and int(outcome.counts.sum()) == outcome.tokens.size
        blocks = [g for i, g in enumerate(outcome.gateways) if not i or outcome.gateways[i - 1] != g]
        assert len(blocks) == len(set(blocks)), "rows of one gateway stand apart"
        at = 0
        for i, request in enumerate(outcome.requests):
            key = (request.id, int(outcome.choices[i]))
            assert outcome.gateways[i] == request.gateway
            assert key not in self.over, "a row after the end"
            finish = Finish(int(outcome.finish[i]))
            if key not in self.stopped:
                assert outcome.first_indices[i] == len(self.published[key]), "a gap or a double"
            count = int(outcome.counts[i])
            assert outcome.waits_ns[i] == (self.now - self.heard[key] if count else -1)
            if count:
                self.heard[key] = self.now
            is_first = count > 0 and outcome.first_indices[i] == 0
            assert outcome.cached_tokens.get(i, 0) == (self.cached[key] if is_first else 0), key
            self.published[key] += outcome.tokens[at : at + count].tolist()
            at += count
            if finish is not Finish.RUNNING:
                self.over[key] = finish
            assert (i in outcome.errors) == (finish is Finish.ERROR)
        for request_id, choice, first, tokens in outcome.checkpoints:
            record = self.records[request_id, choice]
            assert first == len(record), "a checkpoint leaves a gap"
            record += tokens.tolist()
        self.started += outcome.started_ids
        for done in outcome.ended_requests:
            self._end(done.request, [o.tolist() for o in done.outputs], done.finish, done.error)

    def _end(self, request: NewRequest, outputs: list[list[int]], finish: list[Finish], error: str) -> None:
        assert request.id not in self.ended
        self.ended[request.id] = finish
        self.errors[request.id] = error
        for choice, tokens in enumerate(outputs):
            key = (request.id, choice)
            before = request.finishes[choice] if request.finishes else Finish.RUNNING
            assert self.over.setdefault(key, before) is finish[choice], "the last row told another end"
            published = self.published[key]
            if key in self.stopped:
                published = published[: self.stopped[key]]
            assert tokens == published
            assert self.records[key][: len(tokens)] == tokens, "the record is not the outputs"
            if finish[choice] is Finish.ERROR or before is not Finish.RUNNING:
                continue
            expected, natural = answer(request, choice, self.most)
            assert tokens == expected[: len(tokens)], "other tokens than the sequence alone would get"
            if finish[choice] in (Finish.STOP, Finish.LENGTH) and key not in self.stopped:
                assert (tokens, finish[choice]) == (expected, natural)

    def step_once(self) -> None:
        """Plans all that may be planned, then answers one step of each replica."""
        for replica in list(self.workers):
            while self.plan(replica) is not None:
                self.core.check()
        for replica in list(self.workers):
            self.answer(replica)
            self.core.check()
        self.now += STEP_NS

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step_once()

    def run_out(self) -> Iterator[tuple[int, StepPlan]]:
        """Run until nothing is left; yield each step as it is planned, with its replica."""
        while not self.core.idle:
            for replica in self.workers:
                while (step := self.plan(replica)) is not None:
                    self.core.check()
                    yield replica, step
            for replica in self.workers:
                self.answer(replica)
                self.core.check()
            self.now += STEP_NS
            assert self.now < HOUR_NS, "it never ended"

    def finish(self, bound: int = 20_000) -> int:
        """Runs until nothing is left; returns the rounds. Fails when the core stands still with work to do, for longer
        than request-level batching waits for a batch to fill."""
        moved_ns = self.now
        for rounds in range(bound):
            if self.core.idle:
                assert self.core.unfinished_count == 0 and set(self.ended) == set(self.requests)
                return rounds
            before = (self.core.stats()["iteration"], self.core.unfinished_count)
            inflight = sum(len(w.queue) for w in self.workers.values())
            self.step_once()
            if inflight or (self.core.stats()["iteration"], self.core.unfinished_count) != before:
                moved_ns = self.now
            assert self.now - moved_ns <= DELAY_NS + STEP_NS or self.core.idle, "the core stands still"
        raise AssertionError(f"not finished after {bound} rounds")


def request(
    name: str, prompt: int | tuple[int, ...] = 4, max_tokens: int = 5, *, seed: int = 0, stop_ids: Any = (), **more: Any
) -> NewRequest:
    """A request; its prompts and samples follow from `seed`."""
    rng = np.random.default_rng(seed)
    sizes = prompt if isinstance(prompt, tuple) else (prompt,)
    prompts = [rng.integers(0, VOCAB, size).astype(np.int32) for size in sizes]
    return NewRequest(name, prompts, max_tokens, stop_ids=np.array(stop_ids, np.int32), payload=seed, **more)


def house(
    policy: str, slots: int = 8, blocks: int = 1000, block_size: int = 4, context: int = 400, step_max: int = 2048,
    **more: int,
) -> House:  # fmt: skip
    """Return a house of one replica, without lookahead unless it is given."""
    return House(Scheduler(policy, **{"lookahead": 0, **more}), Limits(slots, blocks, block_size, context, step_max))
