"""Count how many of Megatron-Bridge's recipes start with compression, and what stops the others.

    python scripts/count_recipes.py

It prints a markdown table. It needs megatron-bridge where Python finds it (the extra `bridge`), and
neither a GPU nor Transformer Engine nor a network. Each recipe of the package is called, completed
as its `pretrain` does, and given to the checks of `megatron.compression.bridge`. A model that a
recipe reads from Hugging Face is replaced by one of neutral sizes; its name says whether attention
is latent. What layers refuse when they are built is not seen.
"""

import contextlib
import importlib
import inspect
import io
import logging
import pkgutil
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import _bridge

from megatron.host import cuda

CODECS = {"TP": "int6", "EP": "int8"}
"""What each dimension is asked to compress with."""
SIZES = {"TP": "tensor_model_parallel_size", "EP": "expert_model_parallel_size"}
"""The field of a recipe's model that says how many ranks there are."""
PACKAGES = {"performance": "perf_recipes", "library": "recipes"}
"""Megatron-Bridge's packages of recipes, by the name that the table gives them."""
RECIPE_NAME = re.compile(r"^[a-z].*\d+gpu.*_config$")
WITH_LATENT_ATTENTION = re.compile(
    r"deepseek-(v2|v3|r1)|kimi-k|moonlight|glm-5|glm_5", re.IGNORECASE
)
"""Names of models with multi-latent attention."""
WITHOUT_EXPERTS = re.compile(r"llama-3", re.IGNORECASE)
"""Names of models whose recipes have graphs that would not go with experts."""


def neutral_model(name: Any, *_: object, **__: object) -> mock.Mock:
    """Stand in for ``AutoBridge.from_hf_pretrained``: a model whose sizes fit every codec, with
    experts."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider

    provider = GPTModelProvider
    if WITH_LATENT_ATTENTION.search(str(name)):
        provider = MLAModelProvider
    model = provider(
        num_layers=128,
        hidden_size=8192,
        num_attention_heads=64,
        vocab_size=128256,
        num_moe_experts=None if WITHOUT_EXPERTS.search(str(name)) else 128,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
    )
    model.to_text_provider = lambda *_, **__: model
    return mock.MagicMock(to_megatron_provider=lambda *_, **__: model)


def recipes(package: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and container of each recipe of a package; the error of one that cannot be
    made here."""
    base = importlib.import_module(f"megatron.bridge.{package}")
    for module in pkgutil.walk_packages(base.__path__, f"{base.__name__}."):
        members = vars(importlib.import_module(module.name))
        for name, function in list(members.items()):
            # Modules import each other's recipes; each counts where it is defined.
            is_defined_here = inspect.isfunction(function) and function.__module__ == module.name
            if is_defined_here and RECIPE_NAME.search(name):
                try:
                    yield name, function()
                except Exception as error:
                    yield name, error


def completed(cfg: Any) -> Any:
    """Complete a container as ``pretrain`` does before it builds the model, as far as our checks
    read it."""
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    if isinstance(cfg.mixed_precision, str):
        cfg.mixed_precision = get_mixed_precision_config(cfg.mixed_precision)
    if cfg.mixed_precision is not None:
        cfg.mixed_precision.finalize()
        cfg.mixed_precision.setup(cfg.model, cfg.optimizer, cfg.ddp)
    _complete_graph_modules(getattr(cfg.model, "transformer", cfg.model))
    # As if on eight GPUs, which set-ups of overlap look at.
    cfg.data_parallel_size = 8
    if cfg.comm_overlap is not None:
        cfg.comm_overlap.data_parallel_size = 8
        cfg.comm_overlap.finalize()
        cfg.comm_overlap.setup(cfg.model, cfg.optimizer, cfg.ddp)
    return cfg


def _complete_graph_modules(model: Any) -> None:
    """Give a model's graphs the modules that megatron-core reads from older names of the field."""
    from megatron.core.transformer.cuda_graph_config import normalize_cuda_graph_modules

    modules = getattr(model, "cuda_graph_scope", None)
    if modules is None:
        modules = getattr(model, "cuda_graph_modules", None)
    model.cuda_graph_modules = normalize_cuda_graph_modules(modules)[0]


def refusal(cfg: Any, dimension: str) -> str | None:
    """Return the container's field for which a codec of this dimension is refused; None: the run
    starts."""
    from megatron.compression.errors import CompressionConfigError
    from megatron.compression.frontends import bridge

    try:
        # What is said about user buffers is of no interest here.
        with contextlib.redirect_stdout(io.StringIO()):
            attached = bridge.attach(cfg, **{dimension.lower(): CODECS[dimension]})
            bridge.check(completed(cfg), attached.config)
    except AssertionError as error:  # of Megatron-Bridge's
        return f"not for the model of neutral sizes ({error!s:.40})"
    except CompressionConfigError as error:
        field = re.search(r"cfg\.\w+\.(\w+)", str(error))
        if field:
            return f"`{field[1]}`"
        return str(error)
    return None


def ranks_of(cfg: Any, dimension: str) -> int:
    """Return how many ranks a recipe has in a dimension."""
    model = getattr(cfg, "model", None)
    return getattr(model, SIZES[dimension], None) or 1


def row(label: str, containers: list[Any], dimension: str) -> str:
    """Return a row of the table.

    Args:
        label: of the package.
        containers: its recipes.
        dimension: TP or EP; recipes with one rank in it do not count.
    """
    parallel = [cfg for cfg in containers if ranks_of(cfg, dimension) > 1]
    refusals = Counter(refusal(cfg, dimension) for cfg in parallel)
    starts = refusals.pop(None, 0)
    reasons = ", ".join(f"{reason} {count}" for reason, count in refusals.most_common())
    return f"| {label} | {dimension} > 1 | {starts} of {len(parallel)} | {reasons} |"


def main() -> None:
    """Print the table, a row for each package and dimension."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    _bridge.name_version()
    cuda.install_devices()
    if not _bridge.stand_in():
        sys.exit("error: megatron.bridge is not installed: pip install -e '.[bridge]'")
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge

    for name in ("from_hf_pretrained", "from_hf_config"):
        setattr(AutoBridge, name, staticmethod(neutral_model))
    print("| recipes | with | start | what stops the others |\n|---|---|---|---|")
    for label, package in PACKAGES.items():
        containers = []
        for name, container in recipes(package):
            if isinstance(container, Exception):
                print(f"not made: {name} ({container!r:.90})", file=sys.stderr)
            else:
                containers.append(container)
        for dimension in SIZES:
            print(row(label, containers, dimension), flush=True)


if __name__ == "__main__":
    main()
