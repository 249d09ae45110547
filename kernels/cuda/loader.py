"""CUDA sources to kernels: compiled by NVRTC for one architecture, kept in a cache, loaded and launched through CuPy.

An image carries what `prebuilt` compiled; a GPU that can run it needs no compiler. Compiling needs no GPU and no
driver, so CI does what a worker does, up to the launch. Nothing else of ours is imported here: numpy, CuPy and NVRTC
are enough to run the kernels.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kernels.cuda import cubin

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "lib"
CACHE = Path(__file__).parents[2] / ".cache" / "kernels" / "cuda"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What CI compiles for and images carry."""

OPTIONS = ("-std=c++17", "-lineinfo", "--ptxas-options=-v", "--ptxas-options=--warn-on-spills")
KEPT = 256
"""Files in the cache; the oldest go."""

WITHOUT_CUPY = "CuPy is not installed ({}); run make install DEVICE=cuda, or pip install cupy-cuda13x"

_STATIC_SHARED, _MAX_DYNAMIC_SHARED = 1, 8  # CU_FUNC_ATTRIBUTE_.._SHARED_SIZE_BYTES of the driver's API
_MAX_SHARED_OF_BLOCK = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin of the runtime's
Sizes = tuple[int, int, int]
Result = TypeVar("Result")


class CudaError(Exception):
    """A source does not compile, or there is no GPU to launch on; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled source."""

    image: bytes
    log: str

    def usage(self) -> dict[str, cubin.Usage]:
        """Return what each kernel takes of a multiprocessor."""
        return cubin.usage(self.log)

    def params_bytes(self) -> dict[str, int]:
        """Return the size of each kernel's Params, as the compiler laid it out."""
        return cubin.constants(self.image, "_params")


class _Stream:
    """The protocol of a stream for CuPy. CuPy's class for foreign streams warns at every construction."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Program:
    """The kernels of one source, on CuPy's current device. Without a GPU they compile, and only a launch raises."""

    def __init__(self, source: Path, arch: str | None = None) -> None:
        """Load or compile.

        arch: such as "sm_90"; by default the present GPU's. Raise CudaError with what the compiler says.
        """
        self.source = source
        arch = arch or present_architecture()
        self.cubin = prebuilt(source, arch) or compiled(source, arch)
        self._params = self.cubin.params_bytes()
        self._functions: dict[str, Any] = {}
        self._streams: dict[int, _Stream] = {}
        if has_gpu():
            self._load()

    def _load(self) -> None:
        from cupy.cuda import device, driver, function, runtime

        module = function.Module()
        module.load(self.cubin.image)
        self._functions = {name: module.get_function(name) for name in self._params}
        most = runtime.deviceGetAttribute(_MAX_SHARED_OF_BLOCK, device.get_device_id())
        for one in self._functions.values():  # without this, 48 KiB at most
            fixed = driver.funcGetAttribute(_STATIC_SHARED, one.ptr)
            driver.funcSetAttribute(one.ptr, _MAX_DYNAMIC_SHARED, most - fixed)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return the kernels' names."""
        return tuple(self._params)

    def params_bytes(self, name: str) -> int:
        """Return the size of a kernel's Params. Raise KeyError when the source has no such kernel."""
        if name not in self._params:
            raise KeyError(f"{self.source.name} has no kernel {name!r}")
        return self._params[name]

    def launch(
        self, name: str, grid: Sizes, block: Sizes, shared: int, params: np.ndarray[Any, np.dtype[np.void]], stream: int
    ) -> None:
        """Put the kernel on a stream, a cudaStream_t such as torch.cuda.current_stream().cuda_stream, and return.

        shared: bytes of dynamic shared memory; params: one item of a structured dtype, copied by the launch. Raises
        KeyError, ValueError when params is not as large as the kernel's, and CudaError without a GPU.
        """
        expected = self.params_bytes(name)
        if params.size != 1 or params.nbytes != expected:
            raise ValueError(f"{name} takes {expected} bytes of parameters, not {params.nbytes}")
        if not self._functions:
            raise CudaError(f"no GPU to launch {name} on")
        if stream not in self._streams:
            self._streams[stream] = _Stream(stream)
        self._functions[name](grid, block, (params,), shared, self._streams[stream])


def sources(arch: str | None = None) -> list[Path]:
    """Return every source with kernels, sorted; with an architecture, such as "sm_90", those for it."""
    return [source for source in sorted(SOURCES.rglob("*.cu")) if arch is None or is_for(source, arch)]


def is_for(source: Path, arch: str) -> bool:
    """Return whether an architecture has what a source uses: a name that ends with _sm90 is for sm_90 alone."""
    return _only(source) in (None, arch)


def _only(source: Path) -> str | None:
    _, found, number = source.stem.rpartition("_sm")
    return f"sm_{number}" if found and number.isdigit() else None


@cache
def nvrtc_version() -> str:
    """Return the compiler's version; with its last number where it came as a wheel. Another one makes other code."""
    found = ".".join(map(str, _nvrtc().getVersion()))
    try:
        return metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        return found


def _nvrtc() -> Any:
    """Return the binding of the compiler. Raise CudaError where there is no CuPy or no compiler."""
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise CudaError(WITHOUT_CUPY.format(error)) from error
    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        raise CudaError(
            f"no NVRTC is here (pip install nvidia-cuda-nvrtc; torch's CUDA builds bring it): {error}"
        ) from error
    return nvrtc


@cache
def has_gpu() -> bool:
    try:
        import cupy
    except ImportError as error:
        raise CudaError(WITHOUT_CUPY.format(error)) from error
    return bool(cupy.cuda.is_available())


@cache
def present_architecture() -> str:
    """Return the architecture of the current device. Raise CudaError when there is none."""
    if not has_gpu():
        raise CudaError(f"no GPU is here; name an architecture to compile for, such as {ARCHITECTURES[-1]}")
    import cupy

    return f"sm_{cupy.cuda.Device().compute_capability}"


def prebuilt(source: Path, arch: str) -> Cubin | None:
    """Return what an image carries of this very source that runs on an architecture, if anything; its log is empty."""
    for carried in _runs(arch):
        with suppress(OSError):
            return Cubin(prebuilt_path(source, carried).read_bytes(), "")
    return None


def prebuilt_architecture(arch: str) -> str | None:
    """Return the architecture for which all was prebuilt that runs on `arch`; None if something must be compiled."""
    return next(
        (one for one in _runs(arch) if all(prebuilt_path(source, one).is_file() for source in sources(arch))), None
    )


def prebuilt_path(source: Path, arch: str) -> Path:
    """Return where an image has a source's cubin. Any compiler may have made it."""
    return PREBUILT / f"{source.stem}-{arch}-{_digest(source, _options(source, arch))}.cubin"


def _runs(arch: str) -> list[str]:
    """Return those of ARCHITECTURES with cubins that run on another: same major version, no newer, newest first."""

    def version(name: str) -> tuple[int, int]:
        return divmod(int(name.removeprefix("sm_")), 10)

    major, minor = version(arch)
    fitting = [one for one in ARCHITECTURES if version(one)[0] == major and version(one)[1] <= minor]
    return sorted(fitting, key=version, reverse=True)


def compiled(source: Path, arch: str) -> Cubin:
    """Compile a source for one architecture, or take it from the cache; headers are in SOURCES. Raise CudaError."""
    try:
        target = CACHE / f"{source.stem}-{arch}-{_digest(source, _options(source, arch), nvrtc_version())}"
    except CudaError as error:
        carried = ", ".join(ARCHITECTURES)
        raise CudaError(f"{source.name} must be compiled for {arch} (images carry {carried}): {error}") from error
    image, log = target.with_suffix(".cubin"), target.with_suffix(".log")
    try:
        return Cubin(image.read_bytes(), log.read_text())
    except OSError:
        made = compile_source(source, headers(), _options(source, arch))
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        write_whole(log, made.log.encode())  # first: a process that finds the image finds the log
        write_whole(image, made.image)
        for old in sorted(CACHE.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError:  # a checkout that is not ours to write to: compiled again next time
        pass
    return made


def headers() -> list[Path]:
    return sorted(SOURCES.rglob("*.cuh"))


def _options(source: Path, arch: str) -> tuple[str, ...]:
    return (*OPTIONS, f"-arch={_target(source, arch)}")


def _target(source: Path, arch: str) -> str:
    """Return the architecture as the compiler is to take it: "sm_90a" has all that sm_90 has, and no later one."""
    return f"{arch}a" if _only(source) else arch


def _digest(source: Path, *more: object) -> str:
    """Return the digest of a source, of all headers and of what else decides the result."""
    digest = hashlib.sha256(repr(more).encode())
    for path in (source, *headers()):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def compile_source(source: Path, headers: list[Path], options: tuple[str, ...]) -> Cubin:
    def cubin_of(nvrtc: Any, program: Any) -> Cubin:
        image = nvrtc.getCUBIN(program) + b"\0"  # CuPy takes the last byte, a zero, for the end of a text and drops it
        return Cubin(image, nvrtc.getProgramLog(program).rstrip("\0\n "))

    return _compiled(source, headers, options, cubin_of)


def ptx_of(source: Path, arch: str) -> str:
    """Return what NVRTC makes of a source before it knows the GPU, with the source's lines.

    arch: such as "compute_80"; that of a source for one architecture alone is its own. Raise CudaError.
    """

    def ptx(nvrtc: Any, program: Any) -> str:
        text: bytes = nvrtc.getPTX(program)
        return text.decode()

    if only := _only(source):
        arch = _target(source, only).replace("sm_", "compute_")
    return _compiled(source, headers(), (*OPTIONS[:2], f"-arch={arch}"), ptx)


def _compiled(
    source: Path, headers: list[Path], options: tuple[str, ...], result: Callable[[Any, Any], Result]
) -> Result:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(
        source.read_text(),
        source.name,
        [path.read_bytes() for path in headers],
        [path.name.encode() for path in headers],
    )
    try:
        nvrtc.compileProgram(program, options)
        return result(nvrtc, program)
    except nvrtc.NVRTCError as error:
        raise CudaError(f"{source.name} does not compile ({error}):\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def write_whole(target: Path, content: bytes) -> None:
    """Write a file that other processes see whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, target)
