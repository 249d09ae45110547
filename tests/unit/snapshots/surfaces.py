"""Render each surface that users see as text, from the code and without a running service.

`SURFACES` maps the name of a snapshot file to the function that renders it. Rendered text holds names, types, defaults
and limits, no path of this machine and nothing that depends on its cores or its terminal.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin
from unittest import mock

import typer.main
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from prometheus_client import CollectorRegistry
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from typer.testing import CliRunner

from protos import kserve_pb2, queue_pb2, worker_pb2
from services.cli.app import app as command
from services.gateway import metrics as gateway_metrics
from services.gateway.app import ops_app, public_app
from services.gateway.gateway import Gateway
from services.gateway.text.tokenizer import ModelText
from services.scheduler import metrics as scheduler_metrics
from services.worker import metrics as worker_metrics
from shared.keys import Keys
from shared.settings import (
    DEMO_MODEL,
    ROOT,
    BatchSettings,
    ChatSettings,
    CommonSettings,
    EnginesSettings,
    GatewaySettings,
    LauncherSettings,
    RankSettings,
    SchedulerSettings,
    WorkerSettings,
)
from shared.telemetry.metrics import Alias

WIDTH = 100
"""Columns of rendered help."""


def openapi() -> str:
    """Return the OpenAPI documents of the public and the ops port, keys sorted."""
    gateway = Gateway(GatewaySettings(model=DEMO_MODEL, redis_url="redis://127.0.0.1:1/0"), ModelText(DEMO_MODEL))
    documents = {"public": public_app(gateway).openapi(), "ops": ops_app(gateway).openapi()}
    return json.dumps(documents, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def cli() -> str:
    """Return the help of every command, at a fixed width and without colour."""
    return "\n".join(f"$ orcinus {' '.join([*path, '--help'])}\n{_help(path)}" for path in _commands())


def _commands() -> Iterator[list[str]]:
    """Yield the path of every command, groups before what they hold."""

    def walk(path: list[str], node: Any) -> Iterator[list[str]]:
        yield path
        for name, child in sorted(getattr(node, "commands", {}).items()):
            yield from walk([*path, name], child)

    return walk([], typer.main.get_command(command))


def _help(path: list[str]) -> str:
    environment = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    with mock.patch("os.cpu_count", return_value=2):  # some option has it as its default
        result = CliRunner().invoke(
            command, [*path, "--help"], prog_name="orcinus", env=environment, terminal_width=WIDTH
        )
    if result.exit_code:
        raise RuntimeError(f"orcinus {' '.join(path)} --help: exit code {result.exit_code}: {result.output}")
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines()) + "\n"


def metrics() -> str:
    """Return name, type and labels of every metric of every service, then the names of vLLM."""
    gateway = gateway_metrics.Metrics()
    gateway.answers.labels("endpoint", "200")
    gateway.ttft.labels("endpoint")
    gateway.call("enqueue", 0.0)
    gateway.unreadable.labels("tokens")
    gateway.refused_grammars.labels("invalid")
    gateway.batch_lines.labels("answered")
    spec: Any = SimpleNamespace(endpoint="endpoint", prompt_tokens=1, choices=1, max_tokens=1)
    gateway.count_finished(spec, ["stop"], 1, 0.0)
    scheduler = scheduler_metrics.Metrics()
    scheduler.report({})
    scheduler.unreadable.labels("tokens")
    scheduler.replicas({"worker-0": {"role": "both", "state": "ready"}})
    worker = worker_metrics.Metrics()
    worker.rank_busy(0, 0.0)
    registries = {"gateway": gateway.registry, "scheduler": scheduler.registry, "worker": worker.registry}
    parts = [f"# {name}\n{_families(registry)}" for name, registry in registries.items()]
    parts += [
        f"# {name}, names of vLLM\n{_aliases(aliases)}"
        for name, aliases in {"gateway": gateway_metrics.ALIASES, "scheduler": scheduler_metrics.ALIASES}.items()
    ]
    return "\n".join(parts)


def _families(registry: CollectorRegistry) -> str:
    lines = []
    for family in registry.collect():
        if family.name.startswith("process_"):  # prometheus_client's own, and on Linux alone
            continue
        if not family.samples:
            raise RuntimeError(f"metric {family.name}: no sample shows its labels; feed it one in surfaces.metrics()")
        labels = [label for label in family.samples[0].labels if label != "le"]
        name = family.name + ("_total" if family.type == "counter" else "")
        lines.append(f"{name} {family.type} {{{', '.join(labels)}}}\n")
    return "".join(sorted(lines))


def _aliases(aliases: Iterable[Alias]) -> str:
    return "".join(
        sorted(f"{alias.name} = {alias.source} {{{', '.join(alias.labels.values())}}}\n" for alias in aliases)
    )


SETTINGS: dict[str, type[BaseSettings]] = {
    "common": CommonSettings,
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
    "rank": RankSettings,
    "up": LauncherSettings,
    "engines": EnginesSettings,
    "batch": BatchSettings,
    "chat": ChatSettings,
}


def settings() -> str:
    """Return name, environment variable, type, default and limits of every setting."""
    parts = []
    for name, kind in SETTINGS.items():
        inherited = CommonSettings.model_fields if issubclass(kind, CommonSettings) and name != "common" else {}
        prefix = str(kind.model_config.get("env_prefix", ""))
        lines = [
            _setting(field, prefix, info) for field, info in sorted(kind.model_fields.items()) if field not in inherited
        ]
        base = ", and those of common" if inherited else ""
        parts.append(f"# {name}{base}\n" + "".join(lines))
    return "\n".join(parts)


def _setting(name: str, prefix: str, field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, Path):
        default = default.relative_to(ROOT).as_posix()
    limits = [
        f"{rule}={getattr(limit, rule)}"
        for limit in field.metadata
        for rule in ("ge", "gt", "le", "lt", "pattern")
        if getattr(limit, rule, None) is not None
    ]
    cells = [name, f"{prefix}{name}".upper(), _type(field.annotation), f"default={default!r}", *sorted(limits)]
    return "  ".join(cells) + "\n"


def _type(annotation: Any) -> str:
    """Return a type as it is written, whatever module declares it."""
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return "|".join(_type(part) for part in get_args(annotation))
    return "None" if annotation is type(None) else str(getattr(annotation, "__name__", annotation))


def redis() -> str:
    """Return every Redis key and the name of every script."""
    keys = Keys("model")
    patterns = []
    for name, member in inspect.getmembers(Keys):
        if name.startswith("_") or name == "model":
            continue
        if isinstance(member, property):
            patterns.append(str(getattr(keys, name)))
        else:
            parameters = list(inspect.signature(member).parameters)[1:]
            key = member(keys, *(f"<{index}>" for index, _ in enumerate(parameters, 1)))
            patterns += key if isinstance(key, list) else [key]
    scripts = [path.stem for path in (ROOT / "shared" / "lua").glob("*.lua")]
    patterns = [pattern.replace("{model}", "{MODEL}") for pattern in patterns]
    return "# keys\n" + _lines(patterns) + "\n# scripts\n" + _lines(scripts)


def make() -> str:
    """Return the targets that `make help` lists and the settings that make takes."""
    text = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z0-9-]+):[^#\n]*## ", text, re.MULTILINE)
    known = re.search(r"^KNOWN := (.*)$", text, re.MULTILINE)
    if known is None:
        raise RuntimeError("Makefile: no line `KNOWN := ...` lists its settings")
    return "# targets\n" + _lines(targets) + "\n# settings\n" + _lines(known[1].split())


def grpc() -> str:
    """Return services, messages and enums of every proto file, with methods, field numbers and types."""
    return "\n".join(_proto(module) for module in (queue_pb2, worker_pb2, kserve_pb2))


def _proto(module: ModuleType) -> str:
    file = module.DESCRIPTOR
    lines = [f"# {file.name}, package {file.package}"]
    for service in file.services_by_name.values():
        for method in service.methods:
            request = ("stream " if method.client_streaming else "") + method.input_type.full_name
            response = ("stream " if method.server_streaming else "") + method.output_type.full_name
            lines.append(f"rpc {service.full_name}/{method.name}({request}) -> {response}")
    for enum in file.enum_types_by_name.values():
        lines += _enum(enum)
    for message in file.message_types_by_name.values():
        lines += _message(message)
    return "\n".join(lines) + "\n"


def _enum(enum: EnumDescriptor) -> list[str]:
    return [f"enum {enum.full_name}", *(f"  {value.number} {value.name}" for value in enum.values)]


TYPES = {number: name for name, number in vars(FieldDescriptor).items() if name.startswith("TYPE_")}


def _message(message: Descriptor) -> list[str]:
    lines = [f"message {message.full_name}"]
    for field in sorted(message.fields, key=lambda field: field.number):
        kind = next((t.full_name for t in (field.message_type, field.enum_type) if t), TYPES[field.type][5:].lower())
        oneof = f" in {field.containing_oneof.name}" if field.containing_oneof else ""
        lines.append(f"  {field.number} {field.name}: {'repeated ' if field.is_repeated else ''}{kind}{oneof}")
    for enum in message.enum_types:
        lines += _enum(enum)
    for nested in message.nested_types:
        lines += _message(nested)
    return lines


def _lines(names: Iterable[str]) -> str:
    return "".join(f"{name}\n" for name in sorted(set(names)))


SURFACES: dict[str, Callable[[], str]] = {
    "openapi.json": openapi,
    "cli.txt": cli,
    "metrics.txt": metrics,
    "settings.txt": settings,
    "redis.txt": redis,
    "make.txt": make,
    "grpc.txt": grpc,
}
