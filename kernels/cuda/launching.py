"""What every operation of the CUDA backend does when it launches: the name of a type, an address, what must live."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.calls import BF16, F16, Call
from kernels.cuda.device import Stream

_NAMES = {torch.bfloat16: BF16, torch.float16: F16}


def dtype_name(dtype: torch.dtype) -> str:
    """The kernels' word for a type. Raises ValueError, naming who computes in it, for any other."""
    if dtype not in _NAMES:
        raise ValueError(f"the cuda kernels compute in bfloat16 and float16; {dtype} is the reference backend's")
    return _NAMES[dtype]


def pointer(tensor: Tensor | None) -> int:
    """Its address; 0 for none."""
    return 0 if tensor is None else int(tensor.data_ptr())


def launch(stream: Stream, call: Call, *touched: Tensor | None) -> None:
    """Gives a kernel to the stream; touched: all tensors behind its addresses."""
    stream.launch(call, *(tensor for tensor in touched if tensor is not None))
