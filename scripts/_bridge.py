"""Let Megatron-Bridge be imported without a GPU: it gets empty classes for Transformer Engine's.

Checks of settings, counts and tests use this. Nothing is computed with these classes.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

PACKAGES = ("transformer_engine", "transformer_engine_torch")
VERSION = "2.20.0"
LAYERS = (
    "Linear",
    "LayerNormLinear",
    "LayerNormMLP",
    "GroupedLinear",
    "RMSNorm",
    "LayerNorm",
    "TransformerLayer",
    "DotProductAttention",
    "BasicLinear",
)
"""What Megatron-Bridge makes subclasses of, or registers, as modules of torch's."""


class _Double(type):
    """The type of a class that has every attribute it is asked for."""

    def __getattr__(cls, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def _ignore_arguments(self: object, *args: object, **kwargs: object) -> None:
    """Stands for a class's ``__init__``."""


def _member(name: str) -> type:
    """Return what a stand-in module has under a name: a layer of torch's, or a class with any
    attribute."""
    import torch

    # Python looks for names such as __file__, which are not there.
    if name.startswith("__"):
        raise AttributeError(name)
    if name in LAYERS:
        return type(name, (torch.nn.Module,), {})
    return _Double(name, (object,), {"__init__": _ignore_arguments})


class _Loader:
    """Finds and makes the packages and everything below them."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a spec for these packages; None leaves a name to Python's own finders."""
        if name.split(".")[0] not in PACKAGES:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return a module whose members are made when they are asked for."""
        module = types.ModuleType(spec.name)
        # A path makes it a package, whose submodules this loader finds too.
        module.__path__ = []
        module.__version__ = VERSION
        module.__getattr__ = _member
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: there is no code to run."""


def name_version() -> None:
    """Let megatron-core accept an older nvidia_resiliency_ext. Call it before megatron-core is
    imported.

    megatron-core demands 0.6.0 for its asynchronous saving. 0.4.1 has what Megatron-Bridge imports.
    """
    if importlib.util.find_spec("nvidia_resiliency_ext") is not None:
        importlib.import_module("nvidia_resiliency_ext").__version__ = "0.6.0"


def stand_in() -> bool:
    """Let ``megatron.bridge`` be imported on this machine. Returns whether the package is
    installed."""
    if importlib.util.find_spec("megatron.bridge") is None:
        return False
    # A module that is None in sys.modules was hidden, so that an import of it fails.
    for name in [name for name in PACKAGES if sys.modules.get(name, "") is None]:
        del sys.modules[name]
    if importlib.util.find_spec("transformer_engine") is None:
        installed_version = importlib.metadata.version

        # megatron-core asks for the version of the package, not of the module.
        def version(name: str) -> str:
            if name.replace("_", "-") == "transformer-engine":
                return VERSION
            return installed_version(name)

        importlib.metadata.version = version
        sys.meta_path.append(_Loader())
    return True
