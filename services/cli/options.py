"""Make typer commands from the settings classes: every field is an option.

The classes in shared/settings.py are the only source of names, help, defaults and limits;
shared/command_line/options.py reads the options.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import Abort, TyperException

from shared.command_line import options
from shared.command_line.arguments import KINDS
from shared.command_line.options import Values, env_name, fields_of, flag, is_secret
from shared.errors import ConfigurationError
from shared.settings import ROOT, SchedulerSettings

S = TypeVar("S", bound=BaseSettings)


class Command(TyperCommand):
    """A command with arguments and options declared by hand that look like those made of settings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write two columns: `--timeout-s X`, and the text with `(default 60.0)`."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                name, text = record
                is_argument = parameter.param_type_name == "argument"
                if is_argument:
                    name = name.partition(" <")[0]
                for kind, word in KINDS.items():
                    name = re.sub(f"<{kind}( range)?>", word, name, flags=re.IGNORECASE)
                text = re.sub(
                    r" *\[default: (.*?)(; .*)?\]$", r" (default \1)", text.removesuffix("[required]").rstrip()
                )
                sections["Arguments" if is_argument else "Options"].append((name, text))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Group(TyperGroup):
    """A group of commands. Its help wraps the first sentence of each command instead of cutting it off."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and exit; wrong use is one line with the remedy, as other errors are."""
        exits = extra.get("standalone_mode", True)
        extra["standalone_mode"] = False
        if not exits:
            return super().main(*args, **extra)
        try:
            code = super().main(*args, **extra)
        except TyperException as error:
            print(_remedy(error), file=sys.stderr)
            sys.exit(error.exit_code)
        except Abort:
            print("stopped", file=sys.stderr)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(limit=1000)) for name, one in commands if one])


def _remedy(error: TyperException) -> str:
    """Return the line for wrong use of a command, or the help where a command without arguments shows it."""
    text = error.format_message()
    if text.startswith("Usage: "):
        return text
    context = getattr(error, "ctx", None)  # the parser of options knows none
    where = context.command_path if context else "the command with"
    what = "commands" if context and isinstance(context.command, TyperGroup) else "options"
    problem = f"{text[:1].lower()}{text[1:]}".replace(". Did you mean", "; did you mean").rstrip(".?")
    return f"error: {problem}; {where} --help lists the {what}"


def settings_command(app: typer.Typer, name: str, *classes: type[BaseSettings]) -> Callable[[Any], Any]:
    """Decorates `run(values, ...)`: adds the command with an option for every field of `classes`.

    `values` maps the names of the given options to what was typed; further parameters stay ordinary typer options.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        fields = fields_of(*classes)
        declared = list(inspect.signature(run, eval_str=True).parameters.values())[1:]

        def command(**given: Any) -> None:
            extra = {parameter.name: given.pop(parameter.name) for parameter in declared}
            run({key: value for key, value in given.items() if value is not None}, **extra)

        parameters = [_parameter(key, field) for key, field in fields.items()]
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            all_parameters := [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in declared] + parameters
        )
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in all_parameters}
        app.command(name, cls=Command, help=inspect.getdoc(run))(command)
        return run

    return decorate


def build(settings: type[S], values: Values) -> S:
    """Return settings as shared.command_line.options.build does, with the policy checked.

    The command line knows all services; shared code does not know the scheduler's policies.
    """
    built = options.build(settings, values)
    if isinstance(built, SchedulerSettings):
        check_policy(built.policy, flag("policy") if "policy" in values else env_name("policy"))
    return built


def check_policy(policy: str, named: str) -> None:
    """Raise ConfigurationError for a policy that the scheduler does not know. named: what gives it."""
    from services.scheduler.core.policy.presets import parse  # numpy: not for commands that schedule nothing

    try:
        parse(policy)
    except ValueError as error:
        raise ConfigurationError(f"{named}={policy}: {error}") from None


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    annotation = field.annotation
    text = field.description or name.replace("_", " ")
    default = "" if field.default in (None, "") else f", default {_short(field.default)}"
    note = f"({env_name(name)}{default})"
    if is_secret(field):
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
    return KINDS.get(kinds[0].__name__, "TEXT")
