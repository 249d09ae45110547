"""Print what the software of a GPU answers: `python -m services.launcher.gpu.probe driver|python [ARCH]`, as JSON.

`driver` asks libcuda and needs the standard library only; `python` asks torch, CuPy and NVRTC, and the loader for what
was compiled before. A child of facts.py: a library that hangs, crashes or prints takes only this process with it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
NAME_BYTES = 256


def driver() -> dict[str, Any]:
    """Return what libcuda says.

    missing: why it cannot be loaded; cuda: the newest CUDA that it supports, 1000 x major + 10 x minor; init, context:
    its error codes, 0 is fine; devices: name, capability, total_bytes in CUDA's order; free_bytes: of the first one,
    with the context of this process in it.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"missing": str(error)}
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    answer: dict[str, Any] = {"cuda": version.value, "init": library.cuInit(0)}
    if answer["init"] == 0:
        count = ctypes.c_int()
        library.cuDeviceGetCount(ctypes.byref(count))
        answer["devices"] = [_device(library, number) for number in range(count.value)]
        if count.value:
            answer |= _free(library)
    return answer


def _device(library: ctypes.CDLL, number: int) -> dict[str, Any]:
    device, total, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(NAME_BYTES)
    library.cuDeviceGet(ctypes.byref(device), number)
    library.cuDeviceGetName(name, NAME_BYTES, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    capability = []
    for attribute in CAPABILITY:
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return {"name": name.value.decode(errors="replace"), "capability": capability, "total_bytes": total.value}


def _free(library: ctypes.CDLL) -> dict[str, Any]:
    """Make a context, as a worker does first: only that shows whether the device takes work."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    library.cuDeviceGet(ctypes.byref(device), 0)
    if code := library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return {"context": code}
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.cuCtxSetCurrent(context)
    library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return {"context": 0, "free_bytes": free.value}


def python(arch: str) -> dict[str, Any]:
    """Return what torch, CuPy, NVRTC and the loader say, each with `error` when it cannot be asked."""
    questions = {"torch": _torch, "cupy": _cupy, "nvrtc": _nvrtc, "prebuilt": lambda: _prebuilt(arch)}
    return {name: _answer(ask) for name, ask in questions.items()}


def _torch() -> dict[str, Any]:
    import torch

    answer = {"version": torch.__version__, "cuda": torch.version.cuda or "", "devices": torch.cuda.device_count()}
    if answer["cuda"] and not answer["devices"]:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            answer["error"] = _first_line(error)
    return answer


def _cupy() -> dict[str, Any]:
    import cupy

    return {"version": cupy.__version__}


def _nvrtc() -> dict[str, Any]:
    from cupy_backends.cuda.libs import nvrtc

    version = ".".join(map(str, nvrtc.getVersion()))
    return {"version": version, "architectures": [f"sm_{number}" for number in nvrtc.getSupportedArchs()]}


def _prebuilt(arch: str) -> dict[str, Any]:
    from kernels.cuda.loader import prebuilt_architecture

    return {"architecture": prebuilt_architecture(arch) or ""}


def _answer(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return ask()
    except Exception as error:  # whatever a library that is half there raises
        return {"error": _first_line(error)}


def _first_line(error: BaseException) -> str:
    lines = [line.strip(" =") for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


def main() -> None:
    what, *rest = sys.argv[1:]
    print(json.dumps(driver() if what == "driver" else python(*rest)))


if __name__ == "__main__":
    main()
