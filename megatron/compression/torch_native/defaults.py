"""Leaves the attention mask out of the batch where it says no more than "causal"."""

from argparse import Namespace


def leave_out_causal_mask(args: Namespace) -> str | None:
    """Set `--no-create-attention-mask-in-dataloader` where the mask would be the causal one.

    The dataset's [b, 1, s, s] mask differs from the causal mask only with `--reset-attention-mask`. Both
    local attentions make the causal mask themselves; without the tensor, torch's flash kernels can run and
    tensor-parallel ranks need not be sent it.

    Args:
        args: after validation, before the datasets and the configs are built from it.

    Returns:
        A line for the log where the argument changed, else None.
    """
    unneeded = args.transformer_impl == "local" and not args.reset_attention_mask
    if not (unneeded and args.create_attention_mask_in_dataloader):
        return None
    args.create_attention_mask_in_dataloader = False
    return "--no-create-attention-mask-in-dataloader: attention is causal, no mask tensor is needed"
