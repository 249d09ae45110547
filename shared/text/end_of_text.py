"""The token ids that end a text, read from the files of a model directory.

The gateway stops sequences at them. The worker allows them where a grammar is complete.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import ModelError
from shared.models.model_files import has_file, read_bounded

MOST_END_IDS = 8
"""A worker bans and a scheduler checks at most 16 stop ids of a sequence; the request may give the other 8."""


def end_ids(directory: Path) -> list[int]:
    """Return the ids of generation_config.json, else config.json, else the tokenizer's eos_token. Raises ModelError."""
    config = _read(directory, "config.json")
    value = _read(directory, "generation_config.json").get("eos_token_id")
    if value is None:
        value = {**config, **(config.get("text_config") or {})}.get("eos_token_id")
    if value is None:
        value = _named_id(directory)
    ids = [] if value is None else [value] if isinstance(value, int) else list(value)
    if len(ids) > MOST_END_IDS:
        raise ModelError(f"{directory}: {len(ids)} end-of-text ids, at most {MOST_END_IDS}; remove some in config.json")
    return [int(id_) for id_ in ids]


def _named_id(directory: Path) -> int | None:
    """Return the id of eos_token in tokenizer_config.json, a text or an object with `content`; None if absent."""
    token = _read(directory, "tokenizer_config.json").get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    if name is None:
        return None
    tokenizer = _read(directory, "tokenizer.json")
    for added in tokenizer.get("added_tokens") or []:
        if added.get("content") == name:
            return int(added["id"])
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict) and name in vocabulary:
        return int(vocabulary[name])
    return None


def _read(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object of a file; empty if there is no file. Raises ModelError."""
    path = directory / name
    if not has_file(path):
        return {}
    try:
        value = json.loads(read_bounded(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value
