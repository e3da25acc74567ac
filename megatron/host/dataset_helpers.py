"""The compiled dataset index builder: use the one that megatron-core's wheel ships."""

import importlib


def use_shipped_helpers() -> None:
    """Make `megatron.core.datasets.utils.compile_helpers` a no-op where `helpers_cpp` imports.

    Why: start-up runs `make` in the package's folder, but the wheel ships `helpers_cpp` compiled and no
    Makefile, so training from the wheel dies there, on GPUs as well. A source checkout without the compiled
    module keeps Megatron's own behaviour. `initialize` imports the name inside the function that calls it, so
    replacing it in its module reaches every caller.
    """
    utils = importlib.import_module("megatron.core.datasets.utils")
    if getattr(utils.compile_helpers, "_shipped", False):
        return
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return

    def compile_helpers() -> None:
        """Nothing to compile: helpers_cpp imports."""

    compile_helpers._shipped = True
    utils.compile_helpers = compile_helpers
