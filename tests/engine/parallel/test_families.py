"""Every family cut in two and in four, and what a rank holds of it. The oracle is transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import ops as kernel_ops
from kernels.cuda import backend, graphs
from kernels.cuda.backend import CudaOps
from kernels.emulator.device import EmulatedDevice
from protos import worker_pb2
from services.worker import engine as engine_module
from services.worker.checkpoint.source import open_weights
from services.worker.models.config import load_config
from services.worker.models.decoder import Decoder
from services.worker.models.layers import MixtureOfExperts
from services.worker.models.weights import shard_of
from services.worker.parallel.state import ParallelState
from shared.errors import ConfigurationError
from tests.engine.driver import Driver, make_engine
from tests.engine.emulated import SHAPE, SMALL
from tests.engine.ranks import Processes
from tests.support.checkpoints.gguf import write_model
from tests.support.checkpoints.models import Reference, make_llama
from tests.support.compiler import needs_compiler

TOKENS = 10
WAIT_S = 300  # while the other stage compiles its emulated kernels
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"kind": "mistral", "sliding_window": 13},
    "qwen2": {"kind": "qwen2"},
    "qwen3": {"kind": "qwen3", "attention_bias": True},
    "mixtral": {"kind": "mixtral"},
    "qwen2-moe-some-layers": {"kind": "qwen2_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2},
    "gemma": {"kind": "gemma"},
    "gemma2": {"kind": "gemma2", "sliding_window": 11, "final_logit_softcapping": 12.0},
    "gemma3": {"kind": "gemma3", "sliding_window": 11, "sliding_window_pattern": 2},
    "gpt2": {"kind": "gpt2"},
    "bloom": {"kind": "bloom", "hidden_size": 96, "n_head": 6},
    "opt": {"kind": "opt"},
    "phi": {"kind": "phi"},
    "phi3": {"kind": "phi3"},
    "neox": {"kind": "neox"},
    "neox-one-after-the-other": {"kind": "neox", "use_parallel_residual": False},
}


def run(processes: Processes, reference: Reference, tp: int, pp: int, kernels: str) -> None:
    """Three sequences in chunks of 13 tokens."""
    settings = {"kernels": kernels, "block_size": 16, "deterministic": kernels == "cpu"}
    with processes.replica(tp, pp, reference.path, **settings) as replica:
        assert Driver(replica, reference.prompts).run_all(TOKENS, 13) == reference.outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_cut_in_two_has_the_references_tokens(processes: Processes, family: str, tmp_path: Path) -> None:
    """The MLP, the heads and the ids in halves, or the layers; with our own kernels and with torch's in turn."""
    reference = make_llama(tmp_path / "tiny", seed=5, requests=3, output_tokens=TOKENS, **FAMILIES[family])
    run(processes, reference, 2, 1, "cpu")
    run(processes, reference, 1, 2, "reference")


@pytest.mark.parametrize("family", [{}, {"kind": "gpt_oss", "head_dim": 32}], ids=["llama", "gpt-oss"])
def test_a_gguf_file_cut_in_two_has_the_references_tokens(
    processes: Processes, tmp_path: Path, family: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    make_llama(tmp_path / "plain", seed=5, requests=1, output_tokens=1, **sizes, **family)
    kinds = {"blk.0.attn_v.weight": "Q6_K", "blk.1.ffn_down.weight": "Q8_0", "blk.1.ffn_down_exps.weight": "MXFP4"}
    write_model(tmp_path / "plain", tmp_path / "x.gguf", lambda name: kinds.get(name, "Q4_K"), tmp_path / "meant")
    reference = Reference(tmp_path / "meant")
    cases = reference.cases(3, (4, 40), TOKENS, seed=3)
    reference.prompts, reference.outputs = [case.prompt for case in cases], [case.tokens for case in cases]
    reference.path = tmp_path / "x.gguf"
    run(processes, reference, 2, 1, "cpu")
    run(processes, reference, 1, 2, "cpu")


@pytest.mark.parametrize(("vocab", "tied"), [(320, True), (322, False)])
def test_fewer_kv_heads_than_ranks_are_held_by_several(
    processes: Processes, tmp_path: Path, vocab: int, tied: bool
) -> None:
    """Two KV heads at four ranks; and a vocabulary that four do not divide."""
    fields = {"vocab_size": vocab, "tie_word_embeddings": tied}
    reference = make_llama(tmp_path / "tiny", seed=6, requests=3, output_tokens=TOKENS, **fields)
    run(processes, reference, 4, 1, "cpu")


def parts(decoder: Decoder) -> int:
    """Bytes of the matrices."""
    packed = [decoder.embed_tokens, decoder.lm_head]
    for layer in decoder.layers:
        attention, mlp = layer.attention, layer.mlp
        packed += [attention.qkv_proj.weight, attention.o_proj.weight]
        if isinstance(mlp, MixtureOfExperts):
            packed += [one for pair in mlp.experts for one in pair]
        else:
            packed += [mlp.gate_up_proj.weight, mlp.down_proj.weight]
    distinct = {id(one): one.weight.nbytes for one in packed if one is not None}
    return sum(distinct.values())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3", "mixtral"])
def test_a_rank_holds_its_share_and_no_more(tmp_path: Path, kind: str) -> None:
    fields = {"kind": kind} | ({} if kind == "gpt2" else {"num_key_value_heads": 4})
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1, **fields).path
    ops, config = kernel_ops.create("reference", torch.device("cpu")), load_config(path)

    def held(tp: int, pp: int, rank: int) -> int:
        return parts(
            Decoder(config, open_weights(path, "auto"), ops, torch.float32, 64, parallel=ParallelState(tp, pp, rank))
        )

    whole, zeros = held(1, 1, 0), 4 * config.hidden_size  # one more row of the embedding, and of the head
    for tp in (2, 4):
        ranks = [held(tp, 1, rank) for rank in range(tp)]
        assert max(ranks) <= whole // tp + 2 * zeros
    stages = [held(1, 2, rank) for rank in range(2)]
    tables = config.vocab_size * zeros
    assert sum(stages) == whole + (tables if config.tied else 0)
    assert max(stages) < whole


def test_experts_are_cut_inside_or_refused_by_the_name_of_their_size(tmp_path: Path) -> None:
    sizes = {"kind": "qwen2_moe", "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 92}
    path = make_llama(tmp_path / "cut", requests=1, output_tokens=1, **sizes).path
    shard = shard_of(load_config(path), ParallelState(8, 1, 1))  # no layer has an MLP of 92
    assert (shard.expert, shard.shared) == (range(6, 12), range(10, 20))
    for fields, name in (
        ({"moe_intermediate_size": 44}, "moe_intermediate_size 44"),
        ({"shared_expert_intermediate_size": 84}, "shared_expert_intermediate_size 84"),
        ({"mlp_only_layers": [0]}, "intermediate_size 92"),
    ):
        path = make_llama(tmp_path / name, requests=1, output_tokens=1, **(sizes | fields)).path
        with pytest.raises(ConfigurationError, match=f"--tp 8 does not divide the model's {name}"):
            shard_of(load_config(path), ParallelState(8, 1, 1))


@pytest.mark.parametrize(
    ("tp", "pp", "words"),
    [
        (3, 1, "--tp 3 does not divide the model's num_attention_heads 4; --tp 2 does"),
        (4, 1, "--tp 4 does not divide the model's intermediate_size 90; --tp 3 does"),
        (1, 3, "--pp 3 is more stages than the model's 2 layers; lower it"),
    ],
)
def test_model_that_cannot_be_cut_is_refused_with_a_remedy(tmp_path: Path, tp: int, pp: int, words: str) -> None:
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1, intermediate_size=90).path
    with pytest.raises(ConfigurationError, match=words):
        shard_of(load_config(path), ParallelState(tp, pp, 0))


def test_the_stages_share_the_layers_as_evenly_as_can_be(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1, num_hidden_layers=7).path
    layers = [shard_of(load_config(path), ParallelState(1, 3, rank)).layers for rank in range(3)]
    assert [index for stage in layers for index in stage] == list(range(7))
    assert sorted(len(stage) for stage in layers) == [2, 2, 3]


def test_deterministic_logprobs_of_three_ranks_ignore_chunks_and_batches(processes: Processes, tmp_path: Path) -> None:
    """Three numbers have more than one sum; where in its tensor a number stands must not choose among them."""
    fields = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    reference = make_llama(tmp_path / "tiny", seed=6, requests=3, prompt_tokens=(30, 60), output_tokens=1, **fields)
    settings = {"kernels": "cpu", "block_size": 16, "deterministic": True}
    found = []
    with processes.replica(3, 1, reference.path, **settings) as replica:
        for chunk, together in ((4096, 1), (7, 1), (13, 3)):
            replica.reset()
            driver = Driver(replica)
            for slot in range(together):
                driver.enter(slot, reference.prompts[slot], sampling=worker_pb2.Sampling(top_p=1, logprobs=4))
            while len(driver.outputs[0]) < TOKENS:
                driver.step({slot: chunk for slot in range(together)})
            found.append((driver.outputs[0], driver.logprobs[0]))
    assert found[1:] == found[:-1]


class Stage(ParallelState):
    """One of two stages that are threads of one process."""

    def __init__(self, rank: int, between: Barrier, said: dict[int, Any], rows: Queue[Tensor]) -> None:
        super().__init__(1, 2, rank)
        self.between, self.said, self.passed = between, said, rows

    def connect(self, device: torch.device, exact: bool = False) -> None:
        pass

    def everyones(self, mine: Any) -> list[Any]:
        self.said[self.rank] = mine
        self.between.wait(WAIT_S)
        found = [self.said[0], self.said[1]]
        self.between.wait(WAIT_S)
        return found

    def texts(self, text: str) -> list[str]:
        return self.everyones(text)

    def least(self, numbers: list[int]) -> list[int]:
        return [min(both) for both in zip(*self.everyones(numbers), strict=True)]

    def send_rows(self, x: Tensor) -> None:
        self.passed.put(x.clone())

    def receive_rows(self, x: Tensor) -> None:
        sent = self.passed.get(timeout=WAIT_S)
        assert sent.shape == x.shape
        x.copy_(sent)


@needs_compiler
def test_stages_with_other_layers_record_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of dense layers is worth graphs of more rows than one of experts, and each waits for the other's rows."""
    fields = {"kind": "qwen2_moe", "num_hidden_layers": 2, "mlp_only_layers": [0], **SHAPE}
    make_llama(tmp_path, seed=5, requests=1, output_tokens=1, **fields)
    monkeypatch.setattr(engine_module, "choose", lambda *_: (CudaOps(EmulatedDevice()), torch.float16))
    monkeypatch.setattr(graphs, "LAUNCHING", 32 * 100_000)  # a layer has 86,016 numbers, or 190,464 with experts
    recorded: list[Any] = []
    rooms_up_to = graphs.rooms_up_to

    def rooms(*limits: Any) -> Any:
        recorded.append(rooms_up_to(*limits))
        return recorded[-1]

    monkeypatch.setattr(backend, "rooms_up_to", rooms)
    settings: dict[str, Any] = SMALL | {"kernels": "emulator", "dtype": "auto", "kv_blocks": 40}
    between, said, rows = Barrier(2), dict[int, Any](), Queue[Tensor]()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(make_engine, tmp_path, 0, Stage(at, between, said, rows), **settings) for at in range(2)]
        for one in made:
            one.result()
    assert len(recorded) == 2 and recorded[0] == recorded[1] and rows.empty()
