"""`orcinus keys add|list|revoke`: API keys of all models in Redis, effective at every gateway within two seconds.

`add` prints a key once, alone on stdout; Redis holds its digest. Without a Redis address the commands use the stack
that `orcinus up` runs on this machine.
"""

from __future__ import annotations

import json as json_module
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from services.cli.options import Group, settings_command
from shared.command_line.options import Values
from shared.errors import ConfigurationError
from shared.keys import CLASSES, Keys
from shared.security import api_keys
from shared.security.api_keys import MAX_KEYS, SCOPES, KeyRecord
from shared.settings import CommonSettings, LauncherSettings

app = typer.Typer(cls=Group, rich_markup_mode=None, help="Make, list and revoke API keys.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]
WIDE = 1000  # columns of the list; the terminal breaks longer lines
ALL_GONE = "no key is active, and requests still need one: `orcinus keys add NAME` makes one (docs/security.md#keys)"
_TENANT = re.compile(r"[a-z0-9._-]{1,64}")
_SPAN = re.compile(r"(\d{1,6})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


@settings_command(app, "add", CommonSettings, LauncherSettings)
def add(
    values: Values,
    name: Annotated[str, typer.Argument(help="purpose of the key, for people")],
    tenant: Annotated[
        str, typer.Option(help="keys of one tenant see each other's requests; empty means a tenant of this key only")
    ] = "",
    max_priority: Annotated[str, typer.Option(help=f"most urgent class allowed: {', '.join(CLASSES)}")] = (CLASSES[0]),
    requests_per_minute: Annotated[int, typer.Option(min=0, help="0 uses the gateway's setting")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="of prompt and output; 0 uses the gateway's")] = 0,
    concurrent_requests: Annotated[int, typer.Option(min=0, help="0 uses the gateway's setting")] = 0,
    expires: Annotated[
        str, typer.Option(help="30m, 12h, 90d from now, or a date (2027-01-31); empty means never")
    ] = "",
    scope: Annotated[
        str,
        typer.Option(
            help="ops also opens the live page, /metrics and /stats; admin loads adapters, too; empty: requests only"
        ),
    ] = "",
    models: Annotated[
        str, typer.Option(help="names of the models that the key is for, separated by commas; empty means all")
    ] = "",
    json: Json = False,
) -> None:
    """Make a key and print it; it is not shown again."""
    if models and not api_keys.are_models(models):
        raise ConfigurationError(
            f"--models={models[:200]}: not names of models; separate them by commas, without spaces"
        )
    if scope and scope not in SCOPES:
        raise ConfigurationError(f"--scope={scope}: unknown scope; give {' or '.join(SCOPES)}, or none")
    if max_priority not in CLASSES:
        raise ConfigurationError(f"--max-priority={max_priority}: unknown class; give one of {', '.join(CLASSES)}")
    if tenant and not _TENANT.fullmatch(tenant):
        raise ConfigurationError(f"--tenant={tenant!r}: not allowed; give 1 to 64 characters of [a-z0-9._-]")
    if not name.isprintable() or not 1 <= len(name) <= 200:
        raise ConfigurationError(f"name: {len(name)} characters; give 1 to 200 printable characters")
    with _redis(values) as (client, keys):
        count = client.hlen(keys.api_keys)
        if count >= MAX_KEYS:
            raise ConfigurationError(
                f"keys: there are {MAX_KEYS}, the maximum; remove one with `orcinus keys revoke --forget`"
            )
        now_s = int(client.time()[0])
        active = [other for other in _records(client, keys) if other.state(now_s) == "active"]
        namesakes = [other.id for other in active if other.name == name]
        key_id, text = api_keys.new_key()
        record = KeyRecord(
            key_id, api_keys.digest(text).hex(), name, tenant or key_id, max_priority, requests_per_minute,
            tokens_per_minute, concurrent_requests, now_s, _moment(expires, now_s), scope=scope, models=models,
        )  # fmt: skip
        _write(client, keys, record)
    if json:
        print(json_module.dumps({"key": text, **_as_json(record, now_s)}))
        return
    if namesakes:
        ids = ", ".join(namesakes[:5])
        print(f"{name} is also the name of {ids}; give ids to `orcinus keys revoke`", file=sys.stderr)
    if not count:
        print("the first key: from now on every request needs a key", file=sys.stderr)
    print(f"key {key_id} of tenant {record.tenant}; it is shown only this once:", file=sys.stderr)
    print(text)


@settings_command(app, "list", CommonSettings, LauncherSettings)
def list_keys(values: Values, json: Json = False) -> None:
    """List the keys with tenant, limits and last use; a column without a value for any key is left out."""
    with _redis(values) as (client, keys):
        now_s = int(client.time()[0])
        records = sorted(_records(client, keys), key=lambda record: (record.created_s, record.id))
        last_used_s = {key.decode(): int(at) for key, at in client.hgetall(keys.keys_used).items()}
        had_keys = client.exists(keys.keys_version)
    rows = [{**_as_json(record, now_s), "last_used_s": last_used_s.get(record.id, 0)} for record in records]
    if json:
        print(json_module.dumps({"keys": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    if not rows:
        print(ALL_GONE if had_keys else "no keys; `orcinus keys add NAME` makes one")
        return
    columns = {
        "id": [record.id for record in records],
        "name": [record.name for record in records],
        "tenant": ["-" if record.tenant == record.id else record.tenant for record in records],
        "state": [str(row["state"]) for row in rows],
        "max priority": ["-" if record.max_priority == CLASSES[0] else record.max_priority for record in records],
        "scope": [record.scope or "-" for record in records],
        "models": [record.models or "-" for record in records],
        "requests/min": [str(record.requests_per_minute or "-") for record in records],
        "tokens/min": [str(record.tokens_per_minute or "-") for record in records],
        "at once": [str(record.concurrent_requests or "-") for record in records],
        "created": [_day(record.created_s) for record in records],
        "expires": [_day(record.expires_s) for record in records],
        "last used": [_day(row["last_used_s"]) for row in rows],
    }
    used_columns = {title: cells for title, cells in columns.items() if set(cells) != {"-"}}
    table = Table(*used_columns, box=None)
    for cells in zip(*used_columns.values(), strict=True):
        table.add_row(*cells)
    console = Console(markup=False, highlight=False)
    console.width = WIDE  # an id that is cut off is of no use
    console.print(table)


@settings_command(app, "revoke", CommonSettings, LauncherSettings)
def revoke(
    values: Values,
    key: Annotated[str, typer.Argument(help="id of the key, its name where no other has it, or the key itself")],
    forget: Annotated[bool, typer.Option("--forget", help="also remove it from the list")] = False,
    json: Json = False,
) -> None:
    """Refuse a key, within two seconds everywhere; its running requests end normally."""
    with _redis(values) as (client, keys):
        stored = _select(_records(client, keys), api_keys.id_of(key) or key)
        key_id = stored.id
        now_s = int(client.time()[0])
        record = replace(stored, revoked_s=stored.revoked_s or now_s)
        if forget:
            _forget(client, keys, key_id)
        else:
            _write(client, keys, record)
        _tell_older(client, record)
        active = sum(other.state(now_s) == "active" for other in _records(client, keys))
    if not active:
        print(ALL_GONE, file=sys.stderr)
    text = f"key {key_id} ({record.name}) is revoked" + (" and forgotten" if forget else "")
    print(json_module.dumps({**_as_json(record, now_s), "forgotten": forget}) if json else text)


@contextmanager
def _redis(values: Values) -> Iterator[tuple[Any, Keys]]:
    """Yield a client and the keys of the model. Raises ConfigurationError when Redis does not answer."""
    import redis

    from services.cli.stack import find, models_of_file, reachable_redis
    from services.launcher import redis_server

    target = find(values)
    settings, models = target.settings, models_of_file(target)
    url, access = reachable_redis(settings, target.launcher)
    try:
        with redis_server.client(url, timeout_s=5.0, **access) as client:
            for name in dict.fromkeys((settings.served_model_name, *models)):
                _move_old(client, Keys(name))
            yield client, settings.keys
    except redis.RedisError as error:
        raise ConfigurationError(f"Redis: refused the command: {error}; check the rights of its user") from error


def _select(records: list[KeyRecord], id_or_name: str) -> KeyRecord:
    """Return the record with that id, or else the only one with that name; revoked ones count only if all are."""
    matches = [record for record in records if record.id == id_or_name] or [
        record for record in records if record.name == id_or_name
    ]
    if len(matches) > 1:
        matches = [record for record in matches if not record.revoked_s] or matches
    if len(matches) > 1:
        ids = ", ".join(record.id for record in matches[:20])
        raise ConfigurationError(f"key {id_or_name[:40]!r}: the name of {len(matches)} keys; give the id of one: {ids}")
    if not matches:
        raise ConfigurationError(f"key {id_or_name[:40]!r}: unknown; `orcinus keys list` shows all keys")
    return matches[0]


def _records(client: Any, keys: Keys) -> list[KeyRecord]:
    return [KeyRecord.decode(stored) for stored in client.hvals(keys.api_keys)]


def _move_old(client: Any, keys: Keys) -> None:
    """Move the keys that an older version kept for this model to those of all models, bound to the model."""
    for key_id, stored in client.hgetall(keys.model_keys).items():
        record = replace(KeyRecord.decode(stored), models=keys.model)
        with client.pipeline(transaction=True) as pipe:
            pipe.hset(keys.api_keys, record.id, record.encode())
            pipe.hdel(keys.model_keys, key_id)
            pipe.incr(keys.keys_version)
            pipe.execute()


def _write(client: Any, keys: Keys, record: KeyRecord) -> None:
    with client.pipeline(transaction=True) as pipe:
        pipe.hset(keys.api_keys, record.id, record.encode())
        pipe.incr(keys.keys_version)
        pipe.execute()


def _forget(client: Any, keys: Keys, key_id: str) -> None:
    with client.pipeline(transaction=True) as pipe:
        pipe.hdel(keys.api_keys, key_id)
        pipe.hdel(keys.keys_used, key_id)
        pipe.incr(keys.keys_version)
        pipe.execute()


def _tell_older(client: Any, record: KeyRecord) -> None:
    """Make gateways of an older version read the keys of their models again: they refuse a key that has moved."""
    for version in (Keys(name).model_keys_version for name in record.models.split(",") if name):
        if client.exists(version):  # a model without keys under the old name stays so
            client.incr(version)


def _moment(text: str, now_s: int) -> int:
    """Return seconds of Redis's clock; 0 means never. Raises ConfigurationError."""
    if not text:
        return 0
    if span := _SPAN.fullmatch(text):
        moment_s = now_s + int(span[1]) * _SECONDS[span[2]]
    else:
        try:
            day = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigurationError(
                f"--expires={text}: not a time; give 30m, 12h, 90d or a day such as 2027-01-31"
            ) from None
        moment_s = int((day if day.tzinfo else day.replace(tzinfo=UTC)).timestamp())
    if moment_s <= now_s:
        raise ConfigurationError(f"--expires={text}: in the past; give a later time")
    return moment_s


def _as_json(record: KeyRecord, now_s: int) -> dict[str, Any]:
    """Return the fields of a record that may be printed: all but the digest."""
    return {name: value for name, value in asdict(record).items() if name != "digest"} | {"state": record.state(now_s)}


def _day(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}" if seconds else "-"
