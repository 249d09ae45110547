"""The CUDA backend and its kernels: sources in src/, compiled by NVRTC and launched through CuPy, or emulated on a CPU.

`backend` has the operations and registers `cuda`; `kernels.emulator` builds on this package. This file imports nothing,
so that `loader` needs no torch. `calls` says how each kernel is launched; `check` compares what the compiler makes of
them with registers.json.
"""
