"""--step-log: one JSON line a step, for debugging. Apart from `metrics`: an engine in process needs no Prometheus."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from protos import worker_pb2
from services.worker.slots import Chunks
from shared.errors import ConfigurationError


class StepLog:
    """--step-log: append one JSON line a step to a file, for debugging."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raise ConfigurationError when it cannot be written."""
        try:
            self._file = path.open("a")
        except OSError as error:
            raise ConfigurationError(f"--step-log {path}: {error.strerror}; name a file that can be written") from error

    def write(self, result: worker_pb2.Result, chunks: Chunks) -> None:
        """Append a step that was answered."""
        one = chunks.lengths - (0 if chunks.drafts is None else chunks.drafts) == 1  # a decode, perhaps with drafts
        starts, lengths = chunks.starts[~one].astype(np.int64), chunks.lengths[~one]
        timings = result.timings
        line = {
            "time_ms": int(time.time() * 1000),
            "epoch": result.epoch,
            "step": result.id,
            "sequences": len(chunks.slots),
            "tokens": int(chunks.lengths.sum()),
            "decode_context": int(chunks.starts[one].sum()),
            "prefill_context": float((lengths * (starts + (lengths + 1) / 2)).sum()),
            "sampled": len(result.tokens) // 4,
            "errors": len(result.errors),
            "queued_us": timings.queued_ns // 1000,
            "idle_us": timings.idle_ns // 1000,
            "forward_us": timings.forward_ns // 1000,
            "sample_us": timings.sample_ns // 1000,
            "swap_us": timings.swap_ns // 1000,
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()
