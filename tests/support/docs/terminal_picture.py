"""Record the first minute in a terminal: `python -m tests.support.docs.terminal_picture` writes docs/img/terminal.svg.

An empty clone of this commit, an empty home, no cache of pip: `make run` installs, compiles and starts (cold). Then the
same again with all of it there (warm), and the request that it prints. Every line has the seconds since `make run`.
Commands really run; only the ports, which are free ones, are written as 8000 and 8001.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from shared.settings import ROOT
from tests.support.waiting import free_port

PICTURE = ROOT / "docs" / "img" / "terminal.svg"
COLUMNS = 112
LIMIT_S = 1800.0
SHOWN = re.compile(
    r"making|installing the|packages written|compil|^\S+-0: ready|^redis: ready|ready in|serves|demo model|chat:|curl"
)
FONTS = re.compile(r"@font-face\s*\{.*?\}", re.DOTALL)
"""Fonts from the network, which pages of ours do not load."""


@dataclass(slots=True)
class Start:
    """What one `make run` printed: seconds since its start, and the line."""

    lines: list[tuple[float, str]]
    answer: str
    answer_s: float

    @property
    def seconds(self) -> float:
        """Return the time until it served."""
        return self.lines[-1][0]

    @property
    def silence(self) -> float:
        """Return the longest time without a line."""
        times = [0.0, *(at for at, _ in self.lines)]
        return max(after - before for before, after in itertools.pairwise(times))


def start(clone: Path, home: Path) -> Start:
    """Run `make run` in a clone until it serves, send the request that it prints, and stop it."""
    port = free_port()
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("ORCINUS_", "MAKE", "HF_", "XDG_"))
    }
    env |= {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "PIP_NO_CACHE_DIR": "1"}
    begun = time.monotonic()
    run = subprocess.Popen(
        ["make", "--no-print-directory", "run", f"PORT={port}"], cwd=clone, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines: list[tuple[float, str]] = []
    try:
        for line in run.stdout or ():
            lines.append((time.monotonic() - begun, line.rstrip()))
            print(f"{lines[-1][0]:6.1f}  {lines[-1][1]}", file=sys.stderr)
            if line.startswith("curl ") or lines[-1][0] > LIMIT_S:
                break
        else:
            raise RuntimeError(f"make run ended with {run.wait()}: the lines above say why")
        asked = time.monotonic()
        curl = [*shlex.split(lines[-1][1]), "-s"]
        answer = subprocess.run(curl, capture_output=True, text=True, check=True, timeout=60).stdout
        answer_s = time.monotonic() - asked
    finally:
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    named = {str(clone): ".", str(port): "8000", str(port + 1): "8001"}
    for there, shown in named.items():
        lines = [(at, line.replace(there, shown)) for at, line in lines]
    return Start(lines, answer, answer_s)


def recorded() -> tuple[Start, Start]:
    """Return the cold and the warm start."""
    with tempfile.TemporaryDirectory(prefix="first-minute-") as name:
        clone, home = Path(name) / "orcinus", Path(name) / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        return start(clone, home), start(clone, home)


def picture(cold: Start, warm: Start) -> str:
    """Return the SVG."""
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, highlight=False)

        def show(prompt: str, one: Start) -> None:
            console.print(Text(prompt, "bold"))
            last = ""
            for at, line in one.lines:
                kind = re.sub(r"[\d.]+", "", line)
                if SHOWN.search(line) and kind != last:  # of lines that only count on, the first
                    console.print(Text.assemble((f"{at:5.1f} s ", "dim"), line))
                last = kind

        show("$ make run                  # an empty clone, an empty home", cold)
        console.print(Text("  ^C\n", "dim"))
        show("$ make run                  # again", warm)
        console.print(
            Text(
                f"\n$ curl ... | jq -r '.choices[0].message.content'    # that line: answered in {warm.answer_s:.1f} s",
                "bold",
            )
        )
        console.print(Text(json.loads(warm.answer)["choices"][0]["message"]["content"]))
        return FONTS.sub("", console.export_svg(title="orcinus", theme=MONOKAI, unique_id="terminal"))


def main() -> None:
    """Record, write the picture, and print the times."""
    cold, warm = recorded()
    PICTURE.write_text(picture(cold, warm))
    for name, one in (("cold", cold), ("warm", warm)):
        print(f"{name}: {one.seconds:.0f} s, at most {one.silence:.1f} s without a line", file=sys.stderr)
    print(f"{PICTURE.relative_to(ROOT)}: Python {platform.python_version()}, {os.cpu_count()} cores", file=sys.stderr)


if __name__ == "__main__":
    main()
