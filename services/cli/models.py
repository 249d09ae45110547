"""`orcinus pull`, `orcinus list` and `orcinus rm`: models of the Hugging Face Hub on this machine.

They are what huggingface_hub keeps in its cache (HF_HOME), shared with other tools of the same user.
"""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer

from shared.errors import ConfigurationError, ModelError
from shared.messages import quantity
from shared.models.gguf.parts import part_names
from shared.models.hub import HubName, cache_directory, gguf_in, in_address, parse_name

Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]
Name = Annotated[str, typer.Argument(metavar="ORG/NAME[@REVISION]", help="a model of the Hugging Face Hub")]


def pull(
    name: Name,
    file: Annotated[
        str, typer.Option(help="fetch this one GGUF file, with all its parts, instead of the safetensors")
    ] = "",
    json: Json = False,
) -> None:
    """Fetch a model, or its missing files, from the Hugging Face Hub. An interrupted run can be repeated: it goes on.

    Settings of huggingface_hub apply: HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE.
    """
    from services.hub.fetch import pull as fetch
    from services.hub.progress import Bars, size
    from services.launcher.model_check import model_problem

    bars, wanted, warned = Bars(), _parse_name(name), ""

    def look(snapshot: Path, _: int) -> None:
        nonlocal warned
        if not file and (warned := config_problem(snapshot)):
            bars.note(f"warning: it cannot be served here: {warned}")

    fetched = fetch(wanted, bars, file, look)
    served = fetched.path / part_names(file)[0] if file else fetched.path
    problem = model_problem(served, "auto")
    serve = served if file and gguf_in(fetched.path) != served else wanted
    if json:
        print(
            json_module.dumps(
                {
                    "name": str(wanted), "commit": fetched.commit, "path": str(fetched.path),
                    "bytes": fetched.total_bytes, "fetched_bytes": fetched.new_bytes, "problem": problem,
                }
            )
        )  # fmt: skip
        return
    print(f"{wanted}: {size(fetched.total_bytes)} in {fetched.path}, {size(fetched.new_bytes)} of them fetched now")
    if not problem:
        print(f"serve it with `make run MODEL={serve}` or `orcinus up --model {serve}`")
    elif problem != warned:
        print(f"note: {problem}")


def config_problem(snapshot: Path) -> str:
    """Return the reason why a worker refuses the model, from its config.json; empty if a worker takes it."""
    from services.launcher.model_check import read_config

    try:
        read_config(snapshot)
    except ModelError as error:
        return str(error)
    return ""


def list_models(json: Json = False) -> None:
    """List the models on this machine: size, revision, origin, and whether they can be served."""
    from services.hub.progress import size
    from services.hub.store import local_models
    from services.launcher.model_check import model_problem

    rows = [(model, model_problem(model.path, "auto")) for model in local_models()]
    if json:
        models = [
            {
                "name": model.repository, "commit": model.commit, "refs": model.refs, "path": str(model.path),
                "bytes": model.size_bytes, "origin": model.origin, "in_use": model.in_use, "problem": problem,
            }
            for model, problem in rows
        ]  # fmt: skip
        print(json_module.dumps({"directory": str(cache_directory()), "models": models}))
        return
    if not rows:
        print(f"no models in {cache_directory()}; fetch one with `orcinus pull ORG/NAME`")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "revision", "size", "fetched by", "state", box=None)
    for model, problem in rows:
        revision = f"{', '.join(model.refs) or '-'} ({model.commit[:8]})"
        state = "in use" if model.in_use else "cannot be served" if problem else "can be served"
        table.add_row(model.repository, revision, size(model.size_bytes), model.origin, state)
    Console(markup=False, highlight=False, soft_wrap=True).print(table)
    for model, problem in rows:
        if problem and not model.in_use:
            print(f"{model.repository}: {problem.replace(f'{model.path}/', '')}")


def rm(
    name: Name,
    others: Annotated[bool, typer.Option("--others", help="also remove what another tool fetched")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Remove a model from this machine: all its revisions, or the one that is named. It asks before."""
    from services.hub.progress import size
    from services.hub.store import is_in_use, plan_removal, remove

    wanted = _parse_name(name)
    if is_in_use(wanted.repository):
        raise ConfigurationError(f"{wanted.repository}: in use by a process that serves it; stop that one first")
    removal = plan_removal(wanted, others, whole="@" not in name)
    if removal.other_files:
        print(
            f"kept: {quantity(removal.other_files, 'file')} ({size(removal.other_bytes)}) fetched by another tool; "
            "--others removes these too",
            file=sys.stderr,
        )
    if not removal.files and not removal.partial:
        raise ConfigurationError(f"{wanted}: nothing of it was fetched by orcinus; --others removes it")
    what = f"{quantity(len(removal.files), 'file')} of {wanted} ({size(removal.size_bytes)})"
    theirs = ", also those that another tool fetched" if others else ""
    if not yes and not typer.confirm(f"Remove {what}{theirs}?"):
        print("nothing was removed")
        raise typer.Exit(1)
    remove(removal)
    print(f"removed {what}{theirs}")


def _parse_name(name: str) -> HubName:
    parsed = parse_name(name)
    if parsed is None:
        inside = in_address(name)
        remedy = f"write {inside}" if inside else "write ORG/NAME or ORG/NAME@REVISION"
        raise ConfigurationError(f"{name}: not a name of the Hub; {remedy}")
    return parsed
