"""GGUF files of small models, written from the format's specification, and the weights that they mean.

Names of tensors are those of the `gguf` package's tables, and so are the numbers that packed blocks stand for.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Float = NDArray[np.float32]
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}
_KINDS = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Bytes of a block where its float16 scale lies, and perhaps its minimum."""


def write_file(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> None:
    """Writes a file; a tensor is the name of its type, its shape with the outputs first, and its bytes."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_text(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, (kind, shape, data) in tensors.items():
        number = int(gguf.GGMLQuantizationType[kind])
        head.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, offset))
        offset += -(-len(data) // 32) * 32
    with path.open("wb") as file:
        file.write(b"".join(head))
        for _, _, data in tensors.values():
            file.write(b"\0" * (-file.tell() % 32))
            file.write(data)
        file.write(b"\0" * (-file.tell() % 32))


def pack(values: Float, kind: str, seed: int) -> tuple[bytes, Float]:
    """Numbers of about the spread of these in blocks of a type: the bytes, and what gguf reads in them.

    Packed ones are random but for their scales.
    """
    if kind in ("F32", "F16"):
        plain = values.astype(np.float32 if kind == "F32" else np.float16)
        return plain.tobytes(), plain.astype(np.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    if kind == "BF16":
        raw = gguf.quantize(values, type_)
        return raw.tobytes(), gguf.dequantize(raw, type_)
    numbers, size = gguf.GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (values.size // numbers, size), dtype=np.uint8)
    middle = -7.5 if kind == "Q4_1" else -15.5 if kind == "Q5_1" else 15.0 if kind == "Q5_K" else 7.5
    for factor in (1.0, None):
        if factor is None:
            found = gguf.dequantize(raw, type_)
            factor = float(values.std() / found.std())
        for at, each in zip(_HALVES[kind], (factor, middle * factor), strict=False):
            spread = rng.uniform(0.5, 1.5, (len(raw), 1)) if factor != 1.0 else np.ones((len(raw), 1))
            raw[:, at : at + 2] = (each * spread).astype(np.float16).view(np.uint8)
    raw = raw.reshape(*values.shape[:-1], -1)
    return raw.tobytes(), gguf.dequantize(raw, type_)


def write_model(
    plain: Path,
    path: Path,
    kind_of: Callable[[str], str],
    meant: Path | None = None,
    more: dict[str, Any] | None = None,
    **metadata: Any,
) -> None:
    """Writes a Hugging Face directory as a GGUF file, as convert_hf_to_gguf.py lays it out.

    kind_of: the type of a matrix, by its name in the file. meant: gets the directory with the weights that the file
    then holds. metadata: with `__` for a dot, put over what is derived; None leaves a key out. more:
    further tensors of F32.
    """
    import torch  # most tests need a few values alone
    from safetensors.torch import load_file, save_file

    config = json.loads((plain / "config.json").read_text())
    name = ARCHITECTURES[config["architectures"][0]]
    table = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name), 16)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    changed = {}
    for at, (key, weight) in enumerate(load_file(plain / "model.safetensors").items()):
        if key == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        stem, _, end = key.rpartition(".")
        known = table.get_name(stem)
        assert known is not None, key
        target = f"{known}.{end}"
        kind = kind_of(target) if weight.ndim == 2 else "F32"
        values = weight.float().numpy()
        if name.startswith("gemma") and known.endswith("norm"):
            values = values + np.float32(1)
        data, exact = pack(values, kind, at)
        part = known.rpartition(".")[2]
        if name == "llama" and part in heads:  # the rows alone change places: LlamaModel.permute
            rows = np.frombuffer(data, np.uint8).reshape(weight.shape[0], -1)
            size = weight.shape[0] // heads[part]
            data = rows.reshape(heads[part], 2, size // 2, -1).swapaxes(1, 2).tobytes()
        tensors[target] = kind, tuple(weight.shape), data
        if name.startswith("gemma") and known.endswith("norm"):
            exact = exact - np.float32(1)
        changed[key] = torch.from_numpy(exact.reshape(weight.shape).copy())
    for target, array in (more or {}).items():
        tensors[target] = "F32", array.shape, array.tobytes()
    given = {**_metadata(name, config), **_vocabulary(plain)}
    given |= {key.replace("__", "."): value for key, value in metadata.items()}
    write_file(path, {key: value for key, value in given.items() if value is not None}, tensors)
    if meant is not None:
        meant.mkdir()
        for file in plain.iterdir():
            if file.suffix == ".json" or file.suffix == ".jinja":
                (meant / file.name).write_bytes(file.read_bytes())
        save_file(changed, meant / "model.safetensors", {"format": "pt"})


def _metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "general.architecture": name,
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": size,
        f"{name}.attention.value_length": size,
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": float(rope.get("rope_theta", 1e4)),
        f"{name}.rope.freq_base_swa": float(local["rope_theta"]) if local else None,
        f"{name}.rope.dimension_count": size,
        f"{name}.attention.sliding_window": config.get("sliding_window"),
        f"{name}.attention.sliding_window_pattern": (
            [kind == "sliding_attention" for kind in config["layer_types"]] if name == "gemma3" else None
        ),
    }


def _vocabulary(plain: Path) -> dict[str, Any]:
    source = json.loads((plain / "tokenizer.json").read_text())
    tokens = dict(source["model"]["vocab"])
    special = {token["content"]: token["id"] for token in source["added_tokens"]}
    texts = sorted({**tokens, **special}.items(), key=lambda item: item[1])
    merges = [one if isinstance(one, str) else " ".join(one) for one in source["model"]["merges"]]
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [text for text, _ in texts],
        "tokenizer.ggml.token_type": [3 if text in special else 1 for text, _ in texts],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": special.get("<|bos|>"),
        "tokenizer.ggml.eos_token_id": special.get("<|eos|>"),
        "tokenizer.chat_template": settings.get("chat_template"),
    }


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        kind, letter = (5, "i") if not value else {bool: (7, "?"), int: (5, "i"), float: (6, "f")}[type(value[0])]
        return struct.pack(f"<IIQ{len(value)}{letter}", 9, kind, len(value), *value)
    kind, letter = _KINDS[type(value)]
    return struct.pack(f"<I{letter}", kind, value)
