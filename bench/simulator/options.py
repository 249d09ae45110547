"""The command line of `orcinus simulate`: what may be given, and what it means for workload, replicas and clock.

Everything wrong is told as WrongUse with the value and the remedy, before anything runs.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NoReturn

from bench.simulator.arrivals import CHAT, Lengths, Spec
from bench.simulator.clock import RooflineClock, StepClock, fit_step_log, read_coefficients
from bench.simulator.engine import Setup, named
from bench.simulator.roofline import DEVICES, SHAPES, Roofline
from bench.simulator.routing import ROUTERS
from services.scheduler.core.placer import CLASSES
from services.scheduler.core.presets import PRESETS


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
    add("--policy", type=_policies, default=["orcinus"], metavar="A,B", help="presets, or 'all' (default: orcinus)")
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
    add("--requests", type=_count, default=0, help="so many, in a circle if the trace is shorter (default: the trace)")
    add("--rate-scale", type=_scales, default=[1.0], metavar="X,Y", help="times the arrival rate; a list: one run each")
    add("--rate", type=_positive, default=0.0, help="requests a second, instead of the trace's times")
    add(
        "--cv", type=_positive, default=1.0, help="with --rate: variation of the intervals, gamma (default: 1, Poisson)"
    )
    add("--at-once", action="store_true", help="everything arrives at the start")
    add("--prompt-tokens", type=_lengths, metavar="P", help="N, LOW:HIGH or lognormal:MEAN:SIGMA, not the trace's")
    add("--output-tokens", type=_lengths, metavar="O", help="likewise")
    add(
        "--max-tokens",
        type=_asked,
        default=1024,
        metavar="N|exact",
        help="what clients ask for (default: %(default)s, at least the true length)",
    )
    add("--classes", type=_classes, default={}, metavar="NAME:SHARE,..", help="as realtime:0.1,normal:0.9")
    add(
        "--ttft-slo-ms", type=_by_class, default={}, metavar="MS", help="limit of every request, or NAME:MS,.. by class"
    )
    add("--tbt-slo-ms", type=_by_class, default={}, metavar="MS", help="likewise")
    add("--prefix-groups", type=_count, default=0, help="so many shared system prompts, drawn evenly (default: none)")
    add("--prefix-tokens", type=_count, default=512, help="tokens of each, before the prompt (default: %(default)s)")
    add("--seed", type=_count, default=0)
    add = build.add_argument_group("replicas").add_argument
    add("--max-seqs", type=_above, default=256, help="sequences that run at most (default: %(default)s)")
    add("--microbatches", type=_above, default=1)
    add("--lookahead", type=_count, help="steps planned ahead of the answers (default: the policy's)")
    add("--step-tokens", type=_count, default=0, help="token budget of a step (default: the policy's)")
    add("--max-step-tokens", type=_above, default=8192, help="what a worker takes in one step (default: %(default)s)")
    add("--block-size", type=_above, default=16)
    add("--kv-blocks", type=_count, default=0, help="default: what the device has beside the weights")
    add("--host-blocks", type=_count, default=-1, help="default: the device's host memory")
    add("--replicas", type=_above, default=1)
    add("--routing", choices=list(ROUTERS), default="round-robin", help="default: %(default)s")
    add("--host-us", type=_not_negative, default=300.0, help="the scheduler's own time a step (default: %(default)s)")
    add = build.add_argument_group("what comes out").add_argument
    add("--json", action="store_true", help="one JSON object on stdout, nothing else")
    add("--plots", type=Path, metavar="DIR", help="writes PNGs")
    add("--find", choices=("knee", "capacity"), help="knee: best token budget; capacity: highest rate within the SLOs")
    add("--reproduce", action="store_true", help="the tables of the literature beside ours")
    add("--speed", action="store_true", help="simulated iterations a minute")
    add("--jobs", type=_above, default=2, help="processes (default: %(default)s)")
    return build


def spec_of(options: argparse.Namespace) -> Spec:
    """The workload at the first rate scale. Raises WrongUse."""
    lengths = options.prompt_tokens is not None and options.output_tokens is not None
    if options.at_once and options.rate:
        raise WrongUse("--at-once and --rate exclude each other: drop one")
    if options.cv != 1.0 and not options.rate:
        raise WrongUse(f"--cv {options.cv:g} needs --rate: the trace has its own times")
    return Spec(
        trace=options.trace or (None if lengths else CHAT),
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
    return Setup(
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


def clock_of(options: argparse.Namespace) -> StepClock:
    """Raises WrongUse."""
    if options.step_time and options.fit:
        raise WrongUse("--step-time and --fit exclude each other: drop one")
    try:
        if options.step_time:
            return read_coefficients(options.step_time)
        if options.fit:
            return fit_step_log(options.fit)
    except ValueError as error:
        raise WrongUse(str(error)) from error
    return RooflineClock(Roofline(options.model_shape, options.device))


def _policies(text: str) -> list[str]:
    names = sorted(PRESETS) if text == "all" else []
    for word in text.split(",") if not names else []:
        if (
            names and "=" in word and ":" not in word
        ):  # a further part of the one before: sarathi:order=fair,memory=peak
            names[-1] += f",{word}"
        else:
            names.append(word)
    for name in names:
        try:
            named(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def _positive(text: str) -> float:
    if (value := _number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _not_negative(text: str) -> float:
    if (value := _number(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return value


def _above(text: str) -> int:
    if (value := _count(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _scales(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _asked(text: str) -> int:
    return 0 if text == "exact" else _above(text)


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _named(text: str) -> dict[str, float]:
    named = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        if name not in CLASSES:
            raise argparse.ArgumentTypeError(f"no class {name!r}; there are {', '.join(CLASSES)}")
        if not value:
            raise argparse.ArgumentTypeError(f"{part!r} lacks its value: give {name}:NUMBER")
        named[name] = _not_negative(value)
    return named


def _classes(text: str) -> dict[str, float]:
    shares = _named(text)
    if not sum(shares.values()) > 0:
        raise argparse.ArgumentTypeError(f"{text}: the shares must add up to more than 0")
    return shares


def _by_class(text: str) -> dict[str, float]:
    return _named(text) if ":" in text else {"": _positive(text)}
