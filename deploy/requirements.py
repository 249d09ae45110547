"""Print pins of pyproject.toml, one a line: images install them in a layer that code changes do not touch.

pyproject.toml is the list of direct pins; an image takes a part of it: the gateway and the scheduler need no torch. Run
by deploy/Dockerfile; standard library only. `--constraints` prints deploy/constraints.txt anew, which adds what these
packages need in turn, as it is installed where this runs; lines of packages that are not, as those of CUDA, stay.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any


def name_of(requirement: str) -> str:
    """Return the distribution's name as pip compares it: `Grpcio_tools==1.0; marker` is `grpcio-tools`."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


UNPINNED = ("orcinus", "pip")


def direct_pins(document: dict[str, Any]) -> dict[str, str]:
    """Return the version of each distribution that pyproject.toml pins, in the project and its extras."""
    project = document["project"]
    listed = [*project["dependencies"], *(pin for extra in project["optional-dependencies"].values() for pin in extra)]
    pins = (pin.partition(";")[0].partition("==") for pin in listed)
    return {name_of(name): version.strip() for name, equal, version in pins if equal}


def constraints(document: dict[str, Any], kept: list[str]) -> list[str]:
    """Return a line for each distribution that is installed here, pinned, or in `kept`, as it was printed before.
    Versions are without labels of builds such as +cpu.
    """
    found = {name_of(each.name): each.version.partition("+")[0] for each in importlib.metadata.distributions()}
    installed = {name: version for name, version in found.items() if name not in UNPINNED}
    versions = dict(line.split("==") for line in kept) | installed | direct_pins(document)
    return [f"{name}=={versions[name]}" for name in sorted(versions)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("--extra", help="this extra's pins instead of the project's")
    parser.add_argument("--build-system", action="store_true", help="what builds the package instead")
    parser.add_argument("--exact", action="store_true", help="no builds with a name of their own, such as 1.0+cpu")
    parser.add_argument("--constraints", action="store_true", help="the lines of deploy/constraints.txt instead")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--without", metavar="NAME", help="all but this one; it must be in the list")
    choice.add_argument("--only", metavar="NAME", help="this one alone; it must be in the list")
    options = parser.parse_args()

    document = tomllib.loads(options.pyproject.read_text())
    if options.constraints:
        print("\n".join(constraints(document, Path(__file__).with_name("constraints.txt").read_text().split())))
        return
    if options.build_system:
        pins = document["build-system"]["requires"]
    elif options.extra:
        pins = document["project"]["optional-dependencies"][options.extra]
    else:
        pins = document["project"]["dependencies"]
    chosen = options.without or options.only
    if chosen and chosen not in map(name_of, pins):
        parser.error(f"{options.pyproject} holds no pin of {chosen}")
    if chosen:
        pins = [pin for pin in pins if (name_of(pin) == chosen) == bool(options.only)]
    if options.exact:
        pins = [pin.replace("==", "===", 1) for pin in pins]
    print("\n".join(pins))


if __name__ == "__main__":
    main()
