"""A worker that computes prompts and one that goes on from there: the reference's tokens, whichever of them dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.launcher.up import share_folder
from services.worker.kv.share_folder import ID
from tests.chaos.streams import clients
from tests.stack.test_make_run import MakeRun
from tests.support.checkpoints.models import Reference
from tests.support.stack import Stack, running_stack
from tests.support.waiting import until

STREAMS = 6
TOKENS = 64
SLOTS = 4
ROLES = {"worker": "prefill", "worker-1": "decode"}
MODEL = {
    "requests": STREAMS,
    "output_tokens": TOKENS,
    "prompt_tokens": (40, 300),
    "max_position_embeddings": 4096,
    "seed": 20261203,
}


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    given = settings(directory, "worker")
    with running_stack(directory, reference.path, dtype="float32", max_seqs=SLOTS, threads=1, **given) as running:
        start(running, "worker-1")
        running.wait_workers(2)
        yield running


def settings(directory: Path, name: str) -> dict[str, Any]:
    log = directory / f"{name}.jsonl"
    return {"worker_role": ROLES[name], "kv_share_dir": directory / "kv", "host_blocks": 256, "step_log": log}


def start(stack: Stack, name: str) -> None:
    """Starts a worker, again or for the first time."""
    number = {"worker_id": name} if name != "worker" else {}
    stack.start("worker", name, **settings(stack.directory, name), **number)


def mapped(stack: Stack, name: str) -> int:
    """How often a worker has mapped the host tier of another."""
    return stack.log(name).count("is mapped")


def registered(stack: Stack, name: str) -> int:
    """How often a worker has registered."""
    return stack.log(name).count("registered as")


def steps(stack: Stack, name: str) -> list[dict[str, int]]:
    """Those that the scheduler sent."""
    lines = (stack.directory / f"{name}.jsonl").read_text().splitlines(keepends=True)
    return [step for step in map(json.loads, (line for line in lines if line.endswith("\n"))) if step["epoch"]]


def counted(stack: Stack, name: str) -> int:
    """Return one of the scheduler's counters."""
    return int(stack.stats().get(name, "0"))


def tiers(stack: Stack) -> int:
    return len([name for name in os.listdir(stack.directory / "kv") if name != ID])


def test_one_computes_prompts_and_other_goes_on_with_references_tokens(stack: Stack, reference: Reference) -> None:
    until("the one that decodes reads the other's tier", lambda: mapped(stack, "worker-1"))
    for prompt, known in zip(reference.prompts, reference.outputs, strict=True):
        assert stack.complete(prompt, TOKENS, ignore_eos=True) == known
    stack.settled_empty()
    prefill, decode = steps(stack, "worker"), steps(stack, "worker-1")
    assert sum(step["tokens"] for step in prefill) >= sum(map(len, reference.prompts))
    assert sum(step["sampled"] for step in prefill) == STREAMS, "it decodes, too"
    assert all(step["prefill_context"] == 0 for step in decode), "it computes prompts, too"
    assert sum(step["sampled"] for step in decode) == STREAMS * (TOKENS - 1)


@pytest.mark.parametrize(
    ("name", "how"), [("worker", signal.SIGKILL), ("worker-1", signal.SIGKILL), ("worker", signal.SIGTERM)]
)
def test_either_role_is_killed_or_drained_under_load_and_returns(
    stack: Stack, reference: Reference, name: str, how: int
) -> None:
    """While it is gone the other does both; afterwards it hands over, or takes over, again. Drafts are the answers to
    the same prompt before."""
    other = next(each for each in ROLES if each != name)
    until("each reads the other's tier", lambda: all(mapped(stack, each) for each in ROLES))
    with clients(stack, reference, TOKENS) as (made, may_ask):
        assert stack.kill(name, how) == (-signal.SIGKILL if how == signal.SIGKILL else 0)
        stack.wait_workers(1)
        alone = len(made)
        until("all were answered by the other alone", lambda: len(made) > alone + 2 * STREAMS, 60)
        seen, before, starts = mapped(stack, other), len(steps(stack, name)), registered(stack, name)
        may_ask.clear()  # a load would take the processor from the start
        start(stack, name)
        until("it registers", lambda: registered(stack, name) > starts)
        may_ask.set()
        stack.wait_workers(2)
        until("the other has heard of it", lambda: mapped(stack, other) > seen)
        until("it works again", lambda: len(steps(stack, name)) > before, 60)
        again = len(made)
        until("all were answered by both", lambda: len(made) > again + 2 * STREAMS, 60)
        handed_over, accepted = counted(stack, "handed_over"), counted(stack, "accepted_tokens")
        until("more are handed over", lambda: counted(stack, "handed_over") > handed_over, 60)
        until("more drafts are accepted", lambda: counted(stack, "accepted_tokens") > accepted, 60)
    stack.settled_empty()
    assert stack.stats()["failed"] == "0"
    assert tiers(stack) == 2, "what the killed one left"


def test_make_run_starts_both_roles_with_a_folder_in_memory(reference: Reference, tmp_path: Path) -> None:
    run = MakeRun(tmp_path, reference.path, "--dtype float32 --host-blocks 64")
    run.argv[2:2] = ["PREFILL=1", "DECODE=1"]
    folder = share_folder(run.run_dir)
    with run:
        assert {"worker-0", "worker-1"} < run.pids().keys()
        assert len([name for name in os.listdir(folder) if name != ID]) == 2
        logs = run.run_dir / "logs"
        until("the one that decodes reads the other's tier", lambda: "is mapped" in (logs / "worker-1.log").read_text())
        answer = run.complete(prompt=reference.prompts[0], max_tokens=TOKENS, return_token_ids=True, ignore_eos=True)
        assert answer.json()["choices"][0]["token_ids"] == reference.outputs[0]
    assert not folder.exists()
