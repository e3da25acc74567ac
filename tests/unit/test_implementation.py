"""Which layers a run gets, here and with a stand-in for Transformer Engine's package."""

import importlib.util
import sys
from argparse import Namespace

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron.compression.errors import InputError
from megatron.compression.frontends.megatron_lm import implementation
from megatron.compression.frontends.megatron_lm.implementation import (
    Engine,
    check_implementation,
    describe,
)

WHOLE = {"__init__.py": "__version__ = '2.20.2'\n", "pytorch/__init__.py": ""}
BROKEN = WHOLE | {"pytorch/__init__.py": "raise OSError('libcudnn.so.9: gone')"}
SET_UP = "scripts/setup.sh --with-transformer-engine"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that describes a machine: its package's files (None: no package), its CUDA."""

    def looked_at(package: dict[str, str] | None, cuda: bool = True) -> Engine:
        for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
            monkeypatch.delitem(sys.modules, name)
        for name, text in (package or {}).items():
            file = tmp_path / "transformer_engine" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        implementation.transformer_engine.cache_clear()
        return implementation.transformer_engine()

    yield looked_at
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    implementation.transformer_engine.cache_clear()


def asked(transformer_impl: str, **more) -> Namespace:
    return Namespace(transformer_impl=transformer_impl, **more)


needs_none_installed = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="Transformer Engine is installed",
)


def test_where_it_works_it_is_the_default(machine) -> None:
    """It is the default of Megatron, too; the log says the version."""
    assert machine(WHOLE) == Engine(version="2.20.2")
    check_implementation(asked("transformer_engine"))
    assert describe(asked("transformer_engine"), []) == "layers: Transformer Engine 2.20.2"
    assert describe(asked("local"), ["--transformer-impl=local"]).endswith(
        "(--transformer-impl local)"
    )
    contradiction = asked("transformer_engine", attention_backend=AttnBackend.local)
    with pytest.raises(InputError, match="--attention-backend local is of the local layers: add"):
        check_implementation(contradiction)


@needs_none_installed
@pytest.mark.parametrize("cuda", [True, False])
def test_absent(machine, cuda: bool) -> None:
    """Layers are torch-native; the log says how to get the others where they could run."""
    machine(None, cuda)
    reason = f"is not installed; {SET_UP}" if cuda else "needs CUDA, and there is none here"
    assert describe(asked("local"), []) == f"layers: torch-native (Transformer Engine {reason})"
    check_implementation(asked("local"))
    with pytest.raises(InputError, match=f"which is not installed: run {SET_UP}, or use --tr"):
        check_implementation(asked("transformer_engine"))


def test_broken(machine) -> None:
    """The import's message is logged, and no other module finds half a package."""
    machine(BROKEN)
    assert importlib.util.find_spec("transformer_engine") is None
    with pytest.raises(ImportError):
        import transformer_engine  # noqa: F401
    reason = "cannot be imported (OSError: libcudnn.so.9: gone)"
    assert (
        describe(asked("local"), [])
        == f"layers: torch-native (Transformer Engine {reason}; {SET_UP})"
    )
    with pytest.raises(InputError) as refused:
        check_implementation(asked("transformer_engine"))
    assert f"needs Transformer Engine, which {reason}: run {SET_UP}, or use" in str(refused.value)


def test_without_cuda_it_is_left_alone(machine) -> None:
    """It is not even imported, and hidden from Megatron, which would take its Adam."""
    machine(BROKEN, cuda=False)
    assert importlib.util.find_spec("transformer_engine") is None
    none_here = "needs CUDA, and there is none here"
    assert describe(asked("local"), []) == f"layers: torch-native (Transformer Engine {none_here})"
    with pytest.raises(InputError, match=f"which {none_here}: use --transformer-impl local"):
        check_implementation(asked("transformer_engine"))
