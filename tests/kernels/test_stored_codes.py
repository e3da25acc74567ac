"""Codes of fixed inputs, as hashes: kernels and definitions keep theirs under every version of Triton.

Values are multiples of 1/8 whose sums are exact in fp32, so that no order of summing matters. A hash that
differs is another wire format, or arithmetic that a version changed: ranks with both would not understand
each other. ``python -m tests.kernels.test_stored_codes`` prints the table.
"""

import hashlib
import json
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from taco_kernels import channel_norm, lossless, sdp4bit, taco, tah_quant
from taco_kernels.channel_norm import ChannelNormLayout
from taco_kernels.channel_norm import launch as channel_norm_launch
from taco_kernels.lossless import LosslessLayout
from taco_kernels.lossless import launch as lossless_launch
from taco_kernels.sdp4bit import GroupFormat
from taco_kernels.sdp4bit import launch as sdp4bit_launch
from taco_kernels.taco import CodecConfig
from taco_kernels.taco import launch as taco_launch
from taco_kernels.tah_quant import TahConfig
from taco_kernels.tah_quant import launch as tah_quant_launch
from tests.kernels.interpreter import interpreted


def values() -> torch.Tensor:
    """Return bf16[32, 256]: multiples of 1/8 up to 8.125, and in every 37th place one that is 13 times that."""
    at = torch.arange(32 * 256, dtype=torch.int64)
    eighths = (at * 7919 + at * at * 104729) % 131 - 65
    eighths = torch.where(at % 37 == 0, eighths * 13, eighths)
    return (eighths / 8).bfloat16().view(32, 256)


FP8 = CodecConfig("fp8-e4m3")
INT8 = CodecConfig("int8")
INT6 = CodecConfig("int6", 128, "signed")
INT6_OUTLIERS = CodecConfig("int6", 128, "signed", outliers=True)
INT4 = CodecConfig("int4", 32, "single", hadamard=False)
NORMALISED = CodecConfig("int8", 64, "single", hadamard=False)
DIFFERENCES = GroupFormat(4, 128, False)

ENCODERS: dict[str, tuple[Callable, Callable]] = {
    "taco fp8": (lambda x: taco.encode(x, FP8), lambda x: taco_launch.encode(x, FP8)),
    "taco int8": (lambda x: taco.encode(x, INT8), lambda x: taco_launch.encode(x, INT8)),
    "taco int6": (lambda x: taco.encode(x, INT6), lambda x: taco_launch.encode(x, INT6)),
    "taco int6 outliers": (
        lambda x: taco.encode(x, INT6_OUTLIERS),
        lambda x: taco_launch.encode(x, INT6_OUTLIERS),
    ),
    "taco int4": (lambda x: taco.encode(x, INT4), lambda x: taco_launch.encode(x, INT4)),
    "sdp4bit": (
        lambda x: sdp4bit.quantize(x, DIFFERENCES),
        lambda x: sdp4bit_launch.quantize(x, DIFFERENCES),
    ),
    "tah_quant": (
        lambda x: tah_quant.encode(x.view(4, 8, 256), TahConfig()),
        lambda x: tah_quant_launch.encode(x.view(4, 8, 256), TahConfig()),
    ),
    "lossless": (
        lambda x: lossless.encode(x, LosslessLayout(256, torch.bfloat16)),
        lambda x: lossless_launch.encode(x, LosslessLayout(256, torch.bfloat16)),
    ),
    "channel_norm": (
        lambda x: channel_norm.encode(x, ChannelNormLayout(32, 256, NORMALISED)),
        lambda x: channel_norm_launch.encode(x, ChannelNormLayout(32, 256, NORMALISED)),
    ),
}
"""The definition and the kernel of each family, by name."""


def hash_of(wire: torch.Tensor) -> str:
    return hashlib.sha256(wire.contiguous().numpy().tobytes()).hexdigest()[:16]


def of_kernels() -> str:
    """Return JSON of the hashes of what the kernels encode, in this program."""
    return json.dumps({name: hash_of(kernel(values())) for name, (_, kernel) in ENCODERS.items()})


@pytest.fixture(scope="module")
def kernels() -> dict[str, str]:
    return json.loads(interpreted(of_kernels))


STORED = {
    "taco fp8": ("14c3265100ef8d6c", "1e42140214161d3a"),
    "taco int8": ("efcc7c4435d7fb8e", "c245236729e6c0ed"),
    "taco int6": ("5e64f53691fe9304", "5e64f53691fe9304"),
    "taco int6 outliers": ("10a363b80b17bf9d", "10a363b80b17bf9d"),
    "taco int4": ("46da6cbbb1f9d768", "bb16218db1572f48"),
    "sdp4bit": ("36df5c541552f106", "7f54cdd26cd0ab32"),
    "tah_quant": ("30d922fa4c05c61e", "30d922fa4c05c61e"),
    "lossless": ("26fc3263b4065632", "97ae7d774ea3f24f"),
    "channel_norm": ("8f45d29a0dc141d1", "860bf6920727beba"),
}
"""Of the definition and of the kernel in Triton 3.6's interpreter.

A kernel may have either hash. How far the two may be apart is tested by the families' own files. The kernels
of int4 and sdp4bit have the definition's codes since Triton 3.9, whose interpreter rounds differently."""


@pytest.mark.parametrize("name", ENCODERS)
def test_codes_are_those_of_every_version(name: str, kernels) -> None:
    definition, _ = ENCODERS[name]
    assert hash_of(definition(values())) == STORED[name][0]
    assert kernels[name] in STORED[name]


if __name__ == "__main__":
    from tests.kernels import test_stored_codes as this_module

    of_all_kernels = json.loads(interpreted(this_module.of_kernels))
    for name, (definition, _) in ENCODERS.items():
        print(f'    "{name}": ("{hash_of(definition(values()))}", "{of_all_kernels[name]}"),')
