"""Play seeds, one run for each, in as many processes as asked; print what was wrong and how it is played again."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import warnings
from functools import partial

from tests.simulation import clock, world


def play(seed: int, trace: bool = False) -> tuple[int, list[str], str]:
    """Play a seed; return it, what was wrong, and one line about the run."""
    gc.disable()  # nothing of a killed process is closed within a run
    gc.freeze()  # the collection behind the run looks at what the run has made alone
    played = world.run(seed)
    loop, checker = played.loop, played.checker
    if trace:
        print(*loop.trace, sep="\n")
    about = (
        f"{loop.now_s:.1f} s, {loop.callbacks} callbacks, {played.node.commands} commands, {checker.published} tokens, "
        f"{len(checker.requests)} requests, digest {loop.digest}"
    )
    violations = list(checker.violations)
    del played, loop, checker
    # Now the tasks of killed processes are closed, and complain that no loop runs.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()
    logging.disable(logging.NOTSET)
    sys.unraisablehook = hook
    return seed, violations, about


def play_planted(name: str, seed: int, trace: bool = False) -> tuple[int, list[str], str]:
    """Play a seed with a planted bug."""
    from tests.simulation.mutants import MUTANTS

    with MUTANTS[name]():
        return play(seed, trace)


def hunt(names: list[str], seeds: range, jobs: int) -> int:
    """Play seeds with each planted bug until one finds it; return 1 if one is not found."""
    from tests.simulation.mutants import MUTANTS

    missed = 0
    for name in names or MUTANTS:
        begun = clock.REAL["monotonic"]()
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            runs = pool.imap(partial(play_planted, name), seeds)
            found = next(((seed, violations) for seed, violations, _ in runs if violations), None)
            pool.terminate()
        missed += found is None
        what = f"seed {found[0]}: {found[1][0][:200]}" if found else f"not found in {len(seeds)} seeds"
        print(f"{name} ({clock.REAL['monotonic']() - begun:.0f} s): {what}", flush=True)
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, help="number of seeds: 200, or 1000 to find a bug, without it")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; all cores without it")
    parser.add_argument("--plant", default="", help="plant this bug")
    parser.add_argument("--trace", action="store_true", help="print the last events of each seed")
    parser.add_argument(
        "--mutants", nargs="*", help="plant these bugs, or all, one after another, until a seed finds each"
    )
    given = parser.parse_args()
    given.seeds = given.seeds or (200 if given.mutants is None else 1000)
    if given.mutants is not None:
        return hunt(given.mutants, range(given.first, given.first + given.seeds), given.jobs)
    begun, failed = clock.REAL["monotonic"](), 0
    seeds = range(given.first, given.first + given.seeds)
    one = partial(play_planted, given.plant) if given.plant else play
    with multiprocessing.get_context("fork").Pool(min(given.jobs, len(seeds))) as pool:
        runs = map(partial(one, trace=True), seeds) if given.trace else pool.imap(one, seeds, chunksize=4)
        for seed, violations, about in runs:
            if given.trace:
                print(f"seed {seed}: {about}")
            if violations:
                failed += 1
                print(f"seed {seed}: {violations[0]}")
                planted = f" --plant {given.plant}" if given.plant else ""
                print(f"  again: python -m tests.simulation --seeds 1 --first {seed} --trace{planted}", flush=True)
    print(f"{given.seeds} seeds in {clock.REAL['monotonic']() - begun:.0f} s, {failed} failed")
    return 1 if failed else 0
