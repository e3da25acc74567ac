"""Products of matrices on CPUs without bf16 instructions; what does not run there."""

import pytest
import torch

from megatron.compression.errors import InputError
from megatron.host import cuda


def test_megatron_fsdp_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--use-megatron-fsdp"])
    with pytest.raises(InputError, match="; use --use-torch-fsdp2"):
        cuda.install_devices()


def test_a_product_of_bf16_is_rounded_once() -> None:
    x, y = (torch.randn(7, 7, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    a, b = x.bfloat16(), y.bfloat16()
    found = cuda._in_fp32(torch.ops.aten.addmm.out, a, a, b, beta=0.5)
    assert torch.equal(found, (0.5 * a.float() + a.float() @ b.float()).bfloat16())
    assert torch.equal(cuda._in_fp32(torch.ops.aten.mm.out, x, y), x @ y)
