"""pretrain_gpt.py whose second iteration has values that no lossless payload fits.

The environment variable POISON is a rank and what is poisoned on it: of the first layer's last GEMM
the input or the gradient of the weights. In the end a rank prints "observed" and JSON: passes of
that layer in training by iteration, and how often ranks have asked for overflows before they sent
activations or gradients, by phase and iteration.
"""

import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

import torch

POISONED_ITERATION = 2


def scattered(x: torch.Tensor) -> torch.Tensor:
    """Give every vector along the last dimensions an exponent of its own."""
    exponents = torch.randint(-20, 21, x.shape[:2], generator=torch.Generator().manual_seed(1))
    factors = torch.exp2(exponents.float()).to(x)
    while factors.dim() < x.dim():
        factors = factors.unsqueeze(-1)
    return x * factors


def main() -> None:  # noqa: C901  (observers are closures, one after the other)
    """Install the observers, then be pretrain_gpt.py."""
    from megatron.compression.frontends import megatron_lm

    megatron_lm.prepare()

    from megatron.training import get_args

    from megatron.compression.communication.transport import TorchTransport
    from megatron.compression.data_parallel import weights
    from megatron.compression.session import Session

    passes = Counter()
    asked = Counter()
    rank, _, poisoned = os.environ.get("POISON", "").partition(" ")
    if rank != os.environ["RANK"]:
        poisoned = ""
    any_rank = TorchTransport.any_rank
    attach_wrapped = Session.attach_wrapped
    training = None

    def iteration() -> int:
        return getattr(get_args(), "curr_iteration", 0) + 1

    def ask(self, flag) -> bool:
        # Questions about gathered weights are not counted.
        if sys._getframe(1).f_code.co_filename != weights.__file__:
            phase = "training" if training.training else "evaluation"
            asked[f"{phase} {iteration()}"] += 1
        return any_rank(self, flag)

    def before(module, inputs):
        if module.training:
            passes[iteration()] += 1
        if iteration() == POISONED_ITERATION and poisoned == "input":
            return scattered(inputs[0]), *inputs[1:]

    def poison_gradient(gradient: torch.Tensor) -> torch.Tensor:
        if iteration() == POISONED_ITERATION:
            return scattered(gradient)
        return gradient

    def attach(self, chunks):
        nonlocal training
        training = chunks[0]
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if name.endswith("decoder.layers.0.mlp.linear_fc2"):
                    module.register_forward_pre_hook(before)
                    if poisoned == "gradient":
                        module.weight.register_hook(poison_gradient)
        return attach_wrapped(self, chunks)

    TorchTransport.any_rank = ask
    Session.attach_wrapped = attach
    runpy.run_path(str(Path(__file__).parents[2] / "pretrain_gpt.py"), run_name="__main__")
    print("observed", json.dumps({"passes": passes, "asked": asked}), flush=True)


if __name__ == "__main__":
    main()
