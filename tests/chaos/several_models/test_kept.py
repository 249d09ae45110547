"""KV that outlives its worker: streams go on at the next one with the reference's tokens, and nothing is computed
again, whether the worker ends well or is killed when it has kept the KV. A killed one that loads leaves it to the next.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.worker.kv.share_folder import ID
from tests.chaos.streams import load
from tests.support.checkpoints.models import Reference
from tests.support.stack import Stack, running_stack
from tests.support.waiting import until

STREAMS = 4
TOKENS = 1500
MODEL = {
    "requests": STREAMS, "output_tokens": 48, "prompt_tokens": (40, 300), "max_position_embeddings": 4096, "seed": 41,
}  # fmt: skip
KEPT, MAPPED = "stay for the next worker", "is mapped"


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    settings = {"dtype": "float32", "kv_blocks": 1024, "host_blocks": 1024, "kv_share_dir": directory / "kv"}
    with running_stack(directory, reference.path, **settings) as running:
        yield running


def said(stack: Stack, words: str) -> int:
    return stack.log("worker").count(words)


def recomputed(stack: Stack) -> int:
    return int(stack.stats()["recomputed_tokens"])


def folder(stack: Stack) -> list[str]:
    """Return the host tiers in the folder. A killed worker leaves its reservation, too, until the next one starts."""
    return [name for name in os.listdir(stack.directory / "kv") if name != ID and not name.endswith(".reserved")]


def discarded(stack: Stack) -> list[str]:
    """Return the texts of the events of KV that was not used."""
    rows: Any = stack.redis.client.xrange(stack.keys.events)
    return [fields[b"text"].decode() for _, fields in rows if fields[b"kind"] == b"kv_discarded"]


def change(file: Path) -> None:
    """Invert a bit of the first block that was kept."""
    with file.open("r+b") as opened:
        at = os.lseek(opened.fileno(), 0, os.SEEK_DATA)
        (byte,) = os.pread(opened.fileno(), 1, at)
        os.pwrite(opened.fileno(), bytes([byte ^ 1]), at)


def drain(stack: Stack, how: int | None = None) -> None:
    """Let the worker keep its KV; how: a signal to send then, before it has ended."""
    before = said(stack, KEPT)
    stack.signal("worker", signal.SIGTERM)
    until("it keeps its KV", lambda: said(stack, KEPT) > before)
    if how is not None:
        stack.signal("worker", how)
    stack.wait("worker")


@pytest.mark.parametrize("how", [None, signal.SIGKILL])
def test_streams_go_on_with_what_a_worker_kept(stack: Stack, reference: Reference, how: int | None) -> None:
    before = recomputed(stack)
    with load(stack, reference, TOKENS) as under_way:
        drain(stack, how)
        (file,) = folder(stack)
        assert file.endswith(".kept")
        stack.start("worker")
        under_way.check(TOKENS)
    stack.settled_empty()
    assert recomputed(stack) == before
    until("only the tier of the worker is left", lambda: len(folder(stack)) == 1 and file not in folder(stack))


def test_worker_killed_while_it_loads_leaves_it_to_the_next(stack: Stack, reference: Reference) -> None:
    with load(stack, reference, TOKENS) as under_way:
        drain(stack)
        maps = said(stack, MAPPED)
        stack.start("worker")
        until("it reads what was kept", lambda: said(stack, MAPPED) > maps)
        stack.kill("worker")
        stack.start("worker")
        under_way.check(TOKENS)
    stack.settled_empty()
    assert stack.stats()["failed"] == "0"


def test_kv_that_was_changed_is_computed_again(stack: Stack, reference: Reference) -> None:
    before = recomputed(stack)
    with load(stack, reference, TOKENS) as under_way:
        drain(stack)
        change(stack.directory / "kv" / folder(stack)[0])
        stack.start("worker")
        under_way.check(TOKENS)
    stack.settled_empty()
    assert recomputed(stack) > before
    assert "from its checksum" in discarded(stack)[-1]
