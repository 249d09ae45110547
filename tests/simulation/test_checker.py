"""The checker of the simulation, with commands and replies made by hand."""

from __future__ import annotations

import hashlib
import time

import pytest

from shared.keys import Keys
from shared.redis_client import source
from tests.simulation.checker import Checker
from tests.simulation.clock import START_S, Loop
from tests.simulation.network import Network
from tests.simulation.redis_server import Node

KEYS = Keys("tiny")


class CheckerBench:
    """A checker and the simulated Redis that it watches, over a clock that stands; every script was loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = Loop(0)
        monkeypatch.setattr(time, "time", lambda: START_S + loop.wall_offset_s)
        self.node = Node(loop, Network(loop))
        self.checker = Checker(loop, self.node, KEYS, [], 0)
        for name in ("lease", "take_worker"):
            self.observe("shard-0", [b"SCRIPT", b"LOAD", source(name)], b"")

    def observe(self, owner: str, words: list[bytes], reply: object) -> None:
        for before in self.node.before:
            before(owner, words)
        for after in self.node.after:
            after(owner, words, reply)

    def script(self, name: str, keys: list[str], args: list[str], reply: object) -> None:
        sha = hashlib.sha1(source(name)).hexdigest()
        self.observe("shard-0", [word.encode() for word in ["EVALSHA", sha, str(len(keys)), *keys, *args]], reply)

    def give_lease(self, epoch: int) -> None:
        keys = [KEYS.lease("shard-0"), KEYS.epoch, KEYS.shard_epoch("shard-0")]
        self.script("lease", keys, ["acquire", "1000"], epoch)

    def give_run(self, epoch: int) -> None:
        keys = [KEYS.lease("shard-0"), KEYS.worker("w"), KEYS.epoch, KEYS.worker("w")]
        self.script("take_worker", keys, ["100", "shard-0"], epoch)


@pytest.mark.parametrize("set_back", ["", "before", "behind"])
def test_lost_epoch_may_come_again_where_the_clock_was_set_back(set_back: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CheckerBench(monkeypatch)
    first = round(100 * START_S) - 20
    bench.give_lease(first)
    lose = bench.checker.loss()
    bench.give_run(first + 5)
    if set_back == "before":
        bench.node.move_clock(-1.0)
    lose()
    if set_back == "behind":
        bench.node.move_clock(-1.0)
    bench.give_run(first + 3)
    assert bool(bench.checker.violations) == (not set_back)
    bench.give_run(first + 2)
    assert bench.checker.violations


def test_lost_epoch_may_not_come_again_once_the_clock_has_passed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CheckerBench(monkeypatch)
    first = round(100 * START_S) - 20
    bench.give_lease(first)
    lose = bench.checker.loss()
    bench.give_run(first + 5)
    bench.node.move_clock(-0.5)
    lose()
    bench.node.move_clock(0.375)
    bench.give_run(first + 4)
    assert bench.checker.violations
