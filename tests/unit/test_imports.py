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
DIMENSIONS = tuple(
    f"{COMPRESSION}.{name}"
    for name in (
        *(
            "tensor_parallel",
            "data_parallel",
            "pipeline_parallel",
            "expert_parallel",
            "context_parallel",
        ),
        *("caat_net", "tagc", "torch_native", "transformer_engine", "fsdp2"),
    )
)
ABOVE = tuple(
    f"{COMPRESSION}.{name}" for name in ("session", "frontends", "bridge", "flags", "auto")
)


def _modules() -> dict[str, ast.Module]:
    """Ours by dotted name, parsed."""
    found = {}
    for folder in ("megatron", "taco_kernels"):
        for path in (REPO / folder).rglob("*.py"):
            parts = path.relative_to(REPO).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text())
    return found


MODULES = _modules()


def _statements(tree: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    """All nodes; or without functions' bodies and what only type checkers read: what an import runs."""
    for node in ast.iter_child_nodes(tree):
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _statements(node, at_import)


def imports_of(name: str, at_import: bool = False) -> set[str]:
    """The modules of this project that a module imports; by default also inside functions."""
    found = set()
    for node in _statements(MODULES[name], at_import):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else str(node.module))
    return (found & MODULES.keys()) - {name}


def _group(name: str) -> str:
    """The folder of a module below ``megatron.compression``, or the module if it is in none."""
    depth = 3 if name.startswith(f"{COMPRESSION}.") else 2
    return ".".join(name.split(".")[:depth])


def _assert_no_circle(graph: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for imported in sorted(graph[name]):
                visit(imported, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def _under(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def test_no_circle() -> None:
    """Of what runs when a module is imported. A package's own modules come before it."""
    _assert_no_circle({name: imports_of(name, at_import=True) for name in MODULES})


def test_no_circle_of_folders() -> None:
    """Each folder is a floor of its own: what it imports imports nothing of it, by whatever way."""
    graph: dict[str, set[str]] = {_group(name): set() for name in MODULES}
    for name in MODULES:
        imported = {_group(one) for one in imports_of(name, at_import=True)}
        graph[_group(name)] |= imported - {_group(name), COMPRESSION}
    _assert_no_circle(graph)


@pytest.mark.parametrize(
    ("who", "not_this"),
    [
        (("taco_kernels",), ("megatron",)),
        ((f"{COMPRESSION}.codecs",), (f"{COMPRESSION}.communication", *DIMENSIONS, *ABOVE)),
        ((f"{COMPRESSION}.communication",), (f"{COMPRESSION}.dimension", *DIMENSIONS, *ABOVE)),
        ((*DIMENSIONS, f"{COMPRESSION}.dimension"), ABOVE),
    ],
    ids=lambda places: places[0].rpartition(".")[2],
)
def test_dependencies_point_downwards(who: tuple[str, ...], not_this: tuple[str, ...]) -> None:
    """Also inside functions."""
    members = [name for name in MODULES if _under(name, who)]
    assert members
    found = {
        name: sorted(one for one in imports_of(name) if _under(one, not_this)) for name in members
    }
    assert {name: upwards for name, upwards in found.items() if upwards} == {}


def test_names_of_classes_are_unique() -> None:
    """But for those that start with an underscore, which stay in their module."""
    names = Counter(
        node.name
        for tree in MODULES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name: count for name, count in names.items() if count > 1} == {}


IMPORTING = """
import atexit, importlib, sys

registered, put = [], []
register = atexit.register


def noting(function, *args, **kwargs):
    registered.append(f"{function.__module__}.{function.__qualname__}")
    return register(function, *args, **kwargs)


atexit.register = noting
from megatron.compression.patches import symbols

symbols.put = lambda owner, name, value, reason: put.append(name)
for module in sys.argv[1:]:
    importlib.import_module(module)
ours = [name for name in registered if name.startswith(("megatron.compression", "megatron.host", "taco_"))]
print(ours, [name for _, name in symbols._replacements], put)
"""
"""Imports the modules that it is given, and prints what they have registered, replaced and put somewhere."""


@pytest.mark.slow
def test_nothing_happens_at_import() -> None:
    """No function of another package is replaced, and nothing is registered for the end of the process."""
    modules = [name for name in MODULES if not name.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, *modules], capture_output=True, text=True, cwd=REPO
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] [] []"
