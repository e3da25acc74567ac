"""How many of Megatron-Bridge's recipes start with compression, and what stops the others: a table.

Needs megatron-bridge where Python finds it (extra `bridge`); no GPU, no Transformer Engine, no network. Each
recipe of the package is called, completed as its `pretrain` does, and given to the checks of
`megatron.compression.bridge`. Models that a recipe reads from Hugging Face are replaced by one of neutral
sizes; their names say whether attention is latent. What layers refuse when they are built is not seen.
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
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.host import cuda
from scripts import _bridge

CODEC = {"TP": "int6", "EP": "int8"}
_LATENT = re.compile(r"deepseek-(v2|v3|r1)|kimi-k|moonlight|glm-5|glm_5", re.IGNORECASE)
"""Names of models with multi-latent attention."""


def neutral_model(name: Any, *_: object, **__: object) -> mock.Mock:
    """In place of ``AutoBridge.from_hf_pretrained``: a model of experts whose sizes fit every codec."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider

    kind = MLAModelProvider if _LATENT.search(str(name)) else GPTModelProvider
    sizes = dict(num_layers=128, hidden_size=8192, num_attention_heads=64, vocab_size=128256)
    experts = dict(num_moe_experts=128, moe_token_dispatcher_type="alltoall")
    model = kind(**sizes, **experts, add_bias_linear=False)
    model.to_text_provider = lambda *_, **__: model
    return mock.MagicMock(to_megatron_provider=lambda *_, **__: model)


def recipes(package: str) -> Iterator[tuple[str, Any]]:
    """(name, container) of the package's recipes that can be made here; an error in place of others."""
    base = importlib.import_module(f"megatron.bridge.{package}")
    for module in pkgutil.walk_packages(base.__path__, f"{base.__name__}."):
        for name, function in list(vars(importlib.import_module(module.name)).items()):
            mine = inspect.isfunction(function) and function.__module__ == module.name
            if mine and re.search(r"^[a-z].*\d+gpu.*_config$", name):
                try:
                    yield name, function()
                except Exception as error:
                    yield name, error


def completed(cfg: Any) -> Any:
    """What ``pretrain`` makes of the container before it builds the model, as far as our checks read it."""
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    if isinstance(cfg.mixed_precision, str):
        cfg.mixed_precision = get_mixed_precision_config(cfg.mixed_precision)
    if cfg.mixed_precision is not None:
        cfg.mixed_precision.finalize()
        cfg.mixed_precision.setup(cfg.model, cfg.optimizer, cfg.ddp)
    cfg.data_parallel_size = 8
    if cfg.comm_overlap is not None:
        cfg.comm_overlap.data_parallel_size = 8
        cfg.comm_overlap.finalize()
        cfg.comm_overlap.setup(cfg.model, cfg.optimizer, cfg.ddp)
    return cfg


def refusal(cfg: Any, dimension: str) -> str | None:
    """The container's field for which a codec of this dimension is refused; None: the run starts."""
    from megatron.compression import bridge
    from megatron.compression.errors import CompressionConfigError

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            attached = bridge.attach(cfg, **{dimension.lower(): CODEC[dimension]})
            bridge.check(completed(cfg), attached.config)
    except AssertionError as error:  # of Megatron-Bridge's
        return f"not for the model of neutral sizes ({error!s:.40})"
    except CompressionConfigError as error:
        field = re.search(r"cfg\.\w+\.(\w+)", str(error))
        return f"`{field[1]}`" if field else str(error)
    return None


def main() -> None:
    """Print a row for each set of recipes and dimension: how many there are, how many start, what stops."""
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
    for label, package in (("performance", "perf_recipes"), ("library", "recipes")):
        made = list(recipes(package))
        for dimension, field in (
            ("TP", "tensor_model_parallel_size"),
            ("EP", "expert_model_parallel_size"),
        ):
            several = [
                cfg for _, cfg in made if (getattr(getattr(cfg, "model", None), field, 1) or 1) > 1
            ]
            stops = Counter(refusal(cfg, dimension) for cfg in several)
            starts = stops.pop(None, 0)
            reasons = ", ".join(f"{reason} {count}" for reason, count in stops.most_common())
            print(
                f"| {label} | {dimension} > 1 | {starts} of {len(several)} | {reasons} |",
                flush=True,
            )
        for name, error in (row for row in made if isinstance(row[1], Exception)):
            print(f"not made: {name} ({error!r:.90})", file=sys.stderr)


if __name__ == "__main__":
    main()
