"""The Makefile on machines that lack something: its errors, and that it leaves no broken environment; and `.ci/run`."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.launcher.gpu.facts import NODES
from tests.support.launcher import ROOT, clean_env


def make(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    drop = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON"}
    env = {name: value for name, value in clean_env().items() if name not in drop}
    return subprocess.run(["make", *args], cwd=directory, env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh clone, as far as make looks at it before it installs."""
    directory = tmp_path / "clone"
    shutil.copytree(ROOT / "protos", directory / "protos", ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, directory)
    return directory


def python_that(checkout: Path, name: str, refuses: str) -> Path:
    """A Python that works, but for programs that hold `refuses`."""
    path = checkout / name
    path.write_text(f'#!/bin/sh\ncase "$*" in *"{refuses}"*) exit 1;; esac\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("refuses", "said"),
    [
        ("ensurepip", "sudo apt-get install python3-venv"),
        ("sys.version_info < (3, 11)", "too old, 3.11 to 3.14 is needed; give PYTHON=python3.12"),
        ("--version", "not found; run sudo apt-get install python3 python3-venv"),
    ],
)
def test_unusable_python_is_an_error_with_a_remedy(checkout: Path, refuses: str, said: str) -> None:
    done = make(checkout, "run", f"PYTHON={python_that(checkout, 'broken-python', refuses)}")
    assert done.returncode == 2
    assert said in done.stderr
    assert not (checkout / ".venv" / "bin").exists()


@pytest.mark.parametrize(
    ("bundled", "on_path", "url", "said"),
    [
        (False, "", "", "sudo apt-get install redis-server"),
        (True, "", "", ""),
        (False, "redis-server", "", ""),
        (False, "valkey-server", "", ""),
        (False, "", "redis://elsewhere:6379/0", ""),
    ],
)
def test_missing_redis_is_an_error_before_the_installation(
    checkout: Path, bundled: bool, on_path: str, url: str, said: str
) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python_that(checkout, ".venv/bin/python", "no such program" if bundled else "platform.machine()")
    (checkout / ".venv" / ".made").touch()
    (checkout / "bin").mkdir()
    for name in ("bash", "sh", "make", "sed", "cksum"):  # all of PATH, so without a Redis
        found = shutil.which(name)
        assert found, name
        (checkout / "bin" / name).symlink_to(found)
    if on_path:
        shutil.copy(python, checkout / "bin" / on_path)
    env = clean_env(PATH=str(checkout / "bin"), **({"ORCINUS_REDIS_URL": url} if url else {}))
    env.pop("MAKEFLAGS", None)
    done = subprocess.run(["make", "redis-at-hand"], cwd=checkout, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if said else 0), done.stderr
    assert said in done.stderr
    order = make(checkout, "-n", "run").stdout
    assert order.index("platform.machine()") < order.index("pip_progress")


def test_help_lists_every_target(checkout: Path) -> None:
    listed = {line.split()[0] for line in make(checkout).stdout.splitlines()}
    assert listed >= {"run", "format", "protos", "bench", "up", "down", "doctor", *TARGETS}


def test_clean_removes_libraries_of_an_image(checkout: Path) -> None:
    kept = checkout / "kernels" / "cpu" / "build.py"
    gone = [checkout / "kernels" / "cpu" / "lib" / "avx2.so", checkout / "kernels" / "cuda" / "lib" / "rope.cubin"]
    for file in (kept, *gone):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert make(checkout, "clean").returncode == 0
    assert kept.exists() and not any(file.parent.exists() for file in gone)


def test_torch_is_installed_first_at_the_version_of_pyproject(checkout: Path) -> None:
    pins = checkout / "pyproject.toml"
    text = pins.read_text()
    version = next(line for line in text.splitlines() if '"torch==' in line).split("==")[1].rstrip('",')
    pins.write_text(text.replace(f"torch=={version}", "torch==9.9.9"))
    steps = [line for line in make(checkout, "-n", "run").stdout.splitlines() if "pip_progress" in line]
    assert "torch==9.9.9" in steps[0]
    assert not any("dev" in step or "bench" in step for step in steps)
    assert ".[build,embedded,load]" in steps[-1], "`orcinus bench serve` works after `make run` alone"


def test_index_for_torch_is_used_for_torch_only(checkout: Path) -> None:
    done = make(checkout, "-n", "run", "TORCH_INDEX=https://index.invalid/cpu")
    steps = [line for line in done.stdout.splitlines() if "pip_progress" in line]
    assert ["--index-url" in step for step in steps] == [True, *[False] * (len(steps) - 1)]


def test_cuda_installs_torch_for_cuda_first_when_requested(checkout: Path) -> None:
    plain, cuda = make(checkout, "-n", "run").stdout, make(checkout, "-n", "run", "DEVICE=cuda").stdout
    assert "gpu.checks" not in plain and "cupy" not in plain and "===" not in plain
    steps = [line for line in cuda.splitlines() if "gpu.checks" in line or "pip_progress" in line]
    assert "services.launcher.gpu.checks" in steps[0]
    assert re.search(r"version\.cuda.* != \"(\S+)\".*\|\| .*pip_progress.* 'torch===\1'$", steps[1])
    assert "--extra" in steps[2]
    assert re.search(r"pip_progress.* 'torch==\d", steps[3])
    assert steps[4:] == [line for line in plain.splitlines() if "pip_progress" in line][1:]


def test_index_for_torch_is_used_for_cuda(checkout: Path) -> None:
    cuda = make(checkout, "-n", "install", "DEVICE=cuda", "TORCH_INDEX=https://index.invalid/cu130").stdout
    (step,) = [line for line in cuda.splitlines() if "--force-reinstall" in line]
    assert "--index-url 'https://index.invalid/cu130' 'torch==" in step


@pytest.mark.parametrize(("cuda", "cupy"), [("13.0", "cupy-cuda13x=="), ("12.9", "cupy-cuda12x==")])
def test_cupy_is_for_the_cuda_that_torch_is_for(checkout: Path, cuda: str, cupy: str) -> None:
    (checkout / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "requirements.py", checkout / "deploy")
    pinned = re.search(r"torch==([\d.]+)", (checkout / "pyproject.toml").read_text())
    assert pinned is not None
    (checkout / "torch.py").write_text(
        f"class version:\n    cuda = {cuda!r}\n__version__ = '{pinned[1]}+cu{cuda.replace('.', '')}'\n"
    )
    python, asked = checkout / ".venv" / "bin" / "python", checkout / "asked"
    python.parent.mkdir(parents=True)
    run = f'*torch.version*|*requirements.py*) exec env PYTHONPATH=. "{sys.executable}" "$@";;'
    python.write_text(f'#!/bin/sh\necho "$*" >> "{asked}"\ncase "$*" in {run} esac\n')
    python.chmod(0o755)
    (checkout / ".venv" / ".made").touch()
    done = make(checkout, "install", "DEVICE=cuda", "TORCH_INDEX=https://index.invalid/cu")
    assert done.returncode == 0, done.stderr
    installed = [line for line in asked.read_text().splitlines() if "pip_progress" in line]
    assert f"pip_progress {cupy}" in installed[0]
    assert "gpu.checks --any-driver" in asked.read_text()  # a driver for that torch need not be one for CUDA 13


def test_cuda_without_a_gpu_is_an_error_before_the_installation(checkout: Path) -> None:
    if any(Path(node).exists() for node in NODES):
        pytest.skip("this machine has a GPU")
    for name in (
        "__init__",
        "launcher/__init__",
        "launcher/check",
        *(f"launcher/gpu/{each}" for each in ("__init__", "checks", "facts")),
    ):
        target = checkout / "services" / f"{name}.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "services" / f"{name}.py", target)
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # It installs nothing, whatever the Makefile asks for: its packages are those of these tests.
    look = f'*gpu.checks*) exec "{sys.executable}" "$@";;'
    python.write_text(f'#!/bin/sh\necho "$*" >> "{checkout / "asked"}"\ncase "$*" in {look} *) exit 3;; esac\n')
    python.chmod(0o755)
    (checkout / ".venv" / ".made").touch()
    for target in ("install", "doctor", "run"):
        done = make(checkout, target, "DEVICE=cuda", "ARGS=--redis-url=redis://elsewhere:6379/0")
        assert done.returncode == 2
        assert "error: DEVICE=cuda: " in done.stderr and "-> " in done.stderr
    assert "pip" not in (checkout / "asked").read_text()


def test_python_unlike_that_of_the_environment_is_refused(checkout: Path) -> None:
    other = checkout / "python-2"
    other.write_text("#!/bin/sh\necho '(2, 7)'\n")
    other.chmod(0o755)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    done = make(checkout, "run", f"PYTHON={other}")
    assert done.returncode == 2
    assert "made with another Python" in done.stderr
    assert make(checkout, "help", f"PYTHON={other}").returncode == 0


def test_settings_of_make_reach_the_launcher_as_single_words(checkout: Path) -> None:
    done = make(checkout, "-n", "run", "MODEL=a b/it's", "PORT=81", "DEVICE=cpu", "POLICY=orca", "ARGS=--threads 2")
    line = done.stdout.splitlines()[-1]
    command = ["bash", "-c", line.replace("exec", "printf '%s\\n'", 1)]
    echoed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    options = {"--model": "a b/it's", "--port": "81", "--device": "cpu", "--policy": "orca", "--threads": "2"}
    assert echoed[-10:] == [word for pair in options.items() for word in pair]


def test_every_setting_of_the_help_is_taken_and_a_misspelt_one_refused(checkout: Path) -> None:
    (run,) = [line for line in make(checkout).stdout.splitlines() if line.startswith("run ")]
    settings = re.findall(r"\b([A-Z]+)=", run)
    assert {"MODEL", "MODELS", "ARGS"} <= set(settings)
    assert make(checkout, "-n", "run", *(f"{name}=x" for name in settings if name != "DEVICE")).returncode == 0
    refused = make(checkout, "run", "MODLE=x")
    assert refused.returncode == 2
    assert "unknown setting MODLE" in refused.stderr


@pytest.mark.parametrize("target", ["test-kernels", "kernels-check", "sanitizers"])
def test_kernels_are_compiled_before_their_tests(checkout: Path, target: str) -> None:
    planned = make(checkout, "-n", target).stdout
    assert 0 < planned.index("tests.kernels.build") < planned.index("-m pytest")


STAGES = {
    "install": "install-dev",
    "lint-and-build": "lint kernels-build",
    "test": "test test-slow test-deploy",
    "kernels-and-engine": "kernels-check",
    "stack-and-chaos": "test-stack test-chaos",
    "side-by-side": "clients simulation schemathesis browser foreign-records",
}
"""Those that call make, in order, and the targets of each."""
BEGUN = {"compose-test": "install", "sanitizers": "stack-and-chaos"}
"""Targets that run beside the stages from the one that is named here."""
MADE = [*" ".join(STAGES.values()).split(), *BEGUN]
TARGETS = tuple(dict.fromkeys(MADE))


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """The CI script over a Makefile with targets that only say their name, on a machine that lacks no package."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    for name in [
        "g++",
        "curl",
        "redis-server",
        "node",
        "npm",
        "chromium",
        "promtool",
        "kubectl",
    ]:  # no test installs packages
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "Makefile").write_text("".join(f"{target}:\n\t@echo did {target}; {{}}\n" for target in TARGETS))
    return tmp_path


def run_pipeline(directory: Path, **commands: str) -> tuple[int, str, list[str]]:
    makefile = directory / "Makefile"
    parts = makefile.read_text().split("{}")
    endings = [commands.get(target.replace("-", "_"), "true") for target in TARGETS]
    makefile.write_text("".join(part + end for part, end in zip(parts, [*endings, ""], strict=True)))
    env = clean_env(PATH=f"{directory / 'bin'}:{os.environ['PATH']}")
    done = subprocess.run([directory / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, re.findall(r"^(?:[a-z-]+: )?did (\S+)$", done.stdout, re.MULTILINE)


def test_ci_runs_every_stage_in_order_with_its_time(pipeline: Path) -> None:
    code, said, did = run_pipeline(pipeline)
    assert code == 0 and sorted(did) == sorted(MADE)
    at = iter(target for target in did if target not in BEGUN)
    for targets in (targets.split() for targets in STAGES.values()):
        assert sorted(targets) == sorted(itertools.islice(at, len(targets)))
    for target in ("simulation", *BEGUN):
        assert re.search(rf"^{target}: ok in \d+ s$", said, re.MULTILINE)
    for stage in ("packages", *STAGES, *BEGUN):
        assert f"ok  {stage}  " in said.split("== summary")[1]


@pytest.mark.parametrize(
    ("red", "status", "stage", "never"),
    [
        ({"test": "exit 3"}, 2, "test", {*MADE} - {"install-dev", "kernels-build", "lint", "test", "compose-test"}),
        ({"clients": "exit 3", "simulation": "exit 3"}, 124, "side-by-side", {"schemathesis"}),
    ],
)
def test_ci_starts_nothing_beside_or_behind_a_red_target(
    pipeline: Path, red: dict[str, str], status: int, stage: str, never: set[str]
) -> None:
    code, said, did = run_pipeline(pipeline, **red)
    assert code == status and not never & {*did} and {*did} >= {"install-dev", "kernels-build", "lint"}
    assert f"RED: {stage}" in said.split("== summary")[1]


@pytest.mark.parametrize(
    ("begun", "beside", "never"),
    [("compose-test", "install-dev", "lint"), ("sanitizers", "test-chaos", "clients")],
)
def test_ci_starts_no_stage_behind_a_red_target_that_was_begun(
    pipeline: Path, begun: str, beside: str, never: str
) -> None:
    group = pipeline / "group"
    red = f"cut -d' ' -f6 /proc/$$$$/stat > {group}; exit 3"
    waits = f"until [ -s {group} ] && ! kill -s 0 -- -$$(cat {group}) 2>/dev/null; do sleep 0.1; done"
    code, said, did = run_pipeline(pipeline, **{begun.replace("-", "_"): red, beside.replace("-", "_"): waits})
    assert code == 2 and {begun, beside} <= {*did} and never not in did
    assert f"RED: {begun}" in said.split("== summary")[1]


def test_ci_waits_for_a_red_target_that_was_begun(pipeline: Path) -> None:
    last = pipeline / "last"
    red = f"until [ -e {last} ]; do sleep 0.1; done; exit 3"
    code, said, did = run_pipeline(pipeline, sanitizers=red, foreign_records=f"touch {last}")
    assert code == 2 and sorted(did) == sorted(MADE)
    assert "RED: sanitizers" in said.split("== summary")[1]


def test_ci_ends_what_was_begun_with_a_red_target_beside_it(pipeline: Path) -> None:
    pid = pipeline / "pid"
    low = f"trap 'echo ended >> {pid}; exit' TERM; echo $$$$ > {pid}; sleep 100 & wait"
    code, said, _ = run_pipeline(pipeline, sanitizers=low, test_stack=f"until [ -s {pid} ]; do sleep 0.1; done; exit 3")
    assert code == 2 and "RED: stack-and-chaos" in said.split("== summary")[1]
    assert set(pid.read_text().split()[1:]) == {"ended"}  # the signal may come twice: `timeout` passes it on


def test_ci_stage_has_no_terminal(pipeline: Path) -> None:
    code, _, did = run_pipeline(pipeline, lint="! read answer")
    assert code == 0 and sorted(did) == sorted(MADE)


def test_ci_ends_with_the_counts_of_tests(pipeline: Path) -> None:
    code, said, _ = run_pipeline(pipeline, test="echo 7 passed in 1 s", clients="echo = 9 passed in 2 s =")
    assert code == 0
    assert said.splitlines()[-2:] == ["7 passed in 1 s", "clients: = 9 passed in 2 s ="]


def test_each_folder_of_tests_runs_in_a_stage(checkout: Path) -> None:
    planned = make(checkout, "-n", *MADE).stdout
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert folders == {name for name in folders if re.search(rf"-m pytest .*\btests/{name}\b", planned)}
    everything = make(checkout, "-n", "test-all").stdout
    assert folders == {name for name in folders if re.search(rf"-m pytest .*\btests/{name}\b", everything)}
