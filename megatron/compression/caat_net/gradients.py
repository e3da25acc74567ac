"""Gradients of the parameters that all tensor-parallel ranks hold in whole, each for its own stream."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer import TransformerConfig
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron.compression.communication.ledger import Ledger
from megatron.compression.replicated_parameters import QUERY_KEY_NORMS, cut_without_mark

_MARK = "sees_rank_local_data"


def mark_rank_local(chunk: torch.nn.Module) -> None:
    """Mark the replicated parameters of a GPT model's transformer block, final norm included.

    Those are norms and the biases of row-parallel layers. The embeddings come before the streams begin, and
    the output layer is sharded. What is cut without Megatron's mark (the softmax's offsets) is no replica,
    and megatron-core sums the gradients of the norms of queries and keys itself.
    """
    cut = cut_without_mark(chunk)
    for name, parameter in chunk.decoder.named_parameters():
        sharded = parameter in cut or getattr(parameter, "tensor_model_parallel", False)
        if not sharded and not any(part in name for part in QUERY_KEY_NORMS):
            setattr(parameter, _MARK, True)


def sum_after_finalizing(config: TransformerConfig, ledger: Ledger) -> None:
    """Let ``config.finalize_model_grads_func`` sum the marked gradients as well. Idempotent.

    Megatron's training loop keeps a function that is there already.
    """
    if not isinstance(config.finalize_model_grads_func, _FinalizeAndSum):
        config.finalize_model_grads_func = _FinalizeAndSum(config.finalize_model_grads_func, ledger)


class _FinalizeAndSum:
    """megatron-core's ``finalize_model_grads``, or what was there before, and then the sum."""

    def __init__(self, finalize, ledger: Ledger) -> None:
        self.finalize, self.ledger = finalize or finalize_model_grads, ledger

    def __call__(self, model: list[torch.nn.Module], num_tokens=None, pg_collection=None, **options) -> None:
        self.finalize(model, num_tokens, pg_collection=pg_collection, **options)
        own = parallel_state.get_tensor_model_parallel_group() if pg_collection is None else pg_collection.tp
        sum_rank_local_gradients(model, own, self.ledger)


def sum_rank_local_gradients(model: list[torch.nn.Module], group: dist.ProcessGroup, ledger: Ledger) -> None:
    """Sum the gradients of all marked parameters over the tensor-parallel group, in one all-reduce.

    Args:
        model: chunks, wrapped or not; gradients in ``main_grad`` or else ``grad``.
    """
    gradients = []
    for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
        if parameter.requires_grad and getattr(parameter, _MARK, False):
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is not None:
                gradients.append(gradient.detach())
    if not gradients:
        return
    total = _flatten_dense_tensors(gradients)
    dist.all_reduce(total, group=group)
    ledger.record_uncompressed("tp.other", "exact", "all_reduce", total.nbytes, group.size())
    for gradient, summed in zip(gradients, _unflatten_dense_tensors(total, gradients), strict=True):
        gradient.copy_(summed)
