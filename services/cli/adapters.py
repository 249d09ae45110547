"""`orcinus adapters list|load|unload`: LoRA adapters of the stack that runs here, or of the server of --url.

They go through the API, so that a gateway checks what is loaded. Where keys are needed, one with the scope admin is.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.options import Group, build, settings_command
from shared.command_line.options import Values
from shared.errors import ConfigurationError
from shared.settings import ChatSettings

if TYPE_CHECKING:
    from services.cli.chat import Server

app = typer.Typer(cls=Group, rich_markup_mode=None, help="List, load and unload LoRA adapters.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]
Name = Annotated[str, typer.Argument(help="name by which requests choose the adapter")]
Base = Annotated[str, typer.Option(help="its model; empty means the first one of the server")]


@settings_command(app, "list", ChatSettings)
def list_adapters(values: Values, json: Json = False) -> None:
    """List the adapters of the models that are open at the server."""
    from services.cli.chat import visible

    with _server(values) as server:
        cards = [card for card in server.cards() if card.get("parent") is not None]
    if json:
        print(json_module.dumps({"adapters": cards}))
        return
    if not cards:
        print("no adapters; `orcinus adapters load NAME PATH` loads one")
    for card in cards:
        created = f"{datetime.fromtimestamp(int(card['created']), UTC):%Y-%m-%d %H:%M}"
        print(visible(f"{card['id']}  of {card['parent']}  {created}  {card.get('root', '')}"))


@settings_command(app, "load", ChatSettings)
def load(
    values: Values,
    name: Name,
    path: Annotated[str, typer.Argument(help="folder as PEFT saves it, below the gateway's --adapter-dir")],
    base: Base = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="let a name that is taken stand for this adapter from now on")
    ] = False,
    json: Json = False,
) -> None:
    """Load an adapter and give it a name."""
    _send(values, "load", {"lora_name": name, "lora_path": path, "load_inplace": replace}, base, json)


@settings_command(app, "unload", ChatSettings)
def unload(values: Values, name: Name, base: Base = "", json: Json = False) -> None:
    """Take the name from an adapter; requests that have the adapter go on."""
    _send(values, "unload", {"lora_name": name}, base, json)


def _send(values: Values, verb: str, body: dict[str, Any], base: str, json: bool) -> None:
    from services.cli.chat import visible

    with _server(values) as server:
        text = server.post(f"/v1/{verb}_lora_adapter", body | ({"model": base} if base else {}))
    print(json_module.dumps({"ok": True, "text": text}) if json else visible(text))


@contextmanager
def _server(values: Values) -> Iterator[Server]:
    """Yield the server. Raise ConfigurationError for what it refuses inside."""
    from services.cli.chat import ChatError, Server, find_server, visible  # httpx: not for other commands
    from shared.security.api_keys import describe_refusal

    settings = build(ChatSettings, values)
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    try:
        yield Server(find_server(settings), key, settings.timeout_s)
    except ChatError as error:
        text = visible(str(error))
        raise ConfigurationError(describe_refusal(text, bool(key)) if error.status == 401 else text) from None
