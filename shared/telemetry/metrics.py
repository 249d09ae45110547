"""Common parts of the Prometheus metrics of all services: buckets, histograms of columns, aliases for the boards of
other servers, and the port.

A figure is observed once an iteration, never once a token: `ColumnHistogram` takes a column of values in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.errors import ConfigurationError

SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 600,
)  # fmt: skip
"""Buckets for requests and their phases."""

GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
"""Buckets for times between tokens and for iterations."""

CALLS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
"""Buckets for calls to Redis and for work inside a process."""

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


PENDING_COLUMNS = 512
"""Observed columns that may be pending before `settle` runs."""


class ColumnHistogram:
    """A histogram of columns that are counted later, so that a hot loop only appends to a list.

    One thread observes and settles. A scrape by another thread may see a column that is partly counted.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], label: str = "", values: Sequence[str] = ("",)):
        """label, values: one series per value, numbered in this order by `observe`; without a label there is one."""
        self.name, self.text = name, text
        self._label, self._names = label, tuple(values)
        self._bounds = np.asarray(bounds, np.float64)
        self._bound_texts = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._counts = np.zeros((len(self._names), len(bounds) + 1), np.int64)
        self._sums = np.zeros(len(self._names))
        self._pending_columns: list[list[npt.NDArray[Any] | float]] = [[] for _ in self._names]

    def observe(self, values: npt.NDArray[Any] | float, series: int = 0) -> None:
        """Add a value or a column of values to the pending ones."""
        pending = self._pending_columns[series]
        pending.append(values)
        if len(pending) >= PENDING_COLUMNS:
            self.settle()

    def settle(self) -> None:
        """Count the pending values."""
        for series, pending in enumerate(self._pending_columns):
            if not pending:
                continue
            self._pending_columns[series] = []
            column = np.concatenate([np.atleast_1d(values) for values in pending])
            places = np.searchsorted(self._bounds, column, side="left")
            self._counts[series] += np.bincount(places, minlength=self._counts.shape[1])
            self._sums[series] += float(column.sum())

    def family(self) -> HistogramMetricFamily:
        """Return the metric family for Prometheus, with cumulative counts."""
        family = HistogramMetricFamily(self.name, self.text, labels=[self._label] if self._label else [])
        for name, counts, total in zip(self._names, self._counts, self._sums, strict=True):
            rows = list(zip(self._bound_texts, np.cumsum(counts).tolist(), strict=True))
            family.add_metric([name] if self._label else [], rows, float(total))
        return family


class ColumnHistograms(Collector):
    """Several histograms as one collector of a registry."""

    def __init__(self, *histograms: ColumnHistogram) -> None:
        self._histograms = histograms

    def settle(self) -> None:
        """Count the pending values of all histograms. Call it on the thread that observes."""
        for histogram in self._histograms:
            histogram.settle()

    def collect(self) -> Iterator[Metric]:
        for histogram in self._histograms:
            yield histogram.family()


@dataclass(frozen=True, slots=True)
class Alias:
    """One of our families under another name. Keeps the labels in `labels` and sums over the rest."""

    name: str
    source: str
    labels: Mapping[str, str]  # ours -> theirs


class Aliases(Collector):
    """Exposes families of `sources` a second time under vLLM's names, so that boards and gateways for vLLM work."""

    def __init__(self, sources: Iterable[Collector], aliases: Iterable[Alias], model: str) -> None:
        self._sources = tuple(sources)
        self._aliases = tuple(aliases)
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for family in source.collect():
                for alias in self._aliases:
                    if alias.source == family.name:
                        yield self._rename(family, alias)

    def _rename(self, family: Metric, alias: Alias) -> Metric:
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            kept_labels = {theirs: sample.labels[ours] for ours, theirs in alias.labels.items()}
            if "le" in sample.labels:
                kept_labels["le"] = sample.labels["le"]
            key = (sample.name.removeprefix(family.name), tuple(kept_labels.items()))
            sums[key] = sums.get(key, 0.0) + sample.value
        metric = Metric(alias.name, family.documentation, family.type)
        for (suffix, labels), value in sums.items():
            metric.add_sample(alias.name + suffix, {"model_name": self._model, "engine": "0", **dict(labels)}, value)
        return metric

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the source families are registered under their Orcinus names."""
        return ()


def serve(registry: CollectorRegistry, host: str, port: int, option: str) -> None:
    """Serve `/metrics` on a separate thread until the process ends; port 0 means no server.

    Raises ConfigurationError that names `option` if the address cannot be used.
    """
    if not port:
        return
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(
            f"metrics on {host}:{port}: {error.strerror}; choose another port with {option}"
        ) from error
