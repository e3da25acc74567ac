"""Rotary position embedding, compiled, for the slot that Transformer Engine fills in megatron-core.

    [a, b] -> [a cos - b sin, b cos + a sin]      a, b: the halves of a head

The backward is the rotation by the opposite angle. Angles, sine and cosine are fp32 and nothing is rounded on
the way, as in Transformer Engine's kernel; megatron-core's unfused path rounds four times.
"""

import torch
from megatron.core.jit import jit_fuser
from megatron.core.models.common.embeddings import rope_utils

from megatron.compression import patches
from megatron.compression.communication.collectives import WithBackward


def _rotation(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = t[..., : cos.shape[-1]].float()
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(t.dtype), t[..., cos.shape[-1] :]), dim=-1)


@jit_fuser
def _rotate(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    return _rotation(t, freqs.cos(), freqs.sin())


@jit_fuser
def _rotate_back(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    return _rotation(t, freqs.cos(), -freqs.sin())


def rotary(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first ``freqs.shape[-1]`` values of each head by their position's angles.

    Args:
        t: ``[s, b, heads, head_dim]``.
        freqs: fp32 angles ``[s, 1, 1, rotated]``, both halves alike; no gradient.
        interleaved: pair neighbours in place of halves (``--rotary-interleaved``): megatron-core's unfused
            path does that.
    """
    if interleaved:
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=True)
    return WithBackward.apply(t, lambda t: _rotate(t, freqs), lambda grad: _rotate_back(grad, freqs))


def fill_rope_fusion_slot() -> bool:
    """Make ``--apply-rope-fusion``, megatron-core's default, work without Transformer Engine. Idempotent.

    Packed sequences are not covered. Call it before a ``TransformerConfig`` is built: that checks the slot.

    Returns: Whether our function is in the slot.
    """
    return patches.fill_rope_slot(rotary)
