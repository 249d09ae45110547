"""How facts about GPUs are gathered, with a stand-in for the driver's library and nvidia-smi, and the real torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.launcher import up
from services.launcher.gpu import facts as gpu_facts
from services.launcher.gpu.checks import judge
from services.launcher.gpu.facts import Device, gather, gather_driver, torch_cuda
from shared.settings import DEMO_MODEL, WorkerSettings
from tests.support.compiler import needs_compiler
from tests.support.stand_ins.recorded_gpus import GIB, PROC_VERSION, SMI, driver

SOURCE = str(Path(__file__).with_name("libcuda.cpp"))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libcuda.so.1 in `fine`, and one with a cuInit that finds no Fabric Manager in `waiting`."""
    folder = tmp_path_factory.mktemp("libraries")
    for name, init in (("fine", 0), ("waiting", 802)):
        (folder / name).mkdir()
        made = folder / name / "libcuda.so.1"
        command = ["g++", f"-DINIT={init}", "-shared", "-fPIC", "-o", str(made), SOURCE]
        subprocess.run(command, check=True)
    return folder


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts an nvidia-smi into PATH that prints a text and ends with a code."""

    def put(text: str, code: int = 0) -> Path:
        (tmp_path / "bin").mkdir()
        script = tmp_path / "bin" / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 2\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        return tmp_path / "bin"

    return put


@pytest.fixture(autouse=True)
def no_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever machine these tests run on."""
    monkeypatch.setattr(gpu_facts, "NODES", ("/nothing/nvidiactl", "/nothing/dxg"))


def test_without_a_driver_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_facts, "probe", lambda *_, **__: pytest.fail("a process was started"))
    facts = gather()
    assert (facts.nodes, facts.smi, facts.driver, facts.devices, facts.torch) == (False, None, {}, [], {})


@needs_compiler
def test_driver_reports_its_cuda_devices_and_memory_or_its_error(
    tool: Any, libraries: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool(SMI)
    monkeypatch.setattr(gpu_facts, "DRIVER_VERSION", tmp_path / "version")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries / "fine"))
    facts = gather_driver()
    assert (facts.smi, facts.smi_code, facts.version) == (SMI, 0, "")
    assert (facts.driver["cuda"], facts.driver["init"], facts.driver["context"]) == (13020, 0, 0)
    assert facts.devices == [Device("NVIDIA H200", (9, 0), 139 * GIB), Device("NVIDIA L4", (8, 9), 22 * GIB)]
    assert [device.arch for device in facts.devices] == ["sm_90", "sm_89"]
    assert facts.driver["free_bytes"] == 100 * GIB
    (tmp_path / "version").write_text(PROC_VERSION)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries / "waiting"))
    facts = gather_driver()
    assert (facts.driver, facts.version) == ({"cuda": 13020, "init": 802}, "580.95.05")


def test_missing_library_is_named(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tool("Failed to initialize NVML: Driver/library version mismatch", 18)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    facts = gather_driver()
    assert facts.smi_code == 18 and "mismatch" in str(facts.smi)
    if "missing" not in facts.driver:
        pytest.skip("this machine has a driver")
    assert "libcuda.so.1" in facts.driver["missing"]


@needs_compiler
def test_cpu_build_of_torch_is_a_fault_beside_a_gpu(
    tool: Any, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if torch.version.cuda:
        pytest.skip("this torch is built for CUDA")
    tool(SMI)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries / "fine"))
    facts = gather()
    assert facts.torch["version"] == torch.__version__
    if facts.cupy_packages:
        assert facts.cupy["version"] in facts.cupy_packages.values()
        assert "sm_90" in facts.nvrtc["architectures"]
    checks = {check.name: check for check in judge(facts, "cuda")}
    assert checks["gpu"].detail.startswith("NVIDIA H200, 139.0 GiB, compute capability 9.0; 1 more")
    assert checks["driver"].status == "ok"
    assert (checks["torch"].status, checks["torch"].fix) == ("fail", "make install DEVICE=cuda")
    assert "is a build for CPUs" in checks["torch"].detail


@pytest.mark.parametrize(
    ("program", "timeout_s", "said"),
    [
        ("import time; time.sleep(60)", 1.0, "no answer in 1 s"),
        ("import os; print('half an answer'); os.abort()", 60.0, "exit code -6"),
        ("raise OSError('the library is broken')", 60.0, "OSError: the library is broken"),
    ],
)
def test_probe_that_hangs_or_dies_is_a_fact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, timeout_s: float, said: str
) -> None:
    package = tmp_path / "services" / "launcher" / "gpu"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()  # else the real package goes before it where PYTHONPATH names the checkout
    (package / "probe.py").write_text(program)
    monkeypatch.setattr(gpu_facts, "ROOT", tmp_path)
    assert gpu_facts.probe("driver", timeout_s=timeout_s) == {"failed": said}


def test_torch_that_crashes_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"driver": driver(), "python": {"failed": "exit code -11"}}
    monkeypatch.setattr(gpu_facts, "ask_nvidia_smi", lambda: (SMI, 0))
    monkeypatch.setattr(gpu_facts, "probe", lambda what, *_, timeout_s: answers[what])
    monkeypatch.setattr(gpu_facts, "cupy_packages", lambda: {"cupy-cuda13x": "14.2.0"})
    found = {check.name: check.detail for check in judge(gather(), "cuda") if check.status == "fail"}
    assert list(found) == ["torch", "cupy", "kernels"]
    assert all("exit code -11" in detail for detail in found.values())


@pytest.mark.parametrize(
    ("vendor", "kind", "found"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x1002", "0x030000", False)],
)
def test_card_is_found_on_the_bus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, kind: str, found: bool
) -> None:
    monkeypatch.setattr(gpu_facts, "PCI", tmp_path)
    monkeypatch.setattr(gpu_facts, "probe", lambda *_, **__: {})
    for name in ("0000:17:00.0", "0000:18:00.0"):
        (tmp_path / name).mkdir()
    (tmp_path / "0000:17:00.0" / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "0000:17:00.0" / "class").write_text(f"{kind}\n")  # the other card is gone in between
    assert gather_driver().card is found


@pytest.mark.parametrize(
    ("line", "cuda"),
    [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.8'", "12.8"), ("cuda: Optional[str] = None", "")],
)
def test_cuda_of_torch_is_known_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, cuda: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = '6.4'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_cuda() == cuda


def test_cuda_of_the_installed_torch_is_right() -> None:
    import torch

    assert torch_cuda() == (torch.version.cuda or "")


@pytest.mark.parametrize(
    ("files", "torch", "cupy", "said"),
    [
        (False, "13.0", {"cupy-cuda13x": "14.2.0"}, "shows no NVIDIA GPU"),
        (True, None, {}, "torch is a build for CPUs"),
        (True, "", {"cupy-cuda13x": "14.2.0"}, "torch is a build for CPUs; make run DEVICE=cuda"),
        (True, "13.0", {}, "CuPy is not installed; make run DEVICE=cuda"),
        (True, "13.0", {"cupy-cuda13x": "14.2.0"}, ""),
    ],
)
def test_stack_names_at_once_what_a_gpu_lacks(
    monkeypatch: pytest.MonkeyPatch, files: bool, torch: str | None, cupy: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(up, "device_files", lambda: files)
    monkeypatch.setattr(up, "torch_cuda", lambda: torch)
    monkeypatch.setattr(up, "cupy_packages", lambda: cupy)
    assert said in up.cuda_problem() and bool(up.cuda_problem()) == bool(said)
    # With DEVICE=auto only where there is a GPU; test_on_gpu.py has the settings under which it is silent.
    assert up.unused_gpu(WorkerSettings(device="auto", model=DEMO_MODEL)) == (up.cuda_problem() if files else "")
