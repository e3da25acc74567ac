"""taco_kernels by itself: every sibling encodes and decodes on a host without Megatron."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = '''
import importlib, pkgutil, sys

class Refused:
    """No part of Megatron can be imported."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("megatron", "transformer_engine", "apex"):
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Refused())
import torch
import taco_kernels
from taco_kernels import bitmap_sparse, channel_norm, count_sketch, sdp4bit, symmetric_memory
from taco_kernels import taco, tah_quant
from taco_kernels.common import ALIGNMENT

for module in pkgutil.walk_packages(taco_kernels.__path__, "taco_kernels."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert not any(name.split(".")[0] == "megatron" for name in sys.modules)

def near(a, b, bound):
    assert float((a - b).norm() / b.norm()) < bound

x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
config = taco.CodecConfig("int8")
wire = taco.encode(x, config)
assert wire.shape[1] % ALIGNMENT == 0
near(taco.decode(wire, config, x.shape, x.dtype), x, 0.01)
near(taco.decode_sum(wire.repeat(2, 1), config, x.shape, x.dtype), 2 * x, 0.01)
format = sdp4bit.GroupFormat(8, 64, True)
near(sdp4bit.sum_dequantize(sdp4bit.quantize(x, format)[None], format, torch.empty_like(x)), x, 0.01)
settings = tah_quant.TahConfig()
near(tah_quant.decode(tah_quant.encode(x, settings), settings, x.shape, x.dtype), x, 0.2)
layout = channel_norm.ChannelNormLayout(8, 64, taco.CodecConfig("int8", 64, hadamard=False))
near(channel_norm.decode(channel_norm.encode(x, layout), layout, x.dtype), x, 0.02)
sparse = bitmap_sparse.BitmapLayout(64, 1.0, 16)
near(bitmap_sparse.decode_sum(bitmap_sparse.encode(x, torch.zeros(8), sparse), sparse), x.sum(0), 0.01)
sketch = count_sketch.SketchLayout(count_sketch.SketchConfig(ratio=0.5), 64)
exponents = count_sketch.row_exponents(x[:1], sketch)
sums = count_sketch.combine(
    count_sketch.encode(x[:1], torch.zeros(1), exponents, sketch, 1, 7), sketch
)
near(count_sketch.decode(*sums, exponents[0], sketch, 1, 7).values, x[0], 0.01)
assert symmetric_memory.SymmetricGroup
print("alone")
'''


def test_every_sibling_without_megatron() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "alone", result.stdout + result.stderr


def test_nothing_imports_megatron() -> None:
    for path in (ROOT / "taco_kernels").rglob("*.py"):
        assert "import megatron" not in path.read_text() and "from megatron" not in path.read_text(), path
