"""The checker of the simulation, told of commands and replies."""

from __future__ import annotations

import hashlib

import pytest

from shared.keys import Keys
from shared.redis_client import source
from tests.simulation.checker import Checker
from tests.simulation.clock import Loop
from tests.simulation.network import Network
from tests.simulation.redis_server import Node

KEYS = Keys("tiny")


class Told:
    """A checker and the simulated Redis that it is told of; every script was loaded."""

    def __init__(self) -> None:
        loop = Loop(0)
        self.node = Node(loop, Network(loop))
        self.checker = Checker(loop, self.node, KEYS, [], 0)
        for name in ("lease", "take_worker"):
            self.tell("shard-0", [b"SCRIPT", b"LOAD", source(name)], b"")

    def tell(self, owner: str, words: list[bytes], reply: object) -> None:
        for before in self.node.before:
            before(owner, words)
        for after in self.node.after:
            after(owner, words, reply)

    def script(self, name: str, keys: list[str], args: list[str], reply: object) -> None:
        sha = hashlib.sha1(source(name)).hexdigest()
        self.tell("shard-0", [word.encode() for word in ["EVALSHA", sha, str(len(keys)), *keys, *args]], reply)

    def give_lease(self, epoch: int) -> None:
        keys = [KEYS.lease("shard-0"), KEYS.epoch, KEYS.shard_epoch("shard-0")]
        self.script("lease", keys, ["acquire", "1000"], epoch)

    def give_run(self, epoch: int) -> None:
        keys = [KEYS.lease("shard-0"), KEYS.worker("w"), KEYS.epoch, KEYS.worker("w")]
        self.script("take_worker", keys, ["100", "shard-0"], epoch)


@pytest.mark.parametrize("set_back", ["", "before", "behind"])
def test_lost_epoch_may_come_again_where_the_clock_was_set_back(set_back: str) -> None:
    told = Told()
    told.give_lease(100)
    lose = told.checker.loss()
    told.give_run(105)
    if set_back == "before":
        told.node.move_clock(-1.0)
    lose()
    if set_back == "behind":
        told.node.move_clock(-1.0)
    told.give_run(103)
    assert bool(told.checker.violations) == (not set_back)
    told.give_run(102)
    assert told.checker.violations
