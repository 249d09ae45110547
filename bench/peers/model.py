"""The models of the comparison: weights from a seed, a tokenizer from a formula, a reference.

Nothing is downloaded and nothing is trained, so every checkout makes the same files. The text of a prompt is the same
number of tokens for every server, because each of its words is one token. Called by `bench/peers/install.py`;
`words`, `prompt` and `vocabulary` are pure.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 8192
EOS = "<|endoftext|>"
CONSONANTS = "bdfghjklmnprstvz"
VOWELS = "aeiou"
CHECK_PROMPTS = 16
CHECK_TOKENS = 64
CONTEXT = 2048
SEED = 20261130
SHARPNESS = (60.0, 400.0)  # score of the place that is looked for, of each of the two heads that quote


def shape(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    """Return the configuration of a Llama with four KV heads."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    }


QUOTING = "llama-30m-quoting"
SHAPES = {
    "llama-30m": shape(512, 1408, 8, 8),
    QUOTING: shape(512, 1408, 8, 8),  # its answers go on as the prompt did where their last token stood before
    "llama-380m": shape(1024, 4096, 24, 16),
}


def byte_letters() -> list[str]:
    """Return the printable letter of each of the 256 bytes in a byte-level vocabulary (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in shown}
    for number, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(256 + number)
    return [letters[byte] for byte in range(256)]


def words() -> list[str]:
    """Return the two-syllable words of the vocabulary, each with and without a leading space."""
    syllables = [c + v for c in CONSONANTS for v in VOWELS]
    pairs = [a + b for a in syllables for b in syllables]
    room = (VOCAB_SIZE - 1 - 256 - len(syllables)) // 2
    # Spread over all pairs, so that first syllables are not the same few.
    return [pairs[i * len(pairs) // room] for i in range(room)]


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return token ids and merges of the byte-level BPE: bytes, syllables, words, words after a space, one filler."""
    space = byte_letters()[ord(" ")]
    tokens = [EOS, *byte_letters()]
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        merges.append((left, right))
        tokens.append(left + right)

    for consonant in CONSONANTS:
        for vowel in VOWELS:
            merge(consonant, vowel)
    for word in words():
        merge(word[:2], word[2:])
    for word in words():
        merge(space, word)
    while len(tokens) < VOCAB_SIZE:
        merge(space, space * (VOCAB_SIZE - len(tokens)))
    return {token: number for number, token in enumerate(tokens)}, merges


def prompt(tokens: int, *key: int) -> str:
    """Return a text of exactly `tokens` tokens that depends on `key` alone; keys share prefixes only by chance."""
    known = words()
    return " ".join(known[i] for i in np.random.default_rng(key).integers(0, len(known), size=tokens))


def make(folder: Path) -> None:
    """Write the directory of the model of that name: config.json, model.safetensors (float32), tokenizer, reference."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPES[folder.name]))
    model.float().train(False)
    with torch.no_grad():
        if folder.name == QUOTING:
            _let_quote(model)
        else:
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter *= 2.0  # else the logits of random weights are so close that rounding decides the argmax
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    _write_reference(folder, model)


def _let_quote(model: Any) -> None:
    """Give a Llama of the shape QUOTING weights with which it quotes its context; nothing is trained.

    The two layers of an induction head (Elhage and others, A Mathematical Framework for Transformer Circuits, 2021):
    a head of the first attends to the token before, by RoPE alone, and writes its code down; one of the second looks
    for the current token's code there, in the pairs that RoPE hardly turns, and copies the token that it finds. The
    other layers compute as they always do and add nothing.
    """
    import torch

    random = torch.Generator().manual_seed(SEED)
    size, pairs, slow = 64, 32, 22  # of a head; a pair is turned by 10000 ** (-pair / 32) a token
    unit = math.sqrt(size)  # length of a code, and of the constant beside it
    current, constant, before, found = slice(0, 64), 64, slice(128, 192), slice(256, 320)  # parts of the hidden state
    codes = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, size, generator=random), dim=1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not ("q_proj" in name or "k_proj" in name or "up_proj" in name):
            parameter.zero_()  # what is left computes scores that nothing is multiplied with
    model.model.embed_tokens.weight[:, current] = unit * codes
    model.model.embed_tokens.weight[:, constant] = unit
    model.lm_head.weight[:, found] = codes
    for number, parts in enumerate((2, 3)):  # in the hidden state so far
        attention = model.model.layers[number].self_attn
        rms = unit * math.sqrt(parts / attention.o_proj.weight.shape[0])
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.zero_()
        attention.v_proj.weight[:size, current] = torch.eye(size)
        attention.o_proj.weight[before if number == 0 else found, :size] = rms * torch.eye(size)
        if number == 0:
            length = math.sqrt(SHARPNESS[0] * unit / pairs) * rms / unit
            angles = 10000.0 ** (-torch.arange(pairs) / pairs)  # one token's turn
            attention.k_proj.weight[:pairs, constant] = length
            attention.q_proj.weight[:pairs, constant] = length * torch.cos(angles)
            attention.q_proj.weight[pairs:size, constant] = -length * torch.sin(angles)
        else:
            places = torch.cat([torch.arange(slow, pairs), torch.arange(pairs + slow, size)])
            basis = torch.linalg.qr(torch.randn(size, places.numel(), generator=random))[0].T
            length = math.sqrt(SHARPNESS[1] * unit / places.numel()) * rms
            attention.q_proj.weight[places, current] = length * basis
            attention.k_proj.weight[places, before] = length * basis


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab, merges = vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n")


def _write_reference(folder: Path, model: Any) -> None:
    """Write the answer of transformers in float32 to each prompt: the text that an exact server gives."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = []
    for number in range(CHECK_PROMPTS):
        text = prompt(128, 0, number)
        ids = tokenizer.encode(text).ids
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=CHECK_TOKENS,
                min_new_tokens=CHECK_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        tokens = out[0, len(ids) :].tolist()
        rows.append({"prompt": text, "prompt_tokens": len(ids), "ids": tokens, "text": tokenizer.decode(tokens)})
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    (folder / "reference.json").write_text(json.dumps({"weights_sha256": weights, "rows": rows}, indent=1) + "\n")
