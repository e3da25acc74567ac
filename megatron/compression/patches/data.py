"""The compiled dataset index builder: use the one that megatron-core's wheel ships."""

import importlib

from megatron.compression.patches.symbols import put


def use_shipped_helpers() -> None:
    """Make ``megatron.core.datasets.utils.compile_helpers`` a no-op where ``helpers_cpp`` imports.

    Why: start-up runs ``make`` in the package's folder, but the wheel ships ``helpers_cpp`` compiled and no
    Makefile, so training from the wheel dies there, on GPUs as well. Not reached: a source checkout without
    the compiled module, which keeps Megatron's own behaviour.
    """
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return
    utils = importlib.import_module("megatron.core.datasets.utils")
    put(utils, "compile_helpers", _nothing_to_compile, "the wheel ships helpers_cpp and no Makefile")


def _nothing_to_compile() -> None:
    """helpers_cpp imports."""
