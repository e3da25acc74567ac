"""torch's fused Adam on a GPU takes the steps of the unfused one."""

import torch

from megatron.compression.patches.gaps import fuse


def test_the_same_steps_as_unfused() -> None:
    """Ten steps end within rounding of the unfused optimizer's, also over a saved and loaded state."""
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
