"""Tables of the documentation that come from the code: settings, metrics, presets and parts of policies.

The templates settings.md, metrics.md and choices.md call `settings`, `metrics` and `choices` (bench/render.py).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args, get_origin

from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from services.gateway import metrics as gateway_metrics
from services.scheduler import metrics as scheduler_metrics
from services.scheduler.core.policy.presets import NEEDS, PARTS, PRESETS, TAKES
from services.worker import metrics as worker_metrics
from shared.settings import (
    ROOT,
    BatchSettings,
    ChatSettings,
    CommonSettings,
    EnginesSettings,
    GatewaySettings,
    LauncherSettings,
    SchedulerSettings,
    WorkerSettings,
)

CLASSES: dict[str, type[BaseSettings]] = {
    "common": CommonSettings,
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
    "up": LauncherSettings,
    "engines": EnginesSettings,
    "batch": BatchSettings,
    "chat": ChatSettings,
}

PLAIN = {
    "log_level": "what is logged: debug, info, warning or error",
    "log_json": "log lines as JSON objects",
    "port": "port of the API",
    "max_body_bytes": "a larger request body gets 413",
    "lease_ms": "how long the scheduler's lease lasts without renewal",
    "stats_ms": "how often the stats are written",
    "worker_id": "name of the worker; two workers of one stack need two names",
    "device": "where the model runs; auto: on a GPU if one can be used",
    "max_seqs": "sequences that run at the same time; the scheduler's 0 is the worker's number of slots",
    "ops_port": "port of /metrics and /stats; 0: PORT + 1",
    "requests_per_minute": "requests a minute of one key; 0: unlimited",
    "tokens_per_minute": "tokens a minute of one key, prompt and output together; 0: unlimited",
    "concurrent_requests": "requests of one key at the same time; 0: unlimited",
    "max_input_tokens": "longest prompt; 0: as much as the context allows",
    "max_output_tokens": "longest output; 0: as much as the context allows",
    "kv_blocks": "KV blocks; 0: from kv_memory_fraction",
}
"""Texts for fields without a description, or with one that needs the option's name beside it."""


def own_fields(settings: type[BaseSettings]) -> dict[str, FieldInfo]:
    """Return the fields that a class adds to its base."""
    inherited = CommonSettings.model_fields if settings is not CommonSettings else {}
    return {name: field for name, field in settings.model_fields.items() if name not in inherited}


def meaning(name: str, field: FieldInfo) -> str:
    """Return the field's text; "None" for a field without one, which a test refuses."""
    return PLAIN.get(name) or str(field.description)


def default(field: FieldInfo) -> str:
    """As it stands in the table; paths inside the checkout are relative to it."""
    value = field.default
    if value is None or value == "":
        return ""
    if isinstance(value, Path):
        return f"`{value.relative_to(ROOT)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def limits(field: FieldInfo) -> str:
    """The choices of a Literal, or the bounds of a number."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    if get_origin(field.annotation) is Literal:
        return ", ".join(str(choice) for choice in get_args(field.annotation))
    if SecretStr in (field.annotation, *kinds):
        return "secret"
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    bounds = [f"{sign} {getattr(rule, name)}" for name, sign in signs for rule in field.metadata if hasattr(rule, name)]
    return ", ".join(bounds)


def settings(part: str) -> str:
    """Return the options of one service: `gateway`."""
    rows = ["| variable | default | allowed | meaning |", "|---|---|---|---|"]
    for name, field in own_fields(CLASSES[part]).items():
        cells = (f"`ORCINUS_{name.upper()}`", default(field), limits(field), meaning(name, field))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def metrics(part: str) -> str:
    """Return the metrics of one service, or the `aliases` of all."""
    return _aliases() if part == "aliases" else _families(REGISTRIES[part]())


REGISTRIES: dict[str, Callable[[], CollectorRegistry]] = {
    "gateway": lambda: gateway_metrics.Metrics().registry,
    "scheduler": lambda: scheduler_metrics.Metrics().registry,
    "worker": lambda: worker_metrics.Metrics().registry,
}


def _families(registry: CollectorRegistry) -> str:
    rows = ["| metric | type | meaning |", "|---|---|---|"]
    for family in sorted(registry.collect(), key=lambda each: each.name):
        if not family.name.startswith("process_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            rows.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join(rows)


def _aliases() -> str:
    rows = ["| name | ours |", "|---|---|"]
    rows += [
        f"| `{alias.name}` | `{alias.source}` |" for alias in (*gateway_metrics.ALIASES, *scheduler_metrics.ALIASES)
    ]
    return "\n".join(rows)


def _presets() -> str:
    rows = [
        "| preset | order | memory | tokens | batch | relief | prefix cache |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, make in PRESETS.items():
        policy = make()
        parts = [f"`{type(getattr(policy, part)).__name__}`" for part in PARTS]
        rows.append(f"| `{name}` | " + " | ".join(parts) + f" | {'yes' if policy.prefix_cache else 'no'} |")
    return "\n".join(rows)


def choices(part: str) -> str:
    """Return the choices of one part of a policy, or all `presets`."""
    if part == "presets":
        return _presets()
    rows = ["| choice | class | meaning |", "|---|---|---|"]
    for name, make in PARTS[part].items():
        kind = type(make(64) if name in NEEDS else make())
        number = "-N" if name in NEEDS else "[-N]" if name in TAKES else ""
        text = VARIANTS.get(name) or re.split(r"\.(?:\s|$)", " ".join(str(inspect.getdoc(kind)).split()))[0]
        rows.append(f"| `{name}{number}` | `{kind.__name__}` | {text} |")
    return "\n".join(rows)


VARIANTS = {
    "swapped-first": "the same, with swapped sequences before all waiting ones (vLLM)",
    "fits": "the same with nothing kept free: a sequence that fits now enters (TensorRT-LLM, lmdeploy)",
    "reserve": "the blocks of prompt and `max_tokens` at admission; a running sequence never lacks memory (Orca, TGI)",
    "static": "a batch is formed when nothing runs, and no sequence joins until it has ended (FasterTransformer)",
    "request": "the same, formed when N wait (32) or the first of them has waited for 50 ms (Triton)",
    "capped": "chunks of at most N tokens, multiples of 64",
    "skip": "no prompt is run with less than N tokens left of the budget (SGLang)",
    "shrinking": "chunks, multiples of 64, that shrink behind each N tokens of their prompt",
    "slots": "chunks; at most N sequences run",
    "chunked": "prompts in chunks of what the decodes leave of the budget, multiples of N (Sarathi)",
    "fair": "the tenant that got the fewest tokens; inside a tenant by arrival",
    "newest": "the sequence that arrived last (vLLM, Sarathi)",
    "last-started": "the sequence that entered last (TensorRT-LLM)",
    "least-lost": "in the lowest class the sequence with the fewest tokens to compute again",
    "least-output": "the sequence with the fewest outputs; among these the one with the longest input (SGLang)",
}
"""Texts of choices that share a class, or have another text in their class."""
