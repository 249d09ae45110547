"""lm-evaluation-harness, unmodified, on local tasks: each of its log-likelihoods is transformers'.

`make clients` installs it into an environment of its own. Tolerance: 1e-2 on a sum of log-probabilities in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.settings import DEMO_MODEL
from tests.clients import install
from tests.clients.test_clients import check
from tests.support.checkpoints.models import Reference
from tests.support.stack import Stack, running_stack

NAME, KEY = "lm-eval", "sk-clients"
CHOICES = [
    {"question": "def add(a, b):", "choices": [" return a + b", " return b / a", " import os"], "answer": 0},
    {"question": "for i in", "choices": [" range(10):", " whale", " x"], "answer": 0},
    {"question": "import", "choices": [" os", " def", " naïve 🐋"], "answer": 0},
    {"question": "class Orca:\n", "choices": ["    def __init__(self):", "pass", "    x"], "answer": 0},
]
TEXTS = [{"text": "def greet(name):\n    return 'hello ' + name\n"}, {"text": "x = [i for i in range(3)]\n"}]
CHOICE_TASK = """
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
TEXT_TASK = """
task: local_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""

pytestmark = pytest.mark.skipif(not install.made(NAME), reason="make clients installs the clients")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), DEMO_MODEL, key=KEY, dtype="float32") as running:
        yield running


def write_tasks(folder: Path) -> None:
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    (folder / "choices.yaml").write_text(CHOICE_TASK.format(folder=folder))
    (folder / "texts.yaml").write_text(TEXT_TASK.format(folder=folder))


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"**/samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def likelihood(reference: Reference, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """transformers' log-likelihood of a continuation, and whether it is the greedy one."""
    rows = reference.logits(context + continuation)[len(context) - 1 : -1].double().log_softmax(-1)
    best = rows.argmax(-1).tolist() == continuation
    return sum(float(row[token]) for row, token in zip(rows, continuation, strict=True)), best


HERE = {"tokenizer_backend": "huggingface", "tokenizer": DEMO_MODEL}
REMOTE = {"tokenizer_backend": "remote", "auth_token": KEY}


@pytest.mark.parametrize("backend", [HERE, REMOTE], ids=lambda backend: str(backend["tokenizer_backend"]))
def test_its_log_likelihoods_are_those_of_transformers(stack: Stack, tmp_path: Path, backend: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    write_tasks(tmp_path)
    model_args = {
        "model": stack.name, "base_url": f"{stack.url}/v1/completions", "num_concurrent": 2, "max_length": 512,
        **backend,
    }  # fmt: skip
    check(
        [
            "env", f"OPENAI_API_KEY={KEY}", "HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1", f"HF_HOME={tmp_path / 'home'}",
            install.python_of(NAME), "-m", "lm_eval", "--model", "local-completions", "--batch_size", "3",
            "--model_args", ",".join(f"{name}={value}" for name, value in model_args.items()),
            "--tasks", "local_choices,local_texts", "--include_path", str(tmp_path), "--log_samples",
            "--output_path", str(tmp_path / "out"),
        ],
        tmp_path,
    )  # fmt: skip
    reference, tokenizer = Reference(DEMO_MODEL), AutoTokenizer.from_pretrained(DEMO_MODEL)
    told = samples(tmp_path / "out", "local_choices")
    assert len(told) == len(CHOICES)
    for sample in told:
        question = sample["doc"]["question"]
        for choice, ((logprob, is_greedy),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            # It counts white space at the end of a context to the continuation.
            context = tokenizer(question.rstrip(), add_special_tokens=False)["input_ids"]
            whole = tokenizer(question + choice, add_special_tokens=False)["input_ids"]
            expected, best = likelihood(reference, whole[: len(context)], whole[len(context) :])
            assert float(logprob) == pytest.approx(expected, abs=1e-2)
            assert (str(is_greedy) == "True") == best
    for sample in samples(tmp_path / "out", "local_texts"):
        ids = tokenizer(sample["doc"]["text"], add_special_tokens=False)["input_ids"]
        first = tokenizer.bos_token_id
        if first is None or (backend is REMOTE and first == 0):  # its remote tokenizer passes over an id of 0
            first = tokenizer.eos_token_id
        expected, _ = likelihood(reference, [first], ids)
        while isinstance(found := sample["resps"], list):
            sample["resps"] = found[0]
        assert float(sample["resps"]) == pytest.approx(expected, abs=1e-2)
    stack.settled_empty()
