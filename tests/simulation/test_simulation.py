"""The simulation itself: a seed is one run, and a planted bug is found and played again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.launcher import ROOT


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: it takes over `time` before the services are imported."""
    command = [sys.executable, "-m", "tests.simulation", "--jobs", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=250)


def test_seed_plays_the_same_run_each_time() -> None:
    first, second = (simulate("--seeds", "3", "--first", "2", "--trace") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    about = [line for line in first.stdout.splitlines() if line.startswith("seed ")]
    assert len(about) == 3 and len({line.rpartition("digest ")[2] for line in about}) == 3
    assert first.stdout.split("\n3 seeds in ")[0] == second.stdout.split("\n3 seeds in ")[0]


def test_planted_bug_fails_with_the_command_that_repeats_it() -> None:
    done = simulate("--seeds", "2", "--plant", "doubled-token")
    assert done.returncode == 1
    assert "expected" in done.stdout
    again = done.stdout.partition("again: python -m tests.simulation ")[2].splitlines()[0].split()
    assert again == ["--seeds", "1", "--first", again[3], "--trace", "--plant", "doubled-token"]
    repeated = simulate(*again)
    assert repeated.returncode == 1 and "VIOLATION" in repeated.stdout


@pytest.mark.parametrize(
    "bug",
    [
        "epoch-not-risen",
        "epoch-given-twice",
        "ends-before-its-tokens",
        "refill-repeats",
        "refill-not-copied",
        "job-without-wake",
        "read-before-it-is-copied",
        "unmapped-peer-read",
        "tier-of-another-run-read",
    ],
)
def test_planted_bug_is_found_within_few_seeds(bug: str) -> None:
    done = simulate("--seeds", "60", "--mutants", bug)
    assert done.returncode == 0, done.stdout


def test_hunt_for_a_planted_bug_ends_at_the_first_seed() -> None:
    done = simulate("--seeds", "3", "--mutants", "lost-ack", "doubled-token")
    assert done.returncode == 0, done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if ": seed " in line] == ["lost-ack", "doubled-token"]
