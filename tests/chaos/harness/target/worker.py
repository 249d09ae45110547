"""The worker of a chaos run: the real one with a forward pass that goes wrong once when a file says so.

    python -m tests.chaos.harness.target.worker FILE

FILE holds an order, which the next step takes away and obeys: `error`, `memory`, `hang`, or `hang SECONDS`. The step
has been applied to the slots by then, and its tokens are not computed. Settings come from the environment, as always.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kernels.ops import AnyOps
from services.cli.options import build
from services.worker import engine, main
from services.worker.backend import choose
from services.worker.models.config import DecoderConfig
from shared.settings import WorkerSettings

TOO_MUCH_BYTES = 1 << 60
FOR_EVER_S = 1e6


def obey(order: str) -> None:
    """Raises, or returns late. A hang without seconds ends with the process."""
    what, _, seconds = order.partition(" ")
    if what == "error":
        raise RuntimeError("an error inside a step, as ordered")
    if what == "memory":
        torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8)  # the allocator's own error
    threading.Event().wait(float(seconds or FOR_EVER_S))


def disobedient(prepare: Callable[..., Any], orders: Path) -> Callable[..., Any]:
    """The first operation of every step, with an eye on the orders."""

    def prepare_or_fail(*arguments: Any) -> Any:
        if orders.exists():
            order = orders.read_text()
            orders.unlink()
            obey(order)
        return prepare(*arguments)

    return prepare_or_fail


def run(orders: Path) -> int:
    """As services.worker.main.run, which see."""

    def chosen(settings: WorkerSettings, config: DecoderConfig) -> tuple[AnyOps, torch.dtype]:
        ops, dtype = choose(settings, config)
        object.__setattr__(ops, "prepare", disobedient(ops.prepare, orders))
        return ops, dtype

    with patch.object(engine, "choose", chosen):
        return main.run(build(WorkerSettings, {}))


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
