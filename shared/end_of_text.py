"""Which token ids end a text, by the files of a model directory. The gateway stops sequences at them, the worker allows
them where a grammar is complete, so both read them here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import ModelError

MOST_END_IDS = 8
"""A worker bans and a scheduler checks at most 16 stop ids a sequence; the other 8 are the request's own."""


def end_ids(directory: Path) -> list[int]:
    """generation_config.json's, else config.json's, else the tokenizer's eos_token. Raises ModelError."""
    config = _read(directory, "config.json")
    found = _read(directory, "generation_config.json").get("eos_token_id")
    if found is None:
        found = {**config, **(config.get("text_config") or {})}.get("eos_token_id")
    if found is None:
        found = _named_id(directory)
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    if len(ids) > MOST_END_IDS:
        raise ModelError(f"{directory} names {len(ids)} end-of-text ids; at most {MOST_END_IDS} are supported")
    return [int(id_) for id_ in ids]


def _named_id(directory: Path) -> int | None:
    """The id of tokenizer_config.json's eos_token, which may be text or an object with `content`."""
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
    """The JSON object of a file; empty where there is none."""
    path = directory / name
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value
