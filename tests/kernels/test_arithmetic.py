"""Arithmetic of kernels whose result a compiler or a GPU may choose is avoided, or named here with its reason.

``/`` and ``tl.sqrt`` may be off by 2 units in the last place on a GPU, functions such as ``tl.log2`` by more:
kernels divide by ``tl.div_rn`` and take roots by ``tl.sqrt_rn``, which IEEE 754 fixes.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "taco_kernels"
FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if "residual_norm" not in file.parts]
"""But for a layer of the model, whose values no other rank decodes."""
APPROXIMATE = {"sqrt", "rsqrt", "exp", "exp2", "log", "log2", "sin", "cos", "fdiv", "rcp"}
"""Of triton.language."""
ALLOWED = {
    # Its argument is at least 1/32 from every square, so that the root is rounded down to the same integer.
    ("taco_kernels/taco/wire.py", "quadratic_codes", "tl.sqrt"),
    # An entropy, by which tiles are ranked: two of nearly the same may change places.
    ("taco_kernels/tah_quant/launch.py", "encode_kernel", "tl.log2"),
}
"""File, function and what it does."""


def is_constant(node: ast.expr) -> bool:
    """Return whether a number is known when a kernel is compiled: digits, UPPER names, C.UPPER."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Name):
        return node.id.isupper()
    if isinstance(node, ast.Attribute):
        return node.attr.isupper()
    if isinstance(node, ast.BinOp):
        return is_constant(node.left) and is_constant(node.right)
    return False


def is_kernel(node: ast.AST) -> bool:
    """Return whether a function is compiled by Triton."""
    if not isinstance(node, ast.FunctionDef):
        return False
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def approximations(path: Path) -> set[tuple[str, str, str]]:
    """Return file, function and text of each inexact operation in a file's kernels."""
    name = str(path.relative_to(ROOT))
    result = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if not is_kernel(function):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                if not is_constant(node):
                    result.add((name, function.name, ast.unparse(node)))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if ast.unparse(node.func.value) == "tl" and node.func.attr in APPROXIMATE:
                    result.add((name, function.name, ast.unparse(node.func)))
    return result


def test_kernels_use_arithmetic_that_ieee_fixes() -> None:
    every_place = set().union(*(approximations(path) for path in FILES))
    assert every_place == ALLOWED


@pytest.mark.parametrize("line", ["y = x / count", "y = tl.exp2(x)", "y = 1.0 / x"])
def test_an_approximation_is_seen(line: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tests.kernels.test_arithmetic.ROOT", tmp_path)
    path = tmp_path / "kernel.py"
    path.write_text(f"@triton.jit\ndef kernel(x, count, C):\n    z = x * (1.0 / C.G)\n    {line}\n")
    assert len(approximations(path)) == 1
