"""`alpha_pattern` of an adapter: which pattern a module has, and how little work it takes to find it."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping

from shared.models.adapters import AdapterConfig, parse_config


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
