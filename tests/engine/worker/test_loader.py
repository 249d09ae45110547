"""Reading weights: memory at its peak, made-up weights, names and files as checkpoints really have them."""

from __future__ import annotations

import json
import math
import mmap
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kernels.reference  # noqa: F401 - registers the backend
from kernels import ops as kernel_ops
from kernels.cpu.memory import large
from services.worker import main
from services.worker.checkpoint import fingerprint, source
from services.worker.checkpoint.fingerprint import Fingerprint
from services.worker.checkpoint.source import SHIFT, SPAN, Checkpoint, Dummy, open_weights
from services.worker.checkpoint.stored import GGUF_FORMATS
from services.worker.kv.cache import room_for
from services.worker.models.config import load_config
from services.worker.models.decoder import Decoder, check_matrices
from services.worker.models.matrices import shapes
from services.worker.parallel.state import ParallelState
from services.worker.quantization import METHODS
from shared.errors import ConfigurationError, ModelError
from shared.settings import WorkerSettings
from tests.engine.driver import Driver, fingerprint_of, make_engine
from tests.engine.models.test_model_families import FAMILIES
from tests.engine.test_tokens import all_logits, close
from tests.support.checkpoints import w8a8
from tests.support.checkpoints.gguf import write_file
from tests.support.checkpoints.models import Reference, make_llama
from tests.support.checkpoints.quantized import add_config
from tests.support.compiler import demand_compiler

LOADS_A_MODEL = """
import sys, torch
from pathlib import Path
import kernels.cpu, kernels.reference
from kernels import ops
from services.worker.parallel.state import ParallelState
from services.worker.models.config import load_config
from services.worker.models.decoder import Decoder
from services.worker.checkpoint.source import Checkpoint
from services.worker.models.gguf import GgufWeights
from services.worker.quantization import method_of

def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field + ":"))

path, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
backend = ops.create(sys.argv[3], torch.device("cpu"))
torch.ones(8, 8) @ torch.ones(8, 8)
open("/proc/self/clear_refs", "w").write("5")  # proc(5): the peak starts anew
before = kilobytes("VmRSS")
parallel = ParallelState(*map(int, sys.argv[4:]))
config = load_config(path)
source = GgufWeights(config, path) if path.suffix == ".gguf" else Checkpoint(path)
decoder = Decoder(config, source, backend, dtype, 64, method_of("none", config.stored), parallel)
print(kilobytes("VmHWM") - before)
"""
LARGE: dict[str, tuple[Any, str, str]] = {
    # What takes most of the memory: two matrices of the vocabulary, or one of them and wide layers.
    "llama": (
        transformers.LlamaConfig(
            vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8
        ),
        "bfloat16",
        "float32",
    ),
    "few-wide-layers": (
        transformers.LlamaConfig(
            vocab_size=4000, hidden_size=1024, intermediate_size=7168, num_hidden_layers=2, num_attention_heads=8
        ),
        "float32",
        "float32",
    ),
    "gpt2": (transformers.GPT2Config(n_embd=640, n_layer=13, n_head=8), "float32", "bfloat16"),
    "bloom": (transformers.BloomConfig(hidden_size=512, n_layer=8, n_head=8, vocab_size=50000), "float16", "float32"),
}


@pytest.mark.parametrize(
    ("name", "kernels", "parallel"),
    [
        ("few-wide-layers", "reference", (1, 1, 0)),
        ("bloom", "reference", (1, 1, 0)),
        ("llama", "cpu", (1, 1, 0)),
        ("llama", "cpu", (2, 2, 0)),
        ("gpt2", "reference", (2, 1, 1)),
    ],
)
def test_peak_memory_while_loading_is_little_above_the_weights(
    name: str, kernels: str, parallel: tuple[int, int, int], tmp_path: Path
) -> None:
    """Everything counts: what is allocated and the pages of files that are in memory. parallel: tp, pp and the rank."""
    demand_compiler(kernels)
    config, on_disk, held = LARGE[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    parameters = dict(model.named_parameters())
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    save_file(
        {key: torch.zeros(value.shape, dtype=getattr(torch, on_disk)) for key, value in parameters.items()},
        tmp_path / "model.safetensors",
    )
    bytes_held = sum(value.numel() for value in parameters.values()) * getattr(torch, held).itemsize
    assert_peak(tmp_path, held, kernels, parallel, bytes_held // (parallel[0] * parallel[1]))


def test_peak_memory_of_w8a8_is_little_above_the_weights(tmp_path: Path) -> None:
    """Integers are moved by 128 in place: copies of pieces, freed between matrices that stay, leave holes."""
    demand_compiler()
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=5, num_attention_heads=16
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    add_config(tmp_path, quantization_config=w8a8.config())
    tensors, bytes_held = {}, 0
    for name, value in model.named_parameters():
        is_rounded = value.ndim == 2 and ".layers." in name
        tensors[name] = torch.zeros(value.shape, dtype=torch.int8 if is_rounded else torch.bfloat16)
        if is_rounded:
            tensors[f"{name}_scale"] = torch.zeros(len(value), 1, dtype=torch.bfloat16)
            bytes_held += value.numel()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_peak(tmp_path, "bfloat16", "cpu", (1, 1, 0), bytes_held)


@pytest.mark.parametrize("held", ["Q4_K", "IQ4_XS"])
def test_peak_memory_of_experts_in_one_tensor_is_little_above_them(tmp_path: Path, held: str) -> None:
    """Unpacked, one tensor would take as much as all of them do packed."""
    demand_compiler()
    layers, experts, size = 6, 48, 512
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}

    def add(name: str, kind: str, *shape: int) -> None:
        numbers, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        tensors[f"{name}.weight"] = kind, shape, bytes(math.prod(shape) // numbers * block_bytes)

    for layer in (f"blk.{index}." for index in range(layers)):
        for part in ("attn_norm", "ffn_norm"):
            add(layer + part, "F32", size)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(layer + part, "Q4_K", size, size)
        for part in ("attn_q_norm", "attn_k_norm"):
            add(layer + part, "F32", size // 8)
        add(f"{layer}ffn_gate_inp", "F32", experts, size)
        for part in ("gate", "up", "down"):
            add(f"{layer}ffn_{part}_exps", held, experts, size, size)
    add("token_embd", "Q4_K", 32, size)
    add("output_norm", "F32", size)
    sizes = {
        "context_length": 64, "embedding_length": size, "block_count": layers, "feed_forward_length": size,
        "attention.head_count": 8, "expert_count": experts, "expert_used_count": 2, "expert_feed_forward_length": size,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    vocabulary = {"general.architecture": "qwen3moe", "tokenizer.ggml.tokens": ["a"]}
    write_file(tmp_path / "x.gguf", {**vocabulary, **{f"qwen3moe.{key}": sizes[key] for key in sizes}}, tensors)
    packed = sum(
        math.prod(shape) * GGUF_FORMATS[kind].bits_per_weight
        for kind, shape, _ in tensors.values()
        if kind in GGUF_FORMATS
    )
    assert_peak(tmp_path / "x.gguf", "float32", "cpu", (1, 1, 0), int(packed) // 8)


def assert_peak(model: Path, held: str, kernels: str, parallel: tuple[int, int, int], bytes_held: int) -> None:
    """Demand that a process which loads this model takes little more memory at its peak than the weights do."""
    assert bytes_held > 50 << 20
    arguments = [str(model), held, kernels, *map(str, parallel)]
    ran = subprocess.run([sys.executable, "-c", LOADS_A_MODEL, *arguments], capture_output=True, text=True, check=True)
    peak = int(ran.stdout) * 1024
    print(f"{model.name}, {kernels}: {peak / bytes_held:.3f} of {bytes_held >> 20} MiB")
    assert 0.95 * bytes_held < peak < 1.2 * bytes_held


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma3", "phi", "opt", "gpt-oss"])
def test_dummy_weights_serve_any_config_the_same_every_time(family: str, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1, **FAMILIES[family]).path
    real = make_engine(path).model_hash
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        make_engine(path)
    first, second = (make_engine(path, load_format="dummy") for _ in range(2))
    logits = all_logits(first, [1, 2, 3, 200])
    assert logits.isfinite().all() and 0.01 < logits.std() < 100
    assert torch.equal(logits, all_logits(second, [1, 2, 3, 200]))
    assert first.model_hash.startswith("dummy-") and first.model_hash == second.model_hash != real
    assert len(Driver(first, [[1, 2, 3]]).run(0, 8)) == 8


def test_dummy_weights_differ_between_tensors_and_pieces() -> None:
    dummy, shape = Dummy(Path()), (4096, 4096)
    pieces = list(dummy.pieces("a.weight", shape, torch.float32, range(shape[0]), range(shape[1])))
    assert len(pieces) > 1 and sum(len(piece) for piece in pieces) == 4096
    assert not torch.equal(pieces[0], pieces[1])
    assert not torch.equal(dummy.take("b.weight", (8, 8), torch.float32), dummy.take("a.weight", (8, 8), torch.float32))
    assert float(pieces[0].std()) == pytest.approx(4096**-0.5, rel=0.01)


@pytest.mark.parametrize("shape", [(9,), (9, 6), (9, 4, 5)])
def test_dummy_weights_of_ranks_are_parts_of_one_tensor(shape: tuple[int, ...]) -> None:
    dummy = Dummy(Path())
    assert torch.equal(dummy.read("a.weight", shape, 3, 4), dummy.read("a.weight", shape, 0, 9)[3:7])


@pytest.mark.parametrize("shape", [(128256,), (128256, 64), (128, 1536, 64)])
def test_dummy_weights_of_the_last_rows_are_drawn_alone(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, real = 0, torch.Tensor.uniform_

    def uniform(x: torch.Tensor, *bounds: float, generator: torch.Generator) -> torch.Tensor:
        nonlocal drawn
        drawn += x.numel()
        return real(x, *bounds, generator=generator)

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform)
    last = Dummy(Path()).read("a.weight", shape, shape[0] - 1, 1)
    assert last.shape == (1, *shape[1:])
    of_last = shape[-1] + SHIFT * (last[..., 0].numel() - 1) if len(shape) > 1 else 1
    assert drawn <= of_last + 2 * SPAN


@pytest.mark.parametrize("name", FAMILIES)
def test_matrices_of_every_family_are_checked_before_loading(name: str, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1, **FAMILIES[name]).path
    config, source = load_config(path), Checkpoint(path)
    check_matrices(config, source, METHODS["none"])
    tensors = load_file(path / "model.safetensors")
    checked = {key for key, value in tensors.items() if value.ndim > 1 and not key.endswith("bias")}
    checked = {key for key in checked if not key.startswith(config.family.unread)}
    turned = f"{config.family.names.layers}." if config.family.transposed else "no such matrix"
    named = {key: shape[::-1] if turned in key else shape for key, shape in shapes(config)}
    assert named == {key: tuple(tensors[key].shape) for key in checked}
    for key in checked:
        save_file({**tensors, key: torch.zeros(3, 5)}, path / "model.safetensors")
        with pytest.raises(ModelError, match=rf"{key} has shape \[3, 5\]"):
            check_matrices(config, Checkpoint(path), METHODS["none"])


def test_absurd_size_is_a_misshapen_tensor_before_any_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1).path
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "intermediate_size": 1 << 24}))
    monkeypatch.setattr("services.worker.engine.choose", lambda *_: pytest.fail("memory was asked for"))
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape"):
        make_engine(path)


@pytest.mark.parametrize("tied", [False, True])
def test_made_up_weights_that_no_memory_holds_are_refused(tied: bool, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1).path
    raw = json.loads((path / "config.json").read_text())
    size = {"vocab_size": 1 << 24, "hidden_size": 1 << 24, "tie_word_embeddings": tied}
    (path / "config.json").write_text(json.dumps(raw | size))
    with pytest.raises(ConfigurationError, match=r"no memory for the weights .*; use a smaller model"):
        make_engine(path, load_format="dummy", kernels="auto" if tied else "reference")


@pytest.mark.parametrize(
    "ask",
    [lambda: torch.empty(1 << 45), lambda: mmap.mmap(-1, 1 << 45), lambda: np.zeros(1 << 45), lambda: large(1 << 45)],
)
def test_refused_memory_is_a_configuration_error_with_a_remedy(ask: Any) -> None:
    with (
        pytest.raises(ConfigurationError, match=r"no memory for the pool \(.*; lower it"),
        room_for("the pool", "lower it"),
    ):
        ask()


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), PermissionError(13, "no"), ValueError("x")])
def test_errors_that_are_not_about_memory_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)), room_for("the pool", "lower it"):
        raise error


def test_impossible_step_size_is_refused_as_a_setting() -> None:
    for name in ("max_step_tokens", "kv_blocks", "host_blocks"):
        with pytest.raises(ValueError, match=name):
            WorkerSettings.model_validate({name: 10**12})


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt"])
def test_names_without_what_stands_before_all_of_them_are_found(family: str, tmp_path: Path) -> None:
    """GPT-2 and BLOOM on the Hub were saved without their head, and so without `transformer.`."""
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1, **FAMILIES[family]).path
    before = all_logits(make_engine(path), [3, 1, 4, 1, 5])
    base = "model." if family == "opt" else "transformer."
    tensors = load_file(path / "model.safetensors")
    assert all(name.startswith(base) for name in tensors)
    save_file({name.removeprefix(base): value for name, value in tensors.items()}, path / "model.safetensors")
    assert torch.equal(all_logits(make_engine(path), [3, 1, 4, 1, 5]), before)


def test_text_of_a_model_with_images_is_found_under_either_prefix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1, **FAMILIES["gemma3-and-images"]).path
    before = all_logits(make_engine(path), [3, 1, 4, 1, 5])
    tensors = load_file(path / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in tensors) and "of no use" not in caplog.text
    renamed = {name.replace("language_model.model.", "model.language_model."): value for name, value in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path / "model.safetensors")
    assert torch.equal(all_logits(make_engine(path), [3, 1, 4, 1, 5]), before)


def test_unused_tensors_are_named_unless_they_are_known_buffers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1, tie_word_embeddings=True).path
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    make_engine(path)
    assert "of no use" not in caplog.text
    save_file({**tensors, "vision.proj.weight": torch.ones(2, 2)}, path / "model.safetensors")
    make_engine(path)
    assert "tensors of no use to LlamaForCausalLM: 1, the first is vision.proj.weight" in caplog.text


def test_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1, tie_word_embeddings=True).path
    tensors = load_file(path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    for name in ("language_model.lm_head.weight", "lm_head.weight"):
        save_file({**tensors, name: head}, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=f"tensor {name} differs from model.embed_tokens.weight.* set it to false"):
            make_engine(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tokens = list(range(9))
    close(all_logits(make_engine(path), tokens), Reference(path).logits(tokens))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "phi3", "gemma3"])
def test_shards_and_half_precision_of_fused_matrices_are_read_right(family: str, tmp_path: Path) -> None:
    reference = make_llama(
        tmp_path / "tiny", seed=9, requests=1, output_tokens=8, shards=3, dtype="float16", **FAMILIES[family]
    )
    assert len(list(reference.path.glob("model-*.safetensors"))) > 1
    assert Driver(make_engine(reference.path), reference.prompts).run(0, 8) == reference.outputs[0]


def test_progress_counts_every_byte_of_pieces_and_whole_tensors(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "tiny", requests=1, output_tokens=1, **FAMILIES["bloom"]).path
    seen: list[tuple[int, int]] = []
    source = open_weights(path, "auto", lambda done, of: seen.append((done, of)))
    Decoder(load_config(path), source, kernel_ops.create("reference", torch.device("cpu")), torch.float32, 64)
    size = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert seen[-1][0] == size < seen[-1][1] == (path / "model.safetensors").stat().st_size


def header_of(path: Path, header: object, data: bytes = b"") -> None:
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 16]}, "not that of its shape"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "of no size"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "cut off"),
        ({"dtype": "F32", "shape": [2]}, "data_offsets"),
        (3, "'int' object"),
    ],
)
def test_header_that_the_format_does_not_allow_is_refused(entry: object, message: str, tmp_path: Path) -> None:
    header_of(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}, "x": entry}, bytes(8))
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{message}"):
        Checkpoint(tmp_path)


def test_a_header_with_overlapping_tensors_is_refused(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [4]}
    header_of(
        tmp_path / "model.safetensors",
        {"a": {**entry, "data_offsets": [0, 16]}, "b": {**entry, "data_offsets": [12, 28]}},
        bytes(28),
    )
    with pytest.raises(ModelError, match="tensors a and b overlap; fetch"):
        Checkpoint(tmp_path)


def test_a_header_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((90 << 20).to_bytes(8, "little"))
        file.truncate(100 << 20)
    with pytest.raises(ModelError, match="its header has 94371840 bytes, more than"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full"])
def test_model_file_that_is_a_device_is_refused_unread(device: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(device)
    with pytest.raises(ModelError, match="not a regular file"):
        load_config(tmp_path)
    with pytest.raises(ModelError, match=r"regular file|missing|no safetensors|no weights"):
        Checkpoint(tmp_path)


def test_a_file_that_is_no_safetensors_at_all_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"\x80\x02", b"<html>not found</html>" * 40, (2).to_bytes(8, "little") + b"[]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
            Checkpoint(tmp_path)


def test_fingerprint_changes_with_the_config_and_any_tensors_numbers(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "m", seed=1, requests=1, output_tokens=2).path
    before = fingerprint_of(Checkpoint(path))
    assert before == fingerprint_of(Checkpoint(shutil.copytree(path, tmp_path / "same")))
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 0.5}))
    found = [before, fingerprint_of(Checkpoint(path))]
    tensors = load_file(path / "model.safetensors")
    for name, at in (("model.norm.weight", 63), ("model.embed_tokens.weight", 0), ("model.embed_tokens.weight", -1)):
        tensors[name].view(-1)[at] += 1
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        found.append(fingerprint_of(Checkpoint(path)))
    assert len(set(found)) == len(found)


def test_fingerprint_is_of_every_byte_whatever_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "LEAF_BYTES", 1 << 14)
    monkeypatch.setattr(fingerprint, "READ_BYTES", 1000)
    path = make_llama(tmp_path / "m", seed=1, requests=1, output_tokens=2).path
    before = fingerprint_of(Checkpoint(path))
    assert before == fingerprint_of(Checkpoint(path), threads=4)
    file, rng = path / "model.safetensors", np.random.default_rng(1)
    whole, found = file.read_bytes(), {before}
    spans = list(Checkpoint(path).spans())
    for _, start, size in spans:
        data = bytearray(whole)
        data[start + int(rng.integers(size))] ^= 1
        file.write_bytes(data)
        found.add(fingerprint_of(Checkpoint(path)))
    assert len(found) == 1 + len(spans)


def test_weights_that_are_cut_off_under_their_digest_are_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(100))
    with pytest.raises(ModelError, match=r"read again for their digest: .*short is cut off"):
        Fingerprint(b"", [(tmp_path / "short", 90, 20)]).result()


def test_ranks_with_the_same_files_read_them_once(tmp_path: Path) -> None:
    for name, content in (("model", b"1" * 100), ("copy", b"2" * 100)):
        (tmp_path / name).write_bytes(content)
    said: list[str] = [""] * 3
    barrier = threading.Barrier(3, timeout=60)

    class Rank(ParallelState):
        def texts(self, text: str) -> list[str]:
            said[self.rank] = text
            barrier.wait()
            found = [*said]
            barrier.wait()
            return found

    def read(rank: int) -> str:
        spans = [(tmp_path / "model", 0, 100), (tmp_path / "model", 90, 20), (tmp_path / "copy", 0, 100)]
        return Fingerprint(b"", [spans[rank]], parallel=Rank(3, 1, rank)).result()

    with ThreadPoolExecutor(3) as pool:
        first, second, other = pool.map(read, range(3))
    assert first == second == Fingerprint(b"", [(tmp_path / "model", 0, 100)]).result(), "the second would fail"
    assert other == Fingerprint(b"", [(tmp_path / "copy", 0, 100)]).result() != first


def test_weights_that_are_gone_under_their_digest_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"read again for their digest: .*gone"):
        Fingerprint(b"", [(tmp_path / "gone", 0, 10)]).result()


def test_ranks_of_machines_with_one_name_read_their_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may be copies of each other, with the same name and the same numbers of files."""
    (tmp_path / "model").write_bytes(b"1" * 100)
    said: list[str] = []

    class Rank(ParallelState):
        def texts(self, text: str) -> list[str]:
            said.append(text)
            return [text]

    for boot in ("first", "first", "second"):
        (tmp_path / "boot_id").write_text(boot)
        monkeypatch.setattr(fingerprint, "BOOT_ID", tmp_path / "boot_id")
        Fingerprint(b"", [(tmp_path / "model", 0, 100)], parallel=Rank()).result()
    assert said[0] == said[2] != said[4]


def test_progress_of_one_large_tensor_is_reported_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(main, "PROGRESS_S", 0.0)
    save_file({"embed": torch.ones(16, 1 << 17)}, tmp_path / "model.safetensors")  # 8 MiB
    caplog.set_level("INFO")
    found = Checkpoint(tmp_path, main.Progress("large")).read("embed", (16, 1 << 17), 0, 16)
    assert bool((found == 1).all())
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("loading large: ")]
    assert lines.pop(0) == "loading large: 8 MiB of weights"
    shares = [int(line.split(", ")[1].removesuffix(" %")) for line in lines]
    assert shares == [12, 24, 37, 49, 62, 74, 87, 99]  # the file has a header as well
    assert lines[3].startswith("loading large: 4 of 8 MiB, ") and lines[-1].endswith(" s left")
