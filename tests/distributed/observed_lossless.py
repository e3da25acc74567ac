"""pretrain_gpt.py with values that no lossless payload fits in the second iteration, and what is seen of it.

The environment variable POISON is a rank and what is poisoned there: of the first layer's last GEMM the input
or the gradient of the weights. In the end a rank prints "observed" and JSON: passes of that layer in training
by iteration, and how often ranks have asked for overflows before they sent activations or gradients, by phase
and iteration.
"""

import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

import torch


def main() -> None:
    from megatron.compression.frontends import megatron_lm

    megatron_lm.prepare()

    from megatron.training import get_args

    from megatron.compression.communication.transport import TorchTransport
    from megatron.compression.data_parallel import weights
    from megatron.compression.session import Session

    passes, asked = Counter(), Counter()
    rank, _, poisoned = os.environ.get("POISON", "").partition(" ")
    poisoned = poisoned if rank == os.environ["RANK"] else ""
    any_rank, attach_wrapped = TorchTransport.any_rank, Session.attach_wrapped
    training = None

    def iteration() -> int:
        return getattr(get_args(), "curr_iteration", 0) + 1

    def ask(self, flag) -> bool:
        if sys._getframe(1).f_code.co_filename != weights.__file__:
            asked[f"{'training' if training.training else 'evaluation'} {iteration()}"] += 1
        return any_rank(self, flag)

    def scattered(x: torch.Tensor) -> torch.Tensor:
        """With exponents of their own along the first two dimensions."""
        exponents = torch.randint(-20, 21, x.shape[:2], generator=torch.Generator().manual_seed(1))
        return x * torch.exp2(exponents.float()).to(x).view(*x.shape[:2], *[1] * (x.dim() - 2))

    def before(module, inputs):
        if module.training:
            passes[iteration()] += 1
        if iteration() == 2 and poisoned == "input":
            return scattered(inputs[0]), *inputs[1:]

    def attach(self, chunks):
        nonlocal training
        training = chunks[0]
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if name.endswith("decoder.layers.0.mlp.linear_fc2"):
                    module.register_forward_pre_hook(before)
                    if poisoned == "gradient":
                        module.weight.register_hook(
                            lambda g: scattered(g) if iteration() == 2 else g
                        )
        return attach_wrapped(self, chunks)

    TorchTransport.any_rank, Session.attach_wrapped = ask, attach
    runpy.run_path(str(Path(__file__).parents[2] / "pretrain_gpt.py"), run_name="__main__")
    print("observed", json.dumps({"passes": passes, "asked": asked}), flush=True)


if __name__ == "__main__":
    main()
