"""The JSON files of a model: those of its directory, or what the header of a GGUF file says in their form.

A GGUF file stands for a directory: `x.gguf/config.json`, `x.gguf/tokenizer.json` and `x.gguf/tokenizer_config.json` are
made from its metadata whenever they are read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shared.errors import ModelError
from shared.models.gguf.config import config_of
from shared.models.gguf.reader import GgufFile, is_gguf, open_gguf
from shared.models.gguf.tokenizer import tokenizer_config_of, tokenizer_of

MOST_FILE_BYTES = 64 << 20
"""Of one file. Gemma 3's tokenizer.json has 33 MB."""
_MADE: Mapping[str, Callable[[GgufFile], dict[str, Any]]] = {
    "config.json": config_of,
    "tokenizer.json": tokenizer_of,
    "tokenizer_config.json": tokenizer_config_of,
}


def has_file(path: Path) -> bool:
    """Return whether a model has the file."""
    return path.name in _MADE if is_gguf(path.parent) else path.is_file()


def read_bounded(path: Path) -> bytes:
    """Return the bytes of a JSON file of a model, a regular one of bounded size. Raise ModelError."""
    if is_gguf(path.parent):
        text = json.dumps(_MADE[path.name](open_gguf(path.parent)), ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")
    try:
        # O_NONBLOCK: to open a FIFO would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing; save the fast tokenizer into the directory (transformers' save_pretrained)"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ModelError(f"{path}: not a regular file; put the model's own there")
        if facts.st_size > MOST_FILE_BYTES:
            raise ModelError(f"{path}: {facts.st_size} bytes, at most {MOST_FILE_BYTES}; choose another model")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MOST_FILE_BYTES)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    finally:
        os.close(descriptor)
