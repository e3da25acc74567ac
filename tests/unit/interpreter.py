"""Triton's CPU interpreter, faster: for the programs that run kernels under TRITON_INTERPRET=1.

The variable must be set before triton is imported, so a test runs its own file as a program.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def output_interpreted(file: str, *arguments: str) -> str:
    """What ``python file arguments`` prints with the interpreter on; its failure is the test's."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", file, *arguments]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


def patch_language_once() -> None:
    """Leave triton.language patched once it is: the interpreter searches it anew for each device function.

    That takes a third of the time of a kernel on a small tensor.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_lang(function):
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if not modules <= patched:
            patch(function)
            patched.update(modules)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = patch_lang
