"""Gradient accumulation fusion on torch's own GEMMs: a weight's gradient is added to main_grad as
it is made.

    main_grad += grad_output.T @ x        fp32 sums of bf16 products, without a bf16 gradient

Where apex is installed its kernels do it. The protocol is that of megatron-core's linear layers:
DDP makes ``weight.main_grad`` and ``weight.grad_added_to_main_grad``, and its hook expects a
gradient that it drops.
"""

import torch

from megatron.compression.patches import gaps

try:
    import fused_weight_gradient_mlp_cuda as _apex
except ImportError:
    _apex = None


def add_product(x: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add ``grad_output.T @ x`` to ``main_grad`` in place, by torch; it has the signature of apex's
    functions.

    On CUDA that is one GEMM. Elsewhere the operands are cast to main_grad's dtype first.

    Args:
        x: input ``[n, h_in]`` of the layer.
        grad_output: gradient ``[n, h_out]`` of its output.
        main_grad: ``[h_out, h_in]``, fp32 or of the operands' dtype.
    """
    transposed = grad_output.t()
    if x.dtype == main_grad.dtype:
        main_grad.addmm_(transposed, x)
    elif main_grad.is_cuda:
        torch.addmm(main_grad, transposed, x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(transposed.to(main_grad.dtype), x.to(main_grad.dtype))


def accumulate(x: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add ``grad_output.T @ x`` to ``main_grad`` in place, by apex's kernels where it is installed.

    Args:
        x: input ``[n, h_in]`` of the layer.
        grad_output: gradient ``[n, h_out]`` of its output.
        main_grad: ``[h_out, h_in]``, fp32 or of the operands' dtype.
    """
    if _apex is None:
        add_product(x, grad_output, main_grad)
        return
    fp32 = main_grad.dtype == torch.float32
    kernel = _apex.wgrad_gemm_accum_fp32 if fp32 else _apex.wgrad_gemm_accum_fp16
    kernel(x.contiguous(), grad_output.contiguous(), main_grad)  # they take no strides


def dropped_gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """Return what a backward returns once the gradient is in main_grad: DDP's hook wants one, and
    drops it.

    Its values are undefined, but zero for a weight that embedding and output layer of one stage
    share (``zero_out_wgrad``): autograd adds the embedding's gradient, and the hook adds the sum to
    main_grad.

    Returns: A tensor like ``weight``, ``grad_added_to_main_grad`` being set. None where no DDP asks
        for it, and for a second use of the weight in one backward: DDP's hook runs once a backward.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    backward = torch._C._current_graph_task_id()  # -1 outside of a backward
    # A second use in one backward: the hook has been told already.
    if backward >= 0 and getattr(weight, "reported_in", -1) == backward:
        return None
    weight.grad_added_to_main_grad = True
    weight.reported_in = backward
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def fill_weight_gradient_slot() -> bool:
    """Make gradient accumulation fusion, Megatron's default, work without apex in models built from
    now on.

    Idempotent. Returns whether our function is in the slot.
    """
    if _apex is None:
        gaps.fill_weight_gradient_slot(add_product)
    return _apex is None
