"""The command line of `orcinus simulate`: what may be given, and what it means for workload, replicas and clock.

Everything wrong is told as WrongUse with the value and the remedy, before anything runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from services.simulator.command.values import asked, by_class, classes, lengths, policies, real, scales, whole
from services.simulator.device.clock import (
    COEFFICIENTS,
    Linear,
    RooflineClock,
    StepClock,
    fit_step_log,
    read_coefficients,
)
from services.simulator.device.roofline import DEVICES, SHAPES, Roofline
from services.simulator.engine import Setup
from services.simulator.routing import ROUTERS, SCHEDULER
from services.simulator.workload.arrivals import CHAT, MOST_RATE, MOST_REQUESTS, SLOWEST, Spec
from services.simulator.workload.traffic import MOST_TOKENS

MOST_BLOCKS = 10_000_000  # of a replica
MOST_OF_ALL = {"blocks": 100_000_000, "slots": 1_000_000}  # of all replicas together
ALONE = {"--reproduce": {"--json"}, "--speed": {"--json", "--policy"}}  # these go with no other option


class WrongUse(Exception):  # noqa: N818 - the term of the exit codes
    """The command cannot be carried out as given; its message says what to change. Exit code 2."""


class Parser(argparse.ArgumentParser):
    """Raises WrongUse instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise WrongUse(f"{message} (orcinus simulate --help lists the options)")


def parser() -> Parser:
    build = Parser(
        prog="orcinus simulate",
        description="Runs the scheduler's core on a virtual clock: policies side by side, without a GPU.",
        allow_abbrev=False,
    )
    add = build.add_argument_group("what is compared").add_argument
    add("--policy", type=policies, default=None, metavar="A,B", help="presets, or 'all' (default: orcinus)")
    add("--model-shape", choices=sorted(SHAPES), default="llama-8b", help="default: %(default)s")
    add("--device", choices=sorted(DEVICES), default="h100", help="default: %(default)s")
    add("--step-time", type=Path, metavar="FILE", help='JSON {"c0".."c3"} in ns, instead of shape and device')
    add("--fit", type=Path, metavar="FILE", help="a worker's --step-log to fit the coefficients to")
    add = build.add_argument_group("requests").add_argument
    add(
        "--trace",
        type=Path,
        help="CSV: num_prefill_tokens, num_decode_tokens, perhaps arrived_at (default: the chat trace)",
    )
    add(
        "--requests",
        type=whole(0, MOST_REQUESTS),
        default=0,
        help="so many, in a circle if the trace is shorter (default: the trace)",
    )
    add("--rate-scale", type=scales, default=[1.0], metavar="X,Y", help="times the arrival rate; a list: one run each")
    add("--rate", type=real(SLOWEST, MOST_RATE), default=0.0, help="requests a second, instead of the trace's times")
    add(
        "--cv",
        type=real(0.001, 100),
        default=1.0,
        help="with --rate: variation of the intervals, gamma (default: 1, Poisson)",
    )
    add("--at-once", action="store_true", help="everything arrives at the start")
    add("--prompt-tokens", type=lengths, metavar="P", help="N, LOW:HIGH or lognormal:MEAN:SIGMA, not the trace's")
    add("--output-tokens", type=lengths, metavar="O", help="likewise")
    add(
        "--max-tokens",
        type=asked,
        default=1024,
        metavar="N|exact",
        help="what clients ask for (default: %(default)s, at least the true length)",
    )
    add("--classes", type=classes, default={}, metavar="NAME:SHARE,..", help="as realtime:0.1,normal:0.9")
    add("--ttft-slo-ms", type=by_class, default={}, metavar="MS", help="limit of every request, or NAME:MS,.. by class")
    add("--tbt-slo-ms", type=by_class, default={}, metavar="MS", help="likewise")
    add(
        "--prefix-groups",
        type=whole(0, MOST_REQUESTS),
        default=0,
        help="so many shared system prompts, drawn evenly (default: none)",
    )
    add(
        "--prefix-tokens",
        type=whole(1, MOST_TOKENS),
        default=512,
        help="of each, before the prompt (default: %(default)s)",
    )
    add("--seed", type=whole(0, 2**32 - 1), default=0)
    add = build.add_argument_group("replicas").add_argument
    add("--max-seqs", type=whole(1, 8192), default=256, help="sequences that run at most (default: %(default)s)")
    add("--microbatches", type=whole(1, 16), default=1)
    add("--lookahead", type=whole(0, 4), help="steps planned ahead of the answers (default: the policy's)")
    add("--step-tokens", type=whole(0, MOST_TOKENS), default=0, help="token budget of a step (default: the policy's)")
    add(
        "--max-step-tokens",
        type=whole(1, MOST_TOKENS),
        default=8192,
        help="what a worker takes in one step (default: %(default)s)",
    )
    add("--block-size", type=whole(1, 256), default=16)
    add("--kv-blocks", type=whole(0, MOST_BLOCKS), default=0, help="default: what the device has beside the weights")
    add("--host-blocks", type=whole(0, MOST_BLOCKS), default=-1, help="default: the device's host memory")
    add("--replicas", type=whole(1, 1000), default=1)
    add(
        "--routing",
        choices=[*ROUTERS, SCHEDULER],
        default="round-robin",
        help="a router before replicas with a scheduler each; scheduler: one for all (default: %(default)s)",
    )
    add("--host-us", type=real(0, 1e8), default=300.0, help="the scheduler's own time a step (default: %(default)s)")
    add = build.add_argument_group("what comes out").add_argument
    add("--json", action="store_true", help="one JSON object on stdout, nothing else")
    add("--plots", type=Path, metavar="DIR", help="writes PNGs")
    add(
        "--find",
        choices=("knee", "capacity"),
        help="knee: best token budget; capacity: highest rate at which 99 %% of the requests are within their limits",
    )
    add("--reproduce", action="store_true", help="the tables of the literature beside ours")
    add("--speed", action="store_true", help="simulated iterations a minute (default: of orca and orcinus)")
    add("--jobs", type=whole(1, 64), default=2, help="processes (default: %(default)s)")
    return build


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    """What was given. Raises WrongUse for what cannot be, and for what would be ignored."""
    options = parser().parse_args(argv)
    given = {word.partition("=")[0] for word in argv if word.startswith("--")}  # values never begin so
    for alone, beside in ALONE.items():
        if alone in given and (ignored := sorted(given - {alone} - beside)):
            raise WrongUse(f"{alone} has runs of its own and ignores {', '.join(ignored)}: drop that")
    if wrong := _ignored(options, given):
        raise WrongUse(wrong)
    if options.policy is None:
        options.policy = ["orca", "orcinus"] if options.speed else ["orcinus"]
    return options


def _ignored(options: argparse.Namespace, given: set[str]) -> str:
    """What is wrong with options that are right one by one; empty if nothing is."""
    drawn = {"--prompt-tokens", "--output-tokens", "--requests"} <= given
    wrong = {
        "--at-once and --rate exclude each other: drop one": options.at_once and options.rate,
        "--at-once ignores --rate-scale: drop one": options.at_once and "--rate-scale" in given,
        f"--cv {options.cv:g} needs --rate: the trace has its own times": "--cv" in given and not options.rate,
        f"--prefix-tokens {options.prefix_tokens} needs --prefix-groups N": "--prefix-tokens" in given
        and not options.prefix_groups,
        f"--routing {options.routing} needs --replicas 2 or more": "--routing" in given and options.replicas == 1,
        "--step-time and --fit exclude each other: drop one": options.step_time and options.fit,
        f"--trace {options.trace}: lengths, number and times are all given otherwise: drop it": "--trace" in given
        and drawn
        and (options.rate or options.at_once),
        "--find makes its own runs: drop --plots, and give one --rate-scale": options.find
        and (options.plots is not None or len(options.rate_scale) > 1),
        "--find knee tries all budgets: drop --step-tokens": options.find == "knee" and "--step-tokens" in given,
        "--find capacity changes the rate: drop --at-once": options.find == "capacity" and options.at_once,
    }
    return next((text for text, holds in wrong.items() if holds), "")


def spec_of(options: argparse.Namespace) -> Spec:
    """The workload at the first rate scale. Raises WrongUse."""
    drawn = options.prompt_tokens is not None and options.output_tokens is not None
    return Spec(
        trace=options.trace or (None if drawn else CHAT),
        requests=options.requests,
        prompt=options.prompt_tokens,
        output=options.output_tokens,
        rate_rps=options.rate,
        rate_scale=options.rate_scale[0],
        cv=options.cv,
        at_once=options.at_once,
        max_tokens=options.max_tokens,
        classes=options.classes,
        ttft_slo_ms=options.ttft_slo_ms,
        tbt_slo_ms=options.tbt_slo_ms,
        prefix_groups=options.prefix_groups,
        prefix_tokens=options.prefix_tokens,
        seed=options.seed,
    )


def setup_of(options: argparse.Namespace) -> Setup:
    """Size of a replica; blocks from the roofline unless given. Raises WrongUse."""
    roofline = Roofline(options.model_shape, options.device)
    size = options.block_size
    try:
        blocks = options.kv_blocks or roofline.kv_blocks(size)
    except ValueError as error:
        raise WrongUse(f"{options.model_shape} on {options.device}: {error}; or give --kv-blocks") from error
    setup = Setup(
        blocks=blocks,
        max_seqs=options.max_seqs,
        block_size=size,
        host_blocks=roofline.host_blocks(size) if options.host_blocks < 0 else options.host_blocks,
        max_step_tokens=options.max_step_tokens,
        step_tokens=options.step_tokens,
        microbatches=options.microbatches,
        lookahead=options.lookahead,
        replicas=options.replicas,
        routing=options.routing,
        host_us=options.host_us,
        block_bytes=int(roofline.kv_bytes_per_token) * size,
        swap_bytes_s=roofline.swap_bytes_s,
        seed=options.seed,
    )
    _check_size(setup)
    return setup


def _check_size(setup: Setup) -> None:
    """Raises WrongUse for more than a machine holds, also where the roofline says so."""
    for name, blocks in (("kv", setup.blocks), ("host", setup.host_blocks)):
        if blocks > MOST_BLOCKS:
            raise WrongUse(
                f"the device has {blocks:,} {name} blocks of {setup.block_size} tokens, over {MOST_BLOCKS:,}: give "
                f"--{name}-blocks, or a larger --block-size"
            )
    each = {"blocks": setup.blocks + setup.host_blocks, "slots": setup.max_seqs}
    remedies = {"blocks": "--kv-blocks and --host-blocks", "slots": "--max-seqs"}
    for name, count in each.items():
        if count * setup.replicas > MOST_OF_ALL[name]:
            raise WrongUse(
                f"--replicas {setup.replicas} with {count:,} {name} each are over {MOST_OF_ALL[name]:,} together: take "
                f"fewer, or smaller {remedies[name]}"
            )


def clock_of(options: argparse.Namespace) -> StepClock:
    """Raises WrongUse."""
    try:
        if options.step_time:
            return read_coefficients(options.step_time)
        if options.fit:
            return fit_step_log(options.fit)
    except ValueError as error:
        raise WrongUse(str(error)) from error
    return RooflineClock(Roofline(options.model_shape, options.device))


def notes_of(options: argparse.Namespace, setup: Setup, clock: StepClock) -> list[str]:
    """What the reader of the figures should know and did not say himself."""
    found = []
    if options.fit and isinstance(clock, Linear):
        values = ", ".join(f"{name} {getattr(clock, name):.6g}" for name in COEFFICIENTS)
        found.append(f"fitted to {options.fit}, in ns: {values}")
    if options.step_time or options.fit:
        sizes = [f"{setup.blocks:,} KV blocks"] if not options.kv_blocks else []
        sizes += [f"{setup.host_blocks:,} host blocks"] if options.host_blocks < 0 else []
        found.append(
            f"only the step times are those of {options.step_time or options.fit}: "
            f"{', '.join([*sizes, f'{setup.block_bytes:,} bytes a block', 'the speed of swaps'])} are those of "
            f"{options.model_shape} on {options.device}; --model-shape, --device, --kv-blocks, --host-blocks set them"
        )
    return found
