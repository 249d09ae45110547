"""Rules of the house that a reviewer would otherwise have to remember."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("services", "shared", "kernels", "bench", "deploy")
BANNED_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_CALLS = {
    "eval", "exec", "__import__", "torch.load", "torch.hub.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
}  # fmt: skip
BANNED_ARGUMENTS = {"shell": True, "allow_pickle": True, "trust_remote_code": True, "weights_only": False}
"""Values that may not be given, nor left to a variable."""
SOURCES = sorted(path for folder in (*PRODUCT, "tests") for path in (ROOT / folder).rglob("*.py"))
OF_PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PRODUCT]


def faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each banned thing of a module with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names if top(name.name) in BANNED_IMPORTS)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{name.name}" for name in node.names)
            yield from ((node.lineno, name) for name in names if top(name) in BANNED_IMPORTS or name in BANNED_CALLS)
        elif isinstance(node, ast.Assert):
            yield node.lineno, "assert: python -O drops it; raise instead"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name | ast.Attribute) and (name := ast.unparse(node.func)) in BANNED_CALLS:
                yield node.lineno, name
            for key in node.keywords:
                if key.arg in BANNED_ARGUMENTS and not (
                    isinstance(key.value, ast.Constant) and key.value.value is not BANNED_ARGUMENTS[key.arg]
                ):
                    yield node.lineno, key.arg


def top(module: str) -> str:
    return module.partition(".")[0]


def test_product_has_no_banned_calls_imports_or_asserts() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in OF_PRODUCT
        for line, what in faults(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle.x", "from dill import load", "from os import system", "torch.load(a)", "eval(a)", "assert a",
        "f(shell=True)", "f(shell=a)", "f(weights_only=False)",
    ],
)  # fmt: skip
def test_rule_finds_what_is_banned(source: str) -> None:
    assert len(list(faults(ast.parse(source)))) == 1
    assert list(faults(ast.parse("import os.path, ast\nf(shell=False)"))) == []
