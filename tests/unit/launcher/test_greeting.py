"""What a stack that is ready prints: addresses, commands that can be typed, one line that works."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from services.launcher import up
from shared.settings import DEMO_MODEL, GatewaySettings


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an environment of its own, which the shell has not activated."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "orcinus"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_command_is_named_by_its_path_in_a_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert up.own_command() == ".venv/bin/orcinus"
    monkeypatch.chdir("/usr")
    assert up.own_command() == str(checkout / ".venv/bin/orcinus")
    monkeypatch.setenv("PATH", str(checkout / ".venv/bin"))
    assert up.own_command() == "orcinus"


def test_greeting_names_addresses_and_a_line_to_send(checkout: Path) -> None:
    lines = up.greeting(GatewaySettings(model=DEMO_MODEL, port=8000, ops_port=8001))
    assert "http://127.0.0.1:8000/v1" in lines[0] and "toy" in lines[1]
    assert "http://127.0.0.1:8000/ " in lines[2] and "http://127.0.0.1:8001/dashboard" in lines[2]
    assert lines[2].endswith(".venv/bin/orcinus status")
    assert lines[3].startswith("curl http://127.0.0.1:8000/v1/chat/completions ") and up.DEMO_PROMPT in lines[3]
    assert "Authorization" not in lines[3]
    lines = up.greeting(GatewaySettings(model=DEMO_MODEL), needs_key=True)
    assert '-H "Authorization: Bearer $ORCINUS_API_KEY"' in lines[3]


@pytest.mark.parametrize(
    ("architecture", "endpoint", "field"),
    [
        ("LlamaForCausalLM", "completions", "prompt"),
        ("BertModel", "embeddings", "input"),
        ("BertForSequenceClassification", "rerank", "documents"),
    ],
)
def test_line_to_send_is_one_that_the_model_is_for(
    tmp_path: Path, architecture: str, endpoint: str, field: str
) -> None:
    config = {
        "architectures": [architecture], "model_type": "bert" if "Bert" in architecture else "llama", "num_labels": 1,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
        "max_position_embeddings": 128, "vocab_size": 300, "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    *_, addresses, line = up.greeting(GatewaySettings(model=tmp_path))
    assert f"/v1/{endpoint} " in line
    assert json.loads(shlex.split(line)[-1]).keys() - {"max_tokens", "temperature"} >= {"model", field}
    assert ("max_tokens" in line) == addresses.startswith("chat: ") == (endpoint == "completions")
