"""What `orcinus doctor` makes of a machine's answers: every mismatch is named, with what to do about it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Any

import pytest

from services.launcher.check import Check
from services.launcher.gpu import checks
from services.launcher.gpu.checks import CUDA, OLDEST_CAPABILITY, judge, judge_driver
from services.launcher.gpu.facts import Facts
from tests.support.launcher import ROOT
from tests.support.stand_ins.recorded_gpus import (
    ADA,
    BLACKWELL,
    GIB,
    H200,
    NO_LIBRARY,
    NO_NVRTC,
    SMI_MISMATCH,
    SMI_NO_DEVICES,
    SMI_NO_DRIVER,
    TOO_OLD,
    TURING,
    bare,
    driver,
    machine,
)


def torch_of(cuda: str | None, version: str = "2.13.0", devices: int = 0, **more: Any) -> dict[str, Any]:
    """Return what a torch says that was built for this CUDA; nothing where there is none."""
    return {"version": version, "cuda": cuda, "devices": devices, **more} if cuda is not None else {}


def lines(facts: Facts, wanted: str = "cuda", weights: int = 0) -> dict[str, Check]:
    return {check.name: check for check in judge(facts, wanted, weights)}


def wrong(facts: Facts) -> dict[str, Check]:
    """The lines that are not ok; each says what to do."""
    found = {name: check for name, check in lines(facts).items() if check.status != "ok"}
    assert all(check.fix for check in found.values())
    return found


def test_a_machine_in_order_is_said_to_be_so_line_by_line() -> None:
    found = lines(machine(), weights=15 * GIB)
    assert {check.status for check in found.values()} == {"ok"}
    pinned = found.pop("pinned").detail
    assert pinned and {name: check.detail for name, check in found.items()} == {
        "gpu": "NVIDIA H200, 139.0 GiB, compute capability 9.0",
        "driver": "580.95.05, up to CUDA 13.0",
        "torch": "2.13.0+cu130, built for CUDA 13.0",
        "cupy": "cupy-cuda13x 14.2.0",
        "kernels": "compiled for sm_90 at the first start, by NVRTC 13.0",
        "gpu mem": "137.6 of 139.0 GiB free, weights 15.00 GiB",
    }


@pytest.mark.parametrize(
    ("facts", "line", "said", "remedy"),
    [
        # No device, from the outside in.
        (bare(), "gpu", "shows no NVIDIA GPU", "DEVICE=cpu"),
        (bare(card=True), "gpu", "no driver is loaded", "driver 580"),
        (bare(container=True), "gpu", "no GPU is given to this container", "--gpus all"),
        (bare(smi=SMI_NO_DRIVER, smi_code=9, card=True), "gpu", "no driver is loaded", "driver 580"),
        (machine(smi=SMI_NO_DRIVER, smi_code=9, driver={}), "gpu", "couldn't communicate", "modprobe nvidia"),
        (machine(smi=SMI_MISMATCH, smi_code=18, driver={}), "gpu", "version mismatch", "reboot"),
        (machine(smi=SMI_NO_DEVICES, smi_code=6, driver={}), "gpu", "No devices found", "dmesg"),
        (machine(smi="", smi_code=-11, driver={}), "gpu", "exit code -11", "modprobe nvidia"),
        (machine(driver={"failed": "no answer in 30 s"}), "gpu", "no answer in 30 s", "Xid"),
        (machine(driver={"missing": NO_LIBRARY}), "gpu", "libcuda.so.1", "libcuda1"),
        (machine(driver={"missing": NO_LIBRARY}, container=True), "gpu", "libcuda", "NVIDIA_DRIVER_CAPABILITIES=comp"),
        (machine(driver={"cuda": 13000, "init": 100}, visible="7"), "gpu", "VISIBLE_DEVICES='7'", "unset CUDA_VISIBLE"),
        (machine(driver={"cuda": 13000, "init": 100}, visible=""), "gpu", "VISIBLE_DEVICES=''", "unset CUDA_VISIBLE"),
        (machine(driver={"cuda": 13000, "init": 100}), "gpu", "cuInit: 100", "nvidia-modprobe"),
        (machine(driver={"cuda": 13000, "init": 802}), "gpu", "cuInit: 802", "fabricmanager"),
        (machine(driver={"cuda": 13000, "init": 803}), "gpu", "cuInit: 803", "reboot"),
        (machine(driver={"cuda": 13000, "init": 304}), "gpu", "cuInit: 304", "/dev/nvidia*"),
        (machine(driver={"cuda": 13000, "init": 999}, container=True), "gpu", "cuInit: 999", "--gpus all"),
        # A device that does not do.
        (machine(driver=driver(TURING)), "gpu", "compute capability 7.5, the kernels need 8.0", "DEVICE=cpu"),
        (machine(driver=driver(context=46)), "gpu", "takes no work (error 46)", "exclusive mode"),
        (machine(driver=driver(cuda=12040), version="550.54.15"), "driver", "550.54.15 supports CUDA 12.4",
         "driver 580"),
        # Packages.
        (machine(torch={"error": "No module named 'torch'"}), "torch", "No module named 'torch'",
         "install DEVICE=cuda"),
        (machine(torch={}), "torch", "cannot be asked", "make install DEVICE=cuda"),
        (machine(torch=torch_of("", "2.13.0+cpu")), "torch", "2.13.0+cpu is a build for CPUs", "install DEVICE=cuda"),
        (machine(torch=torch_of("", "2.13.0+cpu"), checkout=False), "torch", "is a build for CPUs", "worker-gpu"),
        (machine(torch=torch_of("13.0", error="CUDA unknown error")), "torch", "sees no GPU: CUDA unknown error",
         "torch.cuda.init()"),
        (machine(torch=torch_of("13.0", error=TOO_OLD), driver=driver(cuda=12040)), "torch",
         "the driver is too old for CUDA 13.0", "the driver's line"),
        (machine(cupy_packages={}), "cupy", "not installed", "make install DEVICE=cuda"),
        (machine(cupy_packages={}, nvrtc={"error": "No module"}), "kernels", "without CuPy", "cupy's line"),
        (machine(cupy_packages={"cupy-cuda12x": "13.6.0"}), "cupy", "cupy-cuda12x is for CUDA 12, torch for CUDA 13.0",
         "pip uninstall cupy-cuda12x; make install DEVICE=cuda"),
        (machine(cupy_packages={"cupy-cuda13x": "14.2.0", "cupy-cuda12x": "13.6.0"}), "cupy",
         "cupy-cuda12x and cupy-cuda13x overwrite each other", "pip uninstall cupy-cuda12x cupy-cuda13x"),
        (machine(cupy={"error": "libcudart.so.13: cannot open"}), "cupy", "cannot be imported: libcudart.so.13",
         "make install DEVICE=cuda"),
        (machine(nvrtc={"error": NO_NVRTC}), "kernels", "nothing prebuilt for sm_90, and no NVRTC", "nvrtc==13.*"),
        (machine(driver=driver({**H200, "capability": [12, 1]})), "kernels", "NVRTC 13.0 is older than sm_121",
         "newer nvidia-cuda-nvrtc"),
        # Memory.
        (machine(driver=driver(free=0.1)), "gpu mem", "13.9 of 139.0 GiB free", "fewer KV blocks"),
        (machine(wsl=True), "pinned", "WSL", "--host-blocks"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_to_do(facts: Facts, line: str, said: str, remedy: str) -> None:
    found = wrong(facts)[line]
    assert said in found.detail and remedy in found.fix


def test_weights_that_do_not_fit_on_the_device_fail() -> None:
    for weights, status in ((60 * GIB, "warn"), (70 * GIB, "fail")):
        assert lines(machine(driver=driver(free=0.5)), weights=weights)["gpu mem"].status == status


def test_only_what_was_asked_for_by_name_fails() -> None:
    facts = machine(cupy_packages={})
    assert lines(facts, "cuda")["cupy"].status == "fail"
    assert lines(facts, "auto")["cupy"].status == "warn"
    assert lines(facts, "cpu") == {"gpu": Check("gpu", "ok", "not used: DEVICE=cpu")}
    assert lines(bare(), "auto") == {"gpu": Check("gpu", "ok", "none: the model runs on the CPU")}
    assert lines(bare(card=True), "auto")["gpu"].status == "warn"


def test_a_device_that_cannot_be_used_is_not_followed_by_what_else_would_be_needed() -> None:
    assert list(lines(machine(driver=driver(TURING), cupy_packages={}))) == ["gpu", "driver"]
    assert list(lines(machine(driver={"cuda": 13000, "init": 802}))) == ["gpu"]


@pytest.mark.parametrize(
    ("cuda", "torch", "is_wrong"),
    [(13000, "13.2", False), (13030, "12.8", False), (12090, "13.0", True), (12090, None, True)],
)
def test_a_driver_runs_older_cuda_and_minor_versions_of_its_own(cuda: int, torch: str | None, is_wrong: bool) -> None:
    """Where torch is not installed yet, what would be installed counts."""
    facts = machine(driver=driver(cuda=cuda), torch=torch_of(torch, devices=1))
    assert ("driver" in wrong(facts)) is is_wrong


@pytest.mark.parametrize(
    "facts",
    [
        machine(torch=torch_of("12.8", devices=1), cupy_packages={"cupy-cuda12x": "14.2.0"}),
        machine(prebuilt="sm_90", nvrtc={"error": NO_NVRTC}),
    ],
    ids=["torch and CuPy of an older CUDA", "prebuilt kernels without a compiler"],
)
def test_parts_that_fit_each_other_are_in_order(facts: Facts) -> None:
    assert wrong(facts) == {}


@pytest.mark.parametrize(
    ("device", "prebuilt", "said"),
    [
        (H200, "sm_90", "prebuilt for sm_90"),
        (ADA, "sm_80", "prebuilt for sm_80"),
        (ADA, "", "compiled for sm_89 at the first start"),
        (BLACKWELL, "", "compiled for sm_100 at the first start"),
    ],
)
def test_where_the_kernels_come_from_is_said(device: dict[str, Any], prebuilt: str, said: str) -> None:
    found = lines(machine(driver=driver(devices=[device, ADA]), prebuilt=prebuilt))
    assert found["kernels"].status == "ok" and said in found["kernels"].detail
    assert "; 1 more, not used" in found["gpu"].detail


def test_before_an_installation_only_the_device_and_its_driver_count() -> None:
    facts = machine(torch={}, cupy={}, cupy_packages={}, nvrtc={})
    assert {check.status for check in judge_driver(facts, "cuda")} == {"ok"}
    assert [check.name for check in judge_driver(facts, "cuda")] == ["gpu", "driver"]


def test_driver_is_not_judged_while_the_cuda_of_torch_is_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = machine(driver={**machine().driver, "cuda": 12040}, torch={}, cupy={}, cupy_packages={}, nvrtc={})
    monkeypatch.setattr(checks, "gather_driver", lambda: old)
    for arguments, code in (([], 2), (["--any-driver"], 0)):
        monkeypatch.setattr(sys, "argv", ["checks", *arguments])
        assert checks.main() == code
        assert ("supports CUDA 12.4" in capsys.readouterr().err) == bool(code)


def test_the_question_before_an_installation_needs_the_standard_library_only() -> None:
    program = "import sys; sys.path.insert(0, '.'); import services.launcher.gpu.checks, services.launcher.gpu.probe"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_versions_of_cuda_agree_in_all_the_pins() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(pin.startswith(f"cupy-cuda{CUDA[0]}x==") for pin in extras["cuda"])
    assert any(pin.startswith("nvidia-cuda-nvrtc=={}.{}.".format(*CUDA)) for pin in extras["dev"])
    assert extras["cuda12"] == [pin.replace(f"cuda{CUDA[0]}x", "cuda12x") for pin in extras["cuda"]]


def test_doctor_and_worker_demand_the_same_of_a_gpu() -> None:
    from kernels.cuda.gpu import CAPABILITY

    assert OLDEST_CAPABILITY == CAPABILITY
