"""Read the tokenizer.json of a model within bounds of memory and time; encode and decode without a panic.

The file is a program of its author's: normalizers that multiply text, regular expressions, templates. It is checked
before any parser of the tokenizers library or of llguidance sees it, and they get the JSON that was checked, not the
file. Gateway, workers, launcher and hub ask here. A panic of the library is a BaseException in Python; here it becomes
a TokenizerError. Texts that may take long are encoded in processes apart (tokenizer_process.py).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import math
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ModelError, OrcinusError
from shared.messages import shorten
from shared.models.gguf.tokenizer import LLAMA_3, QWEN_2
from shared.models.model_files import read_bounded
from shared.processes.jail import Jail, JailError
from shared.text.end_of_text import MAX_ID
from shared.text.regex_bounds import regex_problem
from shared.wire.columns import unpack

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_DECODED_BYTES = 1 << 30
"""Of the text of ids, as bounded by the longest token: 256 bytes for each of a million ids."""
MAX_VALUES = 8 << 20
"""JSON values in the file, counted by its commas and brackets. Gemma 3 has 2 million."""
MAX_STEPS = 64
"""Of a normalizer, pre-tokenizer, post-processor or decoder, each."""
MAX_DEPTH = 4
"""Of a Sequence in a Sequence."""
MAX_STEP_BYTES = 2 << 20
"""Of each of these four parts. T5's table of characters has 320 kB."""
MAX_GROWTH = 4096
"""Bytes that the library makes of one byte of a text at most, by normalizer, pre-tokenizer and post-processor."""
MAX_DECODER_GROWTH = 4
"""The same of a decoder, for one byte of a token."""
MAX_TOKEN_BYTES = 2048
"""Of one token's text. The longest ones of models are runs of some hundred blanks."""
MAX_AFFIX_BYTES = 64
"""Of the prefix or suffix that a model puts at each part of a word."""
MAX_WORD_CHARS = 1000
"""Of a word for WordPiece; its time grows with the square of it."""
MAX_NORMALIZED_BYTES = 32 << 20
"""Of one text after normalizer and pre-tokenizer, by its growth. The library needs up to 130 bytes for each."""
QUICK_CHARS = 1024
QUICK_BYTES = 64 * 1024
"""A text of so many characters, and normalized bytes, is encoded in less than a millisecond."""
IN_PROCESS_BYTES = 64 * 1024
"""A text of so many normalized bytes is encoded in a thread of its process, in 20 ms at most; a longer one in a process
apart, where what the text goes to and fro takes is not seen."""
PROCESSES = max(2, min(4, os.cpu_count() or 1))
"""At work at once for one model, of which one takes texts of SHORT_BYTES at most."""
SHORT_BYTES = 64 * 1024
IDLE_S = 60.0
"""After which a process ends."""
MEMORY_BYTES = 1536 << 20
"""Of such a process, beside the tokenizer. 4 MiB of prose take 0.8 GiB."""
SECONDS, SECONDS_OF_BYTE = 2.0, 5e-6
"""Of processor time. A byte of prose takes 0.4 us."""
PATIENCE = 10
"""An answer may take so many times the processor time: the machine may be busy."""
BOUNDS = (signal.SIGPROF, signal.SIGABRT)
"""Signals of a process that met its bound of processor time, or of memory."""
IDLE = struct.Struct("<d")
"""Seconds without a question after which the process ends; 0: never. The checked JSON follows."""
QUESTION = struct.Struct("<d??I")
"""Seconds, whether special tokens are added, whether there are two texts, bytes of the first. The texts follow."""
FAR_END = "shared.text.tokenizer_process"
MAX_ANSWER_BYTES = 1 << 30
TAKEN, REFUSED = b"T", b"R"
"""First byte of an answer. int32 follow: where tokens of type 1 begin, and the ids; or why."""

KNOWN_REGEXES = frozenset(
    {
        LLAMA_3,
        QWEN_2,
        r"\s*[\r\n]+[ \t]*| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    }
)
"""Of Llama 3, Qwen 2 and 3, and the demo model: their time is proportional to a text. Nothing is known of others."""


class TokenizerError(OrcinusError):
    """A text or ids that this tokenizer cannot turn into the other. The message is for the client."""


class EncodersError(TokenizerError):
    """The processes that encode failed, not the tokenizer; the same text may be sent again. The message is for the
    client.
    """


class Encoders:
    """Processes that encode texts of one tokenizer. They are started when they are needed, and end when they are idle.

    `encode` blocks and may be called by several threads.
    """

    def __init__(self, source: str, is_ready: bool, twin: Encoders | None = None) -> None:
        """source: the checked JSON of the tokenizer. is_ready: short texts come here, too, and should not wait for the
        start of a process. twin: of another tokenizer of the model; both together have PROCESSES at work.
        """
        self._is_ready = is_ready
        self._load_s = PATIENCE * seconds_for(len(source))  # the most that reading the tokenizer may take
        self._slots: threading.Semaphore = threading.Semaphore(PROCESSES) if twin is None else twin._slots
        self._long: threading.Semaphore = threading.Semaphore(PROCESSES - 1) if twin is None else twin._long
        self._jails = [
            Jail(
                FAR_END,
                IDLE.pack(0 if is_ready and at == 0 else IDLE_S) + source.encode(),
                self._load_s,
                MAX_ANSWER_BYTES,
            )
            for at in range(PROCESSES)
        ]
        self._answered_pids = set[int | None]()  # pids of processes that have
        self._busy = set[Jail]()
        self._lock = threading.Lock()
        self._is_closed = False

    def encode(self, first: str, second: str | None, add_special_tokens: bool) -> tuple[list[int], int]:
        """Return as `encode`. Raise TokenizerError, also for a text beyond its time or memory; EncodersError."""
        texts = [text.encode("utf-8", "surrogatepass") for text in (first, second or "")]
        size = sum(map(len, texts))
        seconds = seconds_for(size)
        head = QUESTION.pack(seconds, add_special_tokens, second is not None, len(texts[0]))
        try:
            with self._long if size > SHORT_BYTES else contextlib.nullcontext(), self._slots:
                answer = self._ask(head + b"".join(texts), PATIENCE * seconds)
        except JailError as error:
            if error.signal in BOUNDS:
                raise TokenizerError(
                    f"{size} bytes take more than {seconds:.3g} s of processor time or {MEMORY_BYTES >> 20} MiB; "
                    "send a shorter text"
                ) from error
            raise EncodersError(f"the process that encodes {size} bytes {error}") from error
        if answer[:1] != TAKEN:
            raise TokenizerError(answer[1:].decode("utf-8", "replace"))
        ids = unpack(answer[1:]).tolist()
        return ids[1:], ids[0]

    def make_ready(self) -> None:
        """Start a process in the background where short texts need one and none is free."""
        with self._lock:
            free = next((jail for jail in self._jails if jail not in self._busy), None)
            if self._is_ready and not self._is_closed and free is not None and free.pid is None:
                with contextlib.suppress(RuntimeError):  # no thread can be started; the next text starts the process
                    threading.Thread(target=self._start, args=(free,), daemon=True).start()

    def pids(self, at_work: bool = False) -> list[int]:
        """Return the pids of the processes that run; at_work: of those that have a text."""
        jails = list(self._busy) if at_work else self._jails
        return [pid for jail in jails if (pid := jail.pid) is not None]

    def close(self) -> None:
        """End the processes, for good; texts that they work at fail."""
        self._is_closed = True
        for jail in self._jails:
            jail.close()

    def _ask(self, question: bytes, timeout_s: float) -> bytes:
        """Return the answer of a free process, of a second one where the system killed the first. Raise JailError."""
        with self._lock:
            free = [jail for jail in self._jails if jail not in self._busy]
            jail = next((jail for jail in free if jail.pid is not None), free[0])
            self._busy.add(jail)
            if jail.pid not in self._answered_pids:  # it may still read the tokenizer
                timeout_s += self._load_s
        self.make_ready()
        try:
            if self._is_closed:
                raise JailError("was closed with its model")
            try:
                return jail.ask(question, timeout_s)
            except JailError as error:
                if error.signal != signal.SIGKILL or self._is_closed:
                    raise
            return jail.ask(question, timeout_s + self._load_s)
        finally:
            with self._lock:
                self._busy.remove(jail)
                self._answered_pids = {*self._answered_pids, jail.pid}.intersection(each.pid for each in self._jails)
            if self._is_closed:
                jail.close()
            self.make_ready()

    def _start(self, jail: Jail) -> None:
        with contextlib.suppress(JailError):  # a text that needs the process says why there is none
            jail.start()
        if self._is_closed:
            jail.close()


def seconds_for(size_bytes: int) -> float:
    """Return the processor time that a text may take: some ten times of what tokenizers of models need."""
    return SECONDS + SECONDS_OF_BYTE * size_bytes


def encode(library: Tokenizer, first: str, second: str | None, add_special_tokens: bool) -> tuple[list[int], int]:
    """Return the ids of a text, or of two joined by the post-processor, and where tokens of type 1 begin; 0 without
    any. Other threads run on. Raise TokenizerError.
    """
    text: Any = first if second is None else (first, second)
    with _no_panic():
        # Of the library's calls, this one lets go of the interpreter's lock; `encode` keeps it.
        encoding = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        types = [] if second is None else list(encoding.type_ids)
        return list(encoding.ids), types.index(1) if 1 in types else 0


@dataclass(frozen=True, slots=True)
class BoundedTokenizer:
    """A tokenizer of the library, and the most that it makes of a text."""

    library: Tokenizer
    growth: int
    """Bytes of normalized text for one byte of a text."""
    is_predictable: bool
    """It has no regular expression but known ones, so that short texts take a short time."""
    encoders: Encoders
    """Of all texts that may take long."""

    def is_quick(self, chars: int) -> bool:
        """Return whether texts of so many characters, all together, may be encoded on an event loop."""
        return self.is_predictable and chars <= QUICK_CHARS and 4 * chars * self.growth <= QUICK_BYTES

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Other threads run on. Raise TokenizerError."""
        return self._encode(text, None, add_special_tokens)[0]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the ids of two texts, joined by the post-processor, and where tokens of type 1 begin; 0 without any.

        Other threads run on. Raise TokenizerError.
        """
        return self._encode(first, second, True)

    def _encode(self, first: str, second: str | None, add_special_tokens: bool) -> tuple[list[int], int]:
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in (first, second or ""))
        if size * self.growth > MAX_NORMALIZED_BYTES:
            raise TokenizerError(
                f"{size} bytes may become {self.growth} times as many, and at most {MAX_NORMALIZED_BYTES} are taken; "
                f"send at most {MAX_NORMALIZED_BYTES // self.growth} bytes"
            )
        if self.is_predictable and size * self.growth <= IN_PROCESS_BYTES:
            return encode(self.library, first, second, add_special_tokens)
        return self.encoders.encode(first, second, add_special_tokens)

    def change(self, change: Callable[[dict[str, Any]], None]) -> BoundedTokenizer:
        """Return a tokenizer from a changed copy of this one's JSON. Raise ModelError."""
        source = json.loads(self.library.to_str())
        change(source)
        return parse_bounded(_text(source), self.growth, self.is_predictable, "tokenizer.json", self.encoders)


def load_tokenizer(path: Path) -> BoundedTokenizer:
    """Return the tokenizer of a file, without its truncation and padding. Raise ModelError."""
    source, growth, is_predictable = _check(path)
    return parse_bounded(source, growth, is_predictable, str(path))


def tokenizer_json(path: Path) -> str:
    """Return the JSON of a file, checked, for a parser that takes it as text. Raise ModelError."""
    return _check(path)[0]


def check_tokenizer(data: bytes) -> tuple[str, int, bool]:
    """Return the checked JSON of a tokenizer, its growth, and whether it is predictable. Raise ValueError."""
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > MAX_VALUES:
        raise ValueError(f"JSON: about {values} values, at most {MAX_VALUES}; choose another model")
    try:
        source = json.loads(data, parse_constant=_refuse_constant)
        text = _text(source)  # from values: another parser may take another one of two equal keys
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read as JSON: {error}; save the tokenizer again") from error
    if not isinstance(source, dict):
        raise ValueError("JSON: not an object; save the tokenizer again")
    regexes = set[str]()
    growth = {part: _Steps(part, source.get(part), regexes).growth for part in _NESTED}
    _check_growth("decoder", growth.pop("decoder"), MAX_DECODER_GROWTH)
    total_growth = math.prod(growth.values())
    _check_growth(max(growth, key=lambda part: growth[part]), total_growth, MAX_GROWTH)
    _check_model(source.get("model"))
    _check_added(source.get("added_tokens"), total_growth)
    return text, total_growth, regexes <= KNOWN_REGEXES


def decode(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Return the text of ids, by the tokenizer's decoder. Raise TokenizerError."""
    with _no_panic():
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


@contextlib.contextmanager
def no_panic(make_error: Callable[[str], Exception]) -> Iterator[None]:
    """Raise make_error(reason) for all that bindings to Rust raise, panics among it."""
    try:
        yield
    except BaseException as error:
        # No module has the class of a panic by name, and it is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise make_error(str(error)[:200] or type(error).__name__) from error


def _no_panic() -> contextlib.AbstractContextManager[None]:
    return no_panic(TokenizerError)


def _check(path: Path) -> tuple[str, int, bool]:
    data = read_bounded(path)
    try:
        return check_tokenizer(data)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def parse(source: str) -> Tokenizer:
    """Return the library's tokenizer of a checked JSON, without its truncation and padding."""
    # One text is one thread's work. The library's own threads would make short texts wait for long ones.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(source)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def parse_bounded(
    source: str, growth: int, is_predictable: bool, name: str, twin: Encoders | None = None
) -> BoundedTokenizer:
    with no_panic(lambda reason: ModelError(f"{name} cannot be read: {reason}")):
        tokenizer = parse(source)
    return BoundedTokenizer(tokenizer, growth, is_predictable, Encoders(source, not is_predictable, twin))


_NESTED = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
# What one byte of UTF-8 becomes at most. Unicode's forms: Unicode Technical Report 15 and its FAQ on normalization.
_FACTORS: Mapping[str, Mapping[str, int]] = {
    "normalizer": {
        "BertNormalizer": 8, "ByteLevel": 2, "Lowercase": 2, "NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Nmt": 1,
        "Strip": 1, "StripAccents": 1,
    },
    "pre_tokenizer": {
        "BertPreTokenizer": 1, "CharDelimiterSplit": 1, "Digits": 1, "FixedLength": 1, "Punctuation": 1,
        "UnicodeScripts": 1, "Whitespace": 1, "WhitespaceSplit": 1,
    },
    "post_processor": {"BertProcessing": 1, "ByteLevel": 1, "RobertaProcessing": 1},
    "decoder": {
        "BPEDecoder": 2, "ByteFallback": 1, "ByteLevel": 2, "CTC": 2, "Fuse": 1, "Metaspace": 1, "Strip": 1,
        "WordPiece": 2,
    },
}  # fmt: skip


class _Steps:
    """Walk through the steps of one part; `growth` is the product of theirs."""

    def __init__(self, part: str, root: Any, regexes: set[str]) -> None:
        self._part = part
        self._regexes = regexes
        self._count = 0
        size = len(_text(root).encode("utf-8", "surrogatepass"))
        if size > MAX_STEP_BYTES:
            raise ValueError(f"{part}: {size} bytes, at most {MAX_STEP_BYTES}; choose another model")
        self.growth = 1 if root is None else self._walk(root, 0)

    def _walk(self, step: Any, depth: int) -> int:
        self._count += 1
        if self._count > MAX_STEPS:
            raise self._wrong(f"more than {MAX_STEPS} steps", "remove some")
        if depth > MAX_DEPTH:
            raise self._wrong(f"a Sequence at depth {depth}, at most {MAX_DEPTH}", "put its steps into one Sequence")
        kind = str(step.get("type")) if isinstance(step, dict) else "None"
        if kind == "Sequence":
            steps = step.get(_NESTED[self._part])
            if not isinstance(steps, list):
                raise self._wrong("a Sequence without a list of steps")
            return math.prod(self._walk(one, depth + 1) for one in steps)
        if kind in _FACTORS[self._part]:
            return _FACTORS[self._part][kind]
        if special := _SPECIAL.get((self._part, kind)):
            return special(self, step)
        raise self._wrong(f"{kind[:40]!r} is no type of a step that is known")

    def prepend(self, step: dict[str, Any]) -> int:
        return 1 + self._bytes(step, "prepend")

    def replace(self, step: dict[str, Any]) -> int:
        content = self._bytes(step, "content")
        pattern_bytes = self._pattern(step)
        # An expression may match nothing at all, between any two bytes.
        return max(1, math.ceil(content / pattern_bytes)) if pattern_bytes else 1 + content

    def split(self, step: dict[str, Any]) -> int:
        self._pattern(step)
        return 1

    def metaspace(self, step: dict[str, Any]) -> int:
        return 1 + self._bytes(step, "replacement")

    def byte_level(self, step: dict[str, Any]) -> int:
        return 2 if step.get("add_prefix_space") is False else 4

    def longest_replacement(self, step: dict[str, Any]) -> int:
        """Return the length of the longest replacement. The table: bytes of the trie, trie, replacements and NULs."""
        table = step.get("precompiled_charsmap")
        try:
            data = base64.b64decode(table if isinstance(table, str) else "", validate=True)
        except (ValueError, binascii.Error) as error:
            raise self._wrong("precompiled_charsmap is not base64") from error
        begin = 4 + int.from_bytes(data[:4], "little")
        if not 4 < begin <= len(data):
            raise self._wrong("precompiled_charsmap is cut off")
        return max(1, *map(len, data[begin:].split(b"\0")))

    def template(self, step: dict[str, Any]) -> int:
        pieces = [step.get("single"), step.get("pair")]
        special_tokens = step.get("special_tokens")
        if not all(isinstance(one, list) and len(one) <= MAX_STEPS for one in pieces):
            raise self._wrong(f"TemplateProcessing needs lists `single` and `pair` of at most {MAX_STEPS} pieces")
        if not isinstance(special_tokens, dict) or sum(len(_ids(one)) for one in special_tokens.values()) > MAX_STEPS:
            raise self._wrong(f"TemplateProcessing needs `special_tokens` with at most {MAX_STEPS} ids")
        return max(1, *(sum(isinstance(piece, dict) and "Sequence" in piece for piece in one or ()) for one in pieces))

    def _pattern(self, step: dict[str, Any]) -> int:
        """Return the bytes that a pattern takes at least; 0 for an expression."""
        pattern = step.get("pattern")
        kind, text = next(iter(pattern.items())) if isinstance(pattern, dict) and len(pattern) == 1 else ("", None)
        if not isinstance(text, str) or kind not in ("String", "Regex"):
            raise self._wrong("a pattern is neither a String nor a Regex")
        if kind == "String":
            return len(text.encode())
        if self._part == "decoder":  # it runs on the gateway's event loop, token by token
            raise self._wrong("a Replace by a regular expression, and only by a String is allowed")
        self._regexes.add(text)
        if problem := regex_problem(text):
            raise self._wrong(f"the regular expression {shorten(text)!r} {problem}", "choose another model")
        return 0

    def _bytes(self, step: dict[str, Any], name: str) -> int:
        text = step.get(name)
        if not isinstance(text, str):
            raise self._wrong(f"{step['type']} without a text {name}")
        return len(text.encode())

    def _wrong(self, problem: str, remedy: str = "save the tokenizer again, or choose another model") -> ValueError:
        return ValueError(f"{self._part}: {problem}; {remedy}")


_SPECIAL: Mapping[tuple[str, str], Callable[[_Steps, dict[str, Any]], int]] = {
    ("normalizer", "Prepend"): _Steps.prepend,
    ("normalizer", "Replace"): _Steps.replace,
    ("normalizer", "Precompiled"): _Steps.longest_replacement,
    ("pre_tokenizer", "ByteLevel"): _Steps.byte_level,
    ("pre_tokenizer", "Metaspace"): _Steps.metaspace,
    ("pre_tokenizer", "Split"): _Steps.split,
    ("post_processor", "TemplateProcessing"): _Steps.template,
    ("decoder", "Replace"): _Steps.replace,
}


def _check_growth(part: str, growth: int, most: int) -> None:
    if growth > most:
        raise ValueError(
            f"{part}: one byte of text can become {growth}, at most {most}; remove its Replace and Prepend steps with "
            "long contents, or choose another model"
        )


def _check_model(model: Any) -> None:
    """Raise ValueError for a vocabulary or a field that would take memory or time without bound."""
    if not isinstance(model, dict):
        return  # the library says what is wrong
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if isinstance(text := model.get(name), str) and len(text.encode()) > MAX_AFFIX_BYTES:
            raise ValueError(
                f"model.{name}: {len(text.encode())} bytes, at most {MAX_AFFIX_BYTES}; choose another model"
            )
    chars = model.get("max_input_chars_per_word")
    if isinstance(chars, int) and chars > MAX_WORD_CHARS:
        raise ValueError(f"model.max_input_chars_per_word: {chars}, at most {MAX_WORD_CHARS}; set it to 100")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        _check_id("model.vocab", max((id_ for id_ in vocabulary.values() if isinstance(id_, int)), default=0))
        texts: Iterator[Any] = iter(vocabulary)
    elif isinstance(vocabulary, list):
        _check_id("model.vocab", len(vocabulary) - 1)
        texts = (entry[0] for entry in vocabulary if isinstance(entry, list) and entry)
    else:
        return
    _check_longest("model.vocab", (text for text in texts if isinstance(text, str)))


def _check_added(added_tokens: Any, growth: int) -> None:
    if not isinstance(added_tokens, list):
        return
    tokens = [token for token in added_tokens if isinstance(token, dict)]
    texts = [token["content"] for token in tokens if isinstance(token.get("content"), str)]
    _check_longest("added_tokens", texts)
    _check_id("added_tokens", max((token["id"] for token in tokens if isinstance(token.get("id"), int)), default=0))
    size = growth * sum(len(text.encode()) for text in texts)
    if size > MAX_NORMALIZED_BYTES:  # each is normalized when the file is read
        raise ValueError(
            f"added_tokens: {size} bytes when normalized, at most {MAX_NORMALIZED_BYTES}; remove some of {len(texts)}"
        )


def _check_longest(name: str, texts: Any) -> None:
    longest = max(map(len, texts), default=0)
    if longest > MAX_TOKEN_BYTES:
        raise ValueError(
            f"{name}: a token of {longest} characters, at most {MAX_TOKEN_BYTES}; remove it, or choose another model"
        )


def _check_id(name: str, highest: int) -> None:
    if highest >= MAX_ID:
        raise ValueError(f"{name}: token id {highest}, at most {MAX_ID - 1}; number the tokens from 0")


def _ids(special: Any) -> list[Any]:
    ids = special.get("ids") if isinstance(special, dict) else None
    return ids if isinstance(ids, list) else []
