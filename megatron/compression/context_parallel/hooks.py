"""Puts compression of keys and values into a built model: every attention over a sequence gets its site."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.transformer.attention import Attention

from megatron.compression.communication.site import CommSite, Run, site_name
from megatron.compression.context_parallel.config import ContextParallelConfig
from megatron.compression.errors import CompressionConfigError
from megatron.compression.torch_native.attention import SDPACoreAttention


def attach(
    chunks: list[torch.nn.Module],
    config: ContextParallelConfig,
    run: Run,
    say: Callable[[str], None] = print,
) -> None:
    """Give each attention whose ranks share a sequence its site, which counts and compresses.

    Args:
        chunks: of this pipeline stage, before they are wrapped.
    Raises: CompressionConfigError: compression is on and an attention exchanges in another way. (Collective
    over all ranks of the job where compression is on.)
    """
    groups: dict[dist.ProcessGroup, None] = {}
    if config.enabled and (reason := why_not_attachable(chunks)):
        raise CompressionConfigError(f"{config.flag} cannot compress {reason}")
    for chunk in chunks:
        for path, module in chunk.named_modules():
            if isinstance(module, SDPACoreAttention) and module.context_group is not None:
                name = site_name(path, module.layer_number)
                module.context_site = CommSite(name, module.context_group, run)
                groups[module.context_group] = None
    if config.enabled:
        codecs = (config.forward_codec, config.backward_codec)
        fused = any(codec is not None and codec.fused_config is not None for codec in codecs)
        # On all ranks, also those whose chunks have no attention.
        for line in run.transports.prepare(groups, fused):
            say(f"compression: {line}")


def why_not_attachable(chunks: list[torch.nn.Module]) -> str | None:
    """The first reason why ``attach`` would refuse these chunks with compression on, or None."""
    for chunk in chunks:
        for path, module in chunk.named_modules():
            if _exchanges_otherwise(module):
                return (
                    f"{path}: {type(module.core_attention).__name__} exchanges keys and values by itself; "
                    f"use --transformer-impl local, or drop {ContextParallelConfig.flag}"
                )
    return None


def _exchanges_otherwise(module: torch.nn.Module) -> bool:
    if not isinstance(module, Attention) or module.config.context_parallel_size == 1:
        return False
    return not isinstance(module.core_attention, SDPACoreAttention)
