"""The reduction of delayed scaling's maxima over the ranks."""

import torch
import torch.distributed as dist


class FP8GlobalStateManager:
    """As TE's, of which one method communicates."""

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
