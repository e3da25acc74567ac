"""What the tests of CAAT-Net share: its runtime, and parameters without symmetry."""

import zlib

import torch

from megatron.compression.config import CaatNetSettings, CompressionConfig, TensorParallelCompression
from megatron.compression.runtime import CompressionRuntime

BATCH = 2


def caat_runtime(fraction: float, **settings) -> CompressionRuntime:
    """A runtime of this sync fraction, without a codec unless ``settings`` choose one."""
    if settings:
        settings = {"tp_compression": "taco", "taco_min_message_mb": 0.0, **settings}
    return CompressionRuntime(
        CompressionConfig(
            tensor_parallel=TensorParallelCompression(**settings),
            caat_net=CaatNetSettings(caat_net_sync_fraction=fraction),
        )
    )


def fill_parameters(model, rank: int) -> None:
    """Values without symmetry for every parameter: biases begin at zero and norms at one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            place = rank if getattr(parameter, "tensor_model_parallel", False) else 0
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + place)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter))
