"""What is read of models: models.toml, the placer's records, `alpha_pattern` of adapters."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from shared.models.adapters import AdapterConfig, parse_config
from shared.models.models_file import MAX_BYTES, MAX_MODELS, read_models
from shared.placement import MAX_MS, Placement, read_placements
from shared.settings import GatewaySettings

GOOD = """
models:
  small:
    source: tiny
    aliases: [gpt-4o-mini, "claude:latest"]
    quantize: int8
    kv_memory_fraction: 0.1
  org/Large:
    source: Qwen/Qwen3-0.6B
    workers: 2
    policy: sarathi
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "models.yaml"
    path.write_text(text)
    return path


def test_models_have_names_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    small, large = read_models(written(tmp_path, GOOD)).models
    assert small.aliases == ("gpt-4o-mini", "claude:latest")
    assert small.values() == {
        "model": str(tmp_path / "tiny"), "served_model_name": "small", "replicas": "1", "quantize": "int8",
        "kv_memory_fraction": "0.1",
    }  # fmt: skip
    assert large.values() == {
        "model": "Qwen/Qwen3-0.6B", "served_model_name": "org/Large", "replicas": "2", "policy": "sarathi",
    }  # fmt: skip


def test_source_that_is_no_name_of_the_hub_is_a_path_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "small").mkdir(parents=True)
    monkeypatch.chdir(here)
    text = f"models: {{a: {{source: small}}, b: {{source: 2024-13-45}}, c: {{source: {here}}}, d: {{source: org/d}}}}"
    sources = [entry.source for entry in read_models(written(tmp_path, text)).models]
    assert sources == [str(tmp_path / "small"), str(tmp_path / "2024-13-45"), str(here), "org/d"]


def test_gateway_begins_with_the_first_model_unless_one_is_given(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    path = written(tmp_path, GOOD)
    first = GatewaySettings(models=path)
    assert (first.model, first.served_model_name) == (tmp_path / "tiny", "small")
    assert GatewaySettings(models=path, model=tmp_path / "x").served_model_name == "x"
    assert GatewaySettings(models=path, served_model_name="org/Large").model == Path("Qwen/Qwen3-0.6B")
    with pytest.raises(
        ConfigurationError, match=r"--served-model-name=typo: no model of .*; name one of small, org/Large"
    ):
        GatewaySettings(models=path, served_model_name="typo")
    assert GatewaySettings(models=path, served_model_name="typo", model=tmp_path / "x").served_model_name == "typo"


def test_models_take_turns_where_fewer_may_be_awake_than_there_are(tmp_path: Path) -> None:
    assert read_models(written(tmp_path, GOOD)).awake == 0
    assert read_models(written(tmp_path, "awake: 1" + GOOD)).awake == 1
    assert read_models(written(tmp_path, "awake: 2" + GOOD)).awake == 0, "both may be"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no models"),
        ("models: []", "has no models"),
        ("models: {}", "has no models"),
        ("awak: 1\nmodels: {a: {source: x}}", "'awak': no field of the file; it has `models:` and `awake:`"),
        ("models: {a: {source: x", "not readable as YAML"),
        ("models: {A b: {source: x}}", r"model 'A b': only \[a-z0-9._-\]"),
        ("models: {[a]: {source: x}}", "line 1: a name is a mapping or a list"),
        ("models:\n  a: {source: x}\n  a: {source: y}", "line 3: 'a' stands twice"),
        ("models: {a: {source: x, source: y}}", "line 1: 'source' stands twice"),
        ("models: {a: &a {source: x}}", "anchors and aliases of YAML are not allowed"),
        ("models: {a: *a}", "anchors and aliases of YAML are not allowed"),
        ("models: {a: {<<: {source: x}}}", "model 'a': source: Field required;"),
        (r'models: {a: {source: "\Uffffffff"}}', "not readable as YAML"),
        (r'models: {a: {source: "x\0y"}}', r"model 'a': source: 'x\\x00y' is no path"),
        (f"models: {{a: {{source: {'x' * 300}}}}}", f"model 'a': source: '{'x' * 100}': File name too long"),
        (f"models: {{{'a' * 129}: {{source: x}}}}", "129 characters, at most 128"),
        (f"models: {{a: {{source: x, workers: {'9' * 5000}}}}}", "model 'a': workers: .*maximum size"),
        ("models: {a: {source: x, workers: !!int foo}}", "model 'a': workers: .* got 'foo'"),
        ("models: {a: {source: x, workers: true}}", "model 'a': workers: .* got 'true'"),
        ("models: {a: {source: x, idle_s: .inf}}", "model 'a': idle_s: .* got '.inf'"),
        ("models: {a: {source: x, idle_s: inf}}", "model 'a': idle_s: .*finite"),
        ("models: {a: x}", "model 'a': has no fields"),
        ("models: {a: {}}", "model 'a': source: Field required;"),
        ("models: {a: {source: x, colour: red}}", "model 'a': colour: Extra inputs are not permitted, got 'red'"),
        ("models: {a: {source: x, workers: 0}}", "model 'a': workers: .* got '0'"),
        ("models: {a: {source: x, aliases: ['']}}", "model 'a': aliases.0: "),
        ("models: {a: {source: x, aliases: [b]}, b: {source: y}}", "'b' names both 'a' and 'b'"),
        ("models: {a: {source: x, aliases: [c]}, b: {source: y, aliases: [c]}}", "'c' names both 'a' and 'b'"),
        ("awake: 0\nmodels: {a: {source: x}}", "awake: '0' is no number of models; write one from 1 to 64"),
        ("awake: [1]\nmodels: {a: {source: x}}", r"awake: \['1'\] is no number"),
        (f"awake: {'9' * 5000}\nmodels: {{a: {{source: x}}}}", "awake: '999"),
        (f"models: {{{', '.join(f'm{number}: {{source: x}}' for number in range(MAX_MODELS + 1))}}}", "at most 64"),
        ("#" * (MAX_BYTES + 9), f"{MAX_BYTES + 9} bytes, at most {MAX_BYTES} are read"),
        ("[" * MAX_BYTES, "line 1: mappings and lists in each other 9 deep, at most 8"),
        ("{a: " * 9, "line 1: mappings and lists in each other 9 deep"),
        ("models:\n" + "".join(f"{' ' * depth}a:\n" for depth in range(1, 9)), "line 9: mappings and lists"),
        ("models: {.: {source: x}}", "model '.': only"),
        ("models: {..: {source: x}}", "model '..': only"),
        ("models: {a.: {source: x}}", "model 'a.': only"),
        ("models: {a: {source: x, aliases: [a/..]}}", "aliases.0: String should match"),
    ],
)  # fmt: skip
def test_file_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        read_models(written(tmp_path, text))


def test_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.yaml: cannot be read: No such file"):
        read_models(tmp_path / "none.yaml")


PLACED = Placement(True, 1200, 1_700_000_000_000, (0, 10, 20, 30), 2)


def test_record_is_read_as_it_was_written() -> None:
    assert Placement.decode(PLACED.encode()) == PLACED
    assert read_placements({b"a": PLACED.encode(), b"b": b"{", b"\xff": PLACED.encode()}) == {"a": PLACED}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("true", "1"), ("1200", "-1"), ("1200", "1.5"), ("1200", str(MAX_MS + 1)), ("1200", "true"),
        ("1700000000000", "1e30"), ("[0,10,20,30]", "[0,10,20]"), ("[0,10,20,30]", '[0,10,20,"x"]'),
        ("[0,10,20,30]", "0"), ("load_ms", "load"), ("{", "["),
        ('"failed":2', '"failed":7'), ('"failed":2', '"failed":-1'), (',"failed":2', ""),
    ],
)  # fmt: skip
def test_record_that_no_placer_writes_is_refused(old: str, new: str) -> None:
    text = PLACED.encode().decode()
    assert old in text
    with pytest.raises((ValueError, TypeError)):
        Placement.decode(text.replace(old, new).encode())


def peft_alpha(patterns: dict[str, float], module: str) -> float:
    """Return the alpha as PEFT finds it (peft.utils.other.get_pattern_key): the first key that matches."""
    fits = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({re.escape(key)})$", module))
    return next(fits, 8.0)


def test_module_has_the_alpha_of_the_first_pattern_that_fits() -> None:
    draw = random.Random(3)
    names = [".".join(parts) for size in (1, 2, 3) for parts in itertools.product("ab", repeat=size)]
    for _ in range(300):
        patterns = {name: float(at) for at, name in enumerate(draw.sample(names, draw.randrange(8)))}
        made = parse_config(json.dumps({"lora_alpha": 8, "alpha_pattern": patterns}).encode())
        for module in ("a.b.a", "b.b.b.b", "xa.b", "a"):
            assert made.scale(module, 1) == peft_alpha(patterns, module), (patterns, module)


class Patterns(Mapping[str, float]):
    """Patterns that are looked up, never walked through: there may be 65,536, and as many modules."""

    def __init__(self, alphas: dict[str, float]) -> None:
        self._alphas = alphas

    def __getitem__(self, name: str) -> float:
        return self._alphas[name]

    def __len__(self) -> int:
        return len(self._alphas)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all patterns were read for one module")


def test_alpha_of_a_module_is_looked_up() -> None:
    made = AdapterConfig(8, False, Patterns({"self_attn.q_proj": 16, "q_proj": 4}), "")
    modules = ("model.layers.0.self_attn.q_proj", "model.layers.0.q_proj", "model.layers.0.v_proj")
    assert [made.scale(module, 2) for module in modules] == [8, 2, 4]
