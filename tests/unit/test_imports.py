"""What may import what: no circles, dependencies point downwards, a class name is used once."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
COMPRESSION = "megatron.compression"
DIMENSIONS = (
    f"{COMPRESSION}.tensor_parallel",
    f"{COMPRESSION}.data_parallel",
    f"{COMPRESSION}.pipeline_parallel",
    f"{COMPRESSION}.expert_parallel",
    f"{COMPRESSION}.context_parallel",
    f"{COMPRESSION}.caat_net",
    f"{COMPRESSION}.tagc",
    f"{COMPRESSION}.torch_native",
    f"{COMPRESSION}.transformer_engine",
    f"{COMPRESSION}.fsdp2",
    f"{COMPRESSION}.ddp",
)
ABOVE = (
    f"{COMPRESSION}.session",
    f"{COMPRESSION}.frontends",
    f"{COMPRESSION}.bridge",
    f"{COMPRESSION}.flags",
    f"{COMPRESSION}.auto",
)
"""Modules and folders that put dimensions together, so no dimension imports them."""


def _modules() -> dict[str, ast.Module]:
    """Return this project's modules, parsed, by dotted name."""
    modules = {}
    for folder in ("megatron", "taco_kernels"):
        for path in (REPO / folder).rglob("*.py"):
            parts = path.relative_to(REPO).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            modules[".".join(parts)] = ast.parse(path.read_text())
    return modules


MODULES = _modules()


def _nodes(tree: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    """Yield all nodes of a module, or only those that run when it is imported.

    Bodies of functions do not, nor does what only type checkers read.
    """
    for node in ast.iter_child_nodes(tree):
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _nodes(node, at_import)


def imports_of(name: str, at_import: bool = False) -> set[str]:
    """Return the modules of this project that a module imports; by default also in functions."""
    imported = set()
    for node in _nodes(MODULES[name], at_import):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                imported.add(inner if inner in MODULES else str(node.module))
    return (imported & MODULES.keys()) - {name}


def _group(name: str) -> str:
    """Return the folder of a module in ``megatron.compression``, or the module if it has none."""
    depth = 3 if name.startswith(f"{COMPRESSION}.") else 2
    return ".".join(name.split(".")[:depth])


def _assert_no_circle(graph: dict[str, set[str]]) -> None:
    """Fail with the names along a circle of a graph: of each node, those that it imports."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for imported in sorted(graph[name]):
                visit(imported, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """It counts what runs when a module is imported."""
    _assert_no_circle({name: imports_of(name, at_import=True) for name in MODULES})


def test_folders_do_not_import_each_other_in_a_circle() -> None:
    """A folder that another one imports imports nothing of it, not even by way of a third."""
    graph: dict[str, set[str]] = {_group(name): set() for name in MODULES}
    for name in MODULES:
        imported = {_group(module) for module in imports_of(name, at_import=True)}
        graph[_group(name)] |= imported - {_group(name), COMPRESSION}
    _assert_no_circle(graph)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        (("taco_kernels",), ("megatron",)),
        ((f"{COMPRESSION}.codecs",), (f"{COMPRESSION}.communication", *DIMENSIONS, *ABOVE)),
        ((f"{COMPRESSION}.communication",), (f"{COMPRESSION}.dimension", *DIMENSIONS, *ABOVE)),
        ((*DIMENSIONS, f"{COMPRESSION}.dimension"), ABOVE),
    ],
    ids=lambda packages: packages[0].rpartition(".")[2],
)
def test_dependencies_point_downwards(lower: tuple[str, ...], upper: tuple[str, ...]) -> None:
    """A lower module imports no upper one, not even inside a function."""
    members = [name for name in MODULES if _is_in(name, lower)]
    assert members
    upwards = {}
    for name in members:
        imported = sorted(module for module in imports_of(name) if _is_in(module, upper))
        if imported:
            upwards[name] = imported
    assert upwards == {}


def test_names_of_classes_are_unique() -> None:
    """Names that start with an underscore do not count: they stay in their module."""
    names = Counter()
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names[node.name] += 1
    assert {name: count for name, count in names.items() if count > 1} == {}


IMPORTING = """
import atexit
import importlib
import sys

registered = []
put = []
register = atexit.register


def noting(function, *args, **kwargs):
    registered.append(f"{function.__module__}.{function.__qualname__}")
    return register(function, *args, **kwargs)


atexit.register = noting
from megatron.compression.patches import symbols

symbols.put = lambda owner, name, value, reason: put.append(name)
for module in sys.argv[1:]:
    importlib.import_module(module)
prefixes = ("megatron.compression", "megatron.host", "taco_")
print([name for name in registered if name.startswith(prefixes)])
print([name for _, name in symbols._replacements])
print(put)
"""
"""Imports the modules of its arguments; prints what they registered, replaced and put somewhere."""


@pytest.mark.slow
def test_nothing_happens_at_import() -> None:
    """No function of another package is replaced, nothing is registered for the process's end."""
    modules = [name for name in MODULES if not name.endswith("__main__")]
    command = [sys.executable, "-c", IMPORTING, *modules]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    registered, replaced, put = done.stdout.splitlines()[-3:]
    assert registered == "[]"
    assert replaced == "[]"
    assert put == "[]"
