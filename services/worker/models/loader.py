"""Reads the weights of a Hugging Face directory: one safetensors file or shards with an index.

Tensors are taken one at a time and cast on the way, so the peak is the weights plus one tensor. Nothing of the
directory is executed; pickled checkpoints are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.worker.models.config import read_json
from shared.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Progress = Callable[[int, int], None]  # bytes read, bytes in all


class Checkpoint:
    """The tensors of a model directory by name."""

    def __init__(self, model: Path, progress: Progress | None = None) -> None:
        self.model = model
        self._progress = progress
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        names = self._shards()
        self.bytes_total = sum((model / name).stat().st_size for name in names)
        self._bytes_read = 0
        for name in names:
            try:
                shard = safe_open(model / name, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read {model / name}: {error}; the file may be cut off") from error
            self._files[name] = shard
            for tensor in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                self._where[tensor] = name

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor of that name in `dtype`. Raises ModelError when it is missing or has another shape."""
        if name not in self._where:
            raise ModelError(f"{self.model}: tensor {name} is missing from the checkpoint")
        try:
            tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.model / self._where[name]}: cannot read tensor {name}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.model}: tensor {name} has shape {list(tensor.shape)}, config.json says {list(shape)}"
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ModelError(f"{self.model}: tensor {name} is {tensor.dtype}; use an unquantized checkpoint")
        self._bytes_read += tensor.nbytes
        if self._progress:
            self._progress(self._bytes_read, self.bytes_total)
        return tensor.to(dtype)

    def fingerprint(self) -> str:
        """16 hex digits over config.json and every tensor's name, type and shape, and the files' sizes."""
        digest = hashlib.sha256((self.model / "config.json").read_bytes())
        for tensor in sorted(self._where):
            part = self._files[self._where[tensor]].get_slice(tensor)
            digest.update(f"{tensor} {part.get_dtype()} {part.get_shape()}\n".encode())
        for name in sorted(self._files):
            digest.update(f"{name} {(self.model / name).stat().st_size}\n".encode())
        return digest.hexdigest()[:16]

    def _shards(self) -> list[str]:
        if (self.model / SINGLE).is_file():
            return [SINGLE]
        if not (self.model / INDEX).is_file():
            pickled = any(self.model.glob("*.bin"))
            raise ModelError(
                f"{self.model} has no weights: neither {SINGLE} nor {INDEX} is there"
                + ("; convert its pickled .bin weights to safetensors" if pickled else "")
            )
        shards = read_json(self.model / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{self.model / INDEX} holds no weight_map")
        names = sorted(set(shards.values()))
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelError(f"{self.model / INDEX}: {json.dumps(name)} is no file name")
            if not (self.model / name).is_file():
                raise ModelError(f"{self.model}: shard {name} of {INDEX} is missing")
        return names
