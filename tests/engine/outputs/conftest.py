"""A small model and prompts of all lengths, for tests of what a model says beside its tokens."""

from __future__ import annotations

import pytest

from tests.support.checkpoints.models import Reference, make_llama, random_prompts


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """With prompts that share a prefix of two blocks, and a prompt of one token."""
    path = tmp_path_factory.mktemp("outputs") / "tiny"
    found = make_llama(path, seed=4, requests=1, output_tokens=1, hidden_size=48)
    shared = random_prompts(1, (35, 35), 8)[0]
    found.prompts = random_prompts(6, (3, 60), 7) + [shared + end for end in random_prompts(4, (1, 20), 9)] + [[5]]
    return found
