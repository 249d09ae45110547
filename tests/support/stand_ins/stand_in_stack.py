"""A launcher of the test's own scripts: `stand_in_stack.py PLAN.json`. Only the specs are stand-ins."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from services.launcher.placements import SleepingServices
from services.launcher.rundir import RunDir
from services.launcher.screen import Screen
from services.launcher.supervisor import StackSupervisor
from shared.errors import ConfigurationError
from shared.placement import Placement
from shared.processes.restarts import Backoff
from shared.processes.supervisor import ServiceSpec


class FileProbe:
    """Ready when the process has written its pid's file since the start."""

    wait_reason = ""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def arm(self) -> None:
        self._path.unlink(missing_ok=True)

    def ready(self) -> bool:
        return self._path.exists()


class FileOfPlacements:
    """A Redis in which the placer wants the one model awake that a file names."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def hgetall(self, _: str) -> dict[bytes, bytes]:
        name = self._path.read_bytes() if self._path.exists() else b""
        return {name: Placement(True).encode()} if name else {}


def main() -> int:
    plan = json.loads(Path(sys.argv[1]).read_text())
    specs = [
        ServiceSpec(
            spec["name"],
            spec["argv"],
            probe=FileProbe(spec["ready"]),
            after=tuple(plan.get("after", {}).get(spec["name"], ())),
            stop_s=plan.get("stop_s", 10.0),
        )
        for spec in plan["specs"]
    ]
    screen = Screen()
    sleeping = SleepingServices(FileOfPlacements(plan["awake"]), plan["models"], 1) if "models" in plan else None
    with RunDir(Path(plan["run_dir"])) as run_dir:
        return StackSupervisor(
            run_dir,
            specs,
            screen,
            on_ready=lambda: screen.result([f"STACK READY pid {os.getpid()}"]),
            backoff=Backoff(**plan.get("backoff", {})),
            stop_with_parent=plan.get("stop_with_parent", False),
            guard=plan.get("guard", False),
            sleeping=sleeping,
            has_logs=plan.get("has_logs", True),
        ).run()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
