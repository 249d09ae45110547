"""Grammars that constrain the output of a model, by llguidance: one tokenizer and one set of bounds for both services.

The gateway compiles a grammar to refuse a bad one before it is queued. The worker compiles it again for its masks. The
bounds count work (llguidance's fuel) and not time, so both decide the same on any machine. Nothing is fetched: a `$ref`
to another document is an error. The wire form of a grammar is llguidance's (`LLMatcher.grammar_from_*`).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.errors import ModelError, OrcinusError
from shared.text.end_of_text import end_ids
from shared.text.tokenizer import no_panic, tokenizer_json

if TYPE_CHECKING:  # an engine without grammars, as the GPU's bench runs it, does without llguidance
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_BYTES = 64 * 1024
"""Bound of the wire form."""
TOO_LONG = f"it is longer than {MAX_GRAMMAR_BYTES} bytes; send a shorter one"
CACHE_BYTES = 64 << 20
ENTRY_BYTES, BYTES_PER_BYTE = 64 * 1024, 32
"""Estimated size of a compiled grammar. Measured: 44 KiB for a schema of 300 bytes, growing with its length."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 20_000,
    "max_items_in_row": 500,
    "step_max_items": 5_000,
    "max_lexer_states": 20_000,  # 1 to 2 KiB each
    "max_grammar_size": 10_000,
    "verbose_errors": False,
}
"""Arguments of llguidance's LLParserLimits. docs/structured-output.md has the milliseconds.

An item of an ambiguous grammar is found in about as many ways as its row has items, and each is compared with the row:
the time of a mask grows with step_max_items * max_items_in_row ** 2.
"""
SCHEMA_LIMITS = LIMITS | {"max_items_in_row": 2_500, "step_max_items": 12_000}
"""Of a grammar that is one JSON schema. It has four items in a row for each optional property, and is not ambiguous."""


NOT_FOLLOWED = "the grammar cannot be followed"
"""Start of the error of a sequence with a grammar that exceeds a bound while it runs.

The request is at fault: the gateway compiles a grammar but does not walk through it.
"""


class GrammarError(OrcinusError):
    """A grammar that cannot be used; the message is for its author."""


class GrammarEndedError(GrammarError):
    """A grammar that ended the process which compiled or followed it: the last resort, where no fuel ran out."""


class NoGrammarsError(GrammarError):
    """llguidance cannot read this model's tokenizer, so the model has no structured output."""


class Grammars:
    """The compiled grammars of one model, in a cache that drops the least recently used ones. Thread-safe."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._unavailable = ""
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Return the estimated size of the cached grammars, at most CACHE_BYTES."""
        return self._kept_bytes

    def prepare(self) -> None:
        """Read the tokenizer now. Raises NoGrammarsError."""
        self._read_tokenizer()

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the start of a grammar, for this caller only. Raises GrammarError."""
        with self._lock:
            cached_matcher = self._matchers.get(grammar)
            if cached_matcher is not None:
                self._matchers.move_to_end(grammar)
                return cached_matcher.deep_copy()
        new_matcher = self.fresh(grammar)
        with self._lock:
            if grammar not in self._matchers:
                self._matchers[grammar] = new_matcher
                self._kept_bytes += _bytes_of(grammar)
            while self._kept_bytes > CACHE_BYTES:
                oldest, _ = self._matchers.popitem(last=False)
                self._kept_bytes -= _bytes_of(oldest)
        return new_matcher.deep_copy()

    def fresh(self, grammar: str) -> LLMatcher:
        """Return a newly compiled matcher. Raises GrammarError.

        Copies of one matcher share the states of a lexer, so they count together against a bound of LIMITS.
        """
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarError(TOO_LONG)
        tokenizer = self._read_tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits_of(grammar)))
        _raise_if_wrong(matcher)
        mask_of(matcher, tokenizer)  # the lexer is built at the first use
        _raise_if_wrong(matcher)
        return matcher

    def mask(self, matcher: LLMatcher) -> bytes:
        """Return the ids that a matcher of this model allows next, as `mask_of` does."""
        return mask_of(matcher, self._read_tokenizer())

    def keeps(self, grammar: str) -> bool:
        """Return whether a grammar is in the cache."""
        with self._lock:
            return grammar in self._matchers

    def forget(self, grammar: str) -> None:
        """Drop a grammar from the cache, after the states of its lexer are used up."""
        with self._lock:
            if self._matchers.pop(grammar, None) is not None:
                self._kept_bytes -= _bytes_of(grammar)

    def _read_tokenizer(self) -> LLTokenizer:
        """Return the tokenizer, read at the first call. Raises NoGrammarsError."""
        with self._lock:
            if self._tokenizer is None and not self._unavailable:
                self._tokenizer, self._unavailable = self._open()
            if self._tokenizer is None:
                problem = f"structured output is not available for this model: {self._unavailable}"
                raise NoGrammarsError(f"{problem}; leave it out, or choose another model")
            return self._tokenizer

    def _open(self) -> tuple[LLTokenizer | None, str]:
        path = self._model / "tokenizer.json"
        ends = end_ids(self._model)
        try:
            source = tokenizer_json(path)
        except ModelError as error:
            return None, str(error).replace(str(path), "its tokenizer.json")
        if not ends:
            return None, "it names no end-of-text id, so nothing could end"
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            return None, "llguidance is not installed"
        try:
            with no_panic(NoGrammarsError):
                return LLTokenizer(source, n_vocab=self._vocab_size, eos_token=ends), ""
        except NoGrammarsError as error:
            return None, f"llguidance cannot use its tokenizer ({str(error)[:120]})"


def limits_of(grammar: str) -> dict[str, Any]:
    """Return the bounds of a grammar, by its text alone."""
    try:
        parts = json.loads(grammar)["grammars"]
        is_schema = len(parts) == 1 and set(parts[0]) == {"json_schema"}
    except (ValueError, KeyError, TypeError, RecursionError):
        is_schema = False
    return SCHEMA_LIMITS if is_schema else LIMITS


def mask_of(matcher: LLMatcher, tokenizer: LLTokenizer) -> bytes:
    """Return the ids that a matcher allows next, a bit each.

    llguidance encodes text that is the only one possible with the model's tokenizer. Where that text is the name of a
    control token it allows this token alone, and then refuses it. Such text gets the first of its plain tokens.
    """
    mask = matcher.compute_bitmask()
    (places,) = np.frombuffer(mask, np.uint8).nonzero()
    if len(places) != 1 or (bits := mask[places[0]]) & (bits - 1):
        return mask
    token = 8 * int(places[0]) + bits.bit_length() - 1
    if matcher.is_error() or not tokenizer.is_special_token(token) or matcher.validate_tokens([token]):
        return mask
    plain = tokenizer.greedy_tokenize(matcher.compute_ff_bytes().decode(errors="ignore"))
    if not plain or not matcher.validate_tokens(plain[:1]):
        return mask
    return _bit(plain[0], len(mask))


def allows(mask: bytes, token: int) -> bool:
    """Return whether a mask allows an id."""
    return 0 <= token < 8 * len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _bit(token: int, size: int) -> bytes:
    """Return a mask of `size` bytes that allows one token."""
    mask = bytearray(size)
    mask[token // 8] = 1 << token % 8
    return bytes(mask)


def _raise_if_wrong(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(reason(matcher))


def reason(matcher: LLMatcher) -> str:
    """Return the reason of a matcher's failure, shortened."""
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    if text == "NoExtensionBias":
        return "it allows no text; let each rule and $ref lead to text, not only to itself"
    return text[:400] or "it cannot be used"


def _bytes_of(grammar: str) -> int:
    return ENTRY_BYTES + BYTES_PER_BYTE * len(grammar)
