"""The wire: columns of numbers, and frames of a Run over a Unix socket."""

from __future__ import annotations

import random

import grpc
import numpy as np
import pytest

from shared.errors import ProtocolError
from shared.wire import run_socket
from shared.wire.columns import pack, unpack, unpack_list
from shared.wire.run_socket import END, FRAME_BYTES, HEADER, MESSAGE, Frames, end, is_name, message, new_name, read_end


def test_list_of_a_column_is_that_of_its_array() -> None:
    for values in ([], [0], [-1, 2**31 - 1, -(2**31), 258]):
        column = pack(values)
        assert unpack_list(column) == unpack(column).tolist() == values
        assert column == np.array(values, "<i4").tobytes()


def test_list_of_a_broken_column_is_refused_as_its_array() -> None:
    for read in (unpack, unpack_list):
        with pytest.raises(ValueError, match=r"size|multiple"):
            read(b"\0" * 6)


def test_frames_come_out_whole_however_bytes_were_cut() -> None:
    rng = random.Random(1)
    payloads = [rng.randbytes(size) for size in (0, 1, 5, 300, 70_000)] + [b""]
    sent = b"".join(map(message, payloads)) + end(grpc.StatusCode.ABORTED, "replaced")
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(sent)), k=rng.randrange(40)))
        frames, found = Frames(), []
        for begin, stop in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            found += frames.feed(sent[begin:stop])
        assert [payload for kind, payload in found if kind == MESSAGE] == payloads
        assert found[-1][0] == END and read_end(found[-1][1]) == (grpc.StatusCode.ABORTED, "replaced")


@pytest.mark.parametrize("header", [HEADER.pack(FRAME_BYTES + 1, MESSAGE), HEADER.pack(3, 2)])
def test_frame_too_long_or_unknown_is_refused_by_its_header(header: bytes) -> None:
    with pytest.raises(ProtocolError, match="frame: kind"):
        Frames().feed(header)


def test_message_too_long_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_socket, "FRAME_BYTES", 10)
    assert message(bytes(10))
    with pytest.raises(ProtocolError, match="11 bytes"):
        message(bytes(11))


def test_unknown_status_is_read_as_unknown() -> None:
    assert read_end(b"NEW_CODE what") == (grpc.StatusCode.UNKNOWN, "what")
    assert read_end(b"\xff") == (grpc.StatusCode.UNKNOWN, "")


def test_names_are_new_and_nothing_else_is_one() -> None:
    assert is_name(new_name()) and new_name() != new_name()
    for wrong in ("", "ab" * 15, "AB" * 16, "g" * 32, "ab" * 16 + "\n", "/" * 32):
        assert not is_name(wrong)
