"""Kinds of values on the command line of `orcinus simulate`, each with its bounds.

options.py uses them as argparse types. An error names the value and the bounds; argparse adds the option. The bounds
are far beyond useful values and near enough that a run ends.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from services.scheduler.core.policy.presets import PRESETS
from services.scheduler.core.types import CLASS_NAMES
from services.simulator.engine import check_name
from services.simulator.workload.arrivals import MAX_RATE, SLOWEST, Lengths
from services.simulator.workload.traffic import MAX_TOKENS
from shared.messages import shorten

MIN_MS, MAX_MS = 0.001, 1e9  # of a limit
MAX_SHARE = 1e6
MAX_TENANTS = 1_000


def integer(low: int, high: int) -> Callable[[str], int]:
    """Return a converter to an integer within bounds, both included."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not an integer; give {low:,} to {high:,}") from None
        if value < low:
            what = "must not be negative" if low == 0 else f"must be at least {low:,}"
            raise argparse.ArgumentTypeError(f"{shorten(text)} {what}; give {low:,} to {high:,}")
        if value > high:
            raise argparse.ArgumentTypeError(f"{shorten(text)} is too large; give {low:,} to {high:,}")
        return value

    return convert


def real(low: float, high: float) -> Callable[[str], float]:
    """Return a converter to a float within bounds, both included."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a number from {low:g} to {high:g}") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{shorten(text)} is not a finite number; give {low:g} to {high:g}")
        if not low <= value <= high:
            what = "must be above 0" if value <= 0 < low else f"is too {'small' if value < low else 'large'}"
            raise argparse.ArgumentTypeError(f"{shorten(text)} {what}; give {low:g} to {high:g}")
        return value

    return convert


def policies(text: str) -> list[str]:
    """Return the policies of `A,B` or `all`; `part=value` after a comma belongs to the policy before it."""
    names = sorted(PRESETS) if text == "all" else []
    for word in text.split(",") if not names else []:
        if names and "=" in word and ":" not in word:  # sarathi:order=fair,memory=peak
            names[-1] += f",{word}"
        else:
            names.append(word)
    for name in names:
        try:
            check_name(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{name} is given twice; drop one")
    return names


def scales(text: str) -> list[float]:
    values = [real(SLOWEST, MAX_RATE)(part) for part in text.split(",")]
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{shorten(text)} gives a scale twice; drop one")
    return values


def max_tokens(text: str) -> int:
    """Return the bound of an output; 0 for `exact`."""
    return 0 if text == "exact" else integer(1, MAX_TOKENS)(text)


def lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def classes(text: str) -> dict[str, float]:
    """Return the shares by class, with a sum above 0."""
    shares = _by_name(text, real(0, MAX_SHARE))
    if not sum(shares.values()) >= 1 / MAX_SHARE:
        raise argparse.ArgumentTypeError(
            f"{shorten(text)}: the shares are 0 together; they must add up to {1 / MAX_SHARE:g} or more"
        )
    return shares


def tenants(text: str) -> tuple[float, ...]:
    """Return the share of each tenant, two or more, with a sum above 0."""
    parts = text.split(",")
    if not 2 <= len(parts) <= MAX_TENANTS:
        raise argparse.ArgumentTypeError(
            f"{shorten(text)} has {len(parts)} of 2 to {MAX_TENANTS} tenants; give a share for each, such as 7,1,1,1"
        )
    shares = tuple(real(0, MAX_SHARE)(part) for part in parts)
    if not sum(shares) >= 1 / MAX_SHARE:
        raise argparse.ArgumentTypeError(
            f"{shorten(text)}: the shares are 0 together; they must add up to {1 / MAX_SHARE:g} or more"
        )
    return shares


def by_class(text: str) -> dict[str, float]:
    """Return limits in ms by class; "" stands for every class."""
    limit = real(MIN_MS, MAX_MS)
    return _by_name(text, limit) if ":" in text else {"": limit(text)}


def _by_name(text: str, convert: Callable[[str], float]) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        if name not in CLASS_NAMES:
            raise argparse.ArgumentTypeError(f"no class {shorten(name)!r}; give one of {', '.join(CLASS_NAMES)}")
        if not value:
            raise argparse.ArgumentTypeError(f"{shorten(part)!r} has no value; give {name}:NUMBER")
        if name in values:
            raise argparse.ArgumentTypeError(f"{shorten(text)} gives {name} twice; drop one")
        values[name] = convert(value)
    return values
