"""Megatron-Bridge without a GPU: empty classes for what it imports of Transformer Engine."""

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

_PACKAGES = ("transformer_engine", "transformer_engine_torch")
_VERSION = "2.20.0"
_MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "RMSNorm", "LayerNorm")
_MODULES += ("TransformerLayer", "DotProductAttention", "BasicLinear")


class _Double(type):
    """A class whose every attribute is there."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Loader:
    """Finds and makes the packages; what is asked of them is a class, a module of torch's where one is
    registered as such."""

    def find_spec(self, name: str, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in _PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        import torch

        def member(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            if name in _MODULES:
                return type(name, (torch.nn.Module,), {})
            return _Double(name, (object,), {"__init__": lambda self, *args, **named: None})

        module = types.ModuleType(spec.name)
        module.__path__, module.__version__, module.__getattr__ = [], _VERSION, member
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: members are made when they are asked for."""


def name_version() -> None:
    """Let megatron-core accept an older nvidia_resiliency_ext; before megatron-core is imported.

    It demands 0.6.0 for its asynchronous saving. 0.4.1 has what Megatron-Bridge imports.
    """
    if importlib.util.find_spec("nvidia_resiliency_ext") is not None:
        importlib.import_module("nvidia_resiliency_ext").__version__ = "0.6.0"


def stand_in() -> bool:
    """Let ``megatron.bridge`` be imported on this machine. Returns: whether the package is installed."""
    if importlib.util.find_spec("megatron.bridge") is None:
        return False
    for name in [name for name in _PACKAGES if sys.modules.get(name, "") is None]:
        del sys.modules[name]  # hidden
    if importlib.util.find_spec("transformer_engine") is None:
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: (
            _VERSION if name.replace("_", "-") == "transformer-engine" else version(name)
        )
        sys.meta_path.append(_Loader())
    return True
