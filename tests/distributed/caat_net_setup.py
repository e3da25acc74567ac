"""What the tests of CAAT-Net share: its run, and parameters without symmetry."""

import zlib

import torch

from tests.distributed.tiny_gpt import TinyRun, run_with

BATCH = 2


def caat_run(fraction: float, codec: str = "none", **settings) -> TinyRun:
    """A run of this sync fraction."""
    return run_with(codec, sync_fraction=fraction, **settings)


def fill_parameters(model, rank: int) -> None:
    """Values without symmetry for every parameter: biases begin at zero and norms at one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            place = rank if getattr(parameter, "tensor_model_parallel", False) else 0
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + place)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter))
