"""Golden plans: hashes of all that the scheduler core plans and publishes for fixed random workloads.

A run loops the core with the worker and reader of core/twin.py, which check every token. Rows are hashed by sequence
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
from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.scheduler.core.policy.presets import PARTS, PRESETS
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, Limits, NewRequest, Outcome, StepPlan
from tests.unit.scheduler.core.twin import MS, VOCAB, House, answer

FILE = Path(__file__).with_name("golden_plans.json")
SEEDS = 200
QUICK_SEEDS = (3, 10, 22)  # of each policy, in the unit tests: among them roles and a large pool
COMPOSITIONS = 5  # random compositions of parts for each seed
NAMES = (*sorted(PRESETS), *(f"parts-{i}" for i in range(COMPOSITIONS)))
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
    step_ns: int  # between two rounds


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
        rng.choice((3, 11)) * MS + 12_347,
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
        request = NewRequest(
            f"r{index:03}", prompts, max_tokens, n=n, min_tokens=min_tokens, stop_ids=np.array(STOP_IDS, np.int32),
            priority=rng.choice((0, 1, 2, 2, 3)), tenant=tenant, gateway=rng.choice("abc"),
            ttft_slo_ns=rng.choice((50, 400)) * MS if rng.random() < limited else 0,
            tbt_slo_ns=rng.choice((12, 40)) * MS if rng.random() < limited else 0,
            deadline_ns=rng.randint(100, 900) * MS if rng.random() < 0.06 else 0,  # from arrival; absolute in add()
            salt=tenant.encode() if shared and len(tenants) > 1 else b"",
            payload=index * 16,
        )  # fmt: skip
        if rng.random() < 0.08:  # known from before a restart
            known = rng.randint(0, max_tokens - 1)
            whole = [answer(request, choice, context)[0] for choice in range(n * len(prompts))]
            request.outputs = [np.array(tokens[: min(known, len(tokens) - 1)], np.int32) for tokens in whole]
        found.append((at, request))
    return found


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
    """Writes steps and outcomes without slot numbers, block numbers and the order of rows."""

    def __init__(self) -> None:
        self.of: dict[int, Names] = defaultdict(Names)

    def step(self, step: StepPlan) -> tuple[Any, ...]:
        """Return the canonical form of one step."""
        its = self.of[step.replica]
        freed = sorted(its.slots.pop(slot) for slot in step.free_slots.tolist())
        out = sorted((its.blocks[gpu], host) for gpu, host in rows_of(step.swap_out_gpu, step.swap_out_host))
        swapped_out = [(name, its.fresh(host, host=True)) for name, host in out]
        sources = step.swap_in_host.tolist()
        peers = step.swap_in_peers.tolist() or [-1] * len(sources)
        owners = [self.of[peer].host if peer >= 0 else its.host for peer in peers]
        loads = sorted(
            (peer, owner[source], target)
            for peer, owner, source, target in zip(peers, owners, sources, step.swap_in_gpu.tolist(), strict=True)
        )
        swapped_in = [(peer, source, its.fresh(target)) for peer, source, target in loads]
        enters = []
        for enter in step.enters:
            name = its.slots[enter.slot] = int(enter.request.id[1:]), enter.choice
            blocks = [its.blocks[block] for block in enter.blocks.tolist()]
            enters.append((name, enter.prompt_tokens, enter.computed_tokens, hash_of(enter.tokens.tobytes()), blocks))
        appended = sorted(
            (its.slots[slot], i, block)
            for i, (slot, block) in enumerate(rows_of(step.append_slots, step.append_blocks))
        )
        appends = [(name, its.fresh(block)) for name, _, block in appended]
        columns = rows_of(step.chunk_slots, step.chunk_starts, step.chunk_lengths)
        chunks = sorted((its.slots[slot], start, length) for slot, start, length in columns)
        told = sorted((peer.number, peer.host_tier, peer.host_blocks) for peer in step.peers)
        counts = step.microbatch, step.decode_tokens, step.prefill_tokens
        return (
            step.replica, step.id, freed, swapped_out, swapped_in, sorted(enters), appends, chunks, told, *counts
        )  # fmt: skip

    @staticmethod
    def outcome(outcome: Outcome) -> tuple[Any, ...]:
        """Return the canonical form of what is published."""
        rows, at = [], 0
        columns = rows_of(outcome.choices, outcome.first_indices, outcome.counts, outcome.waits_ns, outcome.finish)
        for i, (choice, first, count, wait, finish) in enumerate(columns):
            tokens, error = outcome.tokens[at : at + count].tolist(), outcome.errors.get(i, "")
            told = outcome.gateways[i], outcome.requests[i].id, choice, first, tokens, wait, finish, error
            rows.append((*told, outcome.cached_tokens.get(i, 0)))
            at += count
        kept = [(name, choice, first, tokens.tolist()) for name, choice, first, tokens in outcome.checkpoints]
        ended = [
            (each.request.id, [tokens.tolist() for tokens in each.outputs], [int(f) for f in each.finish], each.error)
            for each in outcome.ended_requests
        ]
        return sorted(rows), sorted(kept), sorted(outcome.started_ids), sorted(outcome.lost_peers), sorted(ended)


def rows_of(*columns: np.ndarray) -> list[tuple[int, ...]]:
    """Return the rows of columns of equal length."""
    return list(zip(*(column.tolist() for column in columns), strict=True))


def hash_of(data: bytes) -> str:
    """Return a short hash of some bytes."""
    return hashlib.sha256(data).hexdigest()[:DIGITS]


# -- a run


class Run(House):
    """Drives one core through one workload and hashes what it plans and publishes."""

    def __init__(self, name: str, seed: int, trace: bool = False) -> None:
        self.policy, self.work = policy_of(name, seed), workload(seed)
        self.rng = random.Random(mix(5, seed))
        self.parked: dict[str, int] = {}  # until which round
        self.fails: dict[int, int] = {}  # by replica, which row of its next step fails, in the order of names
        self.planned: dict[int, deque[list[Name]]] = defaultdict(deque)  # by replica, rows of its steps
        self.canonical_form = Canonical()
        self.hash = hashlib.sha256()
        self.trace = trace
        first, *further = self.work.replicas
        super().__init__(Scheduler(self.policy, **self.work.settings), first, self.work.lag)
        for limits in further:
            self.join(limits)

    def note(self, kind: str, canonical: Any) -> None:
        """Add one fact to the hash."""
        line = f"{kind} {canonical}\n"
        if self.trace:
            print(line, end="")
        self.hash.update(line.encode())

    def join(self, limits: Limits) -> int:
        number = super().join(limits)
        self.canonical_form.of[number] = Names()
        self.planned[number].clear()
        if mix(6, len(self.tiers), self.work.step_ns) % 5 == 0:
            self.workers[number].unmappable = {f"a/{tier}" for tier in range(64)}
        return number

    def take(self, outcome: Outcome) -> None:
        super().take(outcome)
        self.note("outcome", self.canonical_form.outcome(outcome))

    def plan(self, replica: int = 0) -> StepPlan | None:
        step = super().plan(replica)
        if step is not None:
            self.note("step", self.canonical_form.step(step))
            self.planned[replica].append([self.canonical_form.of[replica].slots[s] for s in step.chunk_slots.tolist()])
        return step

    def answer(self, replica: int = 0) -> Outcome | None:
        worker = self.workers.get(replica)
        if worker is None or not worker.queue:
            return None
        names, failing = self.planned[replica].popleft(), self.fails.pop(replica, -1)
        if names and failing >= 0:
            worker.fail_next = {names.index(sorted(names)[failing % len(names)])}
        return super().answer(replica)

    def add(self, request: NewRequest) -> None:
        if request.deadline_ns:
            request.deadline_ns += self.now
        super().add(request)

    def event(self, number: int) -> None:
        """Let something happen besides steps."""
        rng, arrived = self.rng, sorted(self.requests)
        chosen = rng.choice(arrived) if arrived else "r999"
        kind = rng.choice(
            ("cancel", "stop", "stop", "adopt", "park", "fail", "fail", "lose", "join", "confine", "switch", "release",
             "checkpoint", "look")
        )  # fmt: skip
        draw = rng.random()
        if kind == "cancel":
            finish = Finish.CANCELLED if draw < 0.7 else Finish.ERROR
            self.take(self.core.cancel(chosen, self.now, finish, "poison" if finish is Finish.ERROR else ""))
        elif kind == "stop":
            if known := self.published.get((chosen, 0)):
                self.stop(chosen, 0, int(draw * (len(known) + 1)))
        elif kind == "adopt":
            self.core.adopt(chosen, "abcd"[int(draw * 4)])
        elif kind == "park":
            self.core.park(chosen)
            self.parked[chosen] = number + int(draw * 20)
        elif kind == "fail":
            busy = [replica for replica, worker in sorted(self.workers.items()) if worker.queue]
            if busy:
                self.fails[busy[0]] = int(draw * 100)
        elif kind == "lose" and draw < 0.5 and self.workers:
            self.lose(sorted(self.workers)[int(2 * draw * len(self.workers))])
        elif kind == "join" and len(self.workers) < len(self.work.replicas):
            self.join(self.limits[min(set(self.limits) - set(self.workers))])
        elif kind == "confine":
            self.core.confine(set(rng.sample(arrived, min(len(arrived), int(draw * 3)))) if draw < 0.6 else ())
            if draw < 0.3:
                self.core.assign_dock(self.now)
        elif kind == "switch" and draw < 0.3:
            self.core.switch(self.policy if draw < 0.1 else ("sarathi", "orcinus")[draw < 0.2])
        elif kind == "release":
            self.note(kind, self.core.release(chosen, begun=draw < 0.3))
        elif kind == "checkpoint":
            self.take(self.core.checkpoint())
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
                while self.plan(replica) is not None:
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
        self.note("stats", sorted(stats.items()))
        self.core.check()
        return self.hash.hexdigest()[:DIGITS]

    def _mend(self) -> None:
        """After the last arrival: all replicas are there again and nothing is confined, so that all can end."""
        for number in sorted(set(self.limits) - set(self.workers)):
            self.join(self.limits[number])
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
