"""Brings clients here: an environment each under `.clients/`, never in the project's own.

`python -m tests.clients.install [NAME ...]` makes what is missing; without names all that the suites need. Pins of
Python clients are in pyproject.toml ([tool.orcinus.clients], [tool.orcinus.load-clients]), of JavaScript in
`javascript/package-lock.json`. A stamp says what an environment was made of; other pins make it anew.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".clients"
JAVASCRIPT = "javascript"
JAVASCRIPT_PINS = [Path(__file__).parent / JAVASCRIPT / name for name in ("package.json", "package-lock.json")]


def pins(*tables: str) -> dict[str, list[str]]:
    """Client -> what its environment holds, of these tables of pyproject.toml."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["orcinus"]
    return {name: packages for table in tables for name, packages in known[table].items()}


def made(name: str) -> bool:
    """Whether the environment of a client is there, and of these pins."""
    stamp = HOME / f"{name}.stamp"
    return stamp.exists() and stamp.read_text() == _fingerprint(name)


def python_of(name: str) -> Path:
    """The interpreter of a Python client's environment."""
    return HOME / name / "bin" / "python"


def install(name: str) -> None:
    """Makes one environment. Raises CalledProcessError; the installer has said why."""
    HOME.mkdir(exist_ok=True)
    shutil.rmtree(HOME / name, ignore_errors=True)
    if name == JAVASCRIPT:
        _install_javascript()
    else:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", HOME / name], check=True)
        # A third of the time would go into a pip for each, and into bytecode of modules that are never imported.
        pip = [sys.executable, "-m", "pip", "--python", python_of(name), "install", "-q", "--no-compile"]
        subprocess.run([*pip, "--disable-pip-version-check", *pins("clients", "load-clients")[name]], check=True)
    (HOME / f"{name}.stamp").write_text(_fingerprint(name))


def _install_javascript() -> None:
    folder = HOME / JAVASCRIPT
    folder.mkdir()
    for path in JAVASCRIPT_PINS:
        shutil.copy(path, folder)
    subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder, check=True)


def _fingerprint(name: str) -> str:
    if name == JAVASCRIPT:
        made_of = b"".join(path.read_bytes() for path in JAVASCRIPT_PINS)
    else:
        made_of = repr((sys.version_info[:2], pins("clients", "load-clients")[name])).encode()
    return hashlib.sha256(made_of).hexdigest()


def main(names: list[str]) -> int:
    """0, or 2 for an unknown name."""
    known = {*pins("clients", "load-clients"), JAVASCRIPT}
    if unknown := sorted(set(names) - known):
        print(f"error: no such client: {', '.join(unknown)}; known are {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    for name in names or [*pins("clients"), JAVASCRIPT]:
        if not made(name):
            print(f"installing the client {name} into {HOME.name}/{name}", flush=True)
            install(name)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {' '.join(map(str, error.cmd[:4]))} ... failed with {error.returncode}")
