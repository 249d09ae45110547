"""Between the command line and the settings classes: every field is an option, and every error names it.

The classes in shared/settings.py are the only source: names, help, defaults, limits. An option is passed on as the
text that was typed; pydantic reads it, so the command line and the environment obey the same rules.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

from shared.errors import ConfigurationError
from shared.settings import ROOT, SchedulerSettings

HIDDEN = "********"
Values = dict[str, Any]
S = TypeVar("S", bound=BaseSettings)


def flag(name: str) -> str:
    """`max_seqs` as it is typed: `--max-seqs`."""
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    return f"ORCINUS_{name.upper()}"


def fields_of(*classes: type[BaseSettings]) -> dict[str, FieldInfo]:
    """The fields of all classes; where two have the same name, the first class describes it."""
    fields: dict[str, FieldInfo] = {}
    for settings in classes:
        for name, field in settings.model_fields.items():
            fields.setdefault(name, field)
    return fields


def settings_command(app: typer.Typer, name: str, *classes: type[BaseSettings]) -> Callable[[Any], Any]:
    """Decorates `run(values, ...)`: adds the command with an option for every field of `classes`.

    `values` maps the names of the given options to what was typed; further parameters stay ordinary typer options.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        fields = fields_of(*classes)
        own = list(inspect.signature(run, eval_str=True).parameters.values())[1:]

        def command(**given: Any) -> None:
            extra = {parameter.name: given.pop(parameter.name) for parameter in own}
            run({key: value for key, value in given.items() if value is not None}, **extra)

        parameters = [_parameter(key, field) for key, field in fields.items()]
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            own_first := [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + parameters
        )
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in own_first}
        app.command(name, help=inspect.getdoc(run))(command)
        return run

    return decorate


def build(settings: type[S], values: Values) -> S:
    """The settings of one service from the options that concern it, the environment and the defaults.

    Raises ConfigurationError naming the option or variable, the value and the limit.
    """
    own = {name: value for name, value in values.items() if name in settings.model_fields}
    try:
        found = settings(**own)
    except ValidationError as error:
        raise ConfigurationError("; ".join(_explain(settings, item, own) for item in error.errors())) from None
    if isinstance(found, SchedulerSettings):
        _check_policy(found.policy, own)
    return found


def source(settings: BaseSettings, name: str, values: Values) -> str:
    """Where a setting comes from: option, environment, default, or derived from other settings."""
    if name in values:
        return "option"
    if name in EnvSettingsSource(type(settings))():
        return "environment"
    return "derived" if name in settings.model_fields_set else "default"


def shown(value: Any) -> Any:
    """A value that may be printed: secrets hidden, paths as text."""
    if isinstance(value, SecretStr):
        return HIDDEN if value.get_secret_value() else ""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) and "://" in value:
        return without_password(value)
    return value


def without_password(url: str) -> str:
    """A URL that may be printed."""
    scheme, _, rest = url.partition("://")
    if found := re.match(r"([^/?#]*)@", rest):
        user, colon, _ = found[1].partition(":")
        rest = f"{user}:{HIDDEN}@{rest[found.end() :]}" if colon else f"{HIDDEN}@{rest[found.end() :]}"
    rest = re.sub(r"([?&]password=)[^&]*", rf"\g<1>{HIDDEN}", rest)
    return f"{scheme}://{rest}"


def _check_policy(policy: str, values: Values) -> None:
    """Policies are the scheduler's to know, not those of shared/settings.py. Raises ConfigurationError."""
    from services.scheduler.core.policy.presets import parse  # numpy: not for commands that schedule nothing

    try:
        parse(policy)
    except ValueError as error:
        where = flag("policy") if "policy" in values else env_name("policy")
        raise ConfigurationError(f"{where}={policy}: {error}") from None


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    annotation = field.annotation
    text = field.description or name.replace("_", " ")
    default = "" if field.default in (None, "") else f", default {_short(field.default)}"
    note = f"({env_name(name)}{default})"
    if _is_secret(field):
        note = f"(better by {env_name(name)}: other users see command lines)"
    if annotation is bool:
        option = typer.Option(f"{flag(name)}/--no-{flag(name)[2:]}", help=f"{text} {note}", show_default=False)
        kind: Any = bool | None
    else:
        option = typer.Option(flag(name), help=f"{text} {note}", show_default=False, metavar=_metavar(field))
        kind = str | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _short(default: Any) -> Any:
    if isinstance(default, Path) and default.is_relative_to(ROOT):
        return default.relative_to(ROOT)
    return default


def _metavar(field: FieldInfo) -> str:
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    names = {int: "N", float: "X", Path: "PATH", SecretStr: "SECRET"}
    return names.get(kinds[0], "TEXT")


def _is_secret(field: FieldInfo) -> bool:
    return SecretStr in (get_args(field.annotation) or (field.annotation,))


def _explain(settings: type[BaseSettings], item: Any, values: Values) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    if not item["loc"]:
        return message
    name = str(item["loc"][0])
    where = flag(name) if name in values else env_name(name)
    field = settings.model_fields.get(name)
    value = HIDDEN if field is not None and _is_secret(field) else str(shown(item["input"]))
    return f"{where}={value}: {message[0].lower()}{message[1:]}"
