"""Let a worker draw recorded tokens: what the model says is computed and left aside. For this study alone.

PYTHONPATH names this folder, and Python imports the module of this name at the start of each process. The environment
variable RECORDED_TEXTS names a JSON file with a list of texts: each the token ids of a prompt and its output. A request
with the seed s draws those of text number s. The first text has the number 1.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch


def draw_recorded(path: Path) -> None:
    """Let the CPU kernels draw the tokens of these texts."""
    import numpy as np

    from kernels.cpu.backend import CpuOps

    texts = [np.array(ids) for ids in json.loads(path.read_text())]
    sample = CpuOps.sample

    def recorded(self: CpuOps, logits: Any, rows: Any) -> Any:
        sampled = sample(self, logits, rows)  # its time counts
        for row, (seed, position) in enumerate(zip(rows.seed.tolist(), rows.position.tolist(), strict=True)):
            if 0 < seed <= len(texts) and position < texts[seed - 1].size:
                sampled.tokens[row] = int(texts[seed - 1][position])
        return sampled

    patch.object(CpuOps, "sample", recorded).start()


if "RECORDED_TEXTS" in os.environ and "worker" in sys.orig_argv:
    draw_recorded(Path(os.environ["RECORDED_TEXTS"]))
