"""Lines of the log: those of a process that shares its output with other models name its model."""

from __future__ import annotations

import json
import subprocess
import sys

from shared.telemetry import logs
from tests.support.launcher import ROOT, clean_env

LOG = "from shared.telemetry import logs; logs.setup('worker', as_json={as_json}).info('ready')"


def line(as_json: bool, model: str = "") -> str:
    """Return what a process logs after its supervisor has named a model."""
    env = clean_env(**({logs.MODEL: model} if model else {}))
    command = [sys.executable, "-c", LOG.format(as_json=as_json)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stderr


def test_line_names_the_model_where_there_are_several() -> None:
    assert line(False).endswith(" INFO orcinus.worker: ready\n")
    assert line(False, "org/50%s").endswith(" INFO orcinus.worker of org/50%s: ready\n")
    assert "model" not in json.loads(line(True))
    assert json.loads(line(True, "org/Two"))["model"] == "org/Two"
