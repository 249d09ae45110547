"""Grammars that bind what a model may say, by llguidance: one tokenizer and one set of bounds for gateway and worker.

The gateway compiles a grammar to refuse a bad one at the door, the worker compiles it again for its masks. The bounds
count work (llguidance's fuel) and not time, so both decide the same on any machine. Nothing is fetched: a `$ref` to
another document is an error. A grammar's wire form is llguidance's own (`LLMatcher.grammar_from_*`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.end_of_text import end_ids
from shared.errors import OrcinusError

if TYPE_CHECKING:  # an engine without grammars, as the GPU's bench runs it, does without llguidance
    from llguidance import LLMatcher, LLTokenizer

MOST_GRAMMAR_BYTES = 64 * 1024
"""Of the wire form."""
CACHE_BYTES = 64 << 20
ENTRY_BYTES, BYTES_PER_BYTE = 64 * 1024, 32
"""What a compiled grammar is taken to hold: measured are 44 KiB for a schema of 300 bytes; large ones grow with it."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,  # 50 ms
    "step_lexer_fuel": 100_000,  # 7 ms a mask at most
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,  # 1 to 2 KiB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Of llguidance's LLParserLimits."""


NOT_FOLLOWED = "the grammar cannot be followed"
"""How the error of a sequence begins whose grammar ran out of a bound on the way: the request is at fault, as no walk
through a grammar is tried at the door."""


class GrammarError(OrcinusError):
    """A grammar that cannot be used; the text is for whoever wrote it."""


class NoGrammarsError(GrammarError):
    """llguidance cannot read this model's tokenizer, so the model has no structured output."""


class Grammars:
    """The compiled grammars of one model, the latest used of them kept. Any thread may call."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._why_none = ""
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """What the kept grammars are taken to hold, at most CACHE_BYTES."""
        return self._kept_bytes

    def prepare(self) -> None:
        """Reads the tokenizer now. Raises NoGrammarsError."""
        self._read_tokenizer()

    def matcher(self, grammar: str) -> LLMatcher:
        """At its beginning, for the caller alone. Raises GrammarError."""
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
                return kept.deep_copy()
        made = self.fresh(grammar)
        with self._lock:
            if grammar not in self._kept:
                self._kept[grammar] = made
                self._kept_bytes += _bytes_of(grammar)
            while self._kept_bytes > CACHE_BYTES:
                oldest, _ = self._kept.popitem(last=False)
                self._kept_bytes -= _bytes_of(oldest)
        return made.deep_copy()

    def fresh(self, grammar: str) -> LLMatcher:
        """As `matcher`, sharing nothing: copies share the states of a lexer, and with them a bound of LIMITS."""
        if len(grammar.encode()) > MOST_GRAMMAR_BYTES:
            raise GrammarError(f"it is longer than {MOST_GRAMMAR_BYTES} bytes")
        tokenizer = self._read_tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        _raise_if_wrong(matcher)
        matcher.compute_bitmask()  # a lexer is built when it is needed first
        _raise_if_wrong(matcher)
        return matcher

    def forget(self, grammar: str) -> None:
        """What is kept of a grammar: the states of its lexer are used up."""
        with self._lock:
            if self._kept.pop(grammar, None) is not None:
                self._kept_bytes -= _bytes_of(grammar)

    def _read_tokenizer(self) -> LLTokenizer:
        """Read when the first grammar comes. Raises NoGrammarsError."""
        with self._lock:
            if self._tokenizer is None and not self._why_none:
                self._tokenizer, self._why_none = self._open()
            if self._tokenizer is None:
                raise NoGrammarsError(f"structured output is not available for this model: {self._why_none}")
            return self._tokenizer

    def _open(self) -> tuple[LLTokenizer | None, str]:
        path = self._model / "tokenizer.json"
        ends = end_ids(self._model)
        if not path.is_file():
            return None, "it has no tokenizer.json"
        if not ends:
            return None, "it names no end-of-text id, so nothing could end"
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            return None, "llguidance is not installed"
        try:
            return LLTokenizer(str(path), n_vocab=self._vocab_size, eos_token=ends), ""
        except Exception as error:  # the bindings raise what they like
            return None, f"llguidance cannot use its tokenizer ({str(error)[:120]})"


def _raise_if_wrong(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(reason(matcher))


def reason(matcher: LLMatcher) -> str:
    """Why a matcher failed, in a few words."""
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    return text[:400] or "it cannot be used"


def _bytes_of(grammar: str) -> int:
    return ENTRY_BYTES + BYTES_PER_BYTE * len(grammar)
