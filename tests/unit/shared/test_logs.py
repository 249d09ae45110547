"""Lines of the log: those of a process that shares its output with other models name its model."""

from __future__ import annotations

import json
import subprocess
import sys

from shared.telemetry import logs
from tests.support.launcher import ROOT, clean_env

LOG = "from shared.telemetry import logs; log = logs.setup('worker', as_json={as_json}); {call}"


def line(as_json: bool, model: str = "", call: str = "log.info('ready')") -> str:
    """Return what a process logs after its supervisor has named a model."""
    env = clean_env(**({logs.MODEL: model} if model else {}))
    command = [sys.executable, "-c", LOG.format(as_json=as_json, call=call)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stderr


def test_line_names_the_model_where_there_are_several() -> None:
    assert line(False).endswith(" INFO orcinus.worker: ready\n")
    assert line(False, "org/50%s").endswith(" INFO orcinus.worker of org/50%s: ready\n")
    assert "model" not in json.loads(line(True))
    assert json.loads(line(True, "org/Two"))["model"] == "org/Two"


FOREIGN = (
    "/v1/x\n2026-01-01 00:00:00 ERROR orcinus.gateway: all keys are revoked\x1b[2J\x9b1A\u2028\x7f\U000e0041 größer"
)
"""A path as a client sent it, decoded."""


def test_foreign_text_begins_no_line_and_drives_no_terminal() -> None:
    said = line(False, call=f"log.info('client of %s left', {FOREIGN!r})")
    assert said.count("\n") == 1 and len(said.splitlines()) == 1
    assert said.endswith(r"are revoked\x1b[2J\x9b1A\u2028\x7f\U000e0041 größer left" + "\n")
    as_json = line(True, call=f"log.info('%s', {FOREIGN!r})")
    assert as_json.removesuffix("\n").isprintable() and json.loads(as_json)["text"] == FOREIGN


def test_traceback_keeps_its_lines_and_drives_no_terminal() -> None:
    call = "exec('try: raise ValueError(chr(27) + chr(99))\\nexcept ValueError: log.exception(chr(10))')"
    said = line(False, call=call)
    assert said.splitlines()[0].endswith(r"ERROR orcinus.worker: \n")
    assert said.splitlines()[-1] == r"ValueError: \x1bc" and "Traceback" in said
