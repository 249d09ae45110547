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


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", OF_PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_product_has_no_banned_calls_imports_or_asserts(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & BANNED_IMPORTS
    for node in nodes(path):
        assert not isinstance(node, ast.Assert), f"line {getattr(node, 'lineno', 0)}: python -O drops it; raise instead"
        if isinstance(node, ast.ImportFrom):
            assert not {f"{node.module}.{name.name}" for name in node.names} & BANNED_CALLS
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in BANNED_CALLS
            for key in node.keywords:
                if key.arg in BANNED_ARGUMENTS:
                    good = isinstance(key.value, ast.Constant) and key.value.value is not BANNED_ARGUMENTS[key.arg]
                    assert good, f"line {node.lineno}: {key.arg}"
