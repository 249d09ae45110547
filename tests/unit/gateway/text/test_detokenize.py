"""Incremental text against the tokenizer's own decoding of everything at once."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models

from services.gateway.errors import ApiError
from services.gateway.text.detokenizer import BYTE_OF, TokenText
from tests.support.checkpoints import tokenizers as made

KINDS = {"byte_level": made.byte_level, "byte_fallback": made.byte_fallback, "metaspace": made.metaspace}
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("the quick ox  .,\n"), st.sampled_from("é€ßñ逆戟鲸🐋👩‍🚀e\u0301\u200d\ufe0f")),
    min_size=1,
    max_size=40,
)


@functools.cache
def loaded(kind: str) -> tuple[Tokenizer, TokenText]:
    tokenizer = KINDS[kind]()
    return tokenizer, TokenText(tokenizer)


def continuation(text: TokenText, prompt: list[int], output: list[int]) -> str:
    """What a decoding of everything adds to that of the prompt."""
    whole, before = text.decode(prompt + output), text.decode(prompt)
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.mark.parametrize(("kind", "table"), [("byte_level", True), ("byte_fallback", True), ("metaspace", False)])
def test_table_is_used_when_the_decoder_is_of_bytes(kind: str, table: bool) -> None:
    assert loaded(kind)[1].has_table is table


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXTS, output=TEXTS)
@settings(max_examples=80, deadline=None)
def test_pieces_add_up_to_the_decoded_text(kind: str, prompt: str, output: str) -> None:
    tokenizer, text = loaded(kind)
    before = tokenizer.encode("ox " + prompt + "ox").ids
    after = tokenizer.encode(output, add_special_tokens=False).ids
    detokenizer = text.start(before)
    pieces = [detokenizer.feed(token) for token in after]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == continuation(text, before, after)


@given(st.binary(min_size=1, max_size=40))
@settings(max_examples=120, deadline=None)
def test_any_bytes_decode_as_all_at_once(data: bytes) -> None:
    tokenizer, text = loaded("byte_level")
    id_of = {
        BYTE_OF[token]: id_ for token, id_ in tokenizer.get_vocab().items() if len(token) == 1 and token in BYTE_OF
    }
    ids = [id_of[byte] for byte in data]
    detokenizer = text.start([])
    pieces = [detokenizer.feed(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == text.decode(ids) == data.decode("utf-8", "replace")


def test_only_bytes_that_may_complete_a_character_are_held() -> None:
    """Two bytes may begin one if some third, or third and fourth, complete it: here they are tried."""
    rests = [b"", b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf"]
    tokenizer, text = loaded("byte_fallback")

    def is_character(data: bytes) -> bool:
        try:
            return len(data.decode()) == 1
        except UnicodeDecodeError:
            return False

    for both in map(bytes, itertools.product(range(0xC2, 0xF5), range(0x80, 0xC0))):
        detokenizer = text.start([5])
        shown = "".join(detokenizer.feed(tokenizer.token_to_id(f"<0x{byte:02X}>")) for byte in both)
        is_open = not is_character(both) and any(is_character(both + rest) for rest in rests)
        told = both.decode("utf-8", "replace")
        assert (shown, detokenizer.flush()) == (("", told) if is_open else (told, "")), both


def test_space_before_a_continued_word_is_kept() -> None:
    tokenizer, text = loaded("byte_fallback")
    prompt, word = tokenizer.encode("a quick").ids, tokenizer.token_to_id("▁the")
    assert text.start(prompt).feed(word) == " the"
    assert text.start([1]).feed(word) == "the"  # after nothing but <s> it is the first word


def test_decoder_that_disagrees_with_the_table_uses_windows() -> None:
    tokenizer = Tokenizer(models.WordLevel({"Ġa": 0, "Ġb": 1}, unk_token="Ġa"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("Ġ", "_"), decoders.Fuse()])
    text = TokenText(tokenizer)
    assert not text.has_table
    detokenizer = text.start([0])
    assert detokenizer.feed(1) + detokenizer.flush() == "_b"


def test_panic_of_the_decoder_is_an_error_of_the_answer() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a" * 60 + "cc": 0, "b": 1}, unk_token="b"))
    tokenizer.decoder = decoders.Replace(Regex("(?:a|a)+c(?!c)"), "x")
    reader = TokenText(tokenizer).start([1])
    assert reader.feed(1) == "b"
    with pytest.raises(ApiError, match="cannot decode its tokens") as raised:
        reader.feed(0)
    assert (raised.value.status, raised.value.code) == (500, "tokenizer_failed")
