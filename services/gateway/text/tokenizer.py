"""Load the text side of one model: tokenizer, chat template, end-of-text ids and context length.

Loaded once from a Hugging Face directory or a GGUF file; one that cannot be served raises ModelError naming file and
remedy.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import orjson

from services.gateway.errors import ApiError
from services.gateway.request import SamplingDefaults, TenantThreads
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.detokenizer import TokenText
from services.gateway.text.grammar import GrammarCheck
from services.gateway.text.pairs import CrossEncoder, Pairs, judge_of
from services.gateway.text.reasoning import CHANNEL_WORDS, MARKERS, ChannelIds, is_lookalike, markers_of
from services.gateway.text.tools.formats import format_of
from shared.errors import ModelError
from shared.models.fields import Fields
from shared.models.gguf.reader import is_gguf
from shared.models.model_files import AGAIN, read_bounded, read_json, read_json_if_any
from shared.text.end_of_text import MAX_ID, end_ids
from shared.text.tokenizer import load_tokenizer

log = logging.getLogger("orcinus.gateway")


class ModelText:
    """Text of one model, in and out."""

    def __init__(
        self,
        directory: Path,
        template_timeout_s: float = 2.0,
        tool_parser: str = "auto",
        sampling_defaults: str = "model",
        reasoning_parser: str = "auto",
    ) -> None:
        """Load a model directory. Raise ModelError.

        template_timeout_s: processor time of the chat template for one conversation. tool_parser: the format in which
        the model writes calls of tools; auto reads it from the template. sampling_defaults, reasoning_parser: as those
        settings.
        """
        directory = Path(directory)
        if not directory.is_dir() and not is_gguf(directory):
            raise ModelError(
                f"model directory {directory} does not exist; give a Hugging Face directory or a GGUF file"
            )
        config = read_json(directory / "config.json")
        self._bounded_tokenizer = load_tokenizer(directory / "tokenizer.json")
        self.tokenizer = self._bounded_tokenizer.library
        tokenizer_config = read_json_if_any(directory / "tokenizer_config.json")
        config_path = str(directory / "config.json")
        config = {**config, **Fields(config, config_path, remedy=AGAIN).fields("text_config")}
        config_fields = Fields(config, config_path, remedy=AGAIN)

        architecture = _architecture(config)
        self.is_encoder = is_encoder(config)
        self.max_model_len = _context(config_fields)
        if self.is_encoder:  # what is pooled counts as a token
            self.max_model_len += 1 - ENCODER_OFFSETS.get(config_fields.text("model_type", ""), 0)
        self.vector_size = 0 if architecture in SCORE_ENCODERS else _vector_size(config_fields)
        self.vocab_size = config_fields.integer("vocab_size", self.tokenizer.get_vocab_size(), most=MAX_ID)
        self.text = TokenText(self.tokenizer)
        self.threads = TenantThreads()
        self.grammars = GrammarCheck(directory, self.vocab_size)
        names = {name: text for name in SPECIAL_TOKENS if (text := _token_text(tokenizer_config.get(name))) is not None}
        self.eos_ids = end_ids(directory)
        self.defaults = _defaults(directory) if sampling_defaults == "model" else SamplingDefaults()
        self.tool_format = "none" if tool_parser == "auto" else tool_parser
        source = _template_source(directory, tokenizer_config)
        if source is not None and tool_parser == "auto":
            self.tool_format = format_of(source)
        added = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]
        self.reasoning = markers_of(source or "", added) if reasoning_parser == "auto" else reasoning_parser
        self.markers = MARKERS.get(self.reasoning, MARKERS["think"])
        self.info = _info(tokenizer_config, names, source)
        """What `/tokenizer_info` says of the model's files."""
        self.hides_markers = not set(self.markers).isdisjoint(self.tokens(self.text.special))
        """Whether text without control tokens lacks the markers of thinking."""
        marks = self.tokenizer.token_to_id(self.markers[0]), self.tokenizer.token_to_id(self.markers[1])
        self.thinking_marks = None if marks[0] is None or marks[1] is None else (marks[0], marks[1])
        """Ids of the marks of thinking, where each is one token."""
        try:
            self.chat = ChatTemplate(source, self._bounded_tokenizer, names, template_timeout_s)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(
                f"the chat template of {directory} does not compile: {error}; choose another model"
            ) from error
        self.pairs: Pairs | None = judge_of(architecture, self._bounded_tokenizer, self.chat)
        if architecture in SCORE_ENCODERS:
            self.pairs = CrossEncoder(config, config_path, self._bounded_tokenizer)
        self.tasks = self._tasks()
        """What the model is for: keys of ENDPOINTS in shared/ids.py."""
        self.longest = self.text.longest
        """Bytes of the longest token: a text of k * longest characters has at least about k tokens."""
        self._bounded_tokenizer.encoders.make_ready()
        self.fingerprint = "fp_" + hashlib.sha256(orjson.dumps(config, option=orjson.OPT_SORT_KEYS)).hexdigest()[:10]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return ids of a raw prompt; control tokens written in it count. Raise TokenizerError.

        tokenizer.json alone decides what is added; transformers 5 ignores add_bos_token beside it, too. Other threads
        run on meanwhile; only where `is_quick` says so may it be called on the event loop.
        """
        return self._bounded_tokenizer.encode(text, add_special_tokens)

    def is_quick(self, chars: int) -> bool:
        """Return whether texts of so many characters, all together, are encoded in less than a millisecond or two."""
        return self._bounded_tokenizer.is_quick(chars)

    def try_template(self) -> str:
        """Return why the chat template does not render a plain conversation; empty when it does, or there is none."""
        if not self.chat.exists:
            return ""
        try:
            self.chat.encode([{"role": "user", "content": "Hello"}])
        except ApiError as error:
            return error.message
        return ""

    def close(self) -> None:
        """End the processes that encode, render and compile grammars. Long texts are no longer encoded."""
        self._bounded_tokenizer.encoders.close()
        self.chat.close()
        self.grammars.close()

    def _tasks(self) -> tuple[str, ...]:
        scores = ("rerank", "score") if self.pairs is not None else ()
        if self.is_encoder:
            return scores or ("embeddings",)
        return (*(("chat",) if self.chat.exists else ()), "completions", "embeddings", *scores)

    @cached_property
    def blank_ids(self) -> tuple[int, ...]:
        """Return the ids of tokens that are white space; none where the tokenizer has no table of bytes."""
        return tuple(id_ for id_, piece in self._pieces() if piece and not piece.strip())

    @cached_property
    def channel_ids(self) -> ChannelIds | None:
        """Return the ids of which heads of channels are made; None where the marks and names are not one token each."""
        words = [self.tokenizer.token_to_id(word) for word in CHANNEL_WORDS]
        ids = [id_ for id_ in words if id_ is not None]
        if len(ids) < len(words):
            return None
        channel, message, start, end, analysis, assistant, final = ids
        pieces = ((id_, piece.decode("utf-8", "replace")) for id_, piece in self._pieces())
        lookalikes = tuple(id_ for id_, piece in pieces if is_lookalike(piece) and id_ not in ids)
        return ChannelIds(channel, message, start, end, analysis, assistant, final, lookalikes)

    def _pieces(self) -> Iterable[tuple[int, bytes]]:
        """Yield each id with its bytes; nothing where the tokenizer has no table of bytes."""
        if self.text.has_table:
            yield from ((id_, self.text.piece(id_)) for id_ in range(self.tokenizer.get_vocab_size()))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the vocabulary's strings of some ids."""
        return [self.tokenizer.id_to_token(id_) or "" for id_ in ids]


SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_BOUNDS = {
    "temperature": (0, 2), "top_p": (1e-9, 1), "top_k": (-1, (1 << 31) - 1), "min_p": (0, 1),
    "repetition_penalty": (1e-9, 2),
}  # fmt: skip
"""Least and most of each value, as of a request (openai/bodies.py)."""


def _defaults(directory: Path) -> SamplingDefaults:
    """Return the sampling that generation_config.json recommends; do_sample has no part in it."""
    config = read_json_if_any(directory / "generation_config.json")
    defaults: dict[str, Any] = {}
    for name, (least, most) in _BOUNDS.items():
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            path = directory / "generation_config.json"
            log.warning("%s: %s is %r, not a number from %g to %g; it is passed over", path, name, value, least, most)
            continue
        defaults[name] = max(0, int(value)) if name == "top_k" else float(value)
    return SamplingDefaults(**defaults)


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return read_bounded(path, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: not UTF-8: {error}; {AGAIN}") from error
    path, source = directory / "tokenizer_config.json", config.get("chat_template")
    if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise ModelError(
            f"{path}: chat_template is {repr(source)[:60]}, expected a string or a list of objects with `name` and "
            f"`template`; {AGAIN}"
        )
    if source is not None and len(source.encode()) > MAX_TEMPLATE_BYTES:
        raise ModelError(f"{path}: chat_template has more than {MAX_TEMPLATE_BYTES} bytes; choose another model")
    return source


MAX_TEMPLATE_BYTES = 1 << 20
"""Of a chat template. Those of models have 30 kB at most."""


CONTEXTS = {"bloom": 2048, "gemma3_text": 131072}
"""Of model types with files that may leave it out, as the worker takes it. BLOOM's positions have no end."""


VECTOR_ENCODERS = ("BertModel", "RobertaModel", "XLMRobertaModel")
SCORE_ENCODERS = (
    "BertForSequenceClassification",
    "RobertaForSequenceClassification",
    "XLMRobertaForSequenceClassification",
)
"""Architectures of encoders: those with vectors, and those with a head that scores pairs."""
ENCODER_OFFSETS = {"roberta": 2, "xlm-roberta": 2}
"""Rows of the learned positions that no token has, by model type."""


def is_encoder(config: dict[str, Any]) -> bool:
    """Return whether a config.json is that of an encoder."""
    return _architecture(config) in VECTOR_ENCODERS + SCORE_ENCODERS


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(names)


def _context(fields: Fields) -> int:
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"):
        if fields.raw.get(name) is not None:
            return fields.integer(name)
    if (kind := fields.text("model_type", "")) in CONTEXTS:
        return CONTEXTS[kind]
    return fields.integer("max_position_embeddings")


def _vector_size(fields: Fields) -> int:
    """Return the numbers of a row of the last layer; 0 where config.json does not say."""
    names = ("hidden_size", "n_embd", "n_embed")
    return next((fields.integer(name, least=0) for name in names if fields.raw.get(name) is not None), 0)


def _info(config: dict[str, Any], names: dict[str, str], template: str | None) -> dict[str, str | None]:
    kind = config.get("tokenizer_class")
    head = {"tokenizer_class": kind if isinstance(kind, str) else "PreTrainedTokenizerFast", "chat_template": template}
    return {**head, **{name: names.get(name) for name in SPECIAL_TOKENS}}


def _token_text(token: Any) -> str | None:
    """Return a token of tokenizer_config.json, which may be text or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
