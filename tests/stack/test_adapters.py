"""Adapters through the whole stack: loaded while it runs, tokens of transformers with each, also behind a failover."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints.adapters import Lora, make_lora, unmerged
from tests.support.checkpoints.models import MIN_GAP, Reference, make_llama
from tests.support.stack import Stack, running_stack
from tests.support.waiting import until

SEED = 20261127
NEW = 24
LONG, KNOWN = 800, 150
"""Tokens of a stream that a fault shall hit, and those of them that transformers computes, each of them anew."""


@dataclass
class House:
    stack: Stack
    reference: Reference
    loras: dict[str, Lora]
    folder: Path

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{self.stack.url}{path}", json=body, timeout=120)

    def tokens(self, model: str, prompt: list[int], new: int = NEW) -> list[int]:
        answer = self.post(
            "/v1/completions", model=model, prompt=prompt, max_tokens=new, temperature=0, ignore_eos=True,
            return_token_ids=True,
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return list(answer.json()["choices"][0]["token_ids"])

    def expected(self, model: str, prompt: list[int], new: int = NEW) -> list[int]:
        if model not in self.loras:
            return self.reference.run([prompt], new)[0][0]
        with unmerged(self.reference.model, self.loras[model]):
            (tokens,), (gap,) = self.reference.run([prompt], new)
        assert gap > MIN_GAP, "choose another seed"
        return tokens


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("adapters")
    reference = make_llama(
        folder.parent / "tiny", SEED, 3, prompt_tokens=(20, 40), output_tokens=NEW, max_position_embeddings=1024
    )
    loras = {name: make_lora(folder / name, reference.model, SEED + at) for at, name in enumerate("abc")}
    with running_stack(
        folder.parent, reference.path, dtype="float32", kernels="cpu", adapter_dir=folder, max_loras=2
    ) as stack:
        found = House(stack, reference, loras, folder)
        for name in loras:
            assert found.post("/v1/load_lora_adapter", lora_name=name, lora_path=name).status_code == 200
        yield found


def test_requests_of_base_and_adapters_at_once_get_the_tokens_of_each(house: House) -> None:
    """More adapters than the worker holds; all prompts are the same, so that a wrong prefix would show."""
    models, prompt = [house.stack.name, *house.loras] * 3, house.reference.prompts[0]
    with ThreadPoolExecutor(len(models)) as pool:
        found = list(pool.map(lambda model: house.tokens(model, prompt), models))
    expected = [house.expected(model, prompt) for model in models[:4]]
    assert found == expected * 3
    assert len({tuple(tokens) for tokens in expected}) == 4, "the adapters change too little"


def test_stream_keeps_its_adapter_behind_a_new_version_and_a_dead_scheduler(house: House) -> None:
    prompt = house.reference.prompts[1]
    expected = house.tokens("a", prompt, LONG)
    assert expected[:KNOWN] == house.expected("a", prompt, KNOWN)
    later = make_lora(house.folder / "later", house.reference.model, SEED + 9)
    found: list[int] = []
    body = {
        "model": "a", "prompt": prompt, "max_tokens": LONG, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "speculate": False,
    }  # fmt: skip
    with httpx.stream("POST", f"{house.stack.url}/v1/completions", json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            found += event["choices"][0]["token_ids"]
            if house.loras["a"] is later:
                continue
            house.stack.kill("scheduler")
            answer = house.post("/v1/load_lora_adapter", lora_name="a", lora_path="later", load_inplace=True)
            assert answer.status_code == 200, answer.text
            house.loras["a"] = later
            state = httpx.get(f"{house.stack.url}/v1/requests/{event['id']}", timeout=60).json()
            assert state["status"] != "finished", "the scheduler died too late"
            house.stack.start("scheduler")
    assert found == expected
    until("the gateway has seen the scheduler that was restarted", house.stack.ready)
    assert house.tokens("a", prompt) == house.expected("a", prompt)


def test_adapter_that_the_worker_cannot_load_ends_its_requests_with_the_reason(house: House) -> None:
    shutil.copytree(house.folder / "b", house.folder / "renamed")
    config = house.folder / "renamed" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 7'))
    assert house.post("/v1/load_lora_adapter", lora_name="gone", lora_path="renamed").status_code == 200
    listed = httpx.get(f"{house.stack.url}/v1/models", timeout=60).json()["data"]
    (model,) = [one for one in listed if one["id"] == "gone"]
    assert model["parent"] == house.stack.name
    for stored in (house.folder / ".store").iterdir():
        if '"lora_alpha": 7' in (stored / "adapter_config.json").read_text():
            (stored / "adapter_model.safetensors").unlink()
    answer = house.post("/v1/completions", model="gone", prompt=house.reference.prompts[0], max_tokens=2)
    assert "adapter_model.safetensors: cannot be read" in answer.json()["error"]["message"]
    assert house.tokens("b", house.reference.prompts[0]) == house.expected("b", house.reference.prompts[0])
