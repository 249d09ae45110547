"""The table of presets, each one line that chooses the five parts; and every part by name.

Sources: docs/policies.md. Where a source names no figure, it is the system's default: 2048 tokens a step for vLLM, 8192
for SGLang, LightLLM, TensorRT-LLM and lmdeploy, 4096 for TGI, 768 for FastGen.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from services.scheduler.core.policy.base import Policy
from services.scheduler.core.policy.batching import Chunked, Static, WholePrefill
from services.scheduler.core.policy.budget import TBT_NS, EmaBudget, Fixed, ModelBudget, Unlimited
from services.scheduler.core.policy.fairness import Fair
from services.scheduler.core.policy.iteration_level import iteration_level
from services.scheduler.core.policy.memory import (
    Aimd,
    Expected,
    FtAimd,
    Overcommit,
    PeakEstimate,
    Reserve,
    Watermark,
)
from services.scheduler.core.policy.order import (
    ClassThenArrival,
    ClassThenSlack,
    FirstCome,
    LeastSlack,
    LongestPrefix,
    ResponseRatio,
    ShortestPrompt,
)
from services.scheduler.core.policy.preemption import (
    SLO,
    LastStarted,
    LeastLost,
    LeastOutput,
    Newest,
    cheaper,
    groups,
    recompute,
    swap,
)

DELAY_NS = 50_000_000  # longest queue delay of request-level batching
MS_NS = 1_000_000
TBT_MS = TBT_NS // MS_NS
MAX_NUMBER = 2**31 - 1  # largest number in a name: columns are int32
CACHED: dict[str, Any] = {"prefix_cache": True}
OVERLAPPED: dict[str, Any] = {"prefix_cache": True, "lookahead": 1}

# fmt: off
#                          order               memory          tokens       batch           relief
PRESETS: dict[str, Callable[[], Policy]] = {
    "static": lambda: Policy("static", FirstCome(), Reserve(), Unlimited(), Static(), Newest()),
    "request": lambda: Policy("request", FirstCome(), Reserve(), Unlimited(), Static(32, DELAY_NS, False), Newest()),
    "orca": lambda: Policy("orca", FirstCome(), Reserve(), Unlimited(), WholePrefill(), Newest()),
    "sarathi": lambda: Policy("sarathi", FirstCome(), Watermark(), Fixed(512), Chunked(), Newest()),
    "vllm": lambda: Policy("vllm", FirstCome(True), Watermark(), Fixed(2048), Chunked(), Newest(groups), **CACHED),
    "sglang": lambda: Policy(
        "sglang", LongestPrefix(), Overcommit(), Fixed(8192), Chunked(least=64), LeastOutput(), **OVERLAPPED),
    "lightllm": lambda: Policy("lightllm", FirstCome(), PeakEstimate(), Fixed(8192), Chunked(), Newest()),
    "ft-aimd": lambda: Policy("ft-aimd", FirstCome(), FtAimd(), Unlimited(), WholePrefill(), Newest(swap, stalls=True)),
    "tgi": lambda: Policy("tgi", FirstCome(), Reserve(), Fixed(4096), WholePrefill(), Newest()),
    "fastgen": lambda: Policy("fastgen", FirstCome(), Watermark(), Fixed(768), Chunked(), Newest()),
    "trt-no-evict": lambda: Policy("trt-no-evict", FirstCome(), Reserve(), Fixed(8192), Chunked(64), Newest()),
    "trt-max-utilization": lambda: Policy(
        "trt-max-utilization", FirstCome(), Watermark(0.0), Fixed(8192), Chunked(64), LastStarted()),
    "lmdeploy": lambda: Policy("lmdeploy", FirstCome(), Watermark(0.0), Fixed(8192), WholePrefill(128), Newest()),
    "iteration-level": iteration_level,
    "orcinus": lambda: Policy(
        "orcinus", ClassThenSlack(), Expected(), ModelBudget(), Chunked(),
        LeastLost(cheaper, takes=True, slo=SLO), **OVERLAPPED),
}

PARTS: dict[str, dict[str, Callable[..., Any]]] = {
    "order": {
        "fcfs": FirstCome, "swapped-first": lambda: FirstCome(True), "class": ClassThenArrival,
        "class-slack": ClassThenSlack, "least-slack": LeastSlack, "prefix": LongestPrefix, "shortest": ShortestPrompt,
        "ratio": ResponseRatio, "fair": Fair,
    },
    "memory": {
        "reserve": Reserve, "watermark": Watermark, "fits": lambda: Watermark(0.0), "peak": PeakEstimate,
        "expected": Expected, "ft-aimd": FtAimd, "aimd": Aimd, "overcommit": Overcommit,
    },
    "tokens": {
        "unlimited": Unlimited, "fixed": Fixed, "ema": lambda ms=TBT_MS: EmaBudget(ms * MS_NS),
        "model": lambda ms=0: ModelBudget(ms * MS_NS),
    },
    "batch": {
        "static": Static, "request": lambda most=32: Static(most, DELAY_NS, False), "whole": WholePrefill,
        "chunked": Chunked, "capped": lambda most: Chunked(64, most=most), "skip": lambda least: Chunked(least=least),
        "shrinking": lambda depth: Chunked(64, depth=depth), "slots": lambda slots: Chunked(slots=slots),
    },
    "relief": {"newest": Newest, "last-started": LastStarted, "least-lost": LeastLost, "least-output": LeastOutput},
}
# fmt: on
NEEDS = {"fixed", "capped", "skip", "shrinking", "slots"}  # need a number, as in fixed-512
TAKES = {"static", "request", "whole", "chunked", "ema", "model"}  # may have one; of ema and model a TBT target in ms
WAYS = {"recompute": recompute, "swap": swap, "cheaper": cheaper, "groups": groups}
OPTIONS: dict[str, dict[str, Any]] = {"stalls": {"stalls": True}, "takes": {"takes": True}, "slo": {"slo": SLO}}


def preset(name: str) -> Policy:
    """Return a new policy of that name. Raise ValueError for an unknown name.

    Parts may learn, so no two schedulers share a policy.
    """
    try:
        return PRESETS[name]()
    except KeyError:
        raise ValueError(f"no policy {name!r}; there are {', '.join(sorted(PRESETS))}") from None


def parse(text: str) -> Policy:
    """Return the policy that --policy names: a preset, or a preset with parts replaced, as in
    `sarathi:order=fair,memory=peak,tokens=fixed-256,batch=chunked-64,relief=newest-swap+slo`.

    The name of the policy is `text`. Raise ValueError for an unknown word, with the words that exist.
    """
    name, colon, rest = text.partition(":")
    policy = preset(name)
    changes: dict[str, Any] = {}
    for word in rest.split(",") if colon else []:
        part, equals, choice = word.partition("=")
        if part not in PARTS or not equals:
            raise ValueError(f"no part {word!r} in policy {text!r}; parts are {_list(PARTS)}, as in order=fcfs")
        if part in changes:
            raise ValueError(f"policy {text!r} gives {part} twice")
        changes[part] = _relief(choice) if part == "relief" else _part(part, choice)
    return dataclasses.replace(policy, name=text, **changes) if changes else policy


def _part(part: str, choice: str) -> Any:
    """Return a part by its name, with its number if it has one (1 to MAX_NUMBER). Raise ValueError for another name."""
    table = PARTS[part]
    match = re.fullmatch(r"(.+?)(?:-([0-9]+))?", choice)
    word, number = match.groups() if match else (choice, None)
    if word in table:
        if number is None and word not in NEEDS:
            return table[word]()
        if number is not None and word in NEEDS | TAKES:
            if number[0] == "0" or len(number) > len(str(MAX_NUMBER)) or int(number) > MAX_NUMBER:
                shown = number if len(number) <= 40 else f"{number[:40]}... ({len(number)} digits)"
                raise ValueError(f"{part} {word} takes a number of 1 to {MAX_NUMBER}, not {shown}")
            return table[word](int(number))
    raise ValueError(f"no {part} {choice!r}; there are {_list(table)}")


def _relief(choice: str) -> Any:
    """Return the preemption part that `choice` names: a victim or victim-way, each followed by any +options.

    Raise ValueError for an unknown name or an option that is given twice.
    """
    base, *options = choice.split("+")
    if twice := {option for option in options if options.count(option) > 1}:
        raise ValueError(f"relief {choice!r} gives +{' +'.join(sorted(twice))} twice")
    victims = PARTS["relief"]
    for name, build in victims.items():
        for way, mode in {"": recompute, **{f"-{way}": mode for way, mode in WAYS.items()}}.items():
            if base == name + way and all(option in OPTIONS for option in options):
                return build(mode, **{key: value for option in options for key, value in OPTIONS[option].items()})
    raise ValueError(
        f"no relief {choice!r}; there are {_list(victims)}, each may be followed by -{' -'.join(WAYS)}, "
        f"and then by +{' +'.join(OPTIONS)}"
    )


def _list(names: dict[str, Any]) -> str:
    """Return the names for an error text, with `-N` where a number is needed and `[-N]` where there may be one."""
    marks = dict.fromkeys(NEEDS, "-N") | dict.fromkeys(TAKES, "[-N]")
    return ", ".join(name + marks.get(name, "") for name in names)
