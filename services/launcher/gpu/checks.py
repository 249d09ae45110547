"""Judge the facts of a machine for DEVICE=cuda: one line for each thing that must fit, with what to do.

Pure, except `main`, which make calls before it installs gigabytes: `python -m services.launcher.gpu.checks`. Standard
library only, for the same reason.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from services.launcher.check import Check
from services.launcher.gpu.facts import Device, Facts, gather_driver

GIB = 1 << 30
OLDEST_CAPABILITY = (8, 0)  # bfloat16 tensor cores and cp.async
CUDA = (13, 0)  # of the pinned torch and CuPy
DRIVERS = {12: "525", 13: "580"}  # the oldest driver for a major version of CUDA
CONTEXT_BYTES = GIB // 2
CROWDED = 0.8

NO_DEVICE, NO_PERMISSION, NOT_READY, MISMATCH = 100, 304, 802, 803  # of cuInit
HIDDEN_BY = "CUDA_VISIBLE_DEVICES"
WITH_GPUS = "start the container with --gpus all, or with deploy/compose.gpu.yaml (needs the NVIDIA Container Toolkit)"
NEW_DRIVER = "install NVIDIA's driver {} or newer, then reboot"
REBOOT = "reboot: after an upgrade the old kernel module stays loaded"


@dataclass(frozen=True, slots=True)
class Trouble:
    """One fault, and what to do."""

    detail: str
    fix: str


def judge(facts: Facts, wanted: str, weights_bytes: int = 0) -> list[Check]:
    """Return all lines. wanted: auto, cpu or cuda; what is missing fails only when cuda was asked for by name."""
    if wanted == "cpu":
        return [Check("gpu", "ok", "not used: DEVICE=cpu")]
    checks = judge_driver(facts, wanted)
    if not facts.devices or facts.devices[0].capability < OLDEST_CAPABILITY:
        return checks
    bad, device = _severity(wanted), facts.devices[0]
    return [
        *checks,
        _line("torch", bad, torch_trouble(facts), _torch_build(facts)),
        _line("cupy", bad, cupy_trouble(facts), ", ".join(map(" ".join, facts.cupy_packages.items()))),
        _line("kernels", bad, kernels_trouble(facts, device), _kernels_from(facts, device)),
        check_memory(facts, bad, device, weights_bytes),
        check_pinned(facts),
    ]


def judge_driver(facts: Facts, wanted: str) -> list[Check]:
    """Return the lines that need no Python package: the device, and the driver's CUDA."""
    bad = _severity(wanted)
    if not facts.devices:
        if wanted != "cuda" and not _sign_of_gpu(facts):
            return [Check("gpu", "ok", "none: the model runs on the CPU")]
        return [_line("gpu", bad, absence(facts), "")]
    device, others = facts.devices[0], len(facts.devices) - 1
    text = f"{device.name}, {device.total_bytes / GIB:.1f} GiB, compute capability {_version_text(device.capability)}"
    text += f"; {others} more, not used" if others else ""
    return [
        _line("gpu", bad, device_trouble(facts, device), text),
        _line(
            "driver",
            bad,
            driver_trouble(facts),
            f"{facts.version or 'present'}, up to CUDA {_version_text(_cuda(facts))}",
        ),
    ]


def absence(facts: Facts) -> Trouble:
    """Return why CUDA sees no device."""
    driver, smi = facts.driver, (facts.smi or "").splitlines()
    if not facts.nodes and not _smi_works(facts):
        if facts.container:
            return Trouble("no GPU is given to this container", f"{WITH_GPUS}; or DEVICE=cpu")
        if facts.card:
            return Trouble("an NVIDIA card is here, but no driver is loaded", NEW_DRIVER.format(DRIVERS[CUDA[0]]))
        return Trouble("this machine shows no NVIDIA GPU", "DEVICE=cpu, or a machine with one and its driver")
    if facts.smi is not None and not _smi_works(facts):
        text = smi[0] if smi else f"exit code {facts.smi_code}"
        fix = REBOOT if "mismatch" in text else "sudo modprobe nvidia, or install the driver again; dmesg says more"
        return Trouble(f"nvidia-smi: {text}", fix)
    if "failed" in driver:
        return Trouble(f"the driver does not answer: {driver['failed']}", "look into dmesg for NVRM and Xid; reboot")
    if "missing" in driver:
        return _without_library(facts)
    return _init_trouble(facts, int(driver.get("init", 0)))


def _without_library(facts: Facts) -> Trouble:
    text = f"the driver's libcuda is not here: {facts.driver['missing']}"
    if facts.container:
        return Trouble(text, "give the container NVIDIA_DRIVER_CAPABILITIES=compute,utility, and the NVIDIA runtime")
    return Trouble(text, "install the compute part of the driver (Debian: libcuda1, Ubuntu: libnvidia-compute-...)")


def _init_trouble(facts: Facts, code: int) -> Trouble:
    text = f"CUDA sees no device (cuInit: {code})"
    if code in (0, NO_DEVICE) and facts.visible is not None:
        return Trouble(f"{text}, {HIDDEN_BY}={facts.visible!r}", f"unset {HIDDEN_BY}, or name a device that is there")
    if code == NOT_READY:
        return Trouble(
            text, "start the Fabric Manager of the driver's version: sudo systemctl start nvidia-fabricmanager"
        )
    if code == MISMATCH:
        return Trouble(text, REBOOT)
    if facts.container:
        return Trouble(text, WITH_GPUS)
    if code == NO_PERMISSION:
        return Trouble(text, "let this user open /dev/nvidia*")
    return Trouble(text, "sudo nvidia-modprobe -u -c=0 makes /dev/nvidia-uvm; else reboot, and look into dmesg")


def device_trouble(facts: Facts, device: Device) -> Trouble | None:
    """Return why the first device cannot run the kernels or takes no work; None when it can."""
    if device.capability < OLDEST_CAPABILITY:
        text = f"{device.name} has compute capability {_version_text(device.capability)}"
        return Trouble(
            f"{text}, the kernels need {_version_text(OLDEST_CAPABILITY)}", "DEVICE=cpu, or an Ampere or newer GPU"
        )
    if code := facts.driver.get("context"):
        text = f"{device.name} takes no work (error {code})"
        return Trouble(text, "nvidia-smi shows what uses it: another process, or exclusive mode (nvidia-smi -c 0)")
    return None


def driver_trouble(facts: Facts) -> Trouble | None:
    """Return why the driver is too old: it runs programs of its major version of CUDA and of older ones."""
    needed, supported = _built_for(facts), _cuda(facts)
    if supported[0] >= needed[0]:
        return None
    here, there = _version_text(supported), _version_text(needed)
    text = f"driver {facts.version} supports CUDA {here}; torch and CuPy are for CUDA {there}"
    return Trouble(text, NEW_DRIVER.format(DRIVERS.get(needed[0], "of that CUDA")))


def torch_trouble(facts: Facts) -> Trouble | None:
    """Return what torch lacks. Most often it is the build for CPUs, which pip takes where its settings offer one."""
    torch = facts.torch
    version = torch.get("version")
    if version is None:
        return Trouble(torch.get("error", "torch cannot be asked"), _install(facts))
    if not torch["cuda"]:
        return Trouble(f"{version} is a build for CPUs", _install(facts))
    if not torch["devices"]:
        if driver_trouble(facts) is not None:
            return Trouble(
                f"{version} sees no GPU: the driver is too old for CUDA {torch['cuda']}", "see the driver's line"
            )
        return Trouble(f"{version} sees no GPU: {torch.get('error', 'it does not say why')}", _remedy(facts))
    return None


def cupy_trouble(facts: Facts) -> Trouble | None:
    """Return what is wrong unless there is one CuPy, of the same major version of CUDA as torch."""
    names = sorted(facts.cupy_packages)
    if not names:
        return Trouble("CuPy is not installed", _install(facts))
    if len(names) > 1:
        return Trouble(
            f"{' and '.join(names)} overwrite each other", f"pip uninstall {' '.join(names)}; {_install(facts)}"
        )
    major = re.fullmatch(r"cupy-cuda(\d\d).*", names[0])
    if major and int(major[1]) != _built_for(facts)[0]:
        text = f"{names[0]} is for CUDA {major[1]}, torch for CUDA {_version_text(_built_for(facts))}"
        return Trouble(text, f"pip uninstall {names[0]}; {_install(facts)}")
    if error := facts.cupy.get("error"):
        return Trouble(f"{names[0]} cannot be imported: {error}", f"pip uninstall {names[0]}; {_install(facts)}")
    return None


def kernels_trouble(facts: Facts, device: Device) -> Trouble | None:
    """Return why there are no kernels: they come compiled with an image, or NVRTC compiles them."""
    if facts.prebuilt:
        return None
    if not facts.cupy_packages:
        return Trouble(
            f"nothing prebuilt for {device.arch}, and without CuPy no compiler can be asked", "see cupy's line"
        )
    if "version" not in facts.nvrtc:
        text = f"nothing prebuilt for {device.arch}, and no NVRTC: {facts.nvrtc.get('error', 'it cannot be asked')}"
        return Trouble(
            text, f"pip install 'nvidia-cuda-nvrtc=={_built_for(facts)[0]}.*', which torch's CUDA builds bring"
        )
    if device.arch not in facts.nvrtc["architectures"]:
        text = f"NVRTC {facts.nvrtc['version']} is older than {device.arch}, and nothing is prebuilt for it"
        return Trouble(text, "install a newer nvidia-cuda-nvrtc of the same major version")
    return None


def _torch_build(facts: Facts) -> str:
    return f"{facts.torch.get('version')}, built for CUDA {facts.torch.get('cuda')}"


def _kernels_from(facts: Facts, device: Device) -> str:
    if facts.prebuilt:
        return f"prebuilt for {facts.prebuilt}"
    return f"compiled for {device.arch} at the first start, by NVRTC {facts.nvrtc.get('version')}"


def check_memory(facts: Facts, bad: str, device: Device, weights_bytes: int) -> Check:
    """Compare free memory with the weights, which must fit; a crowded device has few blocks."""
    free = int(facts.driver.get("free_bytes", 0))
    detail = f"{free / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free, weights {weights_bytes / GIB:.2f} GiB"
    if free < weights_bytes + CONTEXT_BYTES:
        return Check("gpu mem", bad, detail, "end its other users (nvidia-smi lists them), or choose a smaller model")
    if free < CROWDED * device.total_bytes:
        return Check("gpu mem", "warn", detail, "other processes use the rest (nvidia-smi lists them): fewer KV blocks")
    return Check("gpu mem", "ok", detail)


def check_pinned(facts: Facts) -> Check:
    """Report the memory for swapping. NVIDIA's driver pins it outside ulimit -l; WSL bounds it."""
    limit = facts.memlock_bytes
    detail = "ulimit -l is " + ("unlimited" if limit is None else f"{limit / 1024:.0f} KiB")
    if facts.wsl:
        return Check("pinned", "warn", f"{detail}; WSL pins only a part of memory", "lower --host-blocks if it fails")
    return Check("pinned", "ok", detail)


def _line(name: str, bad: str, trouble: Trouble | None, fine: str) -> Check:
    return Check(name, "ok", fine) if trouble is None else Check(name, bad, trouble.detail, trouble.fix)


def _severity(wanted: str) -> str:
    return "fail" if wanted == "cuda" else "warn"


def _smi_works(facts: Facts) -> bool:
    return facts.smi is not None and facts.smi_code == 0 and "GPU " in facts.smi


def _sign_of_gpu(facts: Facts) -> bool:
    return facts.nodes or facts.card or facts.smi is not None


def _cuda(facts: Facts) -> tuple[int, int]:
    number = int(facts.driver.get("cuda", 0))
    return number // 1000, number % 1000 // 10


def _built_for(facts: Facts) -> tuple[int, int]:
    """Return the CUDA of the installed torch, or of the one that would be installed."""
    version = re.match(r"(\d+)\.(\d+)", facts.torch.get("cuda", ""))
    return (int(version[1]), int(version[2])) if version else CUDA


def _install(facts: Facts) -> str:
    return "make install DEVICE=cuda" if facts.checkout else "use the image worker-gpu (deploy/compose.gpu.yaml)"


def _remedy(facts: Facts) -> str:
    return WITH_GPUS if facts.container else "try it alone: python -c 'import torch; torch.cuda.init()'"


def _version_text(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)


def main() -> int:
    """Return 2 where no GPU can be used here, with the reason on stderr.

    --any-driver: skip the check of the driver, as the torch to be installed may be built for an older CUDA.
    """
    checks = judge_driver(gather_driver(), "cuda")
    passed_over = "driver" if "--any-driver" in sys.argv[1:] else ""
    failed = [check for check in checks if check.status == "fail" and check.name != passed_over]
    for check in failed:
        print(f"error: DEVICE=cuda: {check.detail}\n       -> {check.fix}", file=sys.stderr)
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
