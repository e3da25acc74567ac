"""Triton's CPU interpreter, faster: for the programs that run kernels under TRITON_INTERPRET=1.

The variable must be set before triton is imported, so a test runs a function of its file in a program of its
own (``interpreted``). Starting one takes seconds, so a file with many scenarios runs them all in
one program and
has a test for each::

    SCENARIOS = {"int8 encoded": check_encode, ...}

    @pytest.fixture(scope="module")
    def failures():
        return failures_of_scenarios(__name__)

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_kernels(scenario, failures):
        assert not failures[scenario], failures[scenario]
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def interpreted(main: Callable, *arguments: object) -> str:
    """Return as text what ``main(*arguments)`` returns in a program with the interpreter on.

    Its failure is the test's. In that program outputs begin as 255 or NaN: kernels must write all of them.
    """
    pytest.importorskip("triton")
    module = main.__module__
    program = f"""import torch
from tests.kernels.interpreter import round_as_gpus, speed_up
speed_up()
round_as_gpus()
torch.use_deterministic_algorithms(True, warn_only=True)
import {module}
print({module}.{main.__name__}(*{arguments!r}))"""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-W", "ignore", "-c", program]
    result = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


def failures_of_scenarios(module: str) -> dict[str, str]:
    """Return the trace of every scenario of a module's SCENARIOS, "" where it holds.

    SCENARIOS are functions without arguments, by name. One program with the interpreter on runs them all.
    """
    return json.loads(interpreted(run_scenarios, module))


def run_scenarios(module: str) -> str:
    """Run a module's SCENARIOS here; return JSON of what ``failures_of_scenarios`` returns."""
    failures = {}
    for name, scenario in import_module(module).SCENARIOS.items():
        try:
            scenario()
            failures[name] = ""
        except Exception:
            failures[name] = traceback.format_exc()
    return json.dumps(failures)


def small_tiles(tunings: dict, tile: int = 1024) -> None:
    """Give every tuning of a table a small tile, so that even tiny tensors take several."""
    for name, tuning in tunings.items():
        tunings[name] = tuning._replace(tile=tile)


def speed_up() -> None:
    """Spare the interpreter what takes most of the time of a kernel on a small tensor. No result changes.

    By itself the interpreter patches triton.language anew for each device function; builds types, shapes and a
    table of numpy's types again for each value; and computes overflow checks that only debug mode looks at.

    Loops also run to a bound that the kernel computes, which lies in an array of one element.
    """
    import dataclasses

    from triton.runtime import interpreter

    _count_by_tensors()
    _patch_language_once()
    _remember_types()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def round_as_gpus() -> None:
    """Let the interpreter round as a GPU does what Triton 3.6's does not: bf16 to nearest, multiply-adds once.

    By itself it cuts the lower bits off what becomes bf16, under every Triton; and it rounds a multiply-add
    twice before Triton 3.9.
    """
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)
    cast = builder.cast_impl

    def cast_to_nearest(self, source, target_type):
        types = (source.dtype.scalar.name, target_type.scalar.name)
        if types != ("fp32", "bf16"):
            return cast(self, source, target_type)
        nearest = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        bits = nearest.view(torch.int16).numpy().view(np.uint16).reshape(source.data.shape)
        return interpreter.TensorHandle(bits, target_type.scalar)

    def multiply_add(self, x, y, z):
        result = _rounded_once(x.data, y.data, z.data).astype(z.data.dtype)
        return interpreter.TensorHandle(result, z.dtype.scalar)

    builder.cast_impl = cast_to_nearest
    builder.create_fma = multiply_add


def _rounded_once(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return fp64 that rounds to what x * y + z rounds to, of fp32 or fp16 numbers.

    The product is exact in fp64, the sum need not be. If it is not, its last bit is set (rounding to odd), so
    that it is no tie of the shorter format unless the exact sum is one.
    """
    with np.errstate(all="ignore"):
        product = x.astype(np.float64) * y.astype(np.float64)
        total = product + z.astype(np.float64)
        # What the sum has lost, exactly (Knuth's TwoSum).
        added = total - product
        lost = (product - (total - added)) + (z - added)
        inexact = np.isfinite(total) & (lost != 0)
        even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
        odd = np.nextafter(total, np.copysign(np.inf, lost))
    return np.where(inexact & even, odd, total)


def _count_by_tensors() -> None:
    """Let numbers that kernels compute be bounds of their loops."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _patch_language_once() -> None:
    """Leave triton.language patched once it is."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[int] = set()

    def patch_lang(function):
        modules = {
            id(value) for value in function.__globals__.values() if value is tl or value is tl.core
        }
        if not modules <= patched:
            patch(function)
            patched.update(modules)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = patch_lang


def _remember_types() -> None:
    """Make each block type, each shape of a tensor and each numpy type once, and see when shapes are one."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    make_block = core.block_type.__init__
    make_tensor = core.tensor.__init__
    numpy_type = interpreter._get_np_dtype
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    blocks: dict[tuple, dict] = {}
    block_shapes: dict[tuple[int, ...], core.tuple] = {}
    tensor_shapes: dict[tuple[int, ...], tuple] = {}
    numpy_types: dict[str, object] = {}

    def block(self, element_ty, shape) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if (element_ty.name, sizes) not in blocks:
            make_block(self, element_ty, shape)
            self.shape = block_shapes.setdefault(sizes, self.shape)
            blocks[element_ty.name, sizes] = vars(self)
        self.__dict__ = {**blocks[element_ty.name, sizes], "element_ty": element_ty}

    def tensor(self, handle, type) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in tensor_shapes:
            make_tensor(self, handle, type)
            tensor_shapes[sizes] = self.shape, self.numel
        self.shape, self.numel = tensor_shapes[sizes]
        self.handle = handle
        self.type = type
        self.dtype = type.scalar

    def broadcast_unlike(self, lhs, rhs):
        # Shapes that are equal are one object, by block_shapes.
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def numpy_type_of(type):
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type)
        return numpy_types[name]

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    semantic.TritonSemantic.broadcast_impl_value = broadcast_unlike
    interpreter._get_np_dtype = numpy_type_of
