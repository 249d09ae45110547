"""Read the options of commands that are not made of settings: benches, `simulate`, `fleet`, `chaos`.

Their help and errors read as those of the other commands, which services/cli/options.py makes. The standard library
alone: benches run on machines for GPUs with few packages.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
KINDS = {"int": "N", "float": "X", "str": "TEXT", "Path": "PATH", "SecretStr": "SECRET"}
"""Types of values -> words of the help."""


class Parser(argparse.ArgumentParser):
    """A parser with the look of `orcinus --help`. Options are never abbreviated."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, formatter_class=_Help, add_help=False, allow_abbrev=False)
        self.add_argument("-h", "--help", action="help", help="Show this message and exit.")

    def format_help(self) -> str:
        """Return usage, description and options, `--help` last."""
        formatter = self._get_formatter()
        formatter.add_usage(None, self._actions, [])
        formatter.start_section(None)
        formatter.add_text(self.description)
        formatter.end_section()
        positionals, options, *named = self._action_groups
        for group in (*named, positionals, options):
            formatter.start_section((group.title or "").capitalize())
            formatter.add_arguments(sorted(group._group_actions, key=lambda action: action.dest == "help"))
            formatter.end_section()
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        print(f"error: {message}; {self.prog} --help lists the options", file=sys.stderr)
        self.exit(2)


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        return f"Usage: {self._prog} [OPTIONS]\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings) or action.dest
        return names if action.nargs == 0 else f"{names} {_kind(action)}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        if isinstance(default, Path) and default.is_relative_to(ROOT):
            default = default.relative_to(ROOT)
        if "default" in text or default in ("", argparse.SUPPRESS) or isinstance(default, bool):
            return text
        return f"{text} (default {default})".lstrip() if isinstance(default, int | float | str | Path) else text


def _kind(action: argparse.Action) -> str:
    """Return the word for the value of an option."""
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "|".join(map(str, action.choices))
    reader = action.type or str
    name = getattr(reader, "__annotations__", {}).get("return", getattr(reader, "__name__", ""))
    return KINDS.get(str(name), "TEXT")
