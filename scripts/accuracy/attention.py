"""Causal attention, also of simulated ranks that share sequences (context parallelism).

As in megatron.compression.context_parallel.gather: of 2W chunks rank r has chunks r and 2W - 1 - r, gathers
the keys and values of all, and its gradients of them are reduce-scattered.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.accuracy import layers
from scripts.accuracy.settings import RANKS


@layers.operator("gather_sequence")
def gather_sequence(x: Tensor) -> Tensor:
    """[RANKS, T, n]: keys and values x [T, n] as each rank has them after the all-gather."""
    gathered = layers.attached().gather(x.contiguous(), "context_forward")
    return gathered[None].repeat(RANKS, 1, 1)


@layers.operator("gather_sequence_backward")
def gather_sequence_backward(grad: Tensor) -> Tensor:
    """[T, n]: the sum of the ranks' gradients, grad [RANKS, T, n]."""
    return layers.attached().reduce_scatter(grad.contiguous(), "context_backward")


gather_sequence.register_fake(lambda x: x.new_empty(RANKS, *x.shape))
gather_sequence_backward.register_fake(lambda grad: grad.new_empty(grad.shape[1:]))
gather_sequence.register_autograd(lambda ctx, grad: gather_sequence_backward(grad))


def attend(q: Tensor, k: Tensor, v: Tensor, context_parallel: bool) -> Tensor:
    """[B * S, heads * d] of q [B, S, heads, d] and k, v [B, S, groups, d]."""
    batch, sequence, heads, width = q.shape
    groups = k.shape[2]
    if context_parallel:
        assert not sequence % (2 * RANKS), "as --context-parallel-size wants it"
        copies = gather_sequence(torch.cat([k, v], dim=2).view(batch * sequence, -1))
        k, v = copies.view(-1, sequence, 2 * groups, width).split(groups, dim=2)
        q = q.repeat(RANKS, 1, 1, 1)
    each = (-1, -1, -1, heads // groups, -1)
    k, v = (part.unsqueeze(3).expand(each).flatten(2, 3) for part in (k, v))
    y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
    y = y.transpose(1, 2)
    if context_parallel:  # each rank's own rows
        chunk = torch.arange(sequence, device=y.device) * 2 * RANKS // sequence
        owner = torch.minimum(chunk, 2 * RANKS - 1 - chunk)
        own = owner == torch.arange(RANKS, device=y.device)[:, None]
        y = (y.reshape(RANKS, batch, sequence, heads, width) * own[:, None, :, None, None].to(y.dtype)).sum(0)
    return y.reshape(batch * sequence, heads * width)
