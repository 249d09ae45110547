"""Read the JSON files of a model: those of its directory, or what the header of a GGUF file says in their form.

A GGUF file stands for a directory: `x.gguf/config.json`, `x.gguf/tokenizer.json` and `x.gguf/tokenizer_config.json` are
made from its metadata whenever they are read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import orjson

from shared.errors import ModelError
from shared.models.gguf.config import config_of
from shared.models.gguf.reader import GgufFile, is_gguf, open_gguf
from shared.models.gguf.tokenizer import tokenizer_config_of, tokenizer_of

MAX_FILE_BYTES = 64 << 20
"""Of one file. Gemma 3's tokenizer.json has 33 MB."""
POINTER = b"version https://git-lfs.github.com/spec/"
AGAIN = "fetch the file again, or choose another model"
_MADE: Mapping[str, Callable[[GgufFile], dict[str, Any]]] = {
    "config.json": config_of,
    "tokenizer.json": tokenizer_of,
    "tokenizer_config.json": tokenizer_config_of,
}


def has_file(path: Path) -> bool:
    """Return whether a model has the file."""
    return path.name in _MADE if is_gguf(path.parent) else path.is_file()


JsonT = TypeVar("JsonT", dict[str, Any], list[Any])


@overload
def read_json(path: Path, *, remedy: str = AGAIN) -> dict[str, Any]: ...
@overload
def read_json(path: Path, kind: type[JsonT], remedy: str = AGAIN) -> JsonT: ...
def read_json(path: Path, kind: type[Any] = dict, remedy: str = AGAIN) -> Any:
    """Return the JSON object, or list, of a file of a model. Raise ModelError, which ends with the remedy."""
    data = read_bounded(path)
    if data.startswith(POINTER):
        raise ModelError(
            f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull` in the directory, "
            "or use `orcinus pull ORG/NAME`"
        )
    try:
        value = orjson.loads(data)
    except ValueError as error:
        raise ModelError(f"{path}: not readable as JSON: {error}; {remedy}") from error
    if not isinstance(value, kind):
        raise ModelError(f"{path}: no JSON {'object' if kind is dict else 'list'}; {remedy}")
    return value


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file that a model may lack; empty without the file. Raise ModelError."""
    return read_json(path) if has_file(path) else {}


def read_bounded(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a file of a model, a regular one of bounded size. Raise ModelError."""
    if is_gguf(path.parent):
        text = json.dumps(_MADE[path.name](open_gguf(path.parent)), ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")
    try:
        # O_NONBLOCK: to open a FIFO would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        remedy = "save the fast tokenizer into the directory (transformers' save_pretrained)"
        if path.name != "tokenizer.json":
            remedy = "give a Hugging Face model directory that is whole"
        raise ModelError(f"{path} is missing; {remedy}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}; check its permissions") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ModelError(f"{path}: not a regular file; put the model's own there")
        if facts.st_size > most:
            raise ModelError(f"{path}: {facts.st_size} bytes, at most {most}; choose another model")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}; check its permissions") from error
    finally:
        os.close(descriptor)
