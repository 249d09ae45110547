"""Headers of GGUF files: what the reader finds in whole ones, and that broken ones end with a sentence."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from services.launcher.model_check import read_model
from services.worker.models.config import load_config
from services.worker.models.gguf import GgufWeights
from shared.errors import ModelError
from shared.models.gguf import reader
from shared.models.gguf.reader import MAX_KEYS, MAX_TENSORS, open_gguf
from shared.models.hub import gguf_files, gguf_in
from shared.models.model_files import read_bounded
from shared.settings import CommonSettings
from tests.support.checkpoints.gguf import write_file

HEADERS = 150
MAX_BYTES = 8 << 20
"""Of memory for a header of 2 kB. Python's own objects of a whole one take 0.1 MB."""
METADATA: dict[str, Any] = {
    "general.architecture": "llama", "general.name": "tiny", "llama.context_length": 64, "llama.embedding_length": 64,
    "llama.block_count": 1, "llama.feed_forward_length": 96, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "abc", "<eos>"], "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b", "ab c"], "tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.add_bos_token": False,
}  # fmt: skip
TENSORS = {
    "token_embd.weight": ("Q8_0", (6, 64), bytes(6 * 68)),
    "blk.0.attn_q.weight": ("Q4_0", (64, 64), bytes(64 * 36)),
    "output_norm.weight": ("F32", (64,), bytes(256)),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_file(tmp_path / "x.gguf", METADATA, TENSORS)
    return tmp_path / "x.gguf"


def read_all(path: Path) -> None:
    """Everything that services read of a file but its numbers. Raises ModelError."""
    read_model(path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        json.loads(read_bounded(path / name))
    config = load_config(path)
    weights = GgufWeights(config, path)
    weights.head()
    list(weights.spans())


def test_header_is_what_the_gguf_package_reads(path: Path) -> None:
    found, other = open_gguf(path), GGUFReader(path)
    assert {tensor.name: tensor.data_offset for tensor in other.tensors} == {
        tensor.name: tensor.start for tensor in found.tensors.values()
    }
    for tensor in other.tensors:
        mine = found.tensors[tensor.name]
        assert (mine.type.name, mine.size_bytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert list(mine.shape) == list(reversed(tensor.shape.tolist()))
    read: dict[type, Callable[[str], Any]] = {
        str: found.text, int: found.integer, float: found.number, bool: found.flag,
    }  # fmt: skip
    for key, value in METADATA.items():
        field = other.fields[key].contents()
        if isinstance(value, list):
            assert (found.texts if isinstance(value[0], str) else found.integers)(key) == field == value
        else:
            assert read[type(value)](key) == field
    read_all(path)


def test_mutated_headers_end_with_a_sentence_and_little_memory(tmp_path: Path, path: Path) -> None:
    whole = path.read_bytes()
    header = min(tensor.start for tensor in open_gguf(path).tensors.values())
    broken = 0
    for seed in range(HEADERS):
        rng = random.Random(seed)
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(4, header - 8)
            kind = rng.randrange(4)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at : at + 8] = rng.choice((0, 1, 1 << 31, 1 << 40, (1 << 64) - 1)).to_bytes(8, "little")
            elif kind == 2:
                data[at : at + 4] = rng.randbytes(4)
            else:
                del data[at : at + rng.randrange(1, 64)]
        mutated = tmp_path / f"{seed}.gguf"
        mutated.write_bytes(data)
        tracemalloc.start()
        try:
            read_all(mutated)
        except ModelError as error:
            broken += 1
            assert str(mutated) in str(error), seed
            assert str(error).isprintable(), (seed, str(error))
            assert 20 < len(str(error)) - len(str(mutated)) < 1000, (seed, str(error))
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MAX_BYTES, seed
    assert HEADERS // 2 < broken < HEADERS


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def keys(count: int) -> bytes:
    return b"GGUF" + u32(3) + u64(0) + u64(count)


def tensors(count: int) -> bytes:
    return b"GGUF" + u32(3) + u64(count) + u64(0)


def text(value: str) -> bytes:
    return u64(len(value)) + value.encode()


def tensor(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + u32(len(sizes)) + b"".join(map(u64, sizes)) + u32(kind) + u64(offset)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + u32(1) + bytes(40), "version 1, versions 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (tensors(MAX_TENSORS + 1) + bytes(40), "65537 tensors, at most 65536"),
        (tensors(50) + bytes(40), "50 tensors do not fit into 40 bytes"),
        (keys(MAX_KEYS + 1), "4097 keys, at most 4096"),
        (keys(1) + u64(2000) + bytes(40), "a text of 2000 bytes, at most 1024"),
        (keys(1) + u64(100) + bytes(40), "a text of 100 bytes, 40 are left"),
        (keys(1) + text("k") + u32(13) + bytes(9), "k has a value of the unknown type 13"),
        (keys(1) + text("k") + u32(9) + u32(9) + u64(1), "k is an array of type 9"),
        (keys(1) + text("k") + u32(9) + u32(8) + u64(1 << 60), "values of k, at most"),
        (keys(1) + text("k") + u32(9) + u32(6) + u64(9) + bytes(8), "9 values of k do not"),
        (keys(2) + 2 * (text("k") + u32(4) + u32(1)), "key k is there twice"),
        (keys(1) + text("general.alignment") + u32(4) + u32(48), "general.alignment is 48, expected a power of two"),
        (tensors(1) + tensor("\x1b[2J", (8,), 0, 0) + bytes(99), "has a name that cannot be printed"),
        (tensors(1) + tensor("t", (), 0, 0) + bytes(40), "t has 0 dimensions"),
        (tensors(1) + tensor("t", (2, 0), 0, 0) + bytes(40), r"shape \[2, 0\]"),
        (tensors(1) + tensor("t", (1 << 40,), 0, 0) + bytes(40), "sizes from 1 to"),
        (tensors(1) + tensor("t", (256,), 16, 0) + bytes(99), "t is of type IQ2_XXS, F32, F16"),
        (tensors(1) + tensor("t", (256,), 77, 0) + bytes(99), "t is of type 77, F32, F16"),
        (tensors(1) + tensor("t", (33,), 2, 0) + bytes(99), "rows of 33, blocks of Q4_0 hold 32"),
        (tensors(1) + tensor("t", (8,), 0, 8) + bytes(99), "begins at 8, no multiple of 32"),
        (tensors(1) + tensor("t", (99,), 0, 0) + bytes(99), "ends at byte 460 of 156: cut off"),
        (tensors(1) + tensor("t", (9,), 0, 1 << 63) + bytes(99), "cut off"),
        (tensors(2) + tensor("t", (16,), 0, 0) + tensor("u", (8,), 0, 32) + bytes(99), "tensors t and u overlap"),
        (tensors(2) + 2 * tensor("t", (8,), 0, 0) + bytes(99), "tensor t is there twice"),
        (keys(1) + text("split.count") + u32(2) + struct.pack("<H", 3), "one of 3 parts, and its name does not end"),
        (keys(1) + text("split.count") + u32(2) + struct.pack("<H", 999), "is 999, expected an integer from 0 to 512"),
    ],
)
def test_each_bound_of_a_header_is_named(path: Path, data: bytes, said: str) -> None:
    path.write_bytes(data)
    with pytest.raises(ModelError, match=said):
        open_gguf(path)


def write_split(directory: Path, changes: dict[int, dict[str, Any]] | None = None) -> list[Path]:
    """Writes the file in three parts, one tensor each. changes: part, from 0 on -> keys, None leaves one out."""
    written = []
    for number, (name, tensor_) in enumerate(TENSORS.items()):
        keys_ = {"split.no": number, "split.count": 3, "split.tensors.count": 3, **({} if number else METADATA)}
        keys_ |= (changes or {}).get(number, {})
        written.append(directory / f"x-0000{number + 1}-of-00003.gguf")
        write_file(written[-1], {key: value for key, value in keys_.items() if value is not None}, {name: tensor_})
    return written


def test_first_of_several_parts_stands_for_all(tmp_path: Path, path: Path) -> None:
    parts, whole = write_split(tmp_path), open_gguf(path)
    found = open_gguf(parts[0])
    assert [(one.name, one.shape, one.type) for one in found.tensors.values()] == [
        (one.name, one.shape, one.type) for one in whole.tensors.values()
    ]
    assert [one.path for one in found.tensors.values()] == parts
    assert found.texts("tokenizer.ggml.tokens") == METADATA["tokenizer.ggml.tokens"]
    assert open_gguf(parts[0]) is found  # read once
    read_all(parts[0])
    write_file(
        parts[2], {"split.no": 2, "split.count": 3, "split.tensors.count": 3}, {"cls": TENSORS["output_norm.weight"]}
    )
    assert "cls" in open_gguf(parts[0]).tensors  # once for each version of every part
    with pytest.raises(ModelError, match=r"x-00002-of-00003.gguf: part 2 of 3; give the first one, x-00001-of-00003.g"):
        open_gguf(parts[1])
    assert gguf_in(tmp_path / "parts") == tmp_path / "parts"
    path.unlink()
    assert gguf_in(tmp_path) == parts[0]
    assert CommonSettings(model=tmp_path).served_model_name == "x"
    only = parts[1].rename(tmp_path / "y-00001-of-00001.gguf")
    assert CommonSettings(model=only).served_model_name == "y-00001-of-00001"
    only.rename(parts[1])
    parts[0].unlink()
    assert gguf_files(tmp_path) == parts[1:]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {1: {"split.no": 2}},
            r"x-00002-of-00003.gguf: split.no is 2, expected 1 in part 2 of 3; fetch all parts again",
        ),
        ({0: {"split.no": 1}}, r"x-00001-of-00003.gguf: split.no is 1, expected 0 in part 1 of 3"),
        ({2: {"split.count": 4}}, r"x-00003-of-00003.gguf: split.count is 4, expected 3 in part 3 of 3"),
        ({0: {"split.count": 2}}, "one of 2 parts, and its name does not end in -00001-of-00002.gguf; give the parts"),
        ({2: {"split.tensors.count": 9}}, r"x-00003-of-00003.gguf: split.tensors.count is 9, expected 3 in part 3"),
        ({0: {"split.tensors.count": None}}, "split.tensors.count is missing; convert the model again"),
        ({2: {"split.no": None}}, "x-00003-of-00003.gguf: split.no is missing; convert the model again"),
        ({2: {"split.no": "2"}}, "x-00003-of-00003.gguf: split.no is 2, expected an integer"),
        (
            {part: {"split.tensors.count": 4} for part in range(3)},
            "x-00001-of-00003.gguf: 3 tensors in 3 parts, split.tensors.count is 4; fetch all parts again, from one",
        ),
        (
            {part: {"split.tensors.count": 2} for part in range(3)},
            "x-00003-of-00003.gguf: more than the 2 tensors of split.tensors.count; fetch all parts again",
        ),
        (
            {1: {"general.architecture": "qwen2"}},
            "x-00002-of-00003.gguf: general.architecture differs from that of x-0",
        ),
        ({1: {"general.name": "other"}}, "x-00002-of-00003.gguf: general.name differs from that of x-00001-of-00003"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(tmp_path: Path, changes: dict[int, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        open_gguf(write_split(tmp_path, changes)[0])


def test_head_has_the_header_of_a_later_part_without_tensors(tmp_path: Path) -> None:
    parts, prints = write_split(tmp_path), set()
    write_file(parts[1], {"split.no": 1, "split.count": 3, "split.tensors.count": 3}, dict([*TENSORS.items()][1:]))
    for number in (1, 2, 1):
        keys_ = {"split.no": 2, "split.count": 3, "split.tensors.count": 3, "more": number}
        write_file(parts[2], keys_, {})
        prints.add(GgufWeights(load_config(parts[0]), parts[0]).head())
    assert len(prints) == 2


def test_metadata_of_all_parts_have_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"more": [""] * 200}  # 1.6 kB
    parts = write_split(tmp_path, {1: texts, 2: texts})
    first = open_gguf(parts[0]).header_bytes[parts[0]]
    monkeypatch.setattr(reader, "MAX_METADATA_BYTES", first + 3000)
    parts[0].touch()  # a version that was not read yet
    with pytest.raises(ModelError, match=r"x-00003-of-00003.gguf: 200 values of more do not fit into \d+ bytes"):
        open_gguf(parts[0])
    monkeypatch.setattr(reader, "MAX_METADATA_BYTES", first + 200)
    with pytest.raises(ModelError, match=r"x-00002-of-00003.gguf: 200 values of more do not fit"):
        open_gguf(parts[0])


def test_part_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    renamed = parts[0].rename(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"x.gguf: one of 3 parts, and its name does not end in -00001-of-00003.gguf"):
        open_gguf(renamed)
    renamed.rename(parts[0])
    second = parts[1].read_bytes()
    write_file(parts[1], {"split.no": 1, "split.count": 3, "split.tensors.count": 3}, dict([*TENSORS.items()][:1]))
    with pytest.raises(
        ModelError, match=r"x-00002-of-00003.gguf: tensor token_embd.weight is in x-00001-of-00003.gguf"
    ):
        open_gguf(parts[0])
    parts[1].write_bytes(second[:-128])
    with pytest.raises(ModelError, match=r"x-00002-of-00003.gguf: tensor .* cut off; fetch or convert it again"):
        open_gguf(parts[0])
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"x-00002-of-00003.gguf: part 2 of 3 is missing; fetch it into the same dir"):
        open_gguf(parts[0])
    os.mkfifo(parts[1])  # which is not waited for
    with pytest.raises(ModelError, match=r"x-00002-of-00003.gguf: not a regular file"):
        open_gguf(parts[0])


def test_mutated_parts_end_with_a_sentence_and_little_memory(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    whole, broken = [part.read_bytes() for part in parts], 0
    for seed in range(HEADERS):
        rng = random.Random(seed)
        number = rng.randrange(1, 3)
        data = bytearray(whole[number])
        at = rng.randrange(4, 180)
        size = rng.choice((1, 4, 8))
        data[at : at + size] = rng.choice((rng.randbytes(size), bytes(size), b"\xff" * size))
        parts[number].write_bytes(data)
        tracemalloc.start()
        try:
            read_all(parts[0])
        except ModelError as error:
            broken += 1
            assert str(tmp_path) in str(error) and str(error).isprintable(), seed
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            parts[number].write_bytes(whole[number])
        assert peak < MAX_BYTES, seed
    assert HEADERS // 2 < broken <= HEADERS


def test_file_that_is_cut_off_or_a_fifo_is_named(path: Path) -> None:
    whole = path.read_bytes()
    for size in (0, 3, 4, 8, 23, 24, 100, 400, 1000, 1500):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="; fetch or convert it again"):
            open_gguf(path)
    path.unlink()
    os.mkfifo(path)  # which is not waited for
    with pytest.raises(ModelError, match="not a regular file"):
        open_gguf(path)


def test_value_of_another_type_is_named_with_its_key(path: Path) -> None:
    file = open_gguf(path)
    for read, key, said in (
        (file.integer, "general.name", "general.name is tiny, expected an integer"),
        (file.text, "llama.block_count", "llama.block_count is 1, expected a string"),
        (file.number, "tokenizer.ggml.add_bos_token", "is False, expected a number"),
        (file.flag, "llama.block_count", "is 1, expected true or false"),
        (file.text, "tokenizer.ggml.tokens", "tokens is an array, expected a string"),
        (file.texts, "tokenizer.ggml.token_type", "expected an array of another type"),
        (file.integer, "llama.none", "llama.none is missing"),
    ):
        with pytest.raises(ModelError, match=said):
            read(key)
