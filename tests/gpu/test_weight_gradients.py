"""On CUDA a weight gradient is added to main_grad by its GEMM: in place, in fp32, without a buffer."""

import pytest
import torch

from megatron.compression.tensor_parallel.functions import column_parallel_linear
from megatron.compression.torch_native.weight_gradient import add_product
from tests.unit.test_overlap import OneRankSite

TOKENS, OUT, IN = 4096, 2048, 1536


def products_peak(x: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor, halves: int) -> int:
    """Bytes that adding the product needs beside its operands; cuBLAS has its workspace already."""
    parts = list(zip(grad_output.chunk(halves, dim=1), main_grad.chunk(halves), strict=True))
    for part, rows in parts:
        add_product(x, part, rows.clone())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for part, rows in parts:
        add_product(x, part, rows)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("main", ["fp32", "weight's"])
def test_products_are_added_in_place(dtype: torch.dtype, main: str, halves: int) -> None:
    """Against float64: a product rounded to bf16 or fp16 first would be off by more than 2e-4."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = dict(device="cuda", generator=generator)
    x, grad_output = torch.randn(TOKENS, IN, **draw).to(dtype), torch.randn(TOKENS, OUT, **draw).to(dtype)
    main_dtype = torch.float32 if main == "fp32" else dtype
    main_grad = torch.randn(OUT, IN, **draw).to(main_dtype)
    wanted = main_grad.double() + grad_output.double().t() @ x.double()
    peak = products_peak(x, grad_output, main_grad, halves)
    assert peak < main_grad.nbytes / 8, "no copy of main_grad and no product beside it"
    error = float((main_grad.double() - wanted).abs().max() / wanted.abs().max())
    assert error < (5e-5 if main == "fp32" else torch.finfo(dtype).eps)


def test_a_layers_gradient_is_its_main_grads() -> None:
    """A compressed layer, in halves behind its exchange; few tokens, so that a buffer would show."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = dict(device="cuda", generator=generator)
    x = torch.randn(256, 2, IN, **draw).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(OUT, IN, **draw).bfloat16())
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(OUT, IN, device="cuda"), False
    grad_output = torch.randn(256, 2, OUT, **draw).bfloat16()
    product = grad_output.reshape(-1, OUT).double().t() @ x.detach().reshape(-1, IN).double()
    for added in (1, 2):
        out = column_parallel_linear(x, weight, None, OneRankSite([], "fc1"), False, fusion=True)
        weight.grad = x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out.backward(grad_output)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        torch.testing.assert_close(weight.main_grad.double(), 1 + added * product, rtol=1e-4, atol=1e-2)
    needed = 2 * x.nbytes + weight.nbytes  # the sum of the input gradient, what was summed; what DDP drops
    assert peak < needed + weight.main_grad.nbytes / 8
    assert weight.grad_added_to_main_grad and weight.grad.dtype == torch.bfloat16
