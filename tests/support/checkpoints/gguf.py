"""GGUF files of small models, written from the format's specification, and the weights that they mean.

Names of tensors are those of the `gguf` package's tables, and so are the numbers that packed blocks stand for.
"""

from __future__ import annotations

import json
import re
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
    "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GptOssForCausalLM": "gpt-oss",
    "Gemma2ForCausalLM": "gemma2",
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
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
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
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(125, 129, len(raw))
        raw[:, 0] += np.uint8(round(float(np.log2(values.std() / gguf.dequantize(raw, type_).std()))) % 256)
        return raw.tobytes(), gguf.dequantize(raw, type_).reshape(values.shape)
    middle = {"Q2_K": 1.5, "Q4_1": -7.5, "Q5_1": -15.5, "Q5_K": 15.0}.get(kind, 7.5)
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
    stacks: bool = True,
    **metadata: Any,
) -> None:
    """Writes a Hugging Face directory as a GGUF file, as convert_hf_to_gguf.py lays it out.

    kind_of: the type of a matrix, by its name in the file. meant: gets the directory with the weights that the file
    then holds. metadata: with `__` for a dot, `___` for a hyphen, put over what is derived; None leaves a key out.
    more: further tensors of F32, or others in the place of those that are derived; None leaves one out. stacks: whether
    the experts of a layer lie in one tensor, not each in its own as in files of Mixtral before April 2024.
    """
    import torch  # most tests need a few values alone
    from safetensors.torch import load_file, save_file

    config = json.loads((plain / "config.json").read_text())
    name = ARCHITECTURES[config["architectures"][0]]
    table = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name), 16)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    changed = {}
    for at, (key, weight) in enumerate(sorted(load_file(plain / "model.safetensors").items(), key=_natural)):
        if key == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        changed[key] = weight.float()
        for part_key, view in _parts(key, changed[key]):
            stem, _, end = part_key.rpartition(".")
            known = table.get_name(stem)
            assert known is not None, part_key
            target = f"{known}.{end}"
            is_plain = end == "bias" or view.ndim == 1 or known.endswith("ffn_gate_inp")
            kind = "F32" if is_plain else kind_of(target)
            one = np.float32(name.startswith("gemma") and known.endswith("norm"))
            data, exact = pack(view.numpy() + one, kind, at)
            view.copy_(torch.from_numpy(exact - one).view(view.shape))
            part = known.rpartition(".")[2]
            if name == "llama" and part in heads:  # the rows alone change places: LlamaModel.permute
                rows = np.frombuffer(data, np.uint8).reshape(weight.shape[0], -1)
                size = weight.shape[0] // heads[part]
                data = rows.reshape(heads[part], 2, size // 2, -1).swapaxes(1, 2).tobytes()
            shape = tuple(view.shape)
            if target in tensors:  # of the expert before
                data, shape = tensors[target][2] + data, (tensors[target][1][0] + 1, *shape)
            elif ".experts." in part_key and view.ndim == 2 and end == "weight":
                shape = (1, *shape)
            tensors[target] = kind, shape, data
    for target, (kind, shape, data) in list(tensors.items()):
        if not stacks and target.endswith("_exps.weight"):
            stem, size = tensors.pop(target) and target.removesuffix("_exps.weight"), len(data) // shape[0]
            for expert in range(shape[0]):
                tensors[f"{stem}.{expert}.weight"] = kind, shape[1:], data[expert * size : (expert + 1) * size]
    for target, array in (more or {}).items():
        if array is None:
            del tensors[target]
        else:
            tensors[target] = "F32", array.shape, array.tobytes()
    given = {**_metadata(name, config), **_vocabulary(plain)}
    given |= {key.replace("___", "-").replace("__", "."): value for key, value in metadata.items()}
    write_file(path, {key: value for key, value in given.items() if value is not None}, tensors)
    if meant is not None:
        meant.mkdir()
        for file in plain.iterdir():
            if file.suffix == ".json" or file.suffix == ".jinja":
                (meant / file.name).write_bytes(file.read_bytes())
        save_file(changed, meant / "model.safetensors", {"format": "pt"})


def write_parts(whole: Path, stem: Path, most_tensors: int, first_has_tensors: bool = True) -> list[Path]:
    """Writes a file again in parts STEM-00001-of-0000N.gguf, as the `gguf` package does; returns their paths."""
    source = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(
        None,
        source.fields["general.architecture"].contents(),
        split_max_tensors=most_tensors,
        small_first_shard=not first_has_tensors,
    )
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture" and field.contents() != []:
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_array else None)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(stem.with_name(f"{stem.name}.gguf"))
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(stem.parent.glob(f"{stem.name}-*-of-*.gguf"))


def _natural(item: tuple[str, Any]) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def _parts(key: str, weight: Any) -> list[tuple[str, Any]]:
    """The matrices of a tensor as views [..., outputs, inputs] of it, by the names that gguf's tables know."""
    if key.endswith("sinks"):
        return [(f"{key}.weight", weight)]
    if key.endswith("shared_expert_gate.weight"):
        return [(key, weight[0])]  # convert_hf_to_gguf.py drops dimensions of 1
    if ".experts." not in key or key.endswith(".weight"):
        return [(re.sub(r"\.experts\.\d+\.", ".experts.", key), weight)]
    stem, end = (key.removesuffix("_bias"), "bias") if key.endswith("_bias") else (key, "weight")  # gpt-oss's
    view = weight if end == "bias" else weight.transpose(1, 2)
    if stem.endswith("gate_up_proj"):
        stem = stem.removesuffix("gate_up_proj")
        return [(f"{stem}{part}_proj.{end}", view[:, at::2]) for at, part in enumerate(("gate", "up"))]
    return [(f"{stem}.{end}", view)]


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
        f"{name}.expert_count": config.get("num_local_experts", config.get("num_experts")),
        f"{name}.expert_used_count": config.get("num_experts_per_tok"),
        f"{name}.expert_feed_forward_length": config.get("moe_intermediate_size"),
        f"{name}.expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        f"{name}.attn_logit_softcapping": config.get("attn_logit_softcapping"),
        f"{name}.final_logit_softcapping": config.get("final_logit_softcapping"),
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": size,
        f"{name}.attention.value_length": size,
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": float(rope.get("rope_theta", 1e4)),
        f"{name}.rope.freq_base_swa": float(local["rope_theta"]) if local else None,
        f"{name}.rope.dimension_count": size,
        f"{name}.rope.scaling.type": "yarn" if rope.get("rope_type") == "yarn" else None,
        f"{name}.rope.scaling.factor": float(rope["factor"]) if "factor" in rope else None,
        f"{name}.rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
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
