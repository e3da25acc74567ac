"""The lossless Triton kernels under Triton's CPU interpreter, against the reference, at tiny sizes."""

import pytest

from tests.kernels.interpreter import interpreted

pytestmark = pytest.mark.slow


def test_kernels_keep_every_bit() -> None:
    assert interpreted(main) == "18"


KINDS = {
    136: ("gaussian", "random bits", "negative zeros"),
    2051: ("gaussian", "heavy tails", "outliers", "some random bits", "nan", "one row does not fit"),
}


def main() -> int:
    """Encode and decode by kernels and reference, crosswise; exits with a traceback on a difference."""
    import torch

    from taco_kernels.lossless import FLAG_AT, launch, layout_of, reference
    from tests.kernels.wires.lossless import bits, cases

    count = 0
    for dtype in (torch.bfloat16, torch.float32):
        for numel in (136, 2051):
            layout = layout_of(numel, dtype, 0.07)
            for name, x in cases(2, numel, dtype, seed=numel):
                if name not in KINDS[numel]:
                    continue
                payloads, exact = launch.encode(x, layout), reference.encode(x, layout)
                assert torch.equal(payloads[:, FLAG_AT], exact[:, FLAG_AT]), (name, numel)
                expected = torch.where(exact[:, FLAG_AT, None] == 1, torch.zeros_like(x), x)
                for decode in (launch.decode, reference.decode):
                    for one in (payloads, exact):
                        assert torch.equal(bits(decode(one, layout)), bits(expected)), (name, numel, dtype)
                if numel == 2051:
                    shifted = torch.zeros(2, 2 * numel + 1, dtype=dtype)[:, 1 : numel + 1]
                    shifted.copy_(x)
                    into = torch.empty(2, numel + 3, dtype=dtype)[:, 3:]
                    launch.decode(launch.encode(shifted, layout), layout, into)
                    assert torch.equal(bits(into), bits(expected)), (name, "strides")
                # the interpreter cuts fp32 off to bf16, where devices round
                senders = torch.stack((payloads, exact, payloads))
                total = launch.decode_sum(senders, layout, torch.float32, 0.5)
                expected = reference.decode_sum(senders, layout, torch.float32, 0.5)
                assert torch.equal(total.nan_to_num(9.0), expected.nan_to_num(9.0)), (name, numel, dtype)
                count += 1
    return count
