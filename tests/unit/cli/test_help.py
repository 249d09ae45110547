"""One style for the help of all commands, whichever library reads their options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from shared.command_line.arguments import KINDS

HELP = (Path(__file__).parents[1] / "snapshots" / "cli.txt").read_text()
"""The help that the commands print, as snapshots/test_snapshots.py holds it."""
COMMANDS = dict(re.findall(r"^\$ (orcinus.*?) ?--help\n(.*?)(?=^\$ |\Z)", HELP, re.MULTILINE | re.DOTALL))
OPTION = re.compile(r"^  (-[\w-]+(?:, --[\w-]+| / --[\w-]+)*)(?: (\S+))?(?:  |$)", re.MULTILINE)
KIND = re.compile(rf"{'|'.join(set(KINDS.values()))}|[A-Z]+(,(\.\.|[A-Z]))?|[\w.|-]*\|[\w.|-]+|[A-Z]+:[A-Z]+(,\.\.)?")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_a_command_has_the_common_style(command: str) -> None:
    text = COMMANDS[command]
    assert text.startswith(f"Usage: {command} [OPTIONS]")
    assert re.search(r"\n\n  [A-Z][^\n]+", text), "a description"
    assert not re.search(r"<\w+>|\[default|\[required|^options:", text, re.MULTILINE)
    options = OPTION.findall(text)
    assert "-h, --help" in [name for name, _ in options]
    wrong = [(name, kind) for name, kind in options if kind and not KIND.fullmatch(kind)]
    assert not wrong


def test_every_kind_of_command_is_looked_at_and_listed_in_whole_sentences() -> None:
    assert {"orcinus", "orcinus up", "orcinus keys add", "orcinus pull", "orcinus fleet"} <= COMMANDS.keys()
    assert {"orcinus bench serve", "orcinus simulate", "orcinus chaos"} <= COMMANDS.keys()
    for command in ("orcinus", "orcinus bench", "orcinus keys"):
        listed = COMMANDS[command].partition("\nCommands:\n")[2]
        assert listed.count("\n") > 3 and "..." not in listed


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (["up", "--nonsense"], "no such option: --nonsense; orcinus up --help lists the options"),
        (["nonsense"], "no such command 'nonsense'; orcinus --help lists the commands"),
        (["keys", "revok"], "no such command 'revok'; did you mean 'revoke'; orcinus keys --help lists the commands"),
        (["keys", "add"], "missing argument 'name'; orcinus keys add --help lists the options"),
        (["up", "--port"], "option '--port' requires an argument; the command with --help lists the options"),
    ],
)
def test_wrong_use_of_a_command_is_one_line_with_the_remedy(wrong: list[str], line: str) -> None:
    done = CliRunner().invoke(app, wrong, prog_name="orcinus")
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"error: {line}\n")
