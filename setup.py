"""Dependencies come from megatron/compression/versions.py, so that each version is written once."""

import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup

pins = runpy.run_path(str(Path(__file__).parent / "megatron" / "compression" / "versions.py"))["PINNED"]

setup(
    # megatron/ must stay without __init__.py: it overlays the namespace of the megatron-core wheel.
    packages=find_namespace_packages(include=["megatron.compression*", "megatron.host*", "taco_kernels*"]),
    py_modules=["pretrain_gpt", "pretrain_qwen"],
    install_requires=[
        *pins,
        # megatron-core imports these without declaring them.
        "psutil",
        "einops",
        "tensorboard",
        "regex",
        "PyYAML",
        # ours
        "numpy",
        "packaging",
        "sentencepiece",
        "safetensors",
        "tqdm",
        "transformers",  # --tokenizer-type HuggingFaceTokenizer
        "matplotlib",
    ],
    extras_require={"dev": ["pytest", "pytest-timeout", "pytest-xdist", "ruff"]},
)
