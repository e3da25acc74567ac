"""Compressed communication for Megatron-LM: tensor, data, pipeline, expert and context parallelism.

An overlay of the ``megatron`` namespace: ``megatron.compression`` joins the wheel's
``megatron.core`` and ``megatron.training``. What an entrypoint or a package of one's own needs is
here; everything is loaded when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.compression.caat_net.config import CaatNetConfig
    from megatron.compression.codecs import (
        Codec,
        parse_codec,
        register_codec,
        register_gradient_compressor,
    )
    from megatron.compression.communication import (
        TorchTransport,
        Work,
        all_gather,
        all_reduce,
        reduce_scatter,
    )
    from megatron.compression.communication.ledger import Ledger
    from megatron.compression.config import CompressionConfig
    from megatron.compression.context_parallel.config import ContextParallelConfig
    from megatron.compression.data_parallel.compressor import (
        GradientBucket,
        GradientCompressor,
        GradientSync,
    )
    from megatron.compression.data_parallel.config import DataParallelConfig
    from megatron.compression.errors import CompressionConfigError
    from megatron.compression.expert_parallel.config import ExpertParallelConfig
    from megatron.compression.frontends.megatron_lm.enable import add_arguments, enable
    from megatron.compression.frontends.own_loop import attach
    from megatron.compression.local_steps.config import LocalStepsConfig
    from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
    from megatron.compression.session import Host, Session
    from megatron.compression.tensor_parallel.config import TensorParallelConfig

_NAMES = {
    "frontends.megatron_lm.enable": ("add_arguments", "enable"),
    "frontends.own_loop": ("attach",),
    "session": ("Host", "Session"),
    "config": ("CompressionConfig",),
    "tensor_parallel.config": ("TensorParallelConfig",),
    "pipeline_parallel.config": ("PipelineParallelConfig",),
    "context_parallel.config": ("ContextParallelConfig",),
    "expert_parallel.config": ("ExpertParallelConfig",),
    "data_parallel.config": ("DataParallelConfig",),
    "caat_net.config": ("CaatNetConfig",),
    "local_steps.config": ("LocalStepsConfig",),
    "errors": ("CompressionConfigError",),
    "codecs": ("Codec", "parse_codec", "register_codec", "register_gradient_compressor"),
    "communication": ("TorchTransport", "Work", "all_gather", "all_reduce", "reduce_scatter"),
    "communication.ledger": ("Ledger",),
    "data_parallel.compressor": ("GradientBucket", "GradientCompressor", "GradientSync"),
}
"""Names that are offered here, by the module that defines them."""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


_FORMER_NAMES = {"Compression": "Session"}


def __getattr__(name: str) -> Any:
    name = _FORMER_NAMES.get(name, name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
