"""Build settings from the options of a command line: every field is an option, and every error names it.

Used by the command line and the launcher. An option is passed on as the text that was typed; pydantic reads it, so the
command line and the environment obey the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

from shared.errors import ConfigurationError
from shared.messages import HIDDEN, hide_password

OTHER_FORMS = {
    "int_parsing": "not a whole number; give one",
    "float_parsing": "not a number; give one",
    "bool_parsing": "not a truth value; give true or false",
}
"""Errors of pydantic, which says them at length."""
Values = dict[str, Any]
S = TypeVar("S", bound=BaseSettings)


def flag(name: str) -> str:
    """Return the option of a field: `--max-seqs` for `max_seqs`."""
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    """Return the environment variable of a field."""
    return f"ORCINUS_{name.upper()}"


def fields_of(*classes: type[BaseSettings]) -> dict[str, FieldInfo]:
    """Return the fields of all classes; the first class with a name describes it."""
    fields: dict[str, FieldInfo] = {}
    for settings in classes:
        for name, field in settings.model_fields.items():
            fields.setdefault(name, field)
    return fields


def build(settings: type[S], values: Values, name_of: Callable[[str], str] = flag) -> S:
    """Return the settings of one service from its options in `values`, the environment and the defaults.

    name_of: how an error calls the source of a field of `values`. Raise ConfigurationError naming the option or
    variable, the value and the limit.
    """
    known_values = {name: value for name, value in values.items() if name in settings.model_fields}
    try:
        return settings(**known_values)
    except ValidationError as error:
        raise ConfigurationError(
            "; ".join(_explain(settings, item, known_values, name_of) for item in error.errors())
        ) from None


def source(settings: BaseSettings, name: str, values: Values) -> str:
    """Return the source of a setting: option, environment, default, or derived from other settings."""
    if name in values:
        return "option"
    if name in EnvSettingsSource(type(settings))():
        return "environment"
    return "derived" if name in settings.model_fields_set else "default"


Shown = dict[str, tuple[Any, str]]
"""Settings that may be printed: field -> value, source."""


def effective(settings: BaseSettings, values: Values, env: Mapping[str, str] = MappingProxyType({})) -> Shown:
    """Return all settings of a service. env: variables that its process gets beyond those of this one."""
    rows: Shown = {}
    for name, field in type(settings).model_fields.items():
        value, environment_value = hide_secrets(getattr(settings, name)), env.get(env_name(name))
        if environment_value and is_secret(field):
            environment_value = HIDDEN
        if environment_value is not None and name not in values and hide_secrets(environment_value) != str(value):
            rows[name] = hide_secrets(environment_value), "derived"
        else:
            rows[name] = value, source(settings, name, values)
    return rows


def hide_secrets(value: Any) -> Any:
    """Return a value that may be printed: secrets hidden, paths as text."""
    if isinstance(value, SecretStr):
        return HIDDEN if value.get_secret_value() else ""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) and "://" in value:
        return hide_password(value)
    return value


def is_secret(field: FieldInfo) -> bool:
    return SecretStr in (get_args(field.annotation) or (field.annotation,))


def _explain(settings: type[BaseSettings], item: Any, values: Values, name_of: Callable[[str], str]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "string_pattern_mismatch":
        is_address = "http" in item["ctx"]["pattern"]
        message = f"not allowed; give {'http://HOST:PORT' if is_address else 'characters of [a-z0-9._-]'}"
    message = OTHER_FORMS.get(item["type"], message)
    if not item["loc"]:
        return message
    name = str(item["loc"][0])
    source = name_of(name) if name in values else env_name(name)
    field = settings.model_fields.get(name)
    value = HIDDEN if field is not None and is_secret(field) else str(hide_secrets(item["input"]))
    return f"{source}={value}: {message[0].lower()}{message[1:]}"
