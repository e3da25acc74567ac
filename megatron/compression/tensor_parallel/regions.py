"""What megatron-core's modules gather and scatter between their linear layers, through a site.

Multi-latent attention gathers the positions of keys, ``qk_pos_emb_head_dim`` values a token, under sequence
parallelism, and latents where its projections down are sharded. A multi-token-prediction layer gathers the
output of its projection and, under sequence parallelism, keeps this rank's tokens of it. Both call functions
of their module that get a group and no layer, so a layer says that it runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from megatron.compression.communication.site import CommSite
from megatron.compression.patches import communication
from megatron.compression.tensor_parallel.functions import gather_channels, gather_tokens, scatter_tokens

_site: ContextVar[CommSite | None] = ContextVar("site", default=None)
"""That of the layer that runs."""


@contextlib.contextmanager
def through(site: CommSite | None) -> Iterator[None]:
    """What megatron-core gathers and scatters meanwhile goes through ``site``; None: as without it."""
    token = _site.set(site)
    try:
        yield
    finally:
        _site.reset(token)


def attach() -> None:
    """Put our functions into megatron-core's modules. Idempotent."""
    communication.through_regions(*map(_instead, (gather_tokens, gather_channels, scatter_tokens)))


def _instead(ours: Callable[[CommSite, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(original: Callable[..., torch.Tensor], input_: torch.Tensor, *args: Any, **kwargs: Any):
        site = _site.get()
        return original(input_, *args, **kwargs) if site is None else ours(site, input_)

    return call
