"""Ranks with weights in 8 bits compute what these weights say: a scale for each output row of what a rank holds.

The oracle is transformers with the weights rounded so and widened again. A matrix that is cut by inputs (attention's
output, the MLP's second) has a scale for each rank's part of a row, which is as near to the checkpoint or nearer.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engine.driver import generated
from tests.engine.ranks import Processes
from tests.support.checkpoints.models import Case, Reference, make_llama
from tests.support.compiler import demand_compiler

CUT_BY_INPUTS = ("o_proj.weight", "down_proj.weight")
TOKENS = 32
INT8 = {"kernels": "cpu", "quantize": "int8", "block_size": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    demand_compiler()
    return make_llama(tmp_path_factory.mktemp("int8") / "tiny", seed=31, requests=1, num_hidden_layers=4)


def rounded(weight: Tensor, parts: int) -> Tensor:
    """[outputs, inputs]: multiples of max |w| / 127 of the row, of each of so many parts of its inputs."""
    pieces = []
    for piece in weight.chunk(parts, dim=1):
        scale = piece.abs().amax(dim=1, keepdim=True) / 127
        pieces.append((piece / scale).round() * scale)
    return torch.cat(pieces, dim=1)


def cases(checkpoint: Reference, tp: int) -> list[Case]:
    """transformers with the weights of `tp` ranks: what it answers."""
    reference = Reference(checkpoint.path)
    with torch.no_grad():
        for name, weight in reference.model.named_parameters():
            if ".layers." in name and weight.ndim == 2:
                weight.copy_(rounded(weight, tp if name.endswith(CUT_BY_INPUTS) else 1))
    return reference.cases(6, (4, 60), TOKENS, seed=37)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_int8_ranks_give_the_tokens_of_their_rounded_weights(
    processes: Processes, checkpoint: Reference, tp: int, pp: int
) -> None:
    asked = cases(checkpoint, tp)
    with processes.replica(tp, pp, checkpoint.path, **INT8) as replica:
        found = generated(replica, [case.prompt for case in asked], TOKENS, microbatches=pp, lookahead=1)
    assert found == [case.tokens for case in asked]
