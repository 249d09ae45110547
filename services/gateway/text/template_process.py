"""Render a chat template in a process apart that can open neither a file nor a socket.

A template is a program that comes with a model. The gateway starts this module with an empty environment and one end of
a socket as its standard input, and sends JSON in frames of multiprocessing's: first {source, seconds, bytes}, then
contexts. Each context is answered by a frame: TEXT, REFUSED or FAILED, and words. The process ends when the socket is
closed. It imports jinja2, orjson, shared/processes/jail.py and the standard library only. The environment is that of
transformers, sandboxed.
"""

from __future__ import annotations

import contextlib
import json
import pprint
import signal
import sys
import textwrap
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

import jinja2
import jinja2.constants
import jinja2.debug
import jinja2.ext
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.processes.jail import confine


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of transformers: templates see values, and no attribute that leads out of them."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


class _Generation(jinja2.ext.Extension):
    """Render the body of `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


TEXT, REFUSED, FAILED = b"T", b"R", b"F"
"""Rendered; refused by the template; any other failure."""
MAX_CHARS = 16 << 20
"""Of a rendered text."""


NEEDED_LATER = (pprint, textwrap, jinja2.constants, jinja2.debug)
"""Modules that jinja2 imports when a template needs them, which is too late here."""
WARM_UP = "{{ 'a\\n' | wordwrap(1) | urlize | pprint }}{{ strftime_now('%c %Z') }}"
"""Has codecs and the time zone read before no file can be opened any more."""


class TooLongError(BaseException):
    """A render ran out of its time. No Exception, so that no handler on the way catches it."""


def _answer(render: Any, context: dict[str, Any], seconds: float) -> bytes:
    signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time: a busy machine is no template's fault
    try:
        text: str = render(**context)
        if len(text) > MAX_CHARS:
            return FAILED + f"it has {len(text)} characters; at most {MAX_CHARS} are taken".encode()
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
    """Serve the socket on standard input until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which may still have chats to render
    signal.signal(signal.SIGPROF, _stop)
    with Connection(sys.stdin.fileno()) as connection, contextlib.suppress(EOFError):
        settings = orjson.loads(connection.recv_bytes(64 << 20))
        environment().from_string(WARM_UP).render()
        confine(settings["bytes"])
        # Compiling folds constants, so it is bounded as well; its refusals come with the first context.
        template: list[jinja2.Template] = []

        def render(**context: Any) -> str:
            if not template:
                template.append(environment().from_string(settings["source"]))
            return template[0].render(**context)

        while True:
            context = orjson.loads(connection.recv_bytes(1 << 30))
            connection.send_bytes(_answer(render, context, settings["seconds"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
