"""The options of `orcinus simulate`, and the workload, replicas and clock that they describe.

Every wrong value raises WrongUse with the value and the remedy before a simulation starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from services.simulator.command.values import (
    by_class,
    classes,
    integer,
    lengths,
    max_tokens,
    policies,
    real,
    scales,
    tenants,
)
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
from services.simulator.literature.cases import PROGRAMS
from services.simulator.routing import ROUTERS, SCHEDULER
from services.simulator.workload.arrivals import CHAT, MAX_RATE, MAX_REQUESTS, SLOWEST, Spec
from services.simulator.workload.traffic import MAX_TOKENS
from shared.command_line.arguments import Parser

MAX_BLOCKS = 10_000_000  # of a replica
MAX_TOTAL = {"blocks": 100_000_000, "slots": 1_000_000}  # of all replicas together
ALONE = {  # the only options that these accept
    "--reproduce": {"--json"},
    "--speed": {"--json", "--policy"},
    "--cases": {"--steps", "--check", "--program"},
    "--grid": {"--page", "--json", "--jobs"},
}


class WrongUse(Exception):  # noqa: N818 - the term of the exit codes
    """A wrong command line; the message names the remedy. Exit code 2."""


class SimulateParser(Parser):
    """A parser that raises WrongUse instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise WrongUse(f"{message}; orcinus simulate --help lists the options")


def parser() -> SimulateParser:
    build = SimulateParser(
        "orcinus simulate", "Run the scheduler's core on a virtual clock: compare policies without a GPU."
    )
    add = build.add_argument_group("policies and step times").add_argument
    add("--policy", type=policies, default=None, metavar="A,B", help="presets, or 'all' (default orcinus)")
    add("--model-shape", choices=sorted(SHAPES), default="llama-8b", help="sizes of the model")
    add("--device", choices=sorted(DEVICES), default="h100", help="rates of the device")
    add("--step-time", type=Path, metavar="FILE", help='JSON {"c0".."c3"} in ns; replaces shape and device')
    add("--fit", type=Path, metavar="FILE", help="fit the coefficients to a worker's --step-log")
    add = build.add_argument_group("requests").add_argument
    add(
        "--trace",
        type=Path,
        help="CSV: num_prefill_tokens, num_decode_tokens, optionally arrived_at (default: the chat trace)",
    )
    add(
        "--requests",
        type=integer(0, MAX_REQUESTS),
        default=0,
        help="number of requests; a shorter trace is repeated (default: the length of the trace)",
    )
    add("--rate-scale", type=scales, default=[1.0], metavar="X,Y", help="multiplies the arrival rate; one run for each")
    add("--rate", type=real(SLOWEST, MAX_RATE), default=0.0, help="requests a second; replaces the trace's times")
    add(
        "--cv",
        type=real(0.001, 100),
        default=1.0,
        help="with --rate: coefficient of variation of the gamma intervals (default 1, Poisson)",
    )
    add("--at-once", action="store_true", help="all requests arrive at the start")
    add("--prompt-tokens", type=lengths, metavar="P", help="N, LOW:HIGH or lognormal:MEAN:SIGMA; replaces the trace's")
    add("--output-tokens", type=lengths, metavar="O", help="as --prompt-tokens")
    add(
        "--max-tokens",
        type=max_tokens,
        default=1024,
        metavar="N|exact",
        help="max_tokens of a request (default %(default)s, at least the true length)",
    )
    add("--classes", type=classes, default={}, metavar="NAME:SHARE,..", help="such as realtime:0.1,normal:0.9")
    add("--tenants", type=tenants, default=(), metavar="X,Y", help="shares of the requests, such as 7,1,1,1")
    add("--ttft-slo-ms", type=by_class, default={}, metavar="MS", help="limit of every request, or NAME:MS,.. by class")
    add("--tbt-slo-ms", type=by_class, default={}, metavar="MS", help="as --ttft-slo-ms")
    add("--deadline-ms", type=by_class, default={}, metavar="MS", help="as --ttft-slo-ms; a late request ends")
    add(
        "--prefix-groups",
        type=integer(0, MAX_REQUESTS),
        default=0,
        help="number of shared system prompts, drawn evenly (default: none)",
    )
    add(
        "--prefix-tokens",
        type=integer(1, MAX_TOKENS),
        default=512,
        help="tokens of each, before the prompt",
    )
    add(
        "--acceptance",
        type=real(0, 1),
        metavar="P",
        help="speculate; chance that a draft is right behind right ones (default: the trace says, or none)",
    )
    add("--seed", type=integer(0, 2**32 - 1), default=0, help="of the workload")
    add = build.add_argument_group("replicas").add_argument
    add("--max-seqs", type=integer(1, 8192), default=256, help="sequences that run at most")
    add("--microbatches", type=integer(1, 16), default=1, help="disjoint sets of sequences")
    add("--lookahead", type=integer(0, 4), help="steps planned ahead of the answers (default: the policy's)")
    add("--step-tokens", type=integer(0, MAX_TOKENS), default=0, help="token budget of a step (default: the policy's)")
    add(
        "--max-step-tokens",
        type=integer(1, MAX_TOKENS),
        default=8192,
        help="tokens in one step of a worker at most",
    )
    add("--block-size", type=integer(1, 256), default=16, help="tokens of a KV block")
    add(
        "--kv-blocks",
        type=integer(0, MAX_BLOCKS),
        default=0,
        help="(default: the device's memory beside the weights)",
    )
    add(
        "--host-blocks",
        type=integer(0, MAX_BLOCKS),
        default=-1,
        help="(default: the device's host memory)",
    )
    add("--replicas", type=integer(1, 1000), default=1, help="copies of the model")
    add(
        "--routing",
        choices=[*ROUTERS, SCHEDULER],
        default="round-robin",
        help="front router of replicas with a scheduler each; `scheduler` is one for all",
    )
    add("--host-us", type=real(0, 1e8), default=300.0, help="time of the scheduler for a step")
    add = build.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object on stdout")
    add("--plots", type=Path, metavar="DIR", help="write PNGs")
    add(
        "--find",
        choices=("knee", "capacity"),
        help="knee: best token budget; capacity: highest rate at which 99 %% of the requests are within their limits",
    )
    add("--reproduce", action="store_true", help="compare tables of the literature with simulated ones")
    add("--grid", type=Path, metavar="FILE", help="compare policies over a grid of workloads, limits and loads (TOML)")
    add("--page", type=Path, metavar="FILE", help="with --grid: write heat maps as one HTML page")
    add("--cases", type=Path, metavar="FILE", help="run cases of the article's scheduler; needs --steps or --check")
    add("--steps", action="store_true", help="print the cases with their step tables as JSON")
    add("--check", action="store_true", help="compare with the step tables in the file; exit 1 if one differs")
    add("--program", choices=sorted(PROGRAMS), default="article", help="what runs the cases")
    add("--speed", action="store_true", help="measure simulated iterations a minute (default: of orca and orcinus)")
    add("--jobs", type=integer(1, 64), default=2, help="processes")
    return build


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options. Raises WrongUse for wrong values and for options that would be ignored."""
    options = parser().parse_args(argv)
    given = {word.partition("=")[0] for word in argv if word.startswith("--")}  # no value starts with --
    for alone, beside in ALONE.items():
        if alone in given and (ignored := sorted(given - {alone} - beside)):
            raise WrongUse(f"{alone}: runs fixed workloads and ignores {', '.join(ignored)}; drop that")
    if wrong := _ignored(options, given):
        raise WrongUse(wrong)
    if options.policy is None:
        options.policy = ["orca", "orcinus"] if options.speed else ["orcinus"]
    return options


def _ignored(options: argparse.Namespace, given: set[str]) -> str:
    """Return the problem of options that do not fit together; empty if there is none."""
    drawn = {"--prompt-tokens", "--output-tokens", "--requests"} <= given
    wrong = {
        "--at-once: excludes --rate; drop one": options.at_once and options.rate,
        "--at-once: ignores --rate-scale; drop one": options.at_once and "--rate-scale" in given,
        f"--cv {options.cv:g}: the times of the trace are fixed; add --rate": "--cv" in given and not options.rate,
        f"--prefix-tokens {options.prefix_tokens}: there are no groups; add --prefix-groups N": "--prefix-tokens"
        in given
        and not options.prefix_groups,
        f"--routing {options.routing}: there is one replica; add --replicas 2 or more": "--routing" in given
        and options.replicas == 1,
        "--steps, --check, --program: have no cases; add --cases FILE": options.cases is None
        and {"--steps", "--check", "--program"} & given,
        "--cases: needs --steps or --check, and one of them; give one": options.cases is not None
        and options.steps == options.check,
        f"--page {options.page}: there is no grid; add --grid FILE": options.page is not None and options.grid is None,
        "--step-time: excludes --fit; drop one": options.step_time and options.fit,
        f"--trace {options.trace}: other options set lengths, number and times; drop it": "--trace" in given
        and drawn
        and (options.rate or options.at_once),
        "--find: excludes --plots and several rate scales; drop --plots, and give one --rate-scale": options.find
        and (options.plots is not None or len(options.rate_scale) > 1),
        "--find knee: tries all budgets; drop --step-tokens": options.find == "knee" and "--step-tokens" in given,
        "--find capacity: changes the rate; drop --at-once": options.find == "capacity" and options.at_once,
    }
    return next((text for text, holds in wrong.items() if holds), "")


def spec_of(options: argparse.Namespace) -> Spec:
    """Return the workload at the first rate scale."""
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
        tenants=options.tenants,
        ttft_slo_ms=options.ttft_slo_ms,
        tbt_slo_ms=options.tbt_slo_ms,
        deadline_ms=options.deadline_ms,
        prefix_groups=options.prefix_groups,
        prefix_tokens=options.prefix_tokens,
        seed=options.seed,
        acceptance=options.acceptance,
    )


def setup_of(options: argparse.Namespace) -> Setup:
    """Return the size of a replica; the roofline gives the default number of blocks. Raises WrongUse."""
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
    """Raise WrongUse if the blocks or slots do not fit in this machine, given or from the roofline."""
    for name, blocks in (("kv", setup.blocks), ("host", setup.host_blocks)):
        if blocks > MAX_BLOCKS:
            raise WrongUse(
                f"the device has {blocks:,} {name} blocks of {setup.block_size} tokens, at most {MAX_BLOCKS:,}; give "
                f"--{name}-blocks, or a larger --block-size"
            )
    each = {"blocks": setup.blocks + setup.host_blocks, "slots": setup.max_seqs}
    remedies = {"blocks": "--kv-blocks and --host-blocks", "slots": "--max-seqs"}
    for name, count in each.items():
        if count * setup.replicas > MAX_TOTAL[name]:
            raise WrongUse(
                f"--replicas {setup.replicas}: {count:,} {name} each are over {MAX_TOTAL[name]:,} together; take "
                f"fewer, or smaller {remedies[name]}"
            )


def clock_of(options: argparse.Namespace) -> StepClock:
    """Return the clock of the options. Raises WrongUse."""
    try:
        if options.step_time:
            return read_coefficients(options.step_time)
        if options.fit:
            return fit_step_log(options.fit)
    except ValueError as error:
        raise WrongUse(str(error)) from error
    return RooflineClock(Roofline(options.model_shape, options.device))


def notes_of(options: argparse.Namespace, setup: Setup, clock: StepClock) -> list[str]:
    """Return notes on values that the options did not set."""
    notes = []
    if options.fit and isinstance(clock, Linear):
        values = ", ".join(f"{name} {getattr(clock, name):.6g}" for name in COEFFICIENTS)
        notes.append(f"fitted to {options.fit}, in ns: {values}")
    if options.step_time or options.fit:
        sizes = [f"{setup.blocks:,} KV blocks"] if not options.kv_blocks else []
        sizes += [f"{setup.host_blocks:,} host blocks"] if options.host_blocks < 0 else []
        notes.append(
            f"only the step times are those of {options.step_time or options.fit}: "
            f"{', '.join([*sizes, f'{setup.block_bytes:,} bytes a block', 'the speed of swaps'])} are those of "
            f"{options.model_shape} on {options.device}; --model-shape, --device, --kv-blocks, --host-blocks set them"
        )
    return notes
