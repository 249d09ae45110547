"""Read a body of multipart/form-data (RFC 7578) as it comes in, without holding the file that is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from email.message import Message
from typing import NamedTuple

from services.gateway.errors import ApiError, invalid

MAX_HEAD_BYTES = 4096
MAX_PARTS = 32
MAX_PARAMETERS = 64
"""Semicolons of a Content-Disposition: the library's time grows with the square of their number."""
MAX_BOUNDARY = 70
"""Characters, as RFC 2046 has it."""
MAX_TYPE_BYTES = 512
"""Of a Content-Type: the library's time grows with the square of its length."""


class Part(NamedTuple):
    """The beginning of a part. filename: None for a field."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a Content-Type names. Raise ApiError(400, 415)."""
    if len(content_type) > MAX_TYPE_BYTES:
        text = f"content-type: {len(content_type)} characters, at most {MAX_TYPE_BYTES}; send only the boundary"
        raise ApiError(415, text, code="unsupported_media_type")
    message = Message()
    message["content-type"] = content_type
    if message.get_content_type() != "multipart/form-data":
        text = f"content-type must be multipart/form-data; got {content_type[:80]!r}"
        raise ApiError(415, text, code="unsupported_media_type")
    try:
        boundary = message.get_boundary() or ""
    except ValueError:  # in the form of RFC 2231, with an encoding that decodes nothing
        raise _multipart_error(
            f"the boundary of {content_type[:80]!r} cannot be read; send it as boundary=TEXT"
        ) from None
    if not 0 < len(boundary) <= MAX_BOUNDARY or not boundary.isascii():
        raise _multipart_error(f"a boundary of 1 to {MAX_BOUNDARY} ASCII characters is needed; got {boundary[:80]!r}")
    return boundary.encode()


class MultipartReader:
    """Split a body, in pieces of any size, into parts and their content."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # so that the first delimiter is like the others
        self._step: Callable[[], Iterator[Part | bytes]] | None = self._content
        self._parts = 0

    @property
    def is_whole(self) -> bool:
        """Return whether the last delimiter has come."""
        return self._step is None

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """Yield the beginnings of parts and pieces of the content of the last one. Raise ApiError(400)."""
        self._buffer += data
        step = None
        while self._step is not None and step != self._step:  # until a step needs more bytes to be passed
            step = self._step
            yield from step()
        if self._step is None:
            self._buffer.clear()  # an epilogue means nothing

    def _content(self) -> Iterator[Part | bytes]:
        """Yield content up to the next delimiter, as far as it is there."""
        at = self._buffer.find(self._delimiter)
        length = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        content = bytes(self._buffer[:length])
        del self._buffer[:length]
        if content and self._parts:  # what is before the first part is no content
            yield content
        if at >= 0:
            del self._buffer[: len(self._delimiter)]
            self._step = self._behind

    def _behind(self) -> Iterator[Part | bytes]:
        """Take what follows a delimiter: the end of the body, or of the line."""
        if len(self._buffer) < 2:
            return
        mark = bytes(self._buffer[:2])
        if mark not in (b"--", b"\r\n"):
            raise _multipart_error(f"a boundary is followed by {mark!r}; end it with CRLF")
        del self._buffer[:2]
        self._step = None if mark == b"--" else self._head
        yield from ()

    def _head(self) -> Iterator[Part | bytes]:
        """Yield a part when its head is there."""
        at = self._buffer.find(b"\r\n\r\n")
        if (at if at >= 0 else len(self._buffer)) > MAX_HEAD_BYTES:
            raise _multipart_error(f"the head of a part has more than {MAX_HEAD_BYTES} bytes; send a shorter one")
        if at < 0:
            return
        head = bytes(self._buffer[:at])
        del self._buffer[: at + 4]
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _multipart_error(f"more than {MAX_PARTS} parts; send fewer fields")
        self._step = self._content
        yield _part(head)


def _part(head: bytes) -> Part:
    message = Message()
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            if value.count(";") > MAX_PARAMETERS:
                raise _multipart_error(
                    f"a part has more than {MAX_PARAMETERS} parameters; send its name and its filename alone"
                )
            message["content-disposition"] = value.strip()
    try:
        field_name, filename = message.get_param("name", header="content-disposition"), message.get_filename()
    except ValueError:  # as of a boundary
        raise _multipart_error(
            f"the filename of {head[:80]!r} cannot be read; send it as filename=TEXT in UTF-8"
        ) from None
    if not isinstance(field_name, str) or message.get_content_disposition() != "form-data":
        raise _multipart_error("a part has no name; send Content-Disposition: form-data; name=...")
    return Part(field_name, filename)


def _multipart_error(problem: str) -> ApiError:
    return invalid(None, f"the body is no multipart/form-data: {problem}", "invalid_multipart")
