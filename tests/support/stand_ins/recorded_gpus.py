"""What machines answered, as `Facts` holds it: an H200 in order, and what else is said where something is wrong."""

from __future__ import annotations

from typing import Any

from services.launcher.gpu.facts import Facts

GIB = 1 << 30
SMI = "GPU 0: NVIDIA H200 (UUID: GPU-2f5b6c1e-8f0e-4f63-9a0a-0f3b8f1c2d3e)"
SMI_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running."
)
SMI_MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95"
SMI_NO_DEVICES = "No devices found."
PROC_VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22-I3-AM02)  "
    "Tue Sep 23 09:55:41 UTC 2025\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)
NO_LIBRARY = "libcuda.so.1: cannot open shared object file: No such file or directory"
NO_NVRTC = "CuPy failed to load libnvrtc.so.13: cannot open shared object file: No such file or directory"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."
H200: dict[str, Any] = {"name": "NVIDIA H200", "capability": [9, 0], "total_bytes": 139 * GIB}
TURING: dict[str, Any] = {"name": "Tesla T4", "capability": [7, 5], "total_bytes": 15 * GIB}
ADA: dict[str, Any] = {"name": "NVIDIA L4", "capability": [8, 9], "total_bytes": 22 * GIB}
BLACKWELL: dict[str, Any] = {"name": "NVIDIA B200", "capability": [10, 0], "total_bytes": 178 * GIB}


def driver(device: dict[str, Any] = H200, cuda: int = 13000, free: float = 0.99, **more: Any) -> dict[str, Any]:
    """libcuda's answer. free: share of the memory."""
    taken = {"context": 0, "free_bytes": int(device["total_bytes"] * free)}
    return {"cuda": cuda, "init": 0, "devices": [device], **taken, **more}


def machine(**other: Any) -> Facts:
    """A machine in order, but for what is given."""
    facts: dict[str, Any] = {
        "card": True,
        "nodes": True,
        "smi": SMI,
        "version": "580.95.05",
        "driver": driver(),
        "cupy_packages": {"cupy-cuda13x": "14.2.0"},
        "torch": {"version": "2.13.0+cu130", "cuda": "13.0", "devices": 1},
        "cupy": {"version": "14.2.0"},
        "nvrtc": {"version": "13.0", "architectures": ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100"]},
    }
    return Facts(**(facts | other))


def bare(**other: Any) -> Facts:
    """A machine without any sign of a GPU, but for what is given."""
    return Facts(**other)
