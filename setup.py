"""Dependencies come from megatron/compression/versions.py, so that each is written once."""

import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup

versions = runpy.run_path(str(Path(__file__).parent / "megatron" / "compression" / "versions.py"))
extras = versions["EXTRAS"] | {
    "docs": ["mkdocs", "mkdocstrings[python]"],  # mkdocs serve: these pages and the API reference
}
IN_DEV = sorted(
    extras.keys() - {"transformer-engine", "bridge"}
)  # compiled, for about 25 minutes and more

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
        # ours
        "numpy",
        "packaging",
        "tqdm",
    ],
    extras_require=extras
    | {
        "dev": [
            *sorted({name for extra in IN_DEV for name in extras[extra]}),
            *("pytest", "pytest-timeout", "pytest-xdist"),
            *("ruff", "mypy", "pydoclint", "pre-commit"),
        ]
    },
)
