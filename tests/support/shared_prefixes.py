"""A load for tests of policies: prompts of which most share a prefix with others, and their greedy answers.

Every fifth request asks for three choices; classes and tenants are mixed, the urgent have a limit for their gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from services.scheduler.core.types import NewRequest
from tests.support import in_process
from tests.support.checkpoints.models import MIN_GAP, VOCAB, Reference, random_prompts

REQUESTS = 24
OUTPUT_TOKENS = 14
POLICY_MODEL = {"requests": 1, "output_tokens": 1, "hidden_size": 32, "seed": 7}
"""MODEL of the policies' tests."""


@dataclass(frozen=True)
class Load:
    """Request i has prompts[i], and outputs[i] is the answer of each of its choices."""

    prompts: list[list[int]]
    outputs: list[list[int]]

    @staticmethod
    def choices(index: int) -> int:
        return 3 if index % 5 == 0 else 1

    def requests(self) -> list[NewRequest]:
        """For the core."""
        made = []
        for index, (prompt, output) in enumerate(zip(self.prompts, self.outputs, strict=True)):
            request = in_process.request(f"r{index}", prompt, len(output), n=self.choices(index))
            request.priority = (2, 3, 2, 0)[index % 4]
            request.tenant = f"tenant-{index % 3}"
            request.tbt_slo_ns = 12_000_000 if request.priority == 0 else 0
            made.append(request)
        return made

    def check(self, recorded: in_process.Recorded) -> None:
        """Every choice of every request has the reference's tokens."""
        assert not recorded.errors
        for index, output in enumerate(self.outputs):
            for choice in range(self.choices(index)):
                assert recorded.tokens[f"r{index}", choice] == output, (index, choice)

    def bodies(self) -> list[dict[str, Any]]:
        """For POST /v1/completions."""
        return [
            {
                "prompt": prompt,
                "max_tokens": len(output),
                "n": self.choices(index),
                "priority": ("normal", "low", "normal", "realtime")[index % 4],
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                **({"tbt_slo_ms": 12} if index % 4 == 3 else {}),
            }
            for index, (prompt, output) in enumerate(zip(self.prompts, self.outputs, strict=True))
        ]


def shared_prefixes(reference: Reference) -> Load:
    """The same for every call; asserts that the reference's two best logits are never close."""
    rng = np.random.default_rng(5)
    prefixes = random_prompts(3, (24, 24), 1)
    prompts = [prefixes[i % 3] + rng.integers(0, VOCAB, rng.integers(1, 14)).tolist() for i in range(REQUESTS - 8)]
    prompts += random_prompts(8, (2, 40), 3)
    order = rng.permutation(REQUESTS).tolist()
    outputs, gaps = reference.run(prompts, OUTPUT_TOKENS)
    assert min(gaps) > MIN_GAP
    return Load([prompts[i] for i in order], [outputs[i] for i in order])


@pytest.fixture(scope="module")
def load(reference: Reference) -> Load:
    return shared_prefixes(reference)
