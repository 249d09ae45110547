"""Tokenizers from GGUF files against those that the files were made from, and against transformers' reading."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from services.worker.checkpoint.stored import GGUF_FORMATS
from shared.errors import ModelError
from shared.models.gguf.config import ARCHITECTURES
from shared.models.gguf.reader import BLOCK_TYPES
from shared.models.gguf.tokenizer import PRE
from shared.models.model_files import read_bounded
from shared.text.end_of_text import end_ids
from shared.text.tokenizer import BoundedTokenizer, load_tokenizer
from tests.support.checkpoints.gguf import write_file
from tests.support.launcher import ROOT

TEXTS = (
    "Hello world, it's 12345 o'clock; I'LL see you'd say: ÄÖÜ ßtraße naïve café e\u0301.",
    "def f(x):\n\treturn x**2  # 3.14159\n\n\n   done\r\n",
    "日本語のテキスト 한국어 Привет мир 🙂🙃 مرحبا ١٢٣",
    "CamelCaseWords HTTPServer iPhone don't   spaces    end   ",
    "<|im_start|>user\nHi<|im_end|><tool> x</tool>",
)
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 20, "return self.value 2024 1999 don't we'll"]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REGEXES = {"llama-bpe": LLAMA, "qwen2": LLAMA.replace(r"\p{N}{1,3}", r"\p{N}"), "gpt-2": ""}
"""Of the tokenizer.json of Llama 3 and Qwen 2."""


def byte_level(name: str) -> Tokenizer:
    """A small tokenizer of the kind that a name of `tokenizer.ggml.pre` stands for."""
    made = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if regex := REGEXES[name]:
        steps = [pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|bos|>", "<|im_start|>", "<|im_end|>")])
    made.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    return made


def metadata(made: Tokenizer, name: str, **more: Any) -> dict[str, Any]:
    source = json.loads(made.to_str())
    added = {token["id"]: 3 if token["special"] else 4 for token in source["added_tokens"]}
    size = made.get_vocab_size()
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [made.id_to_token(id_) for id_ in range(size)],
        "tokenizer.ggml.token_type": [added.get(id_, 1) for id_ in range(size)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in source["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": made.token_to_id("<|bos|>"),
        "tokenizer.ggml.eos_token_id": made.token_to_id("<|bos|>"),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentence_piece(**more: Any) -> dict[str, Any]:
    """A vocabulary with scores, as SentencePiece makes it of a corpus: the later a merge, the lower its score."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    merged = [text for text, _ in sorted(made.get_vocab().items(), key=lambda item: item[1])]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(merged)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(at) for at in range(len(merged))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def best_pairs(pieces: dict[str, float], text: str) -> list[str]:
    """SentencePiece's BPE by its definition: merge the neighbours that make the token with the best score."""
    parts = list(text)
    while True:
        found = [(pieces.get(a + b, -1e9), -at) for at, (a, b) in enumerate(pairwise(parts))]
        if not found or max(found)[0] == -1e9:
            return parts
        at = -max(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def transformers_reads(path: Path) -> Any:
    from transformers import AutoTokenizer  # most processes of a run need no transformers

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def written(path: Path, source: dict[str, Any]) -> BoundedTokenizer:
    """Return what is read of a file with this metadata."""
    path.unlink(missing_ok=True)
    write_file(path, source, {})
    return load_tokenizer(path / "tokenizer.json")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.gguf"


@pytest.mark.parametrize("name", REGEXES)
def test_byte_level_ids_are_those_of_the_tokenizer_before(path: Path, name: str) -> None:
    made = byte_level(name)
    found, other = written(path, metadata(made, name, add_bos_token=False)), transformers_reads(path)
    assert found.is_predictable
    for text in TEXTS:
        ids = made.encode(text).ids
        assert found.encode(text) == ids, text
        assert found.library.decode(ids, skip_special_tokens=False) == made.decode(ids, skip_special_tokens=False)
        if name != "qwen2":  # transformers 5.23 leaves out NFC, which Qwen's tokenizer.json has
            assert other.encode(text) == ids, text


@pytest.mark.parametrize("name", PRE)
def test_every_named_expression_passes_the_bounds_and_loses_no_byte(path: Path, name: str) -> None:
    found = written(path, metadata(byte_level("gpt-2"), name, add_bos_token=False))
    for text in TEXTS:
        kept = found.library.decode(found.encode(text), skip_special_tokens=False)
        assert kept == (text if not PRE[name].is_composed else text.replace("e\u0301", "é")), text


def test_bos_is_added_where_the_file_or_its_kind_says_so(path: Path) -> None:
    made = byte_level("llama-bpe")
    bos = made.token_to_id("<|bos|>")
    for name, more, begins in (
        ("llama-bpe", {}, True),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ):
        assert (written(path, metadata(made, name, **more)).encode("Hello")[0] == bos) is begins, (name, more)
    assert written(path, metadata(made, "qwen2", add_eos_token=True)).encode("Hello")[-1] == bos


def test_sentence_piece_merges_the_best_scores_first(path: Path) -> None:
    source = sentence_piece()
    found, other = written(path, source), transformers_reads(path)
    texts = source["tokenizer.ggml.tokens"]
    scores = dict(zip(texts[259:], source["tokenizer.ggml.scores"][259:], strict=True))
    for text in TEXTS:
        ids = found.encode(text)
        assert ids[0] == 1
        assert [texts[id_] for id_ in ids[1:]] == best_pairs(scores, "\u2581" + text.replace(" ", "\u2581")), text
        assert other.encode(text) == ids, text
        assert found.library.decode(ids) == text
    assert found.library.decode(found.encode("\u0bf5 a")) == "\u0bf5 a"  # of bytes: no piece has it
    assert found.encode("\u0bf5")[1:] == [texts.index("\u2581"), *(3 + byte for byte in "\u0bf5".encode())]
    bare = written(path, sentence_piece(add_space_prefix=False, add_bos_token=False))
    assert bare.library.decode(bare.encode("the dog")) == "the dog"
    assert not texts[bare.encode("the dog")[0]].startswith("\u2581")


def test_gemma_merges_blanks_in_the_order_of_the_file(path: Path) -> None:
    source = sentence_piece(add_space_prefix=False)
    texts = source["tokenizer.ggml.tokens"]
    texts += ["  ", "   "]
    source["tokenizer.ggml.token_type"] += [4, 4]
    source["tokenizer.ggml.scores"] = [-1000.0] * len(texts)
    source["general.architecture"] = "gemma3"
    found, other = written(path, source), transformers_reads(path)
    for text in ("the   dog  jumps", "don't   spaces    end   "):
        assert found.encode(text) == other.encode(text), text
    assert len(texts) - 1 in found.encode("a    b") or len(texts) - 2 in found.encode("a    b")


def test_ends_and_template_come_from_the_file(path: Path) -> None:
    made = byte_level("qwen2")
    source = metadata(made, "qwen2", eot_token_id=made.token_to_id("<tool>")) | {"tokenizer.chat_template": "{{ 1 }}"}
    rows = made.get_vocab_size() + 5
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        source[f"llama.{key}"] = 32
    source["llama.attention.layer_norm_rms_epsilon"] = 1e-5
    write_file(path, source, {"token_embd.weight": ("F32", (rows, 32), bytes(rows * 128))})
    assert end_ids(path) == [made.token_to_id(text) for text in ("<|bos|>", "<tool>", "<|im_end|>")]
    settings = json.loads(read_bounded(path / "tokenizer_config.json"))
    assert settings == {"bos_token": "<|bos|>", "eos_token": "<|bos|>", "chat_template": "{{ 1 }}"}
    assert json.loads(read_bounded(path / "config.json"))["vocab_size"] == rows


def test_gpt_oss_goes_on_behind_the_end_of_a_message(path: Path) -> None:
    made = byte_level("gpt-2")
    ends = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
    made.add_special_tokens([AddedToken(text, normalized=False) for text in ends])
    sizes = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
    counts = {**dict.fromkeys(sizes, 32), "expert_count": 4, "expert_used_count": 2}
    for name, wanted in (("gpt-oss", ends[2:]), ("llama", ends[1:])):
        source = metadata(made, "gpt-4o", eos_token_id=made.token_to_id("<|return|>")) | {"general.architecture": name}
        source |= {f"{name}.{key}": value for key, value in counts.items() if name == "gpt-oss" or "expert" not in key}
        source[f"{name}.attention.layer_norm_rms_epsilon"] = 1e-5
        path.unlink(missing_ok=True)
        rows = made.get_vocab_size()
        write_file(path, source, {"token_embd.weight": ("F32", (rows, 32), bytes(rows * 128))})
        wanted_ids = {made.token_to_id(text) for text in (*wanted, "<|im_end|>")}
        assert set(end_ids(path)) == wanted_ids, name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre 'viking' is not supported, dbrx, deepseek-coder, "),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre 'default' is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported, gpt2 and llama are"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores has 0 values for"),
        ({"tokenizer.ggml.tokens": None}, "has 0 tokens, from 1 to"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": None}, "tokens 0 and 2 are both 'a'"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type has 2 values for"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges\\[0\\] is 'ab', expected two tokens"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "cannot be read: "),
        ({"tokenizer.ggml.bos_token_id": 100000}, "bos_token_id is 100000, expected an integer from 0 to"),
        ({"tokenizer.ggml.bos_token_id": None}, "bos_token_id is missing, and the token is added"),
        ({"tokenizer.ggml.tokens": [1.0]}, "tokens is an array, expected an array of another type"),
    ],
)
def test_what_is_wrong_with_a_vocabulary_is_named(path: Path, changes: dict[str, Any], said: str) -> None:
    source = {**metadata(byte_level("gpt-2"), "gpt-2", add_bos_token=True), **changes}
    with pytest.raises(ModelError, match=said):
        written(path, {key: value for key, value in source.items() if value is not None})


def test_a_long_piece_is_refused_before_it_is_cut(path: Path) -> None:
    source = sentence_piece()
    source["tokenizer.ggml.tokens"][-1] = "x" * 2000
    with pytest.raises(ModelError, match="has 2000 characters, at most 256"):
        written(path, source)


def test_page_names_the_types_and_expressions_that_are_read() -> None:
    page = (ROOT / "docs/models.md").read_text()
    assert f"| `tokenizer.ggml.pre` | {', '.join(PRE)} |" in page
    known = ", ".join(ARCHITECTURES).replace("llama", "llama (Mistral and Mixtral too)")
    assert f"| `general.architecture` | {known} |" in page
    row = next(line for line in page.splitlines() if line.startswith("| types of tensors"))
    named = row.split("|")[2].partition(", in any mixture")[0]
    assert set(named.strip().split(", ")) == {type_.name for type_ in BLOCK_TYPES.values()}
    for name, format_ in GGUF_FORMATS.items():
        held = next(line for line in page.splitlines() if line.startswith(f"| {name} | d"))
        assert held.endswith(f" -> {format_.bits_per_weight:g} |"), name
