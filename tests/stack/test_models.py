"""Two real models that `orcinus up --models` starts, through one gateway: the tokens of each are transformers'."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.checkpoints.models import Reference, make_llama
from tests.support.launcher import up

REQUESTS = 8
SETTINGS = ("--device", "cpu", "--dtype", "float32")
FILE = """
models:
  one: {source: one, aliases: [gpt-4o], kv_blocks: 256}
  org/Two: {source: two, kv_blocks: 256, max_seqs: 4}
"""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    directory = tmp_path_factory.mktemp("models")
    one = make_llama(directory / "one", seed=11, requests=REQUESTS, hidden_size=32, num_hidden_layers=2)
    two = make_llama(directory / "two", seed=12, requests=REQUESTS, kind="qwen3")
    (directory / "models.yaml").write_text(FILE)
    return {"one": one, "org/Two": two}


@pytest.fixture(scope="module")
def url(references: dict[str, Reference], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory, file = tmp_path_factory.mktemp("up"), references["one"].path.parent / "models.yaml"
    with up(directory, "--models", str(file), *SETTINGS, "--threads", "1") as (address, log):
        assert f"Orcinus serves one, org/Two at {address}/v1" in log.read_text()
        running = json.loads((directory / "run" / "processes.json").read_text())
        assert running.keys() >= {"worker-0", "worker-1", "scheduler-0", "scheduler-1", "gateway-0"}
        yield address


def test_each_model_gives_its_tokens(url: str, references: dict[str, Reference]) -> None:
    listed = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
    assert {card["id"]: card["state"] for card in listed} == {"one": "ready", "org/Two": "ready"}

    def complete(model: str, prompt: list[int], tokens: int) -> list[int]:
        body = {
            "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    cases = [
        (name, prompt, output)
        for model, reference in references.items()
        for name in ([model, "gpt-4o"] if model == "one" else [model])
        for prompt, output in zip(reference.prompts, reference.outputs, strict=True)
    ]
    with ThreadPoolExecutor(len(cases)) as clients:
        got = list(clients.map(lambda case: complete(case[0], case[1], len(case[2])), cases))
    assert got == [output for _, _, output in cases]
