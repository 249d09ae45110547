"""Engines on an emulated GPU, and a float16 model for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cuda.backend import CudaOps
from services.worker import engine as engine_module
from services.worker.engine import Engine
from tests.engine.driver import make_engine
from tests.kernels.cuda.programs import device_of
from tests.support.checkpoints.models import Reference, make_llama

GAP = 0.25
"""Of the two best logits, which reach 30: a hundred times what float16 is off."""
SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "dtype": "float16"}
SMALL = {"max_seqs": 6, "max_step_tokens": 48, "max_input_tokens": 44, "max_output_tokens": 12, "block_size": 16}


def float16_model(path: Path, prompts: list[list[int]], outputs: int) -> Reference:
    """Return a model with those of the prompts for which rounding to float16 decides no token."""
    found = make_llama(path, seed=9, requests=1, output_tokens=1, **SHAPE)
    tokens, gaps = found.run(prompts, outputs)
    kept = [at for at, gap in enumerate(gaps) if gap > GAP]
    found.prompts, found.outputs = [prompts[at] for at in kept], [tokens[at] for at in kept]
    return found


def engine_on(monkeypatch: pytest.MonkeyPatch, device: Any, model: Path, **settings: Any) -> Engine:
    ops = CudaOps(device)
    monkeypatch.setattr(engine_module, "choose", lambda *_: (ops, torch.float16))
    return make_engine(model, kernels="emulator", dtype="auto", **(SMALL | settings))


def emulated(monkeypatch: pytest.MonkeyPatch, model: Path, order: int | None, **settings: Any) -> Engine:
    """Return an engine on a device that puts its work off in this order."""
    return engine_on(monkeypatch, device_of(order), model, **settings)
