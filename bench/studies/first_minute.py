"""Record the first minute in a terminal: `python -m bench.studies.first_minute` writes docs/img/terminal.svg.

An empty clone of this commit, an empty home, no cache of pip: `make run` installs, compiles and starts (cold). Then the
same again with all of it there (warm), and the request that it prints. Every line has the seconds since `make run`.
Commands really run; only the ports, which are free ones, are written as 8000 and 8001.

With `--container IMAGE`, such as debian:bookworm-slim, all of it runs in a new container of that image, which gets what
the README asks for from its own packages first. pip in there has the settings that pip has here.

Exits with 1 if anything was silent for longer than SILENT_S between `make run` and the answer.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from bench.local import free_ports
from shared.settings import ROOT

PICTURE = ROOT / "docs" / "img" / "terminal.svg"
COLUMNS = 116
LIMIT_S = 1800.0
SILENT_S = 5.0
PACKAGES = ("git", "make", "g++", "python3-venv", "curl")
"""Debian's names of what the README asks for, and of git and curl."""
SOURCES = "/srv/orcinus.bundle"
SHOWN = re.compile(
    r"making|installing the|packages written|compil|^\S+-0: ready|^redis: ready|ready in|serves|demo model|chat:|curl"
)
FONTS = re.compile(r"@font-face\s*\{.*?\}", re.DOTALL)
"""Fonts from the network, which pages of ours do not load."""


@dataclass(slots=True)
class Start:
    """The output of one `make run`: seconds since its start, and the line."""

    lines: list[tuple[float, str]]
    answer: str
    answer_s: float

    @property
    def seconds(self) -> float:
        """Return the time until it served."""
        return self.lines[-1][0]

    @property
    def silence(self) -> float:
        """Return the longest time without a line, from `make run` to the answer of the request that it prints."""
        times = [0.0, *(at for at, _ in self.lines), self.seconds + self.answer_s]
        return max(after - before for before, after in itertools.pairwise(times))


class Here:
    """A clone in an empty folder of this machine."""

    shown = "an empty clone, an empty home"
    before = ""

    def __init__(self, folder: Path) -> None:
        self.clone, self._home = folder / "orcinus", folder / "home"
        self._home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)

    def popen(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a command in the clone; its output is one pipe."""
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ORCINUS_", "MAKE", "HF_", "XDG_"))
        }
        env |= {"HOME": str(self._home), "PATH": "/usr/local/bin:/usr/bin:/bin", "PIP_NO_CACHE_DIR": "1"}
        return subprocess.Popen(
            command, cwd=self.clone, env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def stop(self, run: subprocess.Popen[str]) -> None:
        run.send_signal(signal.SIGTERM)


class Container:
    """A clone in a new container, which has what the README asks for and nothing else."""

    clone = Path("/root/orcinus")

    def __init__(self, folder: Path, image: str) -> None:
        subprocess.run(["git", "bundle", "create", "-q", str(folder / "bundle"), "HEAD"], cwd=ROOT, check=True)
        mounts, env = pip_settings(os.environ)
        mounts[str(folder / "bundle")] = SOURCES
        options = [f"--volume={here}:{there}:ro" for here, there in mounts.items()]
        options += [f"--env={name}={value}" for name, value in env.items()]
        docker = ["docker", "run", "--detach", "--init", "--rm", *options, image, "sleep", "infinity"]
        self._id = subprocess.run(docker, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        self.shown = f"in a new container of {image}"
        self.before = ""

    def prepare(self) -> None:
        """Install what the README asks for, and clone. Raise RuntimeError with the output of what fails."""
        begun = time.monotonic()
        for command in (
            "apt-get update -qq",
            f"apt-get install -qq -y --no-install-recommends ca-certificates {' '.join(PACKAGES)}",
            f"git clone --quiet {SOURCES} {self.clone}",
        ):
            done = self._shell(f"DEBIAN_FRONTEND=noninteractive {command} 2>&1")
            if done.returncode:
                raise RuntimeError(f"{command}: ended with {done.returncode}: {done.stdout[-2000:]}")
        seconds = time.monotonic() - begun
        self.before = f"$ apt-get install {' '.join(PACKAGES)}; git clone ... orcinus; cd orcinus    # {seconds:.0f} s"

    def popen(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a command in the clone; its output is one pipe."""
        shell = f"echo $$ > /tmp/{command[0]}.pid; exec {shlex.join(command)}"
        return subprocess.Popen(
            ["docker", "exec", f"--workdir={self.clone}", self._id, "sh", "-c", shell], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def stop(self, run: subprocess.Popen[str]) -> None:
        self._shell("kill $(cat /tmp/make.pid)")

    def remove(self) -> None:
        subprocess.run(["docker", "rm", "--force", self._id], check=True, capture_output=True)

    def _shell(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["docker", "exec", self._id, "sh", "-c", command], capture_output=True, text=True)


def pip_settings(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return what gives a container the settings of pip that hold here: paths to mount and where, and variables.

    Files and folders that a setting names are mounted elsewhere, so that no package of the container writes to them.
    """
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        settings["PIP_" + key.rpartition(".")[2].upper().replace("-", "_")] = value.strip("'\"")
    settings |= {name: value for name, value in environ.items() if name.startswith("PIP_")}
    mounts: dict[str, str] = {}
    env = {"PIP_NO_CACHE_DIR": "1"}
    for name, value in settings.items():
        words = value.split("\\n") if "\\n" in value else value.split()
        for place, word in enumerate(words):
            if word.startswith("/") and Path(word).exists():
                words[place] = mounts.setdefault(word, f"/mnt/pip/{len(mounts)}")
        env[name] = " ".join(words)
    return mounts, env


def start(place: Here | Container) -> Start:
    """Run `make run` until it serves, send the request that it prints, and stop it."""
    (port,) = free_ports(1)
    begun = time.monotonic()
    run = place.popen(["make", "--no-print-directory", "run", f"PORT={port}"])
    lines: list[tuple[float, str]] = []
    try:
        for line in run.stdout or ():
            lines.append((time.monotonic() - begun, line.rstrip()))
            print(f"{lines[-1][0]:6.1f}  {lines[-1][1]}", file=sys.stderr)
            if line.startswith("curl ") or lines[-1][0] > LIMIT_S:
                break
        else:
            raise RuntimeError(f"make run ended with {run.wait()}: the lines above say why")
        curl = place.popen([*shlex.split(lines[-1][1]), "-sS", "--fail-with-body"])
        answer, _ = curl.communicate(timeout=60)
        answer_s = time.monotonic() - begun - lines[-1][0]
        if curl.returncode:
            raise RuntimeError(f"curl ended with {curl.returncode}: {answer}")
    finally:
        place.stop(run)
        run.communicate(timeout=60)
    named = {str(place.clone): ".", str(port): "8000", str(port + 1): "8001"}
    for there, shown in named.items():
        lines = [(at, line.replace(there, shown)) for at, line in lines]
    return Start(lines, answer, answer_s)


@contextlib.contextmanager
def opened(image: str) -> Iterator[Here | Container]:
    """Yield the place where it runs, and remove it; image: empty for this machine."""
    with tempfile.TemporaryDirectory(prefix="first-minute-") as name:
        if not image:
            yield Here(Path(name))
            return
        container = Container(Path(name), image)
        try:
            container.prepare()
            yield container
        finally:
            container.remove()


def picture(place: Here | Container, cold: Start, warm: Start) -> str:
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

        if place.before:
            console.print(Text(place.before, "bold"))
        show(f"$ make run                  # {place.shown}; never silent for more than {cold.silence:.1f} s", cold)
        console.print(Text("  ^C\n", "dim"))
        show(f"$ make run                  # again; never silent for more than {warm.silence:.1f} s", warm)
        console.print(
            Text(
                f"\n$ curl ... | jq -r '.choices[0].message.content'    # that line: answered in {warm.answer_s:.1f} s",
                "bold",
            )
        )
        console.print(Text(json.loads(warm.answer)["choices"][0]["message"]["content"]))
        return FONTS.sub("", console.export_svg(title="orcinus", theme=MONOKAI, unique_id="terminal"))


def main() -> int:
    """Record, write the picture, and print the times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--container", metavar="IMAGE", default="", help="run in a new container of this image of Debian"
    )
    with opened(parser.parse_args().container) as place:
        cold, warm = start(place), start(place)
        PICTURE.write_text(picture(place, cold, warm))
    print(f"{PICTURE.relative_to(ROOT)}: {place.shown}, {os.cpu_count()} cores", file=sys.stderr)
    for name, one in (("cold", cold), ("warm", warm)):
        print(
            f"{name}: {one.seconds:.0f} s, answered after {one.answer_s:.1f} s more, "
            f"at most {one.silence:.1f} s without a line", file=sys.stderr,
        )  # fmt: skip
    silent = max(cold.silence, warm.silence)
    if silent > SILENT_S:
        print(f"error: {silent:.1f} s without a line; at most {SILENT_S:.0f} s is allowed", file=sys.stderr)
    return int(silent > SILENT_S)


if __name__ == "__main__":
    sys.exit(main())
