"""gpt-oss: experts in MXFP4 and in one tensor, sinks, and what depends on neither batch nor ranks.

Logits and tokens of plain checkpoints are in test_model_families.py. The oracles are transformers' unpacking of MXFP4
and its tokens on the weights that these blocks mean.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels.ops import Groups
from services.scheduler.workers.wire import limits_from_wire
from services.worker.checkpoint.source import Checkpoint, powers
from services.worker.models.config import load_config
from services.worker.quantization import method_of
from services.worker.quantization.base import Matrix, Stack
from shared.errors import ConfigurationError, ModelError
from tests.engine.driver import Driver, generated, make_engine
from tests.engine.models.test_quantized_checkpoints import plain
from tests.engine.ranks import Processes
from tests.engine.test_deterministic import Recorder
from tests.engine.test_tokens import all_logits, close
from tests.support.checkpoints.models import Reference, make_llama
from tests.support.checkpoints.quantized import write_mxfp4
from tests.support.compiler import demand_compiler

TOKENS = 64
SIZES = {"kind": "gpt_oss", "hidden_size": 96, "intermediate_size": 64, "head_dim": 32, "sliding_window": 11}
KERNELS = ["reference", "cpu"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """`path` has the experts in MXFP4; beside it, `meant` has what they mean."""
    path = tmp_path_factory.mktemp("gpt-oss")
    make_llama(path / "meant", seed=5, requests=1, output_tokens=1, **SIZES)
    write_mxfp4(path / "meant", path / "mxfp4")
    found = Reference(path / "meant")
    cases = found.cases(3, (4, 60), TOKENS, seed=3)
    found.prompts, found.outputs = [case.prompt for case in cases], [case.tokens for case in cases]
    found.path = path / "mxfp4"
    return found


def test_mxfp4_weights_are_those_that_transformers_unpacks(reference: Reference) -> None:
    """A rank's rows and columns, too; its gates come before what is beside them."""
    source, method = Checkpoint(reference.path), method_of("none", load_config(reference.path).stored)
    tensors = load_file(reference.path / "model.safetensors")
    for part, outputs, inputs in (("gate_up_proj", 128, 96), ("down_proj", 96, 64)):
        name = f"model.layers.1.mlp.experts.{part}"
        exact = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32)
        assert exact.shape == (6, inputs, outputs)
        for rows, columns, held in (
            (range(outputs), range(inputs), "float4-32"),
            (range(8, 40), range(32, 64), "float4-32"),
            (range(4, 32), range(24, 50), ""),
        ):
            for interleaved in (False, True):
                matrix = Matrix(name, outputs, inputs, rows, columns, stack=Stack(4, 6, interleaved))
                pieces = list(method.read(source, matrix, torch.float32))
                assert {piece.group_format if isinstance(piece, Groups) else "" for piece in pieces} == {held}
                found = plain(pieces)
                wanted = exact[4, columns.start : columns.stop, rows.start : rows.stop].t()
                assert torch.equal(found, torch.cat((wanted[0::2], wanted[1::2])) if interleaved else wanted)


def test_scales_are_powers_of_two_and_the_last_is_not_a_number() -> None:
    found = powers(torch.arange(256, dtype=torch.uint8))
    assert found[[0, 1, 126, 127, 128, 254]].double().tolist() == [2.0**n for n in (-127, -126, -1, 0, 1, 127)]
    assert found.isnan().nonzero().tolist() == [[255]]


@pytest.mark.parametrize("kernels", KERNELS)
def test_mxfp4_gives_the_tokens_and_logits_of_its_weights(reference: Reference, kernels: str) -> None:
    demand_compiler(kernels)
    engine = make_engine(reference.path, kernels=kernels, block_size=16)
    limits = limits_from_wire(engine.info())
    assert (limits.experts, limits.experts_per_token) == (6, 3)
    assert generated(engine, reference.prompts, TOKENS) == reference.outputs
    engine.reset()
    tokens = reference.prompts[0] + reference.outputs[0]
    close(all_logits(engine, tokens), reference.logits(tokens))


def test_logits_over_int8_ignore_batches_chunks_and_threads(reference: Reference) -> None:
    """MXFP4 experts, sinks and a window over a KV cache in int8."""
    demand_compiler()
    prompts = [prompt * 3 for prompt in reference.prompts]
    found = []
    for chunk, threads, batches in ((4096, 2, [prompts]), (7, 1, [prompts]), (13, 2, [[prompt] for prompt in prompts])):
        engine = make_engine(
            reference.path, kernels="cpu", block_size=16, dtype="bfloat16", kv_dtype="int8", deterministic=True,
            threads=threads,
        )  # fmt: skip
        logits = []
        for batch in batches:
            driver = Recorder(engine, batch)
            driver.run_all(24, chunk)
            logits += [torch.stack(driver.logits[slot][-24:]) for slot in range(len(batch))]
            engine.reset()
        found.append(torch.stack(logits))
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


@pytest.mark.parametrize(("tp", "pp", "kernels"), [(4, 1, "cpu"), (1, 2, "reference")])
def test_ranks_give_the_tokens_of_the_whole_model(
    processes: Processes, reference: Reference, tp: int, pp: int, kernels: str
) -> None:
    """Of 64 inner numbers, ranks of four have 16, so that the halves of a block of 32 are two ranks'."""
    demand_compiler(kernels)
    with processes.replica(tp, pp, reference.path, kernels=kernels, block_size=16) as replica:
        found = Driver(replica, reference.prompts).run_all(20, 13)
        assert found == [one[:20] for one in reference.outputs]


def test_bfloat16_checkpoint_is_that_of_its_weights_and_may_be_rounded(tmp_path: Path) -> None:
    demand_compiler()
    found = make_llama(tmp_path / "tiny", seed=6, requests=2, output_tokens=24, dtype="bfloat16", **SIZES)
    engine = make_engine(found.path, kernels="cpu", block_size=16)
    assert generated(engine, found.prompts, 24) == found.outputs
    engine.reset()
    expected = found.logits(found.prompts[0])
    for quantize in ("int8", "int4"):
        rounded = all_logits(make_engine(found.path, kernels="cpu", block_size=16, quantize=quantize), found.prompts[0])
        error = float((rounded - expected).abs().max() / expected.abs().max())
        assert 1e-4 < error < 0.5, (quantize, error)


def test_mxfp4_that_does_not_fit_is_refused_by_name(reference: Reference, tmp_path: Path) -> None:
    model = tmp_path / "broken"
    shutil.copytree(reference.path, model)
    good, name = load_file(model / "model.safetensors"), "model.layers.0.mlp.experts.down_proj"
    for part, spoilt, said in (
        ("blocks", good[f"{name}_blocks"][:, :, :1].contiguous(), r"down_proj_blocks has shape \[6, 96, 1, 16\]"),
        ("scales", good[f"{name}_scales"][1:].contiguous(), r"down_proj_scales has shape \[5, 96, 2\]"),
        ("blocks", good[f"{name}_blocks"].float(), "is F32, expected U8"),
    ):
        save_file({**good, f"{name}_{part}": spoilt}, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=said):
            make_engine(model)
    with pytest.raises(ConfigurationError, match="quantized already \\(mxfp4\\)"):
        make_engine(reference.path, quantize="int8")
