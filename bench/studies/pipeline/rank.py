"""Run one stage of bench.studies.pipeline: the real worker's rank with a stage that takes a synthetic time.

    python -m bench.studies.pipeline.rank STAGE_MS

From the moment in which a stage has its rows (the first: its step) it sleeps until STAGE_MS have passed, its forward
pass included, before it sends the rows on, or samples. It sleeps and does not spin: stages are to wait for one another
and not for the cores of this machine. Settings come from the environment, as always.
"""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest.mock import patch

from torch import Tensor

from kernels.ops import Batch
from protos import worker_pb2
from services.cli.options import build
from services.worker import main
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep, Marks
from services.worker.parallel.state import ParallelState
from services.worker.registration import Registration
from shared.settings import WorkerSettings

STAGE_S = float(sys.argv[1]) / 1000


class SlowParallelState(ParallelState):
    """A replica that passes rows on no sooner than STAGE_S after they came."""

    came = 0.0
    computed_s = 0.0
    """What the last step took of this stage before it slept."""

    def fill(self) -> None:
        """Sleep for the rest of the stage's time."""
        self.computed_s = time.monotonic() - self.came
        time.sleep(max(0.0, STAGE_S - self.computed_s))

    def receive_rows(self, x: Tensor) -> None:
        super().receive_rows(x)
        self.came = time.monotonic()

    def send_rows(self, x: Tensor) -> None:
        self.fill()
        super().send_rows(x)


class SlowEngine(Engine):
    """An engine on a SlowParallelState, which has no send after the last stage."""

    def _begin(self, step: worker_pb2.Step, marks: Marks, queued_ns: int) -> tuple[InFlightStep, Batch | None]:
        if isinstance(self.parallel, SlowParallelState):
            self.parallel.came = time.monotonic()  # later stages say so again
        return super()._begin(step, marks, queued_ns)

    def _sample(self, inflight: InFlightStep, logits: Tensor) -> None:
        if isinstance(self.parallel, SlowParallelState) and self.parallel.last:
            self.parallel.fill()
        super()._sample(inflight, logits)


def run() -> int:
    """Run a rank as services.worker.main.run does."""
    replaced: dict[str, Any] = {"ParallelState": SlowParallelState, "Engine": SlowEngine}
    # The bench has no Redis, so no lease.
    with patch.multiple(main, **replaced), patch.object(Registration, "refusal", lambda *_: ""):
        return main.run(build(WorkerSettings, {}))


if __name__ == "__main__":
    sys.exit(run())
