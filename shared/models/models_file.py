"""Read `models.yaml`: the models that one gateway serves, and what `orcinus up` starts for each.

The file is an operator's. Names and aliases share one space, so a name in a request means one model. Options of a model
have the names of the settings and are checked by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import ConfigurationError
from shared.keys import hash_tag, model_tag
from shared.models.hub import is_repository, parse_name

MAX_MODELS = 64
MAX_BYTES = 1 << 16
"""1 KiB for each model: the parser takes some seconds for a MiB."""
MAX_DEPTH = 8
"""Mappings and lists in each other; the fields of a model have four."""
MAX_NAME = 128
ALIAS = r"^[A-Za-z0-9][A-Za-z0-9._:-]*(/[A-Za-z0-9][A-Za-z0-9._:-]*)*$"

_BEGINS = (
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
)
_ENDS = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)


class ModelEntry(BaseModel):
    """One model. source: a path, beside the file where it is relative, or ORG/NAME[@REVISION] of the Hub where no
    such path is there.

    The fields behind `idle_s` are settings of its workers and its scheduler; one that is left out is as for all models.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    source: str = Field(min_length=1, max_length=4096)
    aliases: tuple[Annotated[str, Field(pattern=ALIAS, max_length=MAX_NAME)], ...] = Field((), max_length=32)
    workers: int = Field(1, ge=1, le=64)
    idle_s: float = Field(600.0, ge=60)
    """Time without a request after which a gateway gives back the memory of tokenizer and template."""
    policy: str | None = None
    prefix_cache: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    quantize: str | None = None
    kv_memory_fraction: float | None = None
    kv_blocks: int | None = None
    host_blocks: int | None = None
    threads: int | None = None
    max_seqs: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None

    def fields(self) -> dict[str, str]:
        """Return the fields that the file gives, by the name of the setting that each is."""
        given = self.model_dump(exclude={"name", "source", "aliases", "workers", "idle_s"}, exclude_none=True)
        return {"model": "source", "replicas": "workers", **{name: name for name in given}}

    def values(self) -> dict[str, str]:
        """Return what the file says of the model as values of the settings, which check them."""
        return {
            "served_model_name": self.name,
            **{setting: str(getattr(self, field)) for setting, field in self.fields().items()},
        }


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """The models in the order of the file. awake: how many of them have workers at a time; 0 means all."""

    models: list[ModelEntry]
    awake: int = 0


def read_models(path: Path) -> ModelsFile:
    """Return what a file says. Raise ConfigurationError that names the file and the entry."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ConfigurationError(
                f"{path}: {path.stat().st_size} bytes, at most {MAX_BYTES} are read; shorten the list of models"
            )
        _check_tokens(path, text)
        document = _texts(path, yaml.compose(text, yaml.BaseLoader))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}; check --models") from error
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:  # the latter: an escape past Unicode
        raise ConfigurationError(f"{path}: not readable as YAML: {' '.join(str(error).split())[:300]}") from error
    fields = document if isinstance(document, dict) else {}
    if unknown := [str(name) for name in fields if name not in ("models", "awake")]:
        raise ConfigurationError(f"{path}: {unknown[0][:100]!r}: no field of the file; it has `models:` and `awake:`")
    items = fields.get("models")
    if not isinstance(items, dict) or not items:
        raise ConfigurationError(f"{path}: has no models; write `models:` and below it a name and a source for each")
    if len(items) > MAX_MODELS:
        raise ConfigurationError(f"{path}: {len(items)} models; a gateway serves at most {MAX_MODELS}")
    entries = [_entry(path, name, values) for name, values in items.items()]
    check_names(path, [(entry.name, entry.aliases) for entry in entries])
    return ModelsFile(entries, _awake(path, fields.get("awake"), len(entries)))


def _awake(path: Path, value: Any, models: int) -> int:
    """Return 0 where the file does not say it, and where all models may be awake."""
    if value is None:
        return 0
    if not (isinstance(value, str) and value.isascii() and value.isdecimal() and 1 <= int(value[:9]) <= MAX_MODELS):
        shown = repr(value)[:100]
        raise ConfigurationError(
            f"{path}: awake: {shown} is no number of models; write one from 1 to {MAX_MODELS}, or leave it out"
        )
    return int(value) if int(value) < models else 0


def _check_tokens(path: Path, text: bytes) -> None:
    """Refuse what the parser would follow without bound."""
    depth = 0
    for token in yaml.scan(text, yaml.BaseLoader):
        if isinstance(token, yaml.AnchorToken | yaml.AliasToken):
            raise ConfigurationError(f"{path}: anchors and aliases of YAML are not allowed; write each model out")
        depth += isinstance(token, _BEGINS) - isinstance(token, _ENDS)
        if depth > MAX_DEPTH:
            line = token.start_mark.line + 1
            raise ConfigurationError(
                f"{path}: line {line}: mappings and lists in each other {depth} deep, at most {MAX_DEPTH}; "
                f"see docs/several-models.md"
            )


def _texts(path: Path, node: yaml.Node | None) -> Any:
    """Return mappings, lists and texts; the settings check and convert them."""
    if isinstance(node, yaml.SequenceNode):
        return [_texts(path, each) for each in node.value]
    if not isinstance(node, yaml.MappingNode):
        return None if node is None else node.value
    texts: dict[str, Any] = {}
    for key, value in node.value:
        place = f"{path}: line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigurationError(f"{place}: a name is a mapping or a list; give it as text")
        if key.value in texts:
            raise ConfigurationError(f"{place}: {key.value[:100]!r} stands twice; drop one of them")
        texts[key.value] = _texts(path, value)
    return texts


def _entry(path: Path, name: str, fields: Any) -> ModelEntry:
    source = f"{path}: model {name[:100]!r}"
    if not (is_repository(name) or _is_tag(name)):
        raise ConfigurationError(f"{source}: only [a-z0-9._-] or ORG/NAME is allowed; give it another name")
    if len(name) > MAX_NAME:
        raise ConfigurationError(f"{source}: {len(name)} characters, at most {MAX_NAME} are allowed; shorten it")
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{source}: has no fields; give at least its source")
    try:
        entry = ModelEntry.model_validate({**fields, "name": name})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))[:100] or "fields"
        shown = "" if first["type"] == "missing" else f", got {str(first.get('input'))[:100]!r}"
        raise ConfigurationError(f"{source}: {field}: {first['msg']}{shown}; see docs/several-models.md") from None
    if not entry.source.isprintable():
        raise ConfigurationError(f"{source}: source: {entry.source[:100]!r} is no path; use printable characters")
    beside = path.absolute().parent / entry.source
    try:
        beside.stat()
    except (FileNotFoundError, NotADirectoryError):
        if parse_name(entry.source) is not None:
            return entry
    except OSError as error:
        raise ConfigurationError(f"{source}: source: {entry.source[:100]!r}: {error.strerror}; check it") from None
    return entry.model_copy(update={"source": str(beside)})


def _is_tag(name: str) -> bool:
    try:
        return model_tag(name) == name
    except ValueError:
        return False


def check_names(source: object, models: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Raise ConfigurationError for a name that means two models. models: names and aliases; source: their source."""
    owners: dict[str, str] = {}
    tags: dict[str, str] = {}
    for model, aliases in models:
        tag = hash_tag(model)
        if tags.setdefault(tag, model) != model:
            raise ConfigurationError(f"{source}: models {tags[tag]!r} and {model!r} have one tag; rename one")
        for name in (model, *aliases):
            if owner := owners.get(name):
                raise ConfigurationError(f"{source}: {name!r} names both {owner!r} and {model!r}; drop one of them")
            owners[name] = model
