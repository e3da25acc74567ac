"""taco_kernels by itself: it is imported without Megatron, and refuses launches that would write elsewhere."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from taco_kernels.common.device import capability_as_if
from taco_kernels.taco import CodecConfig, launch
from tests.kernels.interpreter import ROOT

CONFIG = CodecConfig("int8")


def wires(rows: int, values: int) -> torch.Tensor:
    """Return wires of so many rows, each of so many values."""
    return torch.zeros(rows, CONFIG.wire_bytes(values), dtype=torch.uint8)


@pytest.mark.parametrize("decode", [launch.decode, launch.decode_sum])
def test_an_output_of_another_size_is_refused(decode) -> None:
    with pytest.raises(ValueError, match="512 values, not those of shape"):
        decode(wires(1, 1024), CONFIG, (1024,), torch.float32, out=torch.zeros(512))


@pytest.mark.parametrize("decode", [launch.decode, launch.decode_sum])
def test_wires_without_a_row_are_refused(decode) -> None:
    with pytest.raises(ValueError, match="hold nothing to decode"):
        decode(wires(0, 1024), CONFIG, (1024,), torch.float32)


def test_on_amd_the_definition_runs(monkeypatch) -> None:
    """Tensors say ``is_cuda`` there, and the kernels would not compile."""
    from taco_kernels import common

    operation = common.dispatched(lambda tensor: "definition")
    monkeypatch.setattr(common, "AMD", True)
    assert operation(SimpleNamespace(is_cuda=True)) == "definition"


@pytest.mark.parametrize("requested, capability", [("89", (8, 9)), ("120", (12, 0))])
def test_kernels_as_on_another_architecture(requested: str, capability: tuple[int, int]) -> None:
    """TACO_KERNELS_AS_IF names an architecture whose kernels this GPU, of sm_90, can run."""
    assert capability_as_if(requested, (9, 0)) == capability


@pytest.mark.parametrize(
    "requested, actual", [("hopper", (9, 0)), ("7", (9, 0)), ("89", (8, 0))], ids=str
)
def test_an_architecture_that_cannot_run_here_is_refused(
    requested: str, actual: tuple[int, int]
) -> None:
    """It is none, is too old for the kernels, or is newer than this GPU."""
    with pytest.raises(ValueError, match=f"TACO_KERNELS_AS_IF={requested}"):
        capability_as_if(requested, actual)


PROGRAM = '''
import importlib, pkgutil, sys

class Refused:
    """No part of Megatron can be imported."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("megatron", "transformer_engine", "apex"):
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Refused())
import taco_kernels
for module in pkgutil.walk_packages(taco_kernels.__path__, "taco_kernels."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert not any(name.split(".")[0] == "megatron" for name in sys.modules)
print("alone")
'''


@pytest.mark.slow
def test_every_sibling_without_megatron() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "alone", result.stdout + result.stderr


@pytest.mark.slow
def test_nothing_imports_megatron() -> None:
    for path in (ROOT / "taco_kernels").rglob("*.py"):
        assert (
            "import megatron" not in path.read_text() and "from megatron" not in path.read_text()
        ), path
