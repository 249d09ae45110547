"""Golden plans: hashes of all that the scheduler core sends and publishes for fixed random workloads.

A run loops the core through `services.scheduler.workers.wire` with scripted workers and passes every outcome to the
publisher's `arguments`. It reads nothing else of the core, so it survives a rewrite of it. Rows are hashed by sequence
and blocks by their first use: the hash is equal wherever the scheduler takes the same decisions.

`python -m tests.unit.scheduler.golden_plans` compares a few seeds, `--all` every seed, `--record` writes the file.
`--trace POLICY SEED` prints the hashed lines of one run, to diff two versions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from protos import queue_pb2, worker_pb2
from services.scheduler.core.policy.presets import PARTS, PRESETS
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, Limits, NewRequest, Outcome
from services.scheduler.requests.intake import Entry
from services.scheduler.requests.publisher import arguments
from services.scheduler.workers.wire import result_from_wire, step_to_wire
from shared.columns import pack, unpack

FILE = Path(__file__).with_name("golden_plans.json")
SEEDS = 200
QUICK_SEEDS = (3, 10, 22)  # of each policy, in the unit tests: among them roles and a large pool
COMPOSITIONS = 5  # random compositions of parts for each seed
NAMES = (*sorted(PRESETS), *(f"parts-{i}" for i in range(COMPOSITIONS)))
MS = 1_000_000
VOCAB = 50
STOP_IDS = (3, 7)
DIGITS = 8  # hex digits kept of each hash
ROUNDS = 4000  # bound of one run

Name = tuple[int, int]  # request by order of arrival, choice
NUMBERED = {
    "fixed": (16, 64, 512), "capped": (4, 64), "skip": (4, 64), "shrinking": (8, 64), "slots": (3, 8),
    "static": (2, 8), "request": (2, 8),
}  # fmt: skip


def mix(*values: int) -> int:
    """Return 64 well mixed bits of some integers, the same on every machine."""
    h = 0x9E3779B97F4A7C15
    for value in values:
        h = ((h ^ (value & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        h ^= h >> 29
    return h


def policy_of(name: str, seed: int) -> str:
    """Return the policy of a run: a preset, or a composition that follows from its number and the seed."""
    if name in PRESETS:
        return name
    rng = random.Random(mix(1, seed, int(name.partition("-")[2])))
    chosen = {part: rng.choice(sorted(PARTS[part])) for part in ("order", "memory", "tokens", "batch", "relief")}
    for part in ("tokens", "batch"):
        if chosen[part] in NUMBERED:
            chosen[part] += f"-{rng.choice(NUMBERED[chosen[part]])}"
    chosen["relief"] += "-" + rng.choice(("recompute", "swap", "cheaper", "groups"))
    chosen["relief"] += "".join(f"+{option}" for option in ("stalls", "takes", "slo") if rng.random() < 0.5)
    return f"{rng.choice(('orcinus', 'sarathi', 'vllm'))}:" + ",".join(f"{part}={it}" for part, it in chosen.items())


# -- the workload


Arrival = tuple[int, NewRequest]  # the round in which a request comes


@dataclass
class Workload:
    """All that a run is made of besides the policy."""

    settings: dict[str, Any]
    replicas: list[Limits]
    lag: int  # steps by which copies between the tiers lag
    arrivals: list[Arrival]
    events: float  # probability of an event in a round
    step_ns: int  # of a step, and a token
    token_ns: int


def workload(seed: int) -> Workload:
    """Return the workload of a seed: one of several shapes, filled at random."""
    rng = random.Random(mix(2, seed))
    large = seed % 4 == 3  # block counts and budgets as in service; else so small that memory is always short
    roles = seed % 5 == 2
    size = 16 if large else rng.choice((2, 4))
    context = 1500 if large else rng.choice((30, 64))
    count = rng.choice((2, 3)) if roles or rng.random() < 0.35 else 1
    replicas = []
    for number in range(count):
        limits = Limits(
            slots=rng.choice((24, 40)) if large else rng.randint(2, 10),
            blocks=rng.choice((120, 260)) if large else rng.randint(context // size, 2 * context // size + 12),
            block_size=size,
            max_model_len=context,
            max_step_tokens=2048 if large else rng.choice((12, 24, 64)),
            host_blocks=rng.choice((0, 64, 400)) if large else rng.choice((0, 6, 40)),
            block_bytes=rng.choice((0, 2_000_000)),
            stages=rng.choice((1, 1, 2)),
        )
        if roles:
            role = ("prefill", "decode", rng.choice(("", "decode")))[number]
            limits = replace(limits, role=role, host_blocks=max(limits.host_blocks, 40), kv_format="f")
            limits = replace(limits, host_tier="a/")
        replicas.append(limits)
    settings = {
        "max_seqs": rng.choice((0, 0, 3)) if not large else 0,
        "microbatches": rng.choice((1, 1, 1, 2, 3, 0)),
        "lookahead": rng.choice((0, 1, 1, 2)),
        "step_tokens": rng.choice((0, 0, 256)) if large else rng.choice((0, 0, 7, 32)),
        "prefix_cache": rng.choice((None, True)),
        "checkpoint_tokens": rng.choice((3, 32)),
        "affinity": rng.choice((1.0, 1.0, 0.0)),
    }
    return Workload(
        settings, replicas, rng.randint(0, 2), arrivals(rng, context, large), rng.choice((0.0, 0.1, 0.3)),
        rng.choice((3, 11)) * MS + 12_347, rng.choice((9_973, 104_729)),
    )  # fmt: skip


def arrivals(rng: random.Random, context: int, large: bool) -> list[Arrival]:
    """Return the requests of a workload, in bursts; some share prefixes, some have limits."""
    tenants = ["x"] if rng.random() < 0.4 else ["x", "y", "z"]
    prefixes = [[rng.randrange(VOCAB) for _ in range(context // 3)] for _ in range(3)]
    shared, limited, at = rng.choice((0.0, 0.5)), rng.choice((0.0, 0.4)), 0
    found = []
    for index in range(rng.randint(24, 40) if large else rng.randint(12, 22)):
        if rng.random() < 0.4:
            at += rng.randint(1, 6)
        prompts = []
        for _ in range(2 if rng.random() < 0.08 else 1):
            own = rng.randint(1, context // 2 if rng.random() < 0.3 else max(context // 6, 2))
            head = rng.choice(prefixes)[: rng.randint(1, context // 3)] if rng.random() < shared else []
            prompts.append(np.array([*head, *(rng.randrange(VOCAB) for _ in range(own))], np.int32))
        tenant = rng.choice(tenants) if rng.random() < 0.5 else tenants[0]
        n, max_tokens = rng.choice((1, 1, 1, 1, 2)), rng.randint(1, 40 if large else 20)
        min_tokens = rng.randint(0, 3)
        outputs = None
        if rng.random() < 0.08:  # known from before a restart
            known = rng.randint(0, max_tokens - 1)
            outputs = [
                np.array([token_at(index, choice, i) for i in range(known)], np.int32)
                for choice in range(n * len(prompts))
            ]
        ended = [[i for i, token in enumerate(o) if token in STOP_IDS and i + 1 >= min_tokens] for o in outputs or []]
        request = NewRequest(
            f"r{index:03}", prompts, max_tokens, n=n, min_tokens=min_tokens, stop_ids=np.array(STOP_IDS, np.int32),
            priority=rng.choice((0, 1, 2, 2, 3)), tenant=tenant, gateway=rng.choice("abc"),
            ttft_slo_ns=rng.choice((50, 400)) * MS if rng.random() < limited else 0,
            tbt_slo_ns=rng.choice((12, 40)) * MS if rng.random() < limited else 0,
            deadline_ns=rng.randint(100, 900) * MS if rng.random() < 0.06 else 0,  # from arrival; absolute in add()
            salt=tenant.encode() if shared and len(tenants) > 1 else b"",
            payload=queue_pb2.Request(sampling=queue_pb2.Sampling(temperature=0.5, seed=index * 16)),
            outputs=None if any(ended) else outputs,
        )  # fmt: skip
        found.append((at, request))
    return found


def token_at(request: int, choice: int, index: int) -> int:
    """Return output `index` of a sequence: it depends on nothing else, whatever the schedule."""
    return mix(3, request, choice, index) % VOCAB


# -- the scripted worker


@dataclass
class Row:
    """A slot of a worker."""

    name: Name
    prompt: int
    known: int
    failed: bool = False


class ScriptedWorker:
    """Answers wire steps in order: tokens by sequence and index, acknowledgements of copies as late as the lag says."""

    def __init__(self, limits: Limits, lag: int, step_ns: int, token_ns: int) -> None:
        self.limits, self.lag = limits, lag
        self.queue: deque[worker_pb2.Step] = deque()
        self.rows: dict[int, Row] = {}
        self.can_map = True  # the host tiers of peers
        self.fails = -1  # the next step's row in the order of names that fails; -1: none
        self._copies: deque[tuple[int, str, int]] = deque()  # last step that acknowledges it, direction, source
        self._step_ns, self._token_ns = step_ns, token_ns

    def run(self) -> worker_pb2.Result:
        """Return the Result of the oldest step."""
        step = self.queue.popleft()
        for slot in unpack(step.free_slots).tolist():
            del self.rows[slot]
        for direction, sources in (("out", step.swap_out_gpu), ("in", step.swap_in_host)):
            self._copies.extend((step.id + self.lag, direction, block) for block in unpack(sources).tolist())
        for enter in step.enters:
            known = len(enter.tokens) // 4
            self.rows[enter.slot] = Row(divmod(enter.sampling.seed, 16), enter.prompt_tokens, known)
        slots, tokens, errors, total = [], [], [], 0
        chunks = rows_of(step.chunk_slots, step.chunk_starts, step.chunk_lengths)
        names = sorted(self.rows[slot].name for slot, _, _ in chunks)
        failing = names[self.fails % len(names)] if self.fails >= 0 and names else None
        self.fails = -1
        for slot, start, length in chunks:
            row = self.rows[slot]
            row.failed |= row.name == failing
            if row.failed:
                errors.append(worker_pb2.SequenceError(slot=slot, code="nan_logits", message="not finite"))
                continue
            if not 0 < length <= row.known - start:
                raise RuntimeError(f"step {step.id}: chunk {start}+{length} of {row.known} known tokens")
            total += length
            if start + length == row.known:
                slots.append(slot)
                tokens.append(token_at(*row.name, row.known - row.prompt))
                row.known += 1
        acks = self._acknowledge(step.id)
        peers = [peer.number for peer in step.peers if peer.host_tier and self.can_map]
        timings = worker_pb2.Timings(total_ns=self._step_ns + total * self._token_ns + mix(4, step.id, total) % 99_991)
        if acks["out"] or acks["in"]:
            timings.swap_ns = 70_001 * (len(acks["out"]) + len(acks["in"]))
        return worker_pb2.Result(
            id=step.id, slots=column(slots), tokens=column(tokens), timings=timings, swap_out_acks=column(acks["out"]),
            swap_in_acks=column(acks["in"]), errors=errors, peer_acks=column(peers),
        )  # fmt: skip

    def _acknowledge(self, step: int) -> dict[str, list[int]]:
        acks: dict[str, list[int]] = {"out": [], "in": []}
        while self._copies and (self._copies[0][0] <= step or not self.queue):
            _, direction, source = self._copies.popleft()
            acks[direction].append(source)
        return acks


def column(values: Iterable[int]) -> bytes:
    """Return integers as a column of the wire."""
    return pack(np.array(list(values), np.int32))


def rows_of(*columns: bytes) -> list[tuple[int, ...]]:
    """Return the rows of columns of the wire."""
    return list(zip(*(unpack(column).tolist() for column in columns), strict=True))


# -- the canonical form


@dataclass
class Names:
    """What the canonical form calls the slots and blocks of one replica."""

    slots: dict[int, Name] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)
    host: dict[int, int] = field(default_factory=dict)
    counts: list[int] = field(default_factory=lambda: [0, 0])  # names given to blocks of the GPU, of the host

    def fresh(self, block: int, host: bool = False) -> int:
        """Return a new name for a block that was taken anew."""
        self.counts[host] += 1
        (self.host if host else self.blocks)[block] = self.counts[host]
        return self.counts[host]


class Canonical:
    """Writes steps and publisher's arguments without slot numbers, block numbers and the order of rows."""

    def __init__(self) -> None:
        self.of: dict[int, Names] = {}

    def step(self, replica: int, step: worker_pb2.Step) -> tuple[Any, ...]:
        """Return the canonical form of one wire step."""
        its = self.of[replica]
        freed = sorted(its.slots.pop(slot) for slot in unpack(step.free_slots).tolist())
        out = sorted((its.blocks[gpu], host) for gpu, host in rows_of(step.swap_out_gpu, step.swap_out_host))
        swapped_out = [(name, its.fresh(host, host=True)) for name, host in out]
        sources, peers = unpack(step.swap_in_host).tolist(), unpack(step.swap_in_peers).tolist()
        peers = peers or [-1] * len(sources)
        owners = [self.of[peer].host if peer >= 0 else its.host for peer in peers]
        targets = unpack(step.swap_in_gpu).tolist()
        loads = sorted(
            (peer, owner[source], target)
            for peer, owner, source, target in zip(peers, owners, sources, targets, strict=True)
        )
        swapped_in = [(peer, source, its.fresh(target)) for peer, source, target in loads]
        enters = []
        for enter in step.enters:
            name = its.slots[enter.slot] = divmod(enter.sampling.seed, 16)
            blocks = [its.blocks[block] for block in unpack(enter.blocks).tolist()]
            enters.append((name, enter.prompt_tokens, enter.computed, hash_of(enter.tokens), blocks))
        appended = sorted(
            (its.slots[slot], i, block)
            for i, (slot, block) in enumerate(rows_of(step.append_slots, step.append_blocks))
        )
        appends = [(name, its.fresh(block)) for name, _, block in appended]
        columns = rows_of(step.chunk_slots, step.chunk_starts, step.chunk_lengths)
        chunks = sorted((its.slots[slot], start, length) for slot, start, length in columns)
        told = sorted((peer.number, peer.host_tier, peer.host_blocks) for peer in step.peers)
        return replica, step.id, freed, swapped_out, swapped_in, sorted(enters), appends, chunks, told

    @staticmethod
    def published(args: list[Any]) -> tuple[Any, ...]:
        """Return the canonical form of the publisher's arguments."""
        if args[6]:
            raise RuntimeError("the publisher wrote whole outputs again, though every record was complete")
        at = 7
        groups: list[list[Any]] = []
        for width in (2, 6, 1, 7, 4):
            count = args[at]
            rows = [tuple(args[at + 1 + i * width : at + 1 + (i + 1) * width]) for i in range(count)]
            groups.append(rows)
            at += 1 + count * width
        if at != len(args):
            raise RuntimeError(f"the publisher gave {len(args)} arguments, {at} are understood")
        batches = []
        for gateway, payload in groups[0]:
            batch = queue_pb2.TokenBatch.FromString(payload)
            choices, first, counts = (unpack(c).tolist() for c in (batch.choices, batch.first, batch.counts))
            tokens, rows, start = unpack(batch.tokens).tolist(), [], 0
            for i, request in enumerate(batch.requests):
                end = start + counts[i]
                told = tokens[start:end], batch.finish[i], batch.errors.get(i, "")
                rows.append((request, choices[i], first[i], *told))
                start = end
            batches.append((gateway, sorted(rows)))
        return tuple([args[:6], batches, *(sorted(rows) for rows in groups[1:])])


def hash_of(data: bytes) -> str:
    """Return a short hash of some bytes."""
    return hashlib.sha256(data).hexdigest()[:DIGITS]


# -- a run


class Run:
    """Drives one core through one workload and hashes what it sends and publishes."""

    def __init__(self, name: str, seed: int, trace: bool = False) -> None:
        self.policy, self.work = policy_of(name, seed), workload(seed)
        self.rng = random.Random(mix(5, seed))
        self.core = Scheduler(self.policy, **self.work.settings)
        self.now = 1_000 * MS
        self.workers: dict[int, ScriptedWorker] = {}
        self.sizes: dict[int, Limits] = {}
        self.entries: dict[str, Entry] = {}
        self.published: dict[Name, int] = {}
        self.parked: dict[str, int] = {}  # until which round
        self.canonical_form = Canonical()
        self.hash = hashlib.sha256()
        self.trace = trace
        self._tiers = 0
        for limits in self.work.replicas:
            self.join(limits)

    def note(self, kind: str, canonical: Any) -> None:
        """Add one fact to the hash."""
        line = f"{kind} {canonical}\n"
        if self.trace:
            print(line, end="")
        self.hash.update(line.encode())

    def join(self, limits: Limits) -> None:
        if limits.host_tier:
            self._tiers += 1
            limits = replace(limits, host_tier=f"a/{self._tiers}")
        number = self.core.join(limits)
        self.sizes[number] = limits
        self.workers[number] = ScriptedWorker(limits, self.work.lag, self.work.step_ns, self.work.token_ns)
        self.workers[number].can_map = mix(6, self._tiers, self.work.step_ns) % 5 > 0
        self.canonical_form.of[number] = Names()

    def take(self, kind: str, outcome: Outcome | None, step: int = 0) -> None:
        """Publish an outcome."""
        if outcome is None:
            return
        outcome.cached = {}  # newer than the recorded hashes; twin.py compares it
        args = arguments([(step, outcome)], 1, "p", self.entries)
        ids = [request.id for request in outcome.requests]
        waits = sorted(zip(ids, outcome.choices.tolist(), outcome.waits_ns.tolist(), strict=True))
        for i, request in enumerate(outcome.requests):
            key = int(request.id[1:]), int(outcome.choices[i])
            self.published[key] = self.published.get(key, 0) + int(outcome.counts[i])
        self.note(kind, (self.canonical_form.published(args), waits))

    def plan(self, replica: int) -> bool:
        plan, outcome = self.core.plan(self.now, replica)
        self.take("planned", outcome)
        if plan is None:
            return False
        step = step_to_wire(plan, 1)
        form = self.canonical_form.step(replica, step)
        self.note("step", (*form, plan.microbatch, plan.decode_tokens, plan.prefill_tokens))
        self.workers[replica].queue.append(step)
        return True

    def answer(self, replica: int) -> None:
        worker = self.workers.get(replica)
        if worker is not None and worker.queue:
            result = worker.run()
            self.take("applied", self.core.apply(result_from_wire(result, replica), self.now), result.id)

    def add(self, request: NewRequest) -> None:
        index = int(request.id[1:])
        self.entries[request.id] = Entry(f"p:in:{request.priority}", f"{index}-0", request.payload)
        if request.deadline_ns:
            request.deadline_ns += self.now
        self.take("added", self.core.add(request, self.now))

    def event(self, number: int) -> None:
        """Let something happen besides steps."""
        rng, arrived = self.rng, sorted(self.entries)
        chosen = rng.choice(arrived) if arrived else "r999"
        kind = rng.choice(
            ("cancel", "stop", "stop", "adopt", "park", "fail", "fail", "lose", "join", "confine", "switch", "release",
             "checkpoint", "look")
        )  # fmt: skip
        draw = rng.random()
        if kind == "cancel":
            finish = Finish.CANCELLED if draw < 0.7 else Finish.ERROR
            self.take(kind, self.core.cancel(chosen, self.now, finish, "poison" if finish is Finish.ERROR else ""))
        elif kind == "stop":
            known = self.published.get((int(chosen[1:]), 0), 0)
            if known:
                self.take(kind, self.core.stop(chosen, 0, int(draw * (known + 1)), self.now))
        elif kind == "adopt":
            self.core.adopt(chosen, "abcd"[int(draw * 4)])
        elif kind == "park":
            self.core.park(chosen)
            self.parked[chosen] = number + int(draw * 20)
        elif kind == "fail":
            busy = [replica for replica, worker in sorted(self.workers.items()) if worker.queue]
            if busy:
                self.workers[busy[0]].fails = int(draw * 100)
        elif kind == "lose" and draw < 0.5 and self.workers:
            lost = sorted(self.workers)[int(2 * draw * len(self.workers))]
            self.core.lose(lost, self.now)
            del self.workers[lost]
        elif kind == "join" and len(self.workers) < len(self.work.replicas):
            self.join(self.sizes[min(set(self.sizes) - set(self.workers))])
        elif kind == "confine":
            self.core.confine(set(rng.sample(arrived, min(len(arrived), int(draw * 3)))) if draw < 0.6 else ())
            if draw < 0.3:
                self.core.assign_dock(self.now)
        elif kind == "switch" and draw < 0.3:
            self.core.switch(self.policy if draw < 0.1 else ("sarathi", "orcinus")[draw < 0.2])
        elif kind == "release":
            self.note(kind, self.core.release(chosen, begun=draw < 0.3))
        elif kind == "checkpoint":
            self.take(kind, self.core.checkpoint())
        elif kind == "look":
            facts = sorted(self.core.stats().items())
            ttft = [self.core.predicted_ttft_ns(priority) for priority in range(4)]
            self.note(kind, (facts, ttft))

    def drive(self) -> str:
        """Run to the end; return the hash."""
        waiting, rng = deque(self.work.arrivals), self.rng
        for number in range(ROUNDS):
            while waiting and waiting[0][0] <= number:
                self.add(waiting.popleft()[1])
            if waiting and rng.random() < self.work.events:
                self.event(number)
            for request_id in [r for r, until in self.parked.items() if until <= number]:
                self.core.resume(request_id, self.now)
                del self.parked[request_id]
            if not waiting:
                self._mend()
            for replica in sorted(self.workers):
                while self.plan(replica):
                    self.now += 1_009
            for replica in sorted(self.workers):
                for _ in range(rng.choice((0, 1, 1, 1, 2))):
                    self.answer(replica)
            self.now += self.work.step_ns + 333_667
            if not waiting and self.core.idle:
                break
        else:
            raise RuntimeError(f"{self.policy}, {self.work.settings}: not idle after {ROUNDS} rounds")
        stats = self.core.stats()
        drafts = stats.pop("drafted_tokens"), stats.pop("accepted_tokens")
        assert drafts == (0, 0), "these workers take no drafts"
        self.note("stats", sorted(stats.items()))
        self.core.check()
        return self.hash.hexdigest()[:DIGITS]

    def _mend(self) -> None:
        """After the last arrival: all replicas are there again and nothing is confined, so that all can end."""
        for number in sorted(set(self.sizes) - set(self.workers)):
            self.join(self.sizes[number])
        if not self.parked and self.work.events:
            self.core.confine(())


def run(job: tuple[str, int]) -> str:
    """Return the hash of one run, (policy's name, seed)."""
    return Run(*job).drive()


def recorded() -> dict[str, list[str]]:
    """Return the recorded hashes: for each name, those of each seed."""
    found: dict[str, list[str]] = json.loads(FILE.read_text())
    return found


def differences(jobs: list[tuple[str, int]], found: Iterable[str]) -> list[str]:
    """Return the runs with a hash that is not the recorded one."""
    golden = recorded()
    return [
        f"{name} {seed} ({policy_of(name, seed)})"
        for (name, seed), digest in zip(jobs, found, strict=True)
        if golden[name][seed] != digest
    ]


def record(jobs: list[tuple[str, int]], found: Iterable[str]) -> None:
    """Write the file anew."""
    lines: dict[str, list[str]] = {}
    for (name, _), digest in zip(jobs, found, strict=True):
        lines.setdefault(name, []).append(digest)
    rows = [f'  "{name}": {json.dumps(hashes)}' for name, hashes in lines.items()]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="all seeds instead of a few")
    parser.add_argument("--record", action="store_true", help="run all seeds and write the file")
    parser.add_argument("--trace", nargs=2, metavar=("POLICY", "SEED"), help="print the hashed lines of one run")
    args = parser.parse_args(argv)
    if args.trace:
        print(Run(args.trace[0], int(args.trace[1]), trace=True).drive())
        return 0
    jobs = [(name, seed) for seed in (range(SEEDS) if args.all or args.record else QUICK_SEEDS) for name in NAMES]
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(run, jobs, chunksize=8))
    if args.record:
        record(jobs, found)
        return 0
    wrong = differences(jobs, found)
    print("\n".join(wrong[:20]))
    print(f"{len(wrong)} of {len(jobs)} runs differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
