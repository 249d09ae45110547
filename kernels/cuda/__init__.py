"""CUDA kernels: sources in src/, compiled by NVRTC and launched through CuPy (`loader`), or emulated on a CPU.

`calls` says how each kernel is launched; `check` compares what the compiler makes of them with registers.json.
"""
