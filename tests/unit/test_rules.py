"""Rules of the house that a reviewer would otherwise have to remember."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from grimp import ImportGraph

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("services", "shared", "kernels", "bench", "deploy")
BANNED_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_CALLS = {
    "eval", "exec", "__import__", "torch.load", "torch.hub.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
    "asyncio.wait_for",  # of Python 3.11 loses a cancellation that meets the result; asyncio.timeout keeps it
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


PRIVATE_OF_LIBRARIES = {
    "_request_id",  # documented, of the clients of Anthropic and OpenAI
    "_local_constants", "_get_local_constants",  # of hypothesis
    "_convert_redis_arg", "_lua_current_socket", "_lua_set_keys_argv",  # of fakeredis, for scripts on a virtual clock
    "_reorder_linear_weight", "_linear_pointwise",  # oneDNN's operations in torch
    "_C", "_construct_storage_from_data_pointer",  # torch's view of memory that it has not made
}  # fmt: skip
"""Names that have no public counterpart."""
OURS = ("tests/", "bench/", "kernels/")


def reaches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each private name of another object or module with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            if ast.unparse(owner) not in ("self", "cls", "super"):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, name.name) for name in node.names if is_private(name.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "getattr"):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            yield from ((node.lineno, text) for text in texts if is_private(text.rpartition(".")[2]))


def is_private(name: str) -> bool:
    of_tuples = {"_replace", "_asdict", "_fields", "_make"}
    return name.startswith("_") and not name.endswith("__") and name not in PRIVATE_OF_LIBRARIES | of_tuples


def test_tests_benches_and_kernels_use_what_is_public() -> None:
    found = {
        f"{name}:{line}: {what}"
        for path in SOURCES
        if (name := path.relative_to(ROOT).as_posix()).startswith(OURS)
        for line, what in reaches(ast.parse(path.read_text()))
    }
    assert found == set()


@pytest.mark.parametrize("source", ["a._b", "self.a._b", "from a import _b", "patch.setattr(a, '_b', c)", "f('x')._b"])
def test_rule_finds_what_is_private(source: str) -> None:
    assert len(list(reaches(ast.parse(source)))) == 1
    assert not list(reaches(ast.parse("self._b\nsuper()._b\na._replace(b=1)\na.__name__")))


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
        "f(shell=True)", "f(shell=a)", "f(weights_only=False)", "asyncio.wait_for(a, 1)",
    ],
)  # fmt: skip
def test_rule_finds_what_is_banned(source: str) -> None:
    assert len(list(faults(ast.parse(source)))) == 1
    assert list(faults(ast.parse("import os.path, ast\nf(shell=False)"))) == []


def circles(graph: ImportGraph) -> Iterator[str]:
    """Yield each two packages of one parent that import each other, directly or through what lies beside them.

    A package and modules beside it may import each other: these are its parent's own. Imports under TYPE_CHECKING and
    in functions count.
    """
    for parent in sorted(graph.modules):
        children = graph.find_children(parent)
        child_of = {module: child for child in children for module in (child, *graph.find_descendants(child))}
        imports: dict[str, dict[str, str]] = {child: {} for child in children}
        for module, child in sorted(child_of.items()):
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                if (other := child_of.get(imported, child)) != child:
                    imports[child].setdefault(other, f"{module} imports {imported}")
        packages = sorted(child for child in children if graph.find_children(child))
        for one, other in combinations(packages, 2):
            there, back = path(imports, one, other), path(imports, other, one)
            if there and back:
                yield f"{one} and {other} import each other: {'; '.join((*there, *back))}"


def path(imports: Mapping[str, Mapping[str, str]], start: str, end: str) -> tuple[str, ...]:
    """Return the fewest imports that lead from one package to another; none where no import does."""
    paths: dict[str, tuple[str, ...]] = {start: ()}
    for child in (reached := [start]):
        for other, words in imports[child].items():
            if other not in paths:
                paths[other] = (*paths[child], words)
                reached.append(other)
    return paths.get(end, ())


def test_packages_of_one_parent_import_one_way() -> None:
    grimp = pytest.importorskip("grimp", reason="import-linter brings it: make install-dev")
    graph = grimp.build_graph("services", "shared", "kernels", "bench", cache_dir=None)
    assert list(circles(graph)) == [], "move what both need to the package that the other one may import"


@pytest.mark.parametrize("back", ["a.kv", "a.beside"])
def test_rule_finds_packages_that_import_each_other(back: str) -> None:
    graph = pytest.importorskip("grimp").ImportGraph()
    for module in ("a", "a.kv", "a.kv.cache", "a.ranks", "a.ranks.state", "a.ranks.sender", "a.beside"):
        graph.add_module(module)
    for importer, imported in [("a.kv.cache", "a.ranks.state"), ("a.beside", "a.kv"), ("a.kv", "a.beside")]:
        graph.add_import(importer=importer, imported=imported)
    assert list(circles(graph)) == []
    graph.add_import(importer="a.ranks.sender", imported=back)
    (found,) = circles(graph)
    assert found.startswith(
        "a.kv and a.ranks import each other: a.kv.cache imports a.ranks.state; a.ranks.sender imports"
    )
