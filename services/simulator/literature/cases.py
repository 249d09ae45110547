"""`orcinus simulate --cases FILE`: step tables of the article's scheduler, in the format that they are exchanged in.

A file is a JSON array of cases. A case has a `name`, `requests` (arrival ms, prompt tokens, new tokens, class 0 to 3,
TTFT limit ms, TBT limit ms), `settings` (fields of article.Settings, each with a default) and `steps`: decode tokens,
prefill tokens, waiting, running and preempted sequences of each step that computes something.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.simulator.literature.core import Core
from services.simulator.policies.article import BLOCK_SIZE, CORRECTED, EXACT, Arrival, Article, Program, Settings
from shared.messages import quote

NUDGE_MS = 1e-6  # the clock moves by this with each request that is added, so that no two arrive at once
MAX_COUNT = 1_000_000_000  # of a count
MAX_STEPS = 10_000_000
FIELDS = {"name", "requests", "settings", "steps"}
ROW = ("decode", "prefill", "waiting", "running", "preempted")
Row = tuple[int, int, int, int, int]


class BadCase(ValueError):  # noqa: N818 - says what is wrong
    """A case that cannot be run; the message names case, field, value and remedy."""


@dataclass(frozen=True, slots=True)
class Case:
    """A case, checked.

    label: how messages name it. given: the object as the file has it. expected: its step table, or None where it has
    none.
    """

    label: str
    given: dict[str, Any]
    requests: list[Arrival]
    settings: Settings
    expected: list[Row] | None


def _core(case: Case) -> Program:
    """Return the core for a case; it refuses what the service would refuse. Raises BadCase."""
    settings = case.settings
    for name in ("batch_tokens", "batch_requests", "chunk", "blocks"):
        if getattr(settings, name) < 1:
            raise BadCase(f"{case.label}: settings: {name}: 0, and iteration-level needs 1 or more; give more")
    if not settings.fifo:
        raise BadCase(f"{case.label}: settings: fifo: false, and iteration-level serves by arrival; give true")
    for i, arrival in enumerate(case.requests):
        if not (arrival.prompt and arrival.max_new and arrival.blocks <= settings.blocks):
            raise BadCase(
                f"{case.label}: requests[{i}]: {arrival.prompt} + {arrival.max_new} tokens, and iteration-level needs "
                f"1 or more of both, in {settings.blocks} blocks of {BLOCK_SIZE}; change them"
            )
    return Core(settings, max(arrival.prompt + arrival.max_new for arrival in case.requests))


PROGRAMS: dict[str, Callable[[Case], Program]] = {
    "article": lambda case: Article(case.settings, EXACT),
    "article-corrected": lambda case: Article(case.settings, CORRECTED),
    "iteration-level": _core,
}


def run_case(case: Case, program: Program) -> list[Row]:
    """Return the step table of `program`: the counts of every step that computes something."""
    settings, now_ms = case.settings, 0.0
    due = sorted(enumerate(case.requests), key=lambda each: (each[1].arrival_ms, each[0]), reverse=True)
    rows: list[Row] = []
    for _ in range(settings.steps):
        while due and due[-1][1].arrival_ms <= now_ms:
            number, arrival = due.pop()
            program.add(number, arrival, now_ms)
            now_ms += NUDGE_MS
        step = program.schedule(now_ms)
        if step.decode or step.chunks:
            rows.append((step.decode, step.tokens - step.decode, step.waiting, step.running, step.preempted))
        if settings.virtual:
            now_ms += settings.fixed_ms + settings.token_ms * step.tokens
        program.complete(now_ms)
        if not (step.running or step.waiting or due):
            break
    return rows


def print_steps(path: Path, policy: str) -> int:
    """Print the cases of a file as JSON with the step tables of `policy`; return 0. Raises BadCase."""
    program = PROGRAMS[policy]
    tables = [{**_head(case), "steps": run_case(case, program(case))} for case in read_cases(path)]
    print(json.dumps(tables, separators=(",", ":")))
    return 0


def check_steps(path: Path, policy: str) -> int:
    """Print how many step tables of a file `policy` equals, and where the others differ first; return 1 if any does.

    Raises BadCase, also for a case without a step table.
    """
    program, equal = PROGRAMS[policy], 0
    cases = read_cases(path)
    for case in cases:
        if case.expected is None:
            raise BadCase(f"{case.label}: steps: missing; --check compares with them, --steps makes them")
        rows = run_case(case, program(case))
        if rows == case.expected:
            equal += 1
        else:
            print(f"{case.label}: {_difference(rows, case.expected)}", file=sys.stderr)
    print(f"{equal} of {len(cases)} cases equal")
    return 0 if equal == len(cases) else 1


def read_cases(path: Path) -> list[Case]:
    """Return the cases of a file, at least one. Raises BadCase."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCase(f"{path}: {error.strerror}; give a file of cases") from None
    except (ValueError, RecursionError) as error:
        raise BadCase(f"{path}: not JSON ({error}); give an array of cases") from None
    if not isinstance(given, list):
        raise BadCase(f"{path}: {quote(given)} is not an array; give an array of cases")
    if not given:
        raise BadCase(f"{path}: no case; give at least one")
    return [_case(number, one) for number, one in enumerate(given)]


def _head(case: Case) -> dict[str, Any]:
    """Return the case as given, without its steps."""
    return {name: value for name, value in case.given.items() if name != "steps"}


def _difference(rows: list[Row], expected: list[Row]) -> str:
    """Return where two different step tables differ first."""
    for i, (ours, theirs) in enumerate(zip(rows, expected, strict=False)):
        if ours != theirs:
            parts = [
                f"{name} {mine}, not {other}"
                for name, mine, other in zip(ROW, ours, theirs, strict=True)
                if mine != other
            ]
            return f"differs first in step {i + 1}: {', '.join(parts)}"
    return f"{len(rows)} steps, not {len(expected)}"


def _label(number: int, given: Any) -> str:
    name = given.get("name") if isinstance(given, dict) else None
    return f"case {name!r}" if isinstance(name, str) and name else f"case number {number + 1}"


def _case(number: int, given: Any) -> Case:
    label = _label(number, given)
    if not isinstance(given, dict):
        raise BadCase(f"{label}: {quote(given)} is not an object; give {', '.join(sorted(FIELDS))}")
    if unknown := sorted(set(given) - FIELDS):
        raise BadCase(f"{label}: unknown field {unknown[0]!r}; drop it: a case has {', '.join(sorted(FIELDS))}")
    if missing := sorted({"name", "requests"} - set(given)):
        raise BadCase(f"{label}: {missing[0]}: missing; add it")
    if not isinstance(given["name"], str) or not given["name"]:
        raise BadCase(f"{label}: name: {quote(given['name'])} is no name; give a text of one character or more")
    requests = given["requests"]
    if not isinstance(requests, list):
        raise BadCase(f"{label}: requests: {quote(requests)} is not an array; give an array of requests")
    if not requests:
        raise BadCase(f"{label}: requests: empty; give at least one request")
    arrivals = [_arrival(f"{label}: requests[{i}]", one) for i, one in enumerate(requests)]
    expected = _steps(label, given["steps"]) if "steps" in given else None
    return Case(label, given, arrivals, _settings(label, given.get("settings", {})), expected)


def _arrival(label: str, given: Any) -> Arrival:
    names = Arrival._fields
    if not isinstance(given, list) or len(given) != len(names):
        raise BadCase(f"{label}: {quote(given)} is no request; give [{', '.join(names)}]")
    at, prompt, new, priority, ttft, tbt = given
    return Arrival(
        _number(f"{label}: arrival_ms", at),
        _count(f"{label}: prompt", prompt),
        _count(f"{label}: max_new", new),
        _count(f"{label}: priority", priority, 3),
        _number(f"{label}: ttft_ms", ttft),
        _number(f"{label}: tbt_ms", tbt),
    )


def _settings(label: str, given: Any) -> Settings:
    kinds = {each.name: each.type for each in dataclasses.fields(Settings)}
    if not isinstance(given, dict):
        raise BadCase(f"{label}: settings: {quote(given)} is not an object; give any of {', '.join(kinds)}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        where = f"{label}: settings: {name}"
        if name not in kinds:
            raise BadCase(f"{label}: settings: unknown field {name!r}; drop it: there are {', '.join(kinds)}")
        if kinds[name] == "bool":
            if not isinstance(value, bool):
                raise BadCase(f"{where}: {quote(value)} is neither true nor false; give one of them")
            values[name] = value
        else:
            most = MAX_STEPS if name == "steps" else MAX_COUNT
            values[name] = _number(where, value) if kinds[name] == "float" else _count(where, value, most)
    return Settings(**values)


def _steps(label: str, given: Any) -> list[Row]:
    if not isinstance(given, list):
        raise BadCase(f"{label}: steps: {quote(given)} is not an array; give an array of steps")
    rows: list[Row] = []
    for i, row in enumerate(given):
        if not isinstance(row, list) or len(row) != len(ROW) or not all(type(cell) is int for cell in row):
            raise BadCase(f"{label}: steps[{i}]: {quote(row)} is no step; give the integers [{', '.join(ROW)}]")
        for name, cell in zip(ROW, row, strict=True):
            if cell < 0 and name != "prefill":  # prompts without tokens decode at once and count against prefill
                raise BadCase(f"{label}: steps[{i}]: {name}: {cell} is negative; give 0 or more")
        rows.append((row[0], row[1], row[2], row[3], row[4]))
    return rows


def _count(label: str, value: Any, most: int = MAX_COUNT) -> int:
    if type(value) is not int:
        raise BadCase(f"{label}: {quote(value)} is not an integer; give 0 to {most:,}")
    if value < 0:
        raise BadCase(f"{label}: {quote(value)} is negative; give 0 to {most:,}")
    if value > most:
        raise BadCase(f"{label}: {quote(value)} is too large; give 0 to {most:,}")
    return value


def _number(label: str, value: Any) -> float:
    if type(value) is not int and type(value) is not float:
        raise BadCase(f"{label}: {quote(value)} is not a number; give 0 or more")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadCase(f"{label}: {value} is not a finite number; give 0 or more")
    if value < 0:
        raise BadCase(f"{label}: {quote(value)} is negative; give 0 or more")
    if value > 1e15:
        raise BadCase(f"{label}: {quote(value)} is too large; give 0 to 1e15")
    return float(value)
