"""Packages and dependencies. Versions come from megatron/compression/versions.py: each is written
once."""

import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup

# The file is run, not imported: importing the package would need its dependencies.
versions = runpy.run_path(str(Path(__file__).parent / "megatron" / "compression" / "versions.py"))
extras = dict(versions["EXTRAS"])
# `mkdocs serve` shows these pages and the API reference.
extras["docs"] = ["mkdocs", "mkdocstrings[python]"]

# Everything for development, except the two extras that are compiled for 25 minutes and more.
COMPILED = ("transformer-engine", "bridge")
dev = {"pytest", "pytest-timeout", "pytest-xdist", "ruff", "mypy", "pydoclint", "pre-commit"}
for name in extras:
    if name not in COMPILED:
        dev.update(extras[name])

# Not in dev: what tests/distributed/test_accelerate.py needs, which trains with real packages.
extras["accelerate"] = ["accelerate>=1.15", "peft>=0.21", "transformers"]

setup(
    # megatron/ must stay without __init__.py: it overlays the namespace of the megatron-core wheel.
    packages=find_namespace_packages(
        include=["megatron.compression*", "megatron.host*", "taco_kernels*"]
    ),
    package_data={"megatron.compression": ["py.typed"], "taco_kernels": ["py.typed"]},
    py_modules=["pretrain_gpt", "pretrain_qwen"],
    install_requires=[
        *versions["REQUIRED"],
        # megatron-core imports these without declaring them.
        "psutil",
        "einops",
        "tensorboard",
        "regex",
        "PyYAML",
        # This project imports these.
        "numpy",
        "packaging",
        "tqdm",
    ],
    extras_require={**extras, "dev": sorted(dev)},
)
