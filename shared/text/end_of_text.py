"""The token ids that end a text, read from the files of a model directory.

The gateway stops sequences at them. The worker allows them where a grammar is complete.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.errors import ModelError
from shared.models.fields import Fields
from shared.models.model_files import AGAIN, read_json_if_any

MAX_END_IDS = 8
"""A worker bans and a scheduler checks at most 16 stop ids of a sequence; the request may give the other 8."""
MAX_ID = 4 << 20
"""Token ids are below: tables have a row for each."""


def end_ids(directory: Path) -> list[int]:
    """Return the ids of generation_config.json, else config.json, else the tokenizer's eos_token. Raises ModelError."""
    path = directory / "generation_config.json"
    value = read_json_if_any(path).get("eos_token_id")
    if value is None:
        path = directory / "config.json"
        config = read_json_if_any(path)
        value = {**config, **Fields(config, str(path), remedy=AGAIN).fields("text_config")}.get("eos_token_id")
    if value is None:
        path = directory / "tokenizer.json"
        value = _named_id(directory)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(id_) is int and 0 <= id_ < MAX_ID for id_ in ids):
        raise ModelError(
            f"{path}: eos_token_id is {repr(value)[:60]}, expected an id below {MAX_ID} or a list of them; {AGAIN}"
        )
    if len(ids) > MAX_END_IDS:
        raise ModelError(f"{path}: {len(ids)} end-of-text ids, at most {MAX_END_IDS}; remove some of eos_token_id")
    return ids


def _named_id(directory: Path) -> Any:
    """Return the id of eos_token in tokenizer_config.json, a text or an object with `content`; None if absent."""
    token = read_json_if_any(directory / "tokenizer_config.json").get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    if not isinstance(name, str):
        return None
    tokenizer = read_json_if_any(directory / "tokenizer.json")
    tokens = tokenizer.get("added_tokens")
    for added_token in tokens if isinstance(tokens, list) else ():
        if isinstance(added_token, dict) and added_token.get("content") == name:
            return added_token.get("id")
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return vocabulary.get(name) if isinstance(vocabulary, dict) else None
