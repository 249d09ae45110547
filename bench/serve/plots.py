"""Plots of a load run: distributions of TTFT and TBT, and tokens per second.

Needs matplotlib (the `bench` extra), drawn without a display. Called by `bench/serve/main.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.serve.stats import Float64, Record


def tokens_per_second(records: Sequence[Record]) -> tuple[Float64, Float64]:
    """Return seconds from the first due time, and output tokens in each of them, of failed requests too."""
    times = np.asarray([t for record in records for t in record.event_s], dtype=np.float64)
    if not len(times):
        return np.zeros(0), np.zeros(0)
    # Where the server does not say how many tokens an event carried, its total is spread over the events.
    weights = np.concatenate([_weights(record) for record in records])
    times -= min(record.scheduled_s for record in records)
    counts = np.bincount(times.astype(np.int64), weights=weights).astype(np.float64)
    return np.arange(len(counts), dtype=np.float64), counts


def _weights(record: Record) -> Float64:
    weights = np.asarray(record.event_tokens, dtype=np.float64)
    return weights * (record.output_tokens / weights.sum()) if len(weights) else weights


def cdf(axes: Axes, seconds: Float64, title: str, label: str = "") -> None:
    """Plot the share of [n] times at or below each."""
    axes.set_title(title)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share at or below")
    axes.set_ylim(0, 1)
    if len(seconds):
        values = np.sort(seconds) * 1000
        axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=label)
    axes.grid(alpha=0.3)


def draw(records: Sequence[Record], path: Path, title: str) -> None:
    """Write one picture of three panels, in the format of the file's extension."""
    done = [record for record in records if record.finished]
    figure = Figure(figsize=(13, 4), layout="constrained")
    ttft, tbt, rate = figure.subplots(1, 3)
    figure.suptitle(title)
    cdf(ttft, np.asarray([record.ttft_s() for record in done]), "time to first token")
    cdf(tbt, np.concatenate([record.gaps_s() for record in done]) if done else np.zeros(0), "time between tokens")
    seconds, counts = tokens_per_second(records)
    rate.step(seconds, counts, where="post")
    rate.set_title("output tokens a second")
    rate.set_xlabel("seconds")
    rate.set_ylim(bottom=0)
    rate.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
