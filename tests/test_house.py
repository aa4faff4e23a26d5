"""The rules of the house, read from the sources: who imports whom, and what stands where."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpuq
from gpuq import compiling

PACKAGE = Path(gpuq.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# What a part of the package may import, besides itself. What is not named here stands above all
# of these, may import them and its like, and is imported by none of them.
BELOW = {
    "layout": set(),
    "ordering": set(),
    "errors": set(),
    "version": set(),
    "compiling": set(),
    "config": {"errors", "layout"},
    "kernels": {"compiling", "layout", "ordering"},
    "host": {"compiling", "config", "errors", "layout", "ordering"},
    "formats": {"errors"},
    "launching": {"compiling", "errors", "host", "kernels", "layout"},
    "handles": {"formats", "host", "kernels"},
    "progress": set(),
    "reading": {
        "compiling", "errors", "handles", "host", "kernels", "launching", "layout",
        "ordering",
    },
    "targets": {"compiling", "errors", "host"},
    "registry": {"config", "errors", "handles", "host", "ordering"},
    "kernel_side": {"errors", "handles", "host", "kernels", "launching", "layout", "registry"},
    "arrays": {"errors", "formats", "handles", "host", "progress", "reading"},
    "host_side": {"arrays", "errors", "handles", "layout", "progress", "reading", "registry"},
    "loader": {
        "config", "errors", "handles", "host", "host_side", "kernel_side", "layout", "targets",
    },
}  # fmt: skip

LINES_MOST = 500
LONGER: dict[str, int] = {}
"""Modules that have outgrown their head; they may shrink, and no other may join them."""


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def resolve(name: str) -> str | None:
    """Return the module of gpuq that a dotted name names or stands in, "" for gpuq itself."""
    parts = name.split(".")
    if parts[0] != "gpuq":
        return None
    for length in range(len(parts), 1, -1):
        inner = ".".join(parts[1:length])
        if inner in MODULES:
            return inner
        if f"{inner}.__init__" in MODULES:
            return f"{inner}.__init__"
    return ""


def imported_names(module: str) -> Iterator[tuple[str, str]]:
    """Yield (name here, module of gpuq that it comes from) of every import, wherever it stands."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found = resolve(alias.name)
                if found is not None:
                    yield alias.asname or alias.name.split(".")[0], found
        elif isinstance(node, ast.ImportFrom):
            package = ["gpuq", *module.split(".")][: -node.level or None]
            parts = [*(package if node.level else []), *([node.module] if node.module else [])]
            for alias in node.names:
                found = resolve(".".join([*parts, alias.name]))
                if found is not None:
                    yield alias.asname or alias.name, found


def part_of(module: str) -> str:
    return module.split(".")[0]


def test_the_walk_sees_the_package() -> None:
    # A test of imports that finds none would never fail.
    assert {"layout", "host.poller", "kernels.queue", "loader"} <= set(MODULES)
    assert ("Status", "layout") in set(imported_names("host.admission"))
    assert {module for _, module in imported_names("kernels.lowering")} >= {"ordering"}
    assert resolve("gpuq.host.poller.serve") == "host.poller"
    assert resolve("numpy.random") is None


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downward(module: str) -> None:
    part = part_of(module)
    if part not in BELOW:
        return
    for _, found in imported_names(module):
        if part_of(found) != part:
            assert part_of(found) in BELOW[part], f"{module} imports {found or 'gpuq'}"


def test_kernels_and_host_never_import_each_other() -> None:
    assert "host" not in BELOW["kernels"]
    assert "kernels" not in BELOW["host"]


@pytest.mark.parametrize("module", MODULES)
def test_only_tests_import_testing(module: str) -> None:
    if part_of(module) != "testing":
        assert not [found for _, found in imported_names(module) if part_of(found) == "testing"]


def test_no_import_runs_in_a_circle() -> None:
    """Packages' own `__init__` gather what stands below them and are left out."""
    graph = {
        module: {found for _, found in imported_names(module)}
        for module in MODULES
        if not module.endswith("__init__")
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for found in graph.get(module, ()):
                visit(found, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


# --- compiled code -----------------------------------------------------------------------------

MARKS = {"compiled", "inlined", "protocol", "protocol_of_arrays", "implements", "contract"}
LOWERING_MARKS = {"overload", "intrinsic"}


def decorators(node: ast.FunctionDef) -> set[str]:
    names = set()
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        names.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return names


def names_in(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def compiled_functions(module: str) -> list[ast.FunctionDef]:
    return [
        node
        for node in ast.walk(tree(module))
        if isinstance(node, ast.FunctionDef) and decorators(node) & (MARKS | LOWERING_MARKS)
    ]


def sources_of_compiled_code(module: str) -> set[str]:
    """Return the modules of gpuq that the compiled functions of a module take names from.

    A name may be a constant of the module that is itself made of imported ones.
    """
    constants = {
        target.id: names_in(node.value)
        for node in tree(module).body
        if isinstance(node, ast.Assign)
        for outer in node.targets
        for target in ast.walk(outer)
        if isinstance(target, ast.Name)
    }
    functions = {
        node.name: names_in(node) for node in tree(module).body if isinstance(node, ast.FunctionDef)
    }
    wanted = {name for node in compiled_functions(module) for name in names_in(node)}
    while True:
        more = set().union(*({**functions, **constants}.get(name, set()) for name in wanted))
        if more <= wanted:
            break
        wanted |= more
    return {found for name, found in imported_names(module) if name in wanted}


def is_covered(module: str) -> bool:
    path = MODULES[module].relative_to(PACKAGE)
    return any(
        len(path.parts) == len(Path(pattern).parts) and path.match(pattern)
        for pattern in compiling.COMPILED_SOURCES
    )


def test_every_source_of_compiled_code_is_in_the_caches_key() -> None:
    found = {module for module in MODULES if compiled_functions(module)}
    assert {"host.poller", "host.libc", "host.uring", "kernels.queue", "testing.readers"} <= found
    # What only kernels of the command line or of benchmarks use is compiled anew in each process.
    cached = {m for m in found if part_of(m) in ("host", "kernels", "testing")}
    pending, seen = list(cached), set(cached)
    while pending:
        for source in sources_of_compiled_code(pending.pop()) - seen:
            seen.add(source)
            pending.append(source)
    assert not [module for module in sorted(seen) if not is_covered(module)]


def test_numbas_own_cache_is_used_nowhere() -> None:
    # It would not notice that an imported module changed.
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.keyword) and node.arg == "cache":
                assert not getattr(node.value, "value", True), f"{module}: cache=True"


ATOMIC_METHODS = {"load_atomic", "store_atomic", "atomic_rmw", "cmpxchg", "fence", "asm"}
ATOMIC_PTX = re.compile(r"\b(ld|st|atom|red|fence|membar)\.(\w+\.)*(sys|gl|gpu|cta)\b")
LOWERINGS = {"host.lowering", "kernels.lowering"}
SIMULATED = {"kernels.simulated"}
"""Stands in for the lowerings where there is no PTX."""


def strings_of_code(module: str) -> Iterator[str]:
    """Yield the string constants that are no docstrings."""
    prose = {
        id(node.value)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def touches_atomics(module: str) -> bool:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute):
            if node.attr in ATOMIC_METHODS:
                return True
            if node.attr in ("atomic", "threadfence", "threadfence_system", "threadfence_block"):
                return True
    return any(ATOMIC_PTX.search(text) for text in strings_of_code(module))


def test_nothing_but_the_lowerings_touches_atomics() -> None:
    found = {module for module in MODULES if touches_atomics(module)}
    assert found >= LOWERINGS, "the search finds nothing"
    assert found <= LOWERINGS | SIMULATED


# --- what a reader meets -----------------------------------------------------------------------


PRODUCT = [module for module in MODULES if not module.startswith("testing.")]


@pytest.mark.parametrize("module", PRODUCT)
def test_a_module_fits_in_a_head(module: str) -> None:
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= LONGER.get(module, LINES_MOST)


def test_the_list_of_long_modules_is_not_longer_than_it_must_be() -> None:
    for module in LONGER:
        assert len(MODULES[module].read_text().splitlines()) > LINES_MOST, f"{module} is short now"


def public_nodes(module: str) -> Iterator[tuple[str, ast.AST]]:
    yield module, tree(module)
    for node in tree(module).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield f"{module}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                        yield f"{module}.{node.name}.{inner.name}", inner


@pytest.mark.parametrize("module", PRODUCT)
def test_what_is_public_says_what_it_is(module: str) -> None:
    for name, node in public_nodes(module):
        assert ast.get_docstring(node), f"{name} has no docstring"  # type: ignore[arg-type]


def test_public_names_exist_and_are_documented() -> None:
    assert sorted(gpuq.__all__) == sorted(set(gpuq.__all__))
    for name in gpuq.__all__:
        value = getattr(gpuq, name)
        if callable(value):
            assert value.__doc__, name
