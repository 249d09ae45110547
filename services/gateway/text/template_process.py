"""The process that renders a model's chat template: bounded in time and memory, and unable to open a file or a socket.

A template is a program that comes with a model. The gateway starts this module with an empty environment and one end of
a socket as its standard input, and sends frames (4 bytes of length, then JSON): first {source, seconds, bytes}, then
contexts. Each of these is answered by a frame: TEXT, REFUSED or FAILED, and words. It ends when the socket does.
"""

from __future__ import annotations

import pprint
import resource
import signal
import socket
import struct
import sys
import textwrap
from typing import Any

import jinja2
import jinja2.constants
import jinja2.debug
import orjson

from services.gateway.text.template_environment import environment

LENGTH = struct.Struct("<I")
TEXT, REFUSED, FAILED = b"T", b"R", b"F"
"""Rendered; the template's own refusal; anything else that went wrong."""
MOST_CHARS = 16 << 20
"""Of a rendered text."""


NEEDED_LATER = (pprint, textwrap, jinja2.constants, jinja2.debug)
"""What jinja2 imports when a template asks for it, which is too late here."""
WARM_UP = "{{ 'a\\n' | wordwrap(1) | urlize | pprint }}{{ strftime_now('%c %Z') }}"
"""Has codecs and the time zone read before no file can be opened any more."""


class TooLongError(BaseException):
    """A render ran out of its time. No Exception, so that nothing on the way takes it for one of its own."""


def receive(connection: socket.socket, most: int) -> bytes:
    """The next frame; empty at the end. Raises ValueError for one of more than `most` bytes, OSError."""
    head = _exactly(connection, LENGTH.size)
    if not head:
        return b""
    (length,) = LENGTH.unpack(head)
    if length > most:
        raise ValueError(f"a frame of {length} bytes; at most {most} are taken")
    return _exactly(connection, length)


def send(connection: socket.socket, payload: bytes) -> None:
    """Raises OSError."""
    connection.sendall(LENGTH.pack(len(payload)) + payload)


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(min(1 << 20, count - len(received)))
        if not part:
            return b""
        received += part
    return bytes(received)


def _answer(render: Any, context: dict[str, Any], seconds: float) -> bytes:
    signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time: a busy machine is no template's fault
    try:
        text = render(**context)
        if len(text) > MOST_CHARS:
            return FAILED + f"it has {len(text)} characters; at most {MOST_CHARS} are taken".encode()
        return TEXT + text.encode("utf-8", "surrogatepass")
    except jinja2.TemplateError as error:
        return REFUSED + str(error).encode("utf-8", "replace")
    except MemoryError:
        return FAILED + b"it needs too much memory"
    except TooLongError:
        return FAILED + f"it takes longer than {seconds:g} s".encode()
    except Exception as error:
        return FAILED + str(error).encode("utf-8", "replace")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(*_: object) -> None:
    raise TooLongError


def main() -> int:
    """Serves the socket on standard input until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which may still have chats to render
    signal.signal(signal.SIGPROF, _stop)
    with socket.socket(fileno=sys.stdin.fileno()) as connection:
        asked = orjson.loads(receive(connection, 64 << 20))
        environment().from_string(WARM_UP).render()
        resource.setrlimit(resource.RLIMIT_DATA, (asked["bytes"], asked["bytes"]))
        for nothing in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
            resource.setrlimit(nothing, (0, 0))
        # Compiling folds constants, so it is bounded as well; its own refusals come with the first context.
        template: list[jinja2.Template] = []

        def render(**context: Any) -> str:
            if not template:
                template.append(environment().from_string(asked["source"]))
            return template[0].render(**context)

        while frame := receive(connection, 1 << 30):
            send(connection, _answer(render, orjson.loads(frame), asked["seconds"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
