"""Codes of fixed inputs, as one hash a codec: the definition's and its kernel's, under every version of Triton.

Values are multiples of 1/8 whose sums are exact in fp32, so that no order of summing matters. A hash that
differs is another wire format, or arithmetic that a version changed: ranks with both would not understand
each other. ``python -m tests.kernels.test_stored_codes`` prints the table. Two codecs have parts whose bits
are not fixed (``Encoder.fixed``); test_bits.py and wires/lossless.py say how far they are.
"""

import hashlib
import json
from collections.abc import Callable
from typing import NamedTuple

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
from tests.kernels.wires.lossless import in_order_of_tiles


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

LOSSLESS = LosslessLayout(256, torch.bfloat16)
CHANNELS = ChannelNormLayout(32, 256, NORMALISED)


def whole(wire: torch.Tensor) -> torch.Tensor:
    """Return all of a wire."""
    return wire


def codes_of_eight_bits(wires: torch.Tensor) -> torch.Tensor:
    """Return the codes of wires with dual scales: s and alpha are of a sum of squares, which is rounded."""
    return wires[:, : 32 * 256]


def escapes_in_order(payloads: torch.Tensor) -> torch.Tensor:
    """Return lossless payloads as the definition writes them: a kernel's tiles come in any order."""
    return in_order_of_tiles(payloads, LOSSLESS)


class Encoder(NamedTuple):
    """A codec's encoder, as plain torch and as a kernel."""

    definition: Callable[[torch.Tensor], torch.Tensor]
    kernel: Callable[[torch.Tensor], torch.Tensor]
    fixed: Callable[[torch.Tensor], torch.Tensor] = whole
    """The bytes of a wire on the host that are fixed to the last bit."""


ENCODERS: dict[str, Encoder] = {
    "taco fp8": Encoder(
        lambda x: taco.encode(x, FP8), lambda x: taco_launch.encode(x, FP8), codes_of_eight_bits
    ),
    "taco int8": Encoder(
        lambda x: taco.encode(x, INT8), lambda x: taco_launch.encode(x, INT8), codes_of_eight_bits
    ),
    "taco int6": Encoder(lambda x: taco.encode(x, INT6), lambda x: taco_launch.encode(x, INT6)),
    "taco int6 outliers": Encoder(
        lambda x: taco.encode(x, INT6_OUTLIERS), lambda x: taco_launch.encode(x, INT6_OUTLIERS)
    ),
    "taco int4": Encoder(lambda x: taco.encode(x, INT4), lambda x: taco_launch.encode(x, INT4)),
    "sdp4bit": Encoder(
        lambda x: sdp4bit.quantize(x, DIFFERENCES),
        lambda x: sdp4bit_launch.quantize(x, DIFFERENCES),
    ),
    "tah_quant": Encoder(
        lambda x: tah_quant.encode(x.view(4, 8, 256), TahConfig()),
        lambda x: tah_quant_launch.encode(x.view(4, 8, 256), TahConfig()),
    ),
    "lossless": Encoder(
        lambda x: lossless.encode(x, LOSSLESS),
        lambda x: lossless_launch.encode(x, LOSSLESS),
        escapes_in_order,
    ),
    "channel_norm": Encoder(
        lambda x: channel_norm.encode(x, CHANNELS),
        lambda x: channel_norm_launch.encode(x, CHANNELS),
    ),
}
"""Of each family, by name."""


def hash_of(wire: torch.Tensor, encoder: Encoder) -> str:
    """Return a hash of the fixed bytes of a wire on any device."""
    fixed = encoder.fixed(wire.cpu()).contiguous()
    return hashlib.sha256(fixed.numpy().tobytes()).hexdigest()[:16]


def hashes_of_kernels(device: str = "cpu") -> dict[str, str]:
    """Return the hash of what each kernel encodes, by name."""
    x = values().to(device)
    return {name: hash_of(encoder.kernel(x), encoder) for name, encoder in ENCODERS.items()}


def hashes_as_json() -> str:
    """Return ``hashes_of_kernels`` of this program, as JSON."""
    return json.dumps(hashes_of_kernels())


@pytest.fixture(scope="module")
def kernels() -> dict[str, str]:
    return json.loads(interpreted(hashes_as_json))


STORED = {
    "taco fp8": "7aeab2c1088050cd",
    "taco int8": "4b63fef434076063",
    "taco int6": "5e64f53691fe9304",
    "taco int6 outliers": "10a363b80b17bf9d",
    "taco int4": "46da6cbbb1f9d768",
    "sdp4bit": "36df5c541552f106",
    "tah_quant": "30d922fa4c05c61e",
    "lossless": "26fc3263b4065632",
    "channel_norm": "8f45d29a0dc141d1",
}


@pytest.mark.parametrize("name", ENCODERS)
def test_codes_are_those_of_every_version(name: str, kernels) -> None:
    encoder = ENCODERS[name]
    assert hash_of(encoder.definition(values()), encoder) == STORED[name]
    assert kernels[name] == STORED[name]


if __name__ == "__main__":
    for name, encoder in ENCODERS.items():
        print(f'    "{name}": "{hash_of(encoder.definition(values()), encoder)}",')
