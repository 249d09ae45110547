"""Turn token ids into text, one token at a time, never half a code point.

Two ways, chosen once per model by TokenText: a table of each token's bytes (byte-level BPE, SentencePiece with byte
fallback: nearly every model), or, for any other decoder, decoding a short window twice and taking the difference. Both
make the text after token i a function of the prompt and tokens 0..i alone.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from typing import Any, Protocol

import orjson
from tokenizers import Tokenizer

from services.gateway.errors import undecodable
from shared.text.tokenizer import MAX_DECODED_BYTES, MAX_DECODER_GROWTH, TokenizerError, decode

_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # prompt tokens that the window method starts from; more while they decode to nothing
_MAX_CONTEXT = 64
_MAX_WINDOW = 64
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one sequence."""

    def feed(self, token: int) -> str:
        """Return text that this token completes; empty while a code point is incomplete."""

    def flush(self) -> str:
        """Return the end: U+FFFD for bytes that never became a code point."""


class TokenText:
    """Turn ids of one model into text. Shared by all requests, without state of any."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special = frozenset(id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.longest = (
            max((len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True)), default=0) or 1
        )
        """Bytes of the longest token."""
        self._strips_first_space = False
        self._pieces = self._table()
        self._texts: list[str | None] | None = None  # of pieces that are whole code points; made at the first use

    @property
    def has_table(self) -> bool:
        return self._pieces is not None

    def start(self, prompt: Sequence[int], skip_special: bool = True) -> Detokenizer:
        """Return a detokenizer for a sequence that continues `prompt`."""
        if self._pieces is None:
            return WindowDetokenizer(self._tokenizer, prompt, self.special if skip_special else frozenset())
        if self._texts is None:
            self._texts = [_decode_whole(piece) for piece in self._pieces]
        strip = self._strips_first_space and not any(
            self._pieces[token] for token in prompt if not (skip_special and token in self.special)
        )
        return TableDetokenizer(self._pieces, self._texts, self.special if skip_special else frozenset(), strip)

    def tail(self, prompt: Sequence[int], skip_special: bool = True) -> list[int]:
        """Return the part of a prompt on which the text of its continuation depends: `start` makes the same of both."""
        last = list(prompt[-_MAX_CONTEXT:])
        if self._pieces is None or not self._strips_first_space:
            return last
        skipped = self.special if skip_special else frozenset()
        return next(([token] for token in prompt if self._pieces[token] and token not in skipped), last)

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token, special or not; those that its text alone has where there is no table."""
        if self._pieces is None:
            return _decode_answer(self._tokenizer, [token], skip_special=False).encode()
        return self._pieces[token] if token < len(self._pieces) else b""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of whole sequences, from the decoder of the tokenizer. Raise TokenizerError."""
        size = MAX_DECODER_GROWTH * self.longest * len(ids)
        if size > MAX_DECODED_BYTES:
            raise TokenizerError(f"{len(ids)} ids may be {size} bytes of text, at most {MAX_DECODED_BYTES} are made")
        return decode(self._tokenizer, ids, skip_special)

    def _table(self) -> list[bytes] | None:
        """Return the bytes of every id, or None when the decoder is of another kind or disagrees with the table."""
        steps = _decoder_steps(orjson.loads(self._tokenizer.to_str()).get("decoder"))
        kinds = [step["type"] for step in steps]
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if kinds == ["ByteLevel"]:
            bytes_of = _byte_level
        elif "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            replaces = [step for step in steps if step["type"] == "Replace"]
            if any(step["pattern"] != {"String": "▁"} or step["content"] != " " for step in replaces):
                return None
            strips = [step for step in steps if step["type"] == "Strip"]
            if any((step["content"], step["start"], step["stop"]) != (" ", 1, 0) for step in strips):
                return None
            self._strips_first_space = bool(strips)
            bytes_of = _byte_fallback
        else:
            return None
        pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, id_ in vocabulary.items():
            pieces[id_] = bytes_of(token)
        return pieces if self._agrees(pieces) else None

    def _agrees(self, pieces: list[bytes]) -> bool:
        """Compare the table with the tokenizer's decoder on a fixed sample of ids."""
        known = sorted(self._tokenizer.get_vocab(with_added_tokens=True).values())
        sample = random.Random(0).sample(known, min(len(known), 1000))  # noqa: S311 - a fixed sample, no secret
        for id_ in sample:
            text = pieces[id_].decode("utf-8", "replace")
            if self._strips_first_space and text.startswith(" "):
                text = text[1:]
            try:
                if text != decode(self._tokenizer, [id_], skip_special_tokens=False):
                    return False
            except TokenizerError:
                return False
        return True


class TableDetokenizer:
    """Turn ids into text by a table, O(1) a token. Nearly every token is looked up; the rest is decoded."""

    __slots__ = ("_decoder", "_is_open", "_pieces", "_skip", "_strip", "_texts")

    def __init__(
        self, pieces: list[bytes], texts: list[str | None], skip: frozenset[int], strip_first_space: bool
    ) -> None:
        """texts: of the pieces that are whole code points, else None."""
        self._pieces = pieces
        self._texts = texts
        self._is_open = False  # a code point has begun
        self._skip = skip
        self._strip = strip_first_space
        self._decoder = _utf8_decoder("replace")

    def feed(self, token: int) -> str:
        if token in self._skip or token >= len(self._pieces):
            return ""
        text = None if self._is_open else self._texts[token]
        if text is None:
            text = self._decoder.decode(self._pieces[token])
            rest = self._decoder.getstate()[0]
            if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":
                # Half a surrogate: Python's decoder waits for the rest of what can never be a code point.
                text += self._decoder.decode(b"", final=True)
                rest = b""
            self._is_open = bool(rest)
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _decode_whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class WindowDetokenizer:
    """Turn ids into text by decoding a window [start, read) and [start, now); the text is what the second adds."""

    __slots__ = ("_ids", "_read_count", "_shown_text", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        size = _CONTEXT
        self._ids = list(prompt[-size:])
        while not self._decode(self._ids) and size < min(len(prompt), _MAX_CONTEXT):
            size *= 2
            self._ids = list(prompt[-size:])
        self._read_count = len(self._ids)
        self._shown_text = self._decode(self._ids)

    def feed(self, token: int) -> str:
        if token in self._skip:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(text) <= len(self._shown_text):
            return ""
        if text.endswith(_REPLACEMENT) and len(self._ids) < _MAX_WINDOW:
            return ""
        new = text[len(self._shown_text) :]
        # The window continues from the tokens just shown: a decoder that treats a first token differently sees one.
        del self._ids[: self._read_count]
        self._read_count = len(self._ids)
        self._shown_text = self._decode(self._ids)
        return new

    def flush(self) -> str:
        text = self._decode(self._ids)
        new = text[len(self._shown_text) :]
        self._shown_text = text
        return new

    def _decode(self, ids: list[int]) -> str:
        return _decode_answer(self._tokenizer, ids, skip_special=bool(self._skip))


def _decode_answer(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> str:
    """Return the text of tokens of an answer. Raise ApiError."""
    try:
        return decode(tokenizer, ids, skip_special)
    except TokenizerError as error:
        raise undecodable(error) from error


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _unicode_to_byte() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, reversed."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _unicode_to_byte()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_OF[char] for char in token)
    except KeyError:  # an added token that is no byte-level text
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()
