"""A weight gradient is added to main_grad by its GEMM, in place and in fp32; Adam is fused."""

from collections.abc import Callable

import pytest
import torch

from megatron.compression.patches.gaps import fuse
from megatron.compression.tensor_parallel.weight_gradient import add_product

TOKENS = 4096
OUT = 2048
IN = 1536


def peak_of(call: Callable[[], None]) -> int:
    """Return the bytes that the call needs in addition to what is allocated."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("main", ["fp32", "weight's"])
def test_products_are_added_in_place(dtype: torch.dtype, main: str, halves: int) -> None:
    """Against float64: a product rounded to bf16 or fp16 first would be off by more than 2e-4."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = dict(device="cuda", generator=generator)
    x = torch.randn(TOKENS, IN, **draw).to(dtype)
    grad_output = torch.randn(TOKENS, OUT, **draw).to(dtype)
    main_dtype = torch.float32 if main == "fp32" else dtype
    main_grad = torch.randn(OUT, IN, **draw).to(main_dtype)
    expected = main_grad.double() + grad_output.double().t() @ x.double()
    parts = list(zip(grad_output.chunk(halves, dim=1), main_grad.chunk(halves), strict=True))
    for part, rows in parts:
        add_product(x, part, rows.clone())  # cuBLAS allocates its workspace
    peak = peak_of(lambda: [add_product(x, part, rows) for part, rows in parts])
    assert peak < main_grad.nbytes / 8, "no copy of main_grad and no product beside it"
    error = float((main_grad.double() - expected).abs().max() / expected.abs().max())
    assert error < (5e-5 if main == "fp32" else torch.finfo(dtype).eps)


def test_fused_adam_steps_as_the_unfused() -> None:
    """Ten steps end within rounding of the unfused one's, also over a saved and loaded state."""
    generator = torch.Generator("cuda").manual_seed(0)
    start = [torch.randn(n, device="cuda", generator=generator) for n in (1000, 37)]
    ends = []
    for fused in (False, True):
        params = [torch.nn.Parameter(value.clone()) for value in start]
        optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
        assert not fused or fuse(optimizer)
        for step in range(10):
            if step == 5:
                state = optimizer.state_dict()
                optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
                assert not fused or fuse(optimizer)
                optimizer.load_state_dict(state)
            for index, param in enumerate(params):
                param.grad = torch.sin(param.detach() * (step + 1 + index))
            optimizer.step()
        ends.append(torch.cat([param.detach() for param in params]))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
