"""Write every snapshot anew: `python -m tests.unit.snapshots.record`."""

from __future__ import annotations

from pathlib import Path

from tests.unit.snapshots.surfaces import SURFACES

FOLDER = Path(__file__).parent


def main() -> None:
    """Write the snapshots that differ, and print their names."""
    for name, render in SURFACES.items():
        path, text = FOLDER / name, render()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"recorded {name}")


if __name__ == "__main__":
    main()
