"""Puts compression of keys and values into a built model: every attention over a sequence gets its
site."""

from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core.transformer.attention import Attention

from megatron.compression.communication.site import CommSite, site_name
from megatron.compression.context_parallel.gather import SharesSequence
from megatron.compression.dimension import Dimension
from megatron.compression.errors import SettingError


class ContextParallel(Dimension):
    """Gives each attention whose ranks share a sequence its site, which counts and compresses."""

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        groups: dict[dist.ProcessGroup, None] = {}
        config = self.config
        # Before any site is made: a model is attached as a whole or not.
        if config.enabled and (reason := self.refusal(chunks)):
            raise SettingError(config.path("compression"), None, f"cannot compress {reason}")
        for path, module in _modules(chunks):
            if isinstance(module, SharesSequence) and module.context_group is not None:
                name = site_name(path, module.layer_number)
                module.context_site = CommSite(name, module.context_group, self.run)
                groups[module.context_group] = None
        if config.enabled:
            codecs = (config.forward_codec, config.backward_codec)
            fused = any(codec is not None and codec.fused_config is not None for codec in codecs)
            # On all ranks, also those whose chunks have no attention.
            for line in self.run.transports.prepare(groups, fused):
                self.log(f"compression: {line}")

    def refusal(self, chunks: list[torch.nn.Module]) -> str | None:
        for path, module in _modules(chunks):
            if not isinstance(module, Attention) or module.config.context_parallel_size == 1:
                continue
            if not isinstance(module.core_attention, SharesSequence):
                class_name = type(module.core_attention).__name__
                return (
                    f"{path}: {class_name} exchanges keys and values by itself; "
                    "use --transformer-impl local, or drop --cp-compression"
                )
        return None


def _modules(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    return chain.from_iterable(chunk.named_modules() for chunk in chunks)
