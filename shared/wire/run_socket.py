"""A Run of worker.proto over a Unix socket, for a scheduler and a worker of one user on one host.

The same messages in the same order as over gRPC, at a sixth of its CPU time for small steps. A frame is HEADER and its
bytes: a message, or the end of the stream with a status of gRPC. The address is abstract: it ends with its process, is
seen in one network namespace and leaves no file. Any user of the machine can reach it, so each end compares users.
"""

from __future__ import annotations

import re
import secrets
import struct
import sys

import grpc

from shared.errors import ProtocolError

MESSAGE, END = 0, 1
HEADER = struct.Struct("<IB")  # bytes that follow, MESSAGE or END
FRAME_BYTES = 64 << 20
CODES = {code.name: code for code in grpc.StatusCode}
NAME = re.compile(r"[0-9a-f]{32}")


def new_name() -> str:
    """Return a name that no other socket has; empty on a system without abstract addresses."""
    return secrets.token_hex(16) if sys.platform == "linux" else ""


def is_name(name: str) -> bool:
    """Return whether it may be the name of a worker's socket."""
    return NAME.fullmatch(name) is not None


def address(name: str) -> bytes:
    """Return the abstract address of that name."""
    return b"\0orcinus-run-" + name.encode()


def message(payload: bytes) -> bytes:
    """Return a frame with a serialized message. Raises ProtocolError for one that is too long."""
    if len(payload) > FRAME_BYTES:
        raise ProtocolError(f"message: {len(payload)} bytes, more than {FRAME_BYTES}; lower --max-step-tokens")
    return HEADER.pack(len(payload), MESSAGE) + payload


def end(code: grpc.StatusCode, details: str) -> bytes:
    """Return the last frame of a stream."""
    payload = f"{code.name} {details}".encode()
    return HEADER.pack(len(payload), END) + payload


def read_end(payload: bytes) -> tuple[grpc.StatusCode, str]:
    """Return the status of a stream's last frame."""
    name, _, details = payload.decode(errors="replace").partition(" ")
    return CODES.get(name, grpc.StatusCode.UNKNOWN), details


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return kind and payload of each frame that is complete. Raises ProtocolError for what is no frame."""
        self._rest += data
        messages, at = [], 0
        while len(self._rest) - at >= HEADER.size:
            size, kind = HEADER.unpack_from(self._rest, at)
            if size > FRAME_BYTES or kind not in (MESSAGE, END):
                raise ProtocolError(f"frame: kind {kind} of {size} bytes; at most {FRAME_BYTES} are taken; update both")
            begin = at + HEADER.size
            if len(self._rest) < begin + size:
                break
            at = begin + size
            messages.append((kind, bytes(self._rest[begin:at])))
        if at:
            del self._rest[:at]
        return messages
