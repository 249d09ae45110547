"""docs/img/terminal.svg: what a terminal shows of `make run` and of a first request.

`python -m tests.support.docs.terminal_picture` makes it.
Both commands really run; only the port, which is a free one, is written as 8000.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from shared.settings import ROOT
from tests.support.waiting import free_port, until

PICTURE = ROOT / "docs" / "img" / "terminal.svg"
COLUMNS = 108
BODY = (
    '{"model": "demo-model", "temperature": 0, "max_tokens": 64, '
    '"messages": [{"role": "user", "content": "Read and return a line from the stream."}]}'
)
FONTS = re.compile(r"@font-face\s*\{.*?\}", re.DOTALL)
"""Fonts from the network, which pages of ours do not load."""


def recorded() -> tuple[str, str]:
    """What `make run` printed until it served, and the answer to one request."""
    port = free_port()
    run = subprocess.Popen(
        ["make", "--no-print-directory", "run", f"PORT={port}"], cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines: list[str] = []
    try:
        until("make run says how to ask", lambda: _next_says("max_tokens", run, lines), 180)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        asked = ["curl", "-s", url, "-H", "Content-Type: application/json", "-d", BODY]
        answer = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(60)
    shown = "".join(lines).replace(str(port), "8000").replace(str(port + 1), "8001")
    return shown.replace(str(ROOT), "."), answer


def _next_says(word: str, run: subprocess.Popen[str], lines: list[str]) -> bool:
    if run.stdout is None:
        return False
    lines.append(run.stdout.readline())
    return word in lines[-1]


def picture(run: str, answer: str) -> str:
    """The SVG."""
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text("$ make run", "bold"))
        console.print(Text(run.strip()))
        console.print(
            Text("\n$ curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\", "bold")
        )
        console.print(Text(f"    -d '{BODY}'", "bold"))
        console.print_json(answer, indent=2)
        return FONTS.sub("", console.export_svg(title="orcinus", theme=MONOKAI, unique_id="terminal"))


if __name__ == "__main__":
    PICTURE.write_text(picture(*recorded()))
    print(PICTURE.relative_to(ROOT), file=sys.stderr)
