"""The models of the comparison: weights from a seed, a tokenizer from a formula, a reference.

Nothing is downloaded and nothing is trained, so every checkout makes the same files. The text of a prompt is the same
number of tokens for every server, because each of its words is one token. Called by `bench/peers/install.py`;
`words`, `prompt` and `vocabulary` are pure.
"""

from __future__ import annotations

import hashlib
import json
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


SHAPES = {"llama-30m": shape(512, 1408, 8, 8), "llama-380m": shape(1024, 4096, 24, 16)}


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
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 2.0  # else the logits of random weights are so close that rounding decides the argmax
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    _write_reference(folder, model)


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
