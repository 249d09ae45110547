"""Turn the vocabulary of a GGUF file into what tokenizer.json and tokenizer_config.json of a directory say.

Two kinds are read: byte-level BPE (`gpt2`), cut into words by an expression that `tokenizer.ggml.pre` names, and
SentencePiece's BPE (`llama`): its merges follow from the scores: the pair with the best score is merged first.
What is made passes the bounds of `shared.text.tokenizer` as a file of a directory does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shared.errors import ModelError
from shared.models.gguf.reader import GgufFile

MAX_TOKENS = 1 << 20
MAX_VOCABULARY_BYTES = 32 << 20
"""Of the texts of all tokens, and of all merges. Gemma 3 has 3 MB."""
MAX_MERGED_CHARS = 256
"""Of a token of SentencePiece that is merged of others: each place where it can be cut is looked at."""
MAX_END_IDS = 8
BLANK = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_END_TEXTS = frozenset(
    {
        "<end_of_turn>", "<|call|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<|eom_id|>", "<|eot_id|>",
        "<|im_end|>", "<|return|>", "<｜end▁of▁sentence｜>",
    }
)  # fmt: skip
"""Control tokens that end a text though the file names but one of them: its generation_config.json is lost."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _SUFFIX = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = _WORDS + r"\p{N}{1,3}" + _REST
QWEN_2 = _WORDS + r"\p{N}" + _REST
_DIGITS = (r"\p{N}",)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """How text is cut into words before it is merged."""

    regexes: tuple[str, ...] = ()
    has_gpt2: bool = False  # GPT-2's expression follows
    keeps_words: bool = False  # a word that is a token is not put together by merges
    adds_bos: bool = False
    is_composed: bool = False  # text is normalized to NFC


PRE = {
    "dbrx": _Pre((LLAMA_3,)),
    "deepseek-coder": _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "deepseek-r1-qwen": _Pre((QWEN_2,), is_composed=True),
    "deepseek-v3": _Pre(_DEEPSEEK_3),
    "falcon3": _Pre((LLAMA_3,), keeps_words=True, adds_bos=True),
    "gpt-2": _Pre(has_gpt2=True),
    "gpt-4o": _Pre(
        (f"{_BEFORE}{_UPPER}*{_LOWER}+{_SUFFIX}|{_BEFORE}{_UPPER}+{_LOWER}*{_SUFFIX}|" + r"\p{N}{1,3}" + _CASED_REST,)
    ),
    "llama-bpe": _Pre((LLAMA_3,), keeps_words=True, adds_bos=True),
    "llama-v3": _Pre((LLAMA_3,), keeps_words=True, adds_bos=True),
    "llama3": _Pre((LLAMA_3,), keeps_words=True, adds_bos=True),
    "phi-2": _Pre(has_gpt2=True),
    "pixtral": _Pre((LLAMA_3,), keeps_words=True, adds_bos=True),
    "qwen2": _Pre((QWEN_2,), is_composed=True),
    "smaug-bpe": _Pre((LLAMA_3,)),
    "smollm": _Pre(_DIGITS, has_gpt2=True),
    "starcoder": _Pre(_DIGITS, has_gpt2=True),
    "tekken": _Pre(
        (f"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|" + r"\p{N}" + _CASED_REST,),
        keeps_words=True,
        adds_bos=True,
    ),
}
"""tokenizer.ggml.pre -> what it stands for. Source: the tokenizer.json of the models that are named so."""


def token_count(file: GgufFile) -> int:
    return file.count("tokenizer.ggml.tokens")


def tokenizer_of(file: GgufFile) -> dict[str, Any]:
    """Return tokenizer.json. Raise ModelError naming the key that is missing or refused."""
    vocabulary = _Vocabulary(file)
    kind = file.text("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level(file, vocabulary)
    elif kind == "llama":
        parts = _sentence_piece(file, vocabulary)
    else:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model {kind[:60]!r} is not supported, gpt2 and llama are; choose a model "
            "with a tokenizer.json"
        )
    # As Phi-3's tokenizer.json has it: blanks behind a control token belong to it.
    strips = kind == "llama" and file.text("general.architecture") == "phi3"
    added_tokens = [
        {
            "id": id_, "content": vocabulary.texts[id_], "special": type_ != USER_DEFINED, "single_word": False,
            "lstrip": False, "rstrip": strips and vocabulary.texts[id_] not in ("<unk>", "<s>", "<|endoftext|>"),
            "normalized": False,
        }
        for id_, type_ in enumerate(vocabulary.types)
        if type_ in (UNKNOWN, CONTROL, USER_DEFINED) and vocabulary.texts[id_]
    ]  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens, **parts}


def tokenizer_config_of(file: GgufFile) -> dict[str, Any]:
    """Return tokenizer_config.json: the names of the special tokens and the chat template."""
    texts = file.texts("tokenizer.ggml.tokens")
    config: dict[str, Any] = {}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token"), ("unknown", "unk_token")):
        if (id_ := _special(file, key, len(texts))) is not None:
            config[name] = texts[id_]
    if "tokenizer.chat_template" in file:
        config["chat_template"] = file.text("tokenizer.chat_template")
    return config


def end_ids(file: GgufFile) -> list[int]:
    """Return the ids that end a text: eos, eot, eom, and control tokens that are made for it."""
    vocabulary = _Vocabulary(file)
    end_tokens = [_special(file, key, len(vocabulary.texts)) for key in ("eos", "eot", "eom")]
    typed_texts = enumerate(zip(vocabulary.texts, vocabulary.types, strict=True))
    # In gpt-oss's format <|end|> ends a message, and the text goes on with the next one.
    ends = _END_TEXTS - {"<|end|>"} if file.text("general.architecture") == "gpt-oss" else _END_TEXTS
    known = [id_ for id_, (text, type_) in typed_texts if type_ == CONTROL and text in ends]
    return list(dict.fromkeys(id_ for id_ in (*end_tokens, *known) if id_ is not None))[:MAX_END_IDS]


class _Vocabulary:
    """The tokens of a file, checked.

    Gemma's tokens of several blanks are written as blanks in the file. As its tokenizer.json has them, they are put
    together by merges like others, and a token is merged before those that come later in the file.
    """

    def __init__(self, file: GgufFile) -> None:
        self.texts = file.texts("tokenizer.ggml.tokens")
        self.is_gemma = file.text("general.architecture").startswith("gemma")
        if not 0 < len(self.texts) <= MAX_TOKENS:
            raise ModelError(
                f"{file.path}: tokenizer.ggml.tokens has {len(self.texts)} tokens, from 1 to {MAX_TOKENS} are read; "
                "choose a file with its tokenizer"
            )
        _check_bytes(file, "tokenizer.ggml.tokens", self.texts)
        self.types = file.integers("tokenizer.ggml.token_type") or [NORMAL] * len(self.texts)
        if len(self.types) != len(self.texts):
            raise ModelError(
                f"{file.path}: tokenizer.ggml.token_type has {len(self.types)} values for {len(self.texts)} tokens; "
                "convert the model again"
            )
        if self.is_gemma:
            for id_, text in enumerate(self.texts):
                if text and not text.strip(" "):
                    self.texts[id_], self.types[id_] = BLANK * len(text), NORMAL
        self.ids: dict[str, int] = {}
        for id_, text in enumerate(self.texts):
            if (first := self.ids.setdefault(text, id_)) != id_:
                raise ModelError(
                    f"{file.path}: tokens {first} and {id_} are both {text[:60]!r}; convert the model again"
                )


def _byte_level(file: GgufFile, vocabulary: _Vocabulary) -> dict[str, Any]:
    name = file.text("tokenizer.ggml.pre", "default")
    if name not in PRE:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre {name[:60]!r} is not supported, {', '.join(PRE)} are; choose a model "
            "with a tokenizer.json"
        )
    pre = PRE[name]
    texts = file.texts("tokenizer.ggml.merges")
    _check_bytes(file, "tokenizer.ggml.merges", texts)
    merges = []
    for at, text in enumerate(texts):
        left, blank, right = text.partition(" ")
        if not (left and blank and right):
            raise ModelError(
                f"{file.path}: tokenizer.ggml.merges[{at}] is {text[:60]!r}, expected two tokens with a blank between; "
                "convert the model again"
            )
        merges.append([left, right])
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in pre.regexes
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre.has_gpt2})
    return {
        "normalizer": {"type": "NFC"} if pre.is_composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(file, vocabulary, pre.adds_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre.keeps_words,
            "vocab": vocabulary.ids, "merges": merges,
        },
    }  # fmt: skip


def _sentence_piece(file: GgufFile, vocabulary: _Vocabulary) -> dict[str, Any]:
    has_prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = next(
        (text for text, type_ in zip(vocabulary.texts, vocabulary.types, strict=True) if type_ == UNKNOWN), None
    )
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    normalizers = [{"type": "Prepend", "prepend": BLANK}, blanks] if has_prefix else [blanks]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _post_processor(file, vocabulary, True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocabulary.ids, "merges": _merges(file, vocabulary),
        },
    }  # fmt: skip


def _merges(file: GgufFile, vocabulary: _Vocabulary) -> list[list[str]]:
    """Return the pairs that make up a token, those of the token with the best score first."""
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.texts) or any(map(math.isnan, scores)):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} values for {len(vocabulary.texts)} tokens, or NaN; "
            "convert the model again"
        )
    if vocabulary.is_gemma:
        scores = [-float(id_) for id_ in range(len(scores))]
    pairs = {
        text: score
        for text, type_, score in zip(vocabulary.texts, vocabulary.types, scores, strict=True)
        if type_ in (NORMAL, USER_DEFINED)
    }
    merges: list[tuple[float, str, str]] = []
    for text, score in pairs.items():
        if len(text) > MAX_MERGED_CHARS:
            raise ModelError(
                f"{file.path}: token {text[:40]!r} has {len(text)} characters, at most {MAX_MERGED_CHARS}; choose "
                "another model"
            )
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in pairs and right in pairs:
                merges.append((score, left, right))
    merges.sort(key=lambda one: (one[0], len(one[1]), len(one[2])), reverse=True)
    return [[left, right] for _, left, right in merges]


def _post_processor(file: GgufFile, vocabulary: _Vocabulary, adds_bos: bool) -> dict[str, Any] | None:
    """Return the template that puts bos before a text and eos behind it, where the file says so."""
    before = ["bos"] if file.flag("tokenizer.ggml.add_bos_token", adds_bos) else []
    behind = ["eos"] if file.flag("tokenizer.ggml.add_eos_token", False) else []
    ids = {key: _special(file, key, len(vocabulary.texts)) for key in (*before, *behind)}
    for key, id_ in ids.items():
        if id_ is None:
            raise ModelError(
                f"{file.path}: tokenizer.ggml.{key}_token_id is missing, and the token is added to each text; convert "
                "the model again"
            )
    if not ids:
        return None
    texts = {key: vocabulary.texts[id_] for key, id_ in ids.items() if id_ is not None}

    def pieces(number: int) -> list[dict[str, Any]]:
        special = [
            [{"SpecialToken": {"id": texts[key], "type_id": number}} for key in part] for part in (before, behind)
        ]
        return [*special[0], {"Sequence": {"id": "AB"[number], "type_id": number}}, *special[1]]

    return {
        "type": "TemplateProcessing",
        "single": pieces(0),
        "pair": [*pieces(0), *pieces(1)],
        "special_tokens": {text: {"id": text, "ids": [ids[key]], "tokens": [text]} for key, text in texts.items()},
    }


def _special(file: GgufFile, key: str, tokens: int) -> int | None:
    """Return a special token's id; None where the file names none."""
    name = f"tokenizer.ggml.{key}_token_id"
    if name not in file:
        return None
    return file.integer(name, most=max(0, tokens - 1))


def _check_bytes(file: GgufFile, key: str, texts: list[str]) -> None:
    if (size := sum(map(len, texts))) > MAX_VOCABULARY_BYTES:
        raise ModelError(
            f"{file.path}: {key} has {size} characters, at most {MAX_VOCABULARY_BYTES}; choose another model"
        )
