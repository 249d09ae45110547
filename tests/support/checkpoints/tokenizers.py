"""Model directories without weights worth the name: tokenizers of every kind the gateway meets, made on the spot."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTEXT = 512
SPECIALS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "def main(argument):\n    return argument + 1\n",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Grüße aus Köln, naïve café: 12,5 € 🐋 逆戟鲸 e\u0301",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level() -> Tokenizer:
    """GPT-2's kind: a trained byte-level BPE; control tokens added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIALS
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


@functools.cache
def shared_byte_level() -> Tokenizer:
    return byte_level()


def token_ids(text: str) -> list[int]:
    """Return the ids of a text in the model that `write_model` makes by default."""
    ids: list[int] = shared_byte_level().encode(text).ids
    return ids


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: SentencePiece BPE with 256 byte tokens for what the vocabulary lacks."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for char in "▁abcdefghijklmnopqrstuvwxyzTD.,:\n":
        vocabulary.setdefault(char, len(vocabulary))
    for left, right in [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("o", "x"), ("▁", "▁"), ("r", "e")]:
        vocabulary.setdefault(left + right, len(vocabulary))
        merges.append((left, right))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram with Metaspace, as T5: no table of bytes fits its decoder, so windows are decoded."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<pad>", "</s>"], unk_token="<pad>")
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return tokenizer


def write_model(directory: Path, tokenizer: Tokenizer | None = None, **tokenizer_config: Any) -> Path:
    """A directory that the gateway accepts; its weights are one byte, as no test loads them."""
    tokenizer = tokenizer or byte_level()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "chat_template": CHAT_TEMPLATE,
    } | tokenizer_config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    eos = tokenizer.token_to_id("<|eos|>")
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": CONTEXT,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": eos if eos is not None else 2,
    }
    (directory / "config.json").write_text(json.dumps(model))
    (directory / "model.safetensors").write_bytes(b"\0")
    return directory


def change_tokenizer(model: Path, **parts: Any) -> Path:
    """Change parts of tokenizer.json of a model; return the model."""
    path = model / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return model


PANIC = "a" * 60 + "cc"
"""The library gives up the search of SPLIT in it, with a panic."""
SPLIT = {"type": "Split", "pattern": {"Regex": "(?:a|a)+c(?!c)"}, "behavior": "Isolated", "invert": False}


def write_panicking_model(directory: Path) -> Path:
    """As `write_model`, with SPLIT in its tokenizer."""
    before = json.loads((write_model(directory) / "tokenizer.json").read_text())["pre_tokenizer"]
    return change_tokenizer(directory, pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLIT, before]})
