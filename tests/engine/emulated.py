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
GAP_OF_EXPERTS = 0.02
"""Of the logits of the last expert that a row is given to and the next one, which reach 4."""
SHAPE: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "dtype": "float16"}
SMALL = {"max_seqs": 6, "max_step_tokens": 48, "max_input_tokens": 44, "max_output_tokens": 12, "block_size": 16}


def float16_model(path: Path, prompts: list[list[int]], outputs: int, **fields: Any) -> Reference:
    """Return a model with those of the prompts for which rounding to float16 decides no token and no expert."""
    found = make_llama(path, seed=9, requests=1, output_tokens=1, **(SHAPE | fields))
    tokens, gaps = found.run(prompts, outputs)
    kept = [at for at, gap in enumerate(gaps) if gap > GAP]
    if top_k := getattr(found.model.config, "num_experts_per_tok", 0):
        kept = [at for at in kept if gap_of_experts(found, prompts[at] + tokens[at][:-1], top_k) > GAP_OF_EXPERTS]
    found.prompts, found.outputs = [prompts[at] for at in kept], [tokens[at] for at in kept]
    return found


@torch.inference_mode()
def gap_of_experts(found: Reference, tokens: list[int], top_k: int) -> float:
    """Return the smallest gap, over all rows and layers, of the logits of the experts that are just in and just out."""
    model: Any = found.model
    of_layers = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    best = [logits.float().topk(top_k + 1).values for logits in of_layers]
    return min(float((one[:, -2] - one[:, -1]).min()) for one in best)


def engine_on(monkeypatch: pytest.MonkeyPatch, device: Any, model: Path, **settings: Any) -> Engine:
    ops = CudaOps(device)
    monkeypatch.setattr(engine_module, "choose", lambda *_: (ops, torch.float16))
    return make_engine(model, kernels="emulator", dtype="auto", **(SMALL | settings))


def emulated(monkeypatch: pytest.MonkeyPatch, model: Path, order: int | None, **settings: Any) -> Engine:
    """Return an engine on a device that puts its work off in this order."""
    return engine_on(monkeypatch, device_of(order), model, **settings)
