"""C++ kernels for the CPU, through ctypes. Importing this registers the backend `cpu`; src/ops.h is the border."""

import torch

from kernels.cpu.backend import CpuOps
from kernels.cpu.library import load
from kernels.ops import register

register("cpu", lambda device: CpuOps(load(), torch.get_num_threads()))
