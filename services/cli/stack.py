"""Find the stack that a command is about.

The options and the environment name it; what they leave out is that of the stack that `orcinus up` runs here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic_settings import EnvSettingsSource

from services.cli.options import build
from services.launcher import redis_server
from services.launcher.rundir import RunDir, StackFacts
from shared.command_line.options import Values
from shared.errors import ConfigurationError
from shared.messages import hide_password
from shared.models.models_file import read_models
from shared.settings import CommonSettings, GatewaySettings, LauncherSettings

NO_STACK = "no stack runs here; start one with `make run` or `orcinus up`, or name its Redis with --redis-url"


@dataclass(frozen=True, slots=True)
class Target:
    """The stack of a command. facts: of the local stack, if this is the one."""

    settings: CommonSettings
    launcher: LauncherSettings
    facts: StackFacts | None


def find(values: Values) -> Target:
    """Return the stack that the options, the environment and the run directory name. Raises ConfigurationError."""
    settings, launcher = build(CommonSettings, values), build(LauncherSettings, values)
    facts = RunDir(launcher.run_dir).running()
    given = set(values) | set(EnvSettingsSource(CommonSettings)())
    if facts is None or ("redis_url" in given and facts.redis_url != hide_password(settings.redis_url)):
        target = Target(settings, launcher, None)
        names = [] if given & {"model", "served_model_name"} else models_of_file(target)
        return (
            replace(target, settings=build(CommonSettings, values | {"served_model_name": names[0]}))
            if names
            else target
        )
    missing = {} if given & {"model", "served_model_name"} else {"served_model_name": facts.model}
    if "shard" not in given:
        missing["shard"] = facts.shard
    settings = build(CommonSettings, values | missing)
    return Target(settings, launcher, facts if settings.served_model_name == facts.model else None)


def models_of_file(target: Target) -> list[str]:
    """Return the names in the file of models of the environment, else of the local stack. Raise ConfigurationError."""
    path = EnvSettingsSource(GatewaySettings)().get("models")
    if not path and target.facts is not None:
        running = RunDir(target.launcher.run_dir).running_settings() or {}
        path, _ = running.get("gateway", {}).get("models", (None, ""))
    return [entry.name for entry in read_models(Path(path)).models] if path else []


def models_of(target: Target, values: Values) -> list[str]:
    """Return the models that a command is about: the one that its options name, else all of `models_of_file`, the
    stack's own first. Raise ConfigurationError.
    """
    first = target.settings.served_model_name
    named = values.keys() & {"model", "served_model_name"}
    return [first] if named else list(dict.fromkeys([first, *models_of_file(target)]))


def none_here(settings: CommonSettings, launcher: LauncherSettings) -> bool:
    """Return whether nothing names a Redis, and no stack runs here that has one."""
    return "redis_url" not in settings.model_fields_set and not RunDir(launcher.run_dir).owner()


def reachable_redis(settings: CommonSettings, launcher: LauncherSettings) -> tuple[str, dict[str, str]]:
    """Return `redis_address` of a server that answers. Raises ConfigurationError, with NO_STACK where none is meant."""
    url, access = redis_address(settings, launcher)
    try:
        redis_server.check_server(url, **access)
    except ConfigurationError as error:
        if none_here(settings, launcher):
            raise ConfigurationError(NO_STACK) from error
        raise
    return url, access


def redis_address(settings: CommonSettings, launcher: LauncherSettings) -> tuple[str, dict[str, str]]:
    """Return URL and options of the configured Redis, else of the local stack's, else of the default one."""
    if "redis_url" not in settings.model_fields_set and RunDir(launcher.run_dir).owner():
        local = redis_server.local(launcher.run_dir)
        if local is not None:
            return local[0], {"password": local[1]}
    return settings.redis_url, settings.redis_options()
