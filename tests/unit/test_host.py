"""Products of matrices on CPUs without bf16 instructions; what does not run there."""

import pytest
import torch

from megatron.compression.errors import InputError
from megatron.host import cuda


def test_megatron_fsdp_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--use-megatron-fsdp"])
    with pytest.raises(InputError, match="; use --use-torch-fsdp2"):
        cuda.install_devices()


def random(seed: int) -> torch.Tensor:
    return torch.randn(7, 7, generator=torch.Generator().manual_seed(seed))


def test_a_product_of_bf16_is_rounded_once() -> None:
    """It is computed in fp32, the addend included."""
    first = random(1).bfloat16()
    second = random(2).bfloat16()
    actual = cuda._in_fp32(torch.ops.aten.addmm.out, first, first, second, beta=0.5)
    expected = 0.5 * first.float() + first.float() @ second.float()
    assert torch.equal(actual, expected.bfloat16())


def test_a_product_of_fp32_stays_as_it_is() -> None:
    first = random(1)
    second = random(2)
    assert torch.equal(cuda._in_fp32(torch.ops.aten.mm.out, first, second), first @ second)
