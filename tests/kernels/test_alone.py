"""taco_kernels by itself: every module is imported on a host without Megatron."""

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
import taco_kernels
for module in pkgutil.walk_packages(taco_kernels.__path__, "taco_kernels."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert not any(name.split(".")[0] == "megatron" for name in sys.modules)
print("alone")
'''


def test_every_sibling_without_megatron() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "alone", result.stdout + result.stderr


def test_nothing_imports_megatron() -> None:
    for path in (ROOT / "taco_kernels").rglob("*.py"):
        assert "import megatron" not in path.read_text() and "from megatron" not in path.read_text(), path
