"""Gradient accumulation fusion on torch's own GEMMs: a weight's gradient is added to main_grad as it is made.

    main_grad += grad_output.T @ x        fp32 sums of bf16 products, no bf16 gradient and no add in between

Where apex is installed its kernels do it. The protocol is that of megatron-core's linear layers: DDP makes
``weight.main_grad`` and ``weight.grad_added_to_main_grad``, and its hook expects a gradient that it drops.
"""

import torch

from megatron.compression.patches import gaps

try:
    import fused_weight_gradient_mlp_cuda as _apex
except ImportError:
    _apex = None


def add_product(x: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """``main_grad [h_out, h_in] += grad_output.T @ x`` by torch, in place; has the signature of apex's
    functions. On CUDA one GEMM; elsewhere the operands are cast to main_grad's dtype, fp32 or theirs."""
    left = grad_output.t()
    if x.dtype == main_grad.dtype:
        main_grad.addmm_(left, x)
    elif main_grad.is_cuda:
        torch.addmm(main_grad, left, x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(left.to(main_grad.dtype), x.to(main_grad.dtype))


def accumulate(x: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """As ``add_product``, by apex's kernels where it is installed."""
    if _apex is None:
        add_product(x, grad_output, main_grad)
        return
    fp32 = main_grad.dtype == torch.float32
    kernel = _apex.wgrad_gemm_accum_fp32 if fp32 else _apex.wgrad_gemm_accum_fp16
    kernel(x.contiguous(), grad_output.contiguous(), main_grad)  # they take no strides


def dropped_gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """What a backward returns once the gradient is in main_grad: DDP's hook wants one, and drops it.

    Its values are undefined, but zero for a weight that embedding and output layer of one stage share
    (``zero_out_wgrad``): autograd adds the embedding's gradient, and the hook adds the sum to main_grad.

    Returns: A tensor like ``weight``, ``grad_added_to_main_grad`` being set. None where no DDP asks for it,
        and for a second use of the weight in one backward: DDP's hook runs once a backward.
    """
    backward = torch._C._current_graph_task_id()
    if (
        not hasattr(weight, "grad_added_to_main_grad")
        or getattr(weight, "reported_in", -1) == backward >= 0
    ):
        return None
    weight.grad_added_to_main_grad, weight.reported_in = True, backward
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight)


def fill_weight_gradient_slot() -> bool:
    """Make gradient accumulation fusion, Megatron's default, work without apex in models built from now on;
    whether our function is in the slot. Idempotent."""
    if _apex is None:
        gaps.fill_weight_gradient_slot(add_product)
    return _apex is None
