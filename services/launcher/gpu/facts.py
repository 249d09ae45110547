"""Gather what a machine says about its GPUs; checks.py judges it.

Standard library only, since `make run DEVICE=cuda` asks before anything is installed.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
NODES = ("/dev/nvidiactl", "/dev/dxg")  # Linux, WSL
CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
PCI = Path("/sys/bus/pci/devices")
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
NVIDIA, DISPLAY = "0x10de", "0x03"
SMI_S = 15.0
DRIVER_S = 30.0
PYTHON_S = 120.0


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as CUDA sees it."""

    name: str
    capability: tuple[int, int]
    total_bytes: int

    @property
    def arch(self) -> str:
        """Return the compiler's name of it, such as sm_90."""
        return "sm_{}{}".format(*self.capability)


@dataclass(frozen=True, slots=True)
class Facts:
    """Answers as they came, empty where there was none. See probe.py for `driver`, `torch`, `cupy` and `nvrtc`."""

    card: bool = False  # an NVIDIA card on the PCI bus, which a container sees too
    nodes: bool = False  # the driver's device files
    wsl: bool = False
    container: bool = False
    checkout: bool = True  # not an image, which has no Makefile
    smi: str | None = None  # what `nvidia-smi -L` printed; None: no such program
    smi_code: int = 0
    version: str = ""  # of the kernel's part of the driver
    driver: Mapping[str, Any] = field(default_factory=dict)
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    cupy_packages: Mapping[str, str] = field(default_factory=dict)  # name, version
    torch: Mapping[str, Any] = field(default_factory=dict)
    cupy: Mapping[str, Any] = field(default_factory=dict)
    nvrtc: Mapping[str, Any] = field(default_factory=dict)
    prebuilt: str = ""  # the architecture of the cubins that are here for the first device
    memlock_bytes: int | None = None  # None: unlimited

    @property
    def devices(self) -> list[Device]:
        """Return the devices in CUDA's order; the worker computes on the first."""
        return [
            Device(one["name"], tuple(one["capability"]), one["total_bytes"]) for one in self.driver.get("devices", ())
        ]


def gather_driver() -> Facts:
    """Gather all except Python's packages. It takes a second or two where there is a GPU."""
    nodes = [node for node in NODES if Path(node).exists()]
    smi, code = ask_nvidia_smi()
    return Facts(
        card=_card(),
        nodes=bool(nodes),
        wsl=NODES[1] in nodes,
        container=in_container(),
        checkout=(ROOT / "Makefile").exists(),
        smi=smi,
        smi_code=code,
        version=_kernel_driver(),
        driver=probe("driver", timeout_s=DRIVER_S) if nodes or smi is not None else {},
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        memlock_bytes=_memlock(),
    )


def gather() -> Facts:
    """Gather all; without a GPU torch and CuPy are not asked, since importing them takes seconds."""
    facts = gather_driver()
    if not facts.devices:
        return facts
    answers = probe("python", facts.devices[0].arch, timeout_s=PYTHON_S)
    silent = {"error": answers.get("failed", "no answer")}
    known = {name: answers.get(name, silent) for name in ("torch", "cupy", "nvrtc")}
    prebuilt = answers.get("prebuilt", {}).get("architecture", "")
    return replace(facts, cupy_packages=cupy_packages(), prebuilt=prebuilt, **known)


def device_files() -> bool:
    """Return whether a driver is loaded here. Costs nothing."""
    return any(Path(node).exists() for node in NODES)


def device_count() -> int:
    """Return how many GPUs this machine shows; 1 where the driver has no node for each, as in WSL."""
    return max(1, len([node for node in Path("/dev").glob("nvidia*") if node.name.removeprefix("nvidia").isdigit()]))


def cupy_packages() -> dict[str, str]:
    """Return name and version of every installed distribution that brings the module `cupy`."""
    packages = ((one.metadata["Name"] or "", one.version) for one in metadata.distributions())
    return {name: version for name, version in packages if re.fullmatch(r"cupy(-.*)?", name)}


def torch_cuda() -> str | None:
    """Return the CUDA that the installed torch was built for, "" for a CPU build, None without torch; no import."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    version = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return version[1] if version else ""


def in_container() -> bool:
    """Return whether this is Docker, Podman or Kubernetes, as far as a process can tell."""
    return any(Path(file).exists() for file in CONTAINER_FILES) or "KUBERNETES_SERVICE_HOST" in os.environ


def ask_nvidia_smi() -> tuple[str | None, int]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, 0
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=SMI_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {SMI_S:.0f} s", 1
    except OSError as error:
        return str(error), 1
    return (done.stdout + done.stderr).strip(), done.returncode


def _card() -> bool:
    for device in PCI.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text()
        except OSError:
            continue
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            return True
    return False


def _kernel_driver() -> str:
    try:
        text = DRIVER_VERSION.read_text()
    except OSError:
        return ""
    version = re.search(r"\d+\.\d+(\.\d+)?", text)
    return version[0] if version else ""


def _memlock() -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def probe(*arguments: str, timeout_s: float) -> dict[str, Any]:
    """Return the probe's answer, or {"failed": reason}; a library may print before it."""
    command = [sys.executable, "-m", "services.launcher.gpu.probe", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer in {timeout_s:.0f} s"}
    lines = done.stdout.splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1] if lines else "")
    except json.JSONDecodeError:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return answer
