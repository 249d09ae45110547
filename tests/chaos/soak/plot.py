"""The picture of a soak: one panel for each kind of quantity, all samples, the warm-up shaded.

Needs matplotlib (the `bench` extra), drawn without a display. Called by tests/chaos/soak/__main__.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from tests.chaos.soak.__main__ import Soak

PANELS = {
    "rss_mib": "resident memory, MiB", "fds": "open files", "threads": "threads", "memory_mib": "Redis's memory, MiB",
    "keys": "keys in Redis", "tokens": "entries of the token streams", "entries": "requests in the streams",
    "pending": "pending entries", "blocks": "KV blocks in use",
}  # fmt: skip


def draw(soak: Soak, path: Path) -> None:
    """Writes it; the format is that of the file's ending."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    minutes = [at / 60 for at in soak.samples.at_s]
    for axes, (kind, title) in zip(figure.subplots(3, 3).flat, PANELS.items(), strict=True):
        for name in soak.samples.rows[0]:
            if name.split()[0] == kind:
                axes.plot(minutes, soak.samples.column(name), linewidth=0.8, label=name.split()[1])
        axes.axvspan(minutes[0], soak.warm_up_s / 60, color="0.9")
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes")
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)
