"""`orcinus batch` and `orcinus chat` as processes against a real gateway."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.conftest import KEY, TEXT
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway_process import GatewayProcess
from tests.support.launcher import ROOT, clean_env


def orcinus(gateway: GatewayProcess, *words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    environment = clean_env(ORCINUS_URL=gateway.url, ORCINUS_API_KEY=KEY)
    command = [sys.executable, "-m", "services.cli", *words]
    return subprocess.run(command, input=typed, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)


def test_batch_has_an_answer_for_each_line(tmp_path: Path, gateway: GatewayProcess, answers: None) -> None:
    lines = [
        ("/v1/completions", gateway.name, {"prompt": "0"}),
        ("/v1/chat/completions", gateway.name, {"messages": [{"role": "user", "content": "1"}]}),
        ("/v1/completions", "wrong", {"prompt": "2"}),
    ]
    with (tmp_path / "in").open("w") as file:
        for number, (url, model, more) in enumerate(lines):
            body = {"model": model, "max_tokens": 100, **more}
            print(json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": body}), file=file)
    done = orcinus(gateway, "batch", str(tmp_path / "in"), str(tmp_path / "out"), "--json")
    summary = json.loads(done.stdout)
    assert (summary["succeeded"], summary["failed"], done.returncode) == (2, 1, 1)
    assert summary["completion_tokens"] == 2 * len(token_ids(TEXT))
    answered = map(json.loads, (tmp_path / "out").read_text().splitlines())
    found = {answer["custom_id"]: answer["response"] for answer in answered}
    assert found["0"]["body"]["choices"][0]["text"] == TEXT
    assert found["1"]["body"]["choices"][0]["message"]["content"] == TEXT
    assert (found["2"]["status_code"], found["2"]["body"]["error"]["code"]) == (404, "model_not_found")


def test_chat_answers_the_lines_of_a_pipe(gateway: GatewayProcess, answers: None) -> None:
    done = orcinus(gateway, "chat", gateway.name, "--max-tokens", "60", typed="Hello\nAgain\n")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{TEXT}\n{TEXT}\n")
