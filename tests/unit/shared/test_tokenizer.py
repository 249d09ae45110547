"""Bounds of tokenizer.json: hostile files are refused before a parser sees them, those of real models pass."""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.errors import ModelError
from shared.text import tokenizer as bounds
from shared.text.regex_bounds import regex_problem
from shared.text.tokenizer import TokenizerError, encode, load_tokenizer, tokenizer_json

GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REGEXES = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
        r"|\s+(?!\S)|\s"
    ),
    "llama3": LLAMA3,
    "gpt4o": GPT4O,
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "deepseek-v3": (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "superwords": r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}",
    "thousands": r"\d{1,3}(?=(?:\d{3})*\b)|(?=(\d{3})+(?!\d))",
    "kimi": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+",
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TO_BLOCK = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
FROM_BLOCK = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def nested(kind: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: steps}


def begin(name: str, id_: int) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [id_], "tokens": [name]}},
    }


def charsmap(*replacements: bytes) -> str:
    """The form of SentencePiece: bytes of a trie, the trie, replacements that end with NUL."""
    return base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"\0".join(replacements)).decode()


REAL: dict[str, dict[str, Any]] = {
    "llama-3": {
        "pre_tokenizer": nested("pretokenizers", [split(LLAMA3), BYTE_LEVEL]),
        "post_processor": nested("processors", [{**BYTE_LEVEL, "add_prefix_space": True}, begin("a", 0)]),
        "decoder": BYTE_LEVEL,
    },
    "qwen": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": nested("pretokenizers", [split(LLAMA3.replace("{1,3}", "")), BYTE_LEVEL]),
        "post_processor": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
    },
    "mistral": {
        "normalizer": nested("normalizers", [{"type": "Prepend", "prepend": "▁"}, TO_BLOCK]),
        "post_processor": begin("a", 0),
        "decoder": nested("decoders", [FROM_BLOCK, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP]),
    },
    "mistral-v3": {"pre_tokenizer": METASPACE, "decoder": METASPACE},
    "gemma": {
        "normalizer": TO_BLOCK,
        "pre_tokenizer": {**split(""), "pattern": {"String": " "}, "behavior": "MergedWithPrevious"},
        "post_processor": begin("a", 0),
        "decoder": nested("decoders", [FROM_BLOCK, {"type": "ByteFallback"}, {"type": "Fuse"}]),
    },
    "bert": {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": begin("a", 0),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    },
    "gpt2": {
        "pre_tokenizer": {**BYTE_LEVEL, "use_regex": True},
        "post_processor": {**BYTE_LEVEL, "trim_offsets": False},
        "decoder": BYTE_LEVEL,
    },
    "starcoder": {
        "pre_tokenizer": nested("pretokenizers", [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]),
        "decoder": BYTE_LEVEL,
    },
    "clip": {
        "normalizer": nested(
            "normalizers",
            [{"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}, {"type": "Lowercase"}],
        ),
    },
}  # fmt: skip


def source(**parts: Any) -> dict[str, Any]:
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "fuse_unk": False,
        "end_of_word_suffix": None, "byte_fallback": False, "vocab": {"a": 0, "b": 1, "c": 2}, "merges": [],
    }  # fmt: skip
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **empty, "added_tokens": [], "model": model, **parts}


def write(directory: Path, **parts: Any) -> Path:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(source(**parts)))
    return path


def growing(times: int, length: int) -> dict[str, Any]:
    first = step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * length}
    for _ in range(times - 1):
        step = nested("normalizers", [step, first])
    return step


def deep(levels: int) -> dict[str, Any]:
    step: dict[str, Any] = {"type": "NFC"}
    for _ in range(levels):
        step = nested("normalizers", [step])
    return step


def twice(regex: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": regex}, "content": "x"}


@pytest.mark.parametrize("name", REAL)
def test_shapes_of_real_models_are_read_and_common_ones_encode_short_texts_at_once(tmp_path: Path, name: str) -> None:
    loaded = load_tokenizer(write(tmp_path, **REAL[name]))
    assert loaded.growth <= 64
    assert loaded.encode("a b" * 100)
    assert loaded.is_quick(1000) or name not in ("llama-3", "qwen", "gpt2", "gemma")
    assert not loaded.is_quick(5000)
    unknown = load_tokenizer(write(tmp_path, **{**REAL[name], "pre_tokenizer": split("[ab]+")}))
    assert not unknown.is_quick(1)


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "five replaces by a hundred": (
        {"normalizer": growing(5, 100)}, "normalizer: one byte of text can become 10000000000, at most 4096; remove",
    ),
    "a sequence of replaces": (
        {"normalizer": nested("normalizers", [growing(1, 100)] * 2)}, "one byte of text can become 10000",
    ),
    "prepend": ({"normalizer": {"type": "Prepend", "prepend": "x" * 5000}}, "one byte of text can become 5001"),
    "a prepend of 30 MB": ({"normalizer": {"type": "Prepend", "prepend": "x" * 30_000_000}}, "at most 2097152; choose"),
    "replace of nothing": (
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 5000}}, "can become 5001",
    ),
    "byte levels": ({"pre_tokenizer": nested("pretokenizers", [BYTE_LEVEL] * 13)}, "pre_tokenizer: one byte of text"),
    "parts together": (
        {"normalizer": growing(1, 1000), "pre_tokenizer": nested("pretokenizers", [BYTE_LEVEL] * 3)}, "become 8000",
    ),
    "a text that is put in again and again": (
        {"normalizer": growing(1, 1000), "post_processor": {**begin("a", 0), "single": [{"Sequence": {}}] * 9}},
        "become 9000",
    ),
    "ids of a special token": (
        {"post_processor": {**begin("a", 0), "special_tokens": {"a": {"id": "a", "ids": [0] * 99, "tokens": ["a"]}}}},
        "at most 64 ids",
    ),
    "pieces of a template": ({"post_processor": {**begin("a", 0), "pair": [{}] * 65}}, "of at most 64 pieces"),
    "decoder": ({"decoder": {**FROM_BLOCK, "content": " " * 30}}, "decoder: one byte of text can become 10, at most 4"),
    "an expression in a decoder": ({"decoder": twice("a+")}, "decoder: a Replace by a regular expression"),
    "precompiled": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"x" * 5000)}}, "can become 5000",
    ),
    "precompiled cut off": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAA="}}, "is cut off"),
    "steps": ({"normalizer": nested("normalizers", [{"type": "NFC"}] * 64)}, "more than 64 steps; remove some"),
    "depth": ({"normalizer": deep(5)}, "a Sequence at depth"),
    "an unknown step": ({"normalizer": {"type": "Shout"}}, "'Shout' is no type of a step that is known"),
    "a step without a type": ({"normalizer": {"prepend": "x" * 5000}}, "'None' is no type of a step"),
    "a pattern": ({"normalizer": {"type": "Replace", "pattern": "a", "content": "b"}}, "neither a String nor a Regex"),
    "exponential": ({"pre_tokenizer": split("(?:a+)+b")}, "repeats a group that is a repetition itself"),
    "exponential in a normalizer": ({"normalizer": twice("(a*)*b")}, "repeats a group that is a repetition itself"),
    "a long expression": ({"pre_tokenizer": split("a" * 20_000)}, "has 20000 bytes, at most 16384; choose"),
    "a prefix of parts": ({"model": {"type": "BPE", "continuing_subword_prefix": "#" * 99}}, "99 bytes, at most 64"),
    "words of WordPiece": (
        {"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}}, "1000000000, at most 1000; set it to 100",
    ),
    "an id": ({"model": {"type": "BPE", "vocab": {"a": 1 << 32}, "merges": []}}, "token id 4294967296, at most"),
    "an added id": ({"added_tokens": [{"id": 1 << 31, "content": "x"}]}, "added_tokens: token id 2147483648"),
    "a long token": ({"model": {"type": "BPE", "vocab": {"a" * 3000: 0}, "merges": []}}, "a token of 3000 characters"),
    "a long token of Unigram": ({"model": {"type": "Unigram", "vocab": [["a" * 3000, 0.0]]}}, "of 3000 characters"),
    "added tokens that grow": (
        {"normalizer": growing(1, 4000), "added_tokens": [{"id": 0, "content": "a" * 2000}] * 5}, "40000000 bytes when",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "said"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_tokenizer_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(bounds, "parse_bounded", lambda *_: pytest.fail("it was parsed"))
    path = write(tmp_path, **parts)
    with pytest.raises(ModelError, match=f"^{path}: .*{re.escape(said)}"):
        load_tokenizer(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "too long": (sparse, "67108865 bytes, at most 67108864; choose another model"),
    "a FIFO": (os.mkfifo, "not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "a directory": (Path.mkdir, "not a regular file"),
    "missing": (lambda _: None, "is missing; save the fast tokenizer"),
    "many values": (lambda path: path.write_text("[" + "0," * (9 << 20) + "0]"), "values, at most 8388608"),
    "deep": (lambda path: path.write_text('{"a":' + "[" * 500 + "]" * 500 + "}"), "cannot be read"),
    "very deep": (lambda path: path.write_text("[" * 100_000), "cannot be read"),
    "no object": (lambda path: path.write_text("[]"), "JSON: not an object"),
    "no JSON": (lambda path: path.write_text("{"), "cannot be read"),
    "no tokenizer": (lambda path: path.write_text("{}"), "cannot be read"),
}


@pytest.mark.parametrize(("make", "said"), FILES.values(), ids=FILES)
def test_file_that_is_no_tokenizer_is_refused(tmp_path: Path, make: Callable[[Path], Any], said: str) -> None:
    path = tmp_path / "tokenizer.json"
    make(path)
    with pytest.raises(ModelError, match=f"^{path}.*{re.escape(said)}"):
        load_tokenizer(path)


def test_parser_gets_what_was_checked_not_what_was_written(tmp_path: Path) -> None:
    text = json.dumps(source(normalizer={"type": "NFC"}))
    hidden = '"normalizer": {"type": "Prepend", "prepend": "' + "x" * 9999 + '"}, "normalizer"'
    path = tmp_path / "tokenizer.json"
    path.write_text(text.replace('"normalizer"', hidden))
    assert "Prepend" not in tokenizer_json(path)


@pytest.mark.parametrize(
    "regex",
    [
        "(a+)+", "(a*)*", "(?:a|b+)*c", "(?:(?:a+)?b?)*", "(?<name>x{2,})+", "((a+))+", "(a{1,3}){1,5}", r"(a)\1",
        r"\g<0>", r"\k<n>", "(?R)", "(?~a)", "(?(1)a)", "a{2000}", "(" * 40, r"(?:[]a]+)*", "(?:a+?)+", "(?=(b+)+)",
    ],
)  # fmt: skip
def test_expression_without_a_bound_is_found(regex: str) -> None:
    assert regex_problem(regex)


BOUNDED = ["(a+)?", "(?>a+)+", "(ab+)+", "(?:a{3})+", "a{,}", r"\(a+\)+", "[(a+)]+", "(?i)a+", "a)+"]


@pytest.mark.parametrize("regex", [*REGEXES.values(), *BOUNDED], ids=[*REGEXES, *BOUNDED])
def test_expression_of_a_real_model_or_with_a_bound_passes(regex: str) -> None:
    assert regex_problem(regex) == ""


def test_panic_is_an_error_and_the_next_text_is_encoded(tmp_path: Path) -> None:
    loaded = load_tokenizer(write(tmp_path, pre_tokenizer=split("(?:a|a)+c(?!c)")))
    with pytest.raises(TokenizerError, match="retry-limit"):
        loaded.encode("a" * 60 + "cc")
    assert loaded.encode("abc") == [0, 1, 2]


def test_panic_of_the_parser_names_the_file(tmp_path: Path) -> None:
    changes = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "###"}
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(write(tmp_path, model=source()["model"] | changes))


def test_text_that_may_grow_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    loaded = load_tokenizer(write(tmp_path, normalizer=growing(1, 4000)))
    assert len(loaded.encode("ab")) == 4001
    with pytest.raises(TokenizerError, match=r"10000 bytes may become 4000 times as many.*send at most 8388 bytes"):
        loaded.encode("a" * 10_000)


def test_long_texts_have_the_same_ids_in_a_process_apart(tmp_path: Path) -> None:
    loaded = load_tokenizer(write(tmp_path, **REAL["bert"]))
    short, long = "abc ab ", "abc ab " * 20_000
    assert loaded.encode(short) == encode(loaded.library, short, None, True)[0]
    assert loaded.encoders.pids() == []
    assert loaded.encode(long, False) == encode(loaded.library, long, None, False)[0]
    assert loaded.encode_pair(short, long) == encode(loaded.library, short, long, True)
    (pid,) = loaded.encoders.pids()
    loaded.encoders.close()
    assert loaded.encoders.pids() == [] and loaded.encode("abc") and not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("limits", "text"),
    [({"SECONDS": 0.02, "SECONDS_OF_BYTE": 0.0}, "abc " * 500_000), ({}, "a" * 8000)],
    ids=["time", "memory"],
)
def test_text_that_takes_too_much_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, float], text: str
) -> None:
    loaded = load_tokenizer(write(tmp_path, **(REAL["gpt2"] if limits else {"normalizer": growing(1, 4000)})))
    with monkeypatch.context() as patched:
        for name, value in limits.items():
            patched.setattr(bounds, name, value)
        with pytest.raises(TokenizerError, match=r"bytes take more than .*; send a shorter text"):
            loaded.encode(text)
    after = "b" * 70_000 if limits else "b"
    assert loaded.encode(after) == encode(loaded.library, after, None, True)[0]


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """Each look at the clock of the other thread needs the interpreter's lock, which `encode` of the library keeps."""
    loaded = load_tokenizer(write(tmp_path, **REAL["gpt2"]))
    turns, is_done = 0, threading.Event()

    def work() -> None:
        loaded.encode("abc " * 250_000)
        is_done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not is_done.wait(0.001):
        turns += 1
    thread.join()
    assert turns >= 5
