"""Configurations that the codec kernels' GPU tests compile: few, and every pair of choices."""

from dataclasses import replace
from typing import NamedTuple

import torch

from taco_kernels.taco import FORMATS, GROUP_SIZES, CodecConfig

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types of a tensor."""
SIGNED = (
    ("int4", 32, True),
    ("int4", 128, True),
    ("int5", 64, False),
    ("int5", 256, True),
    ("int6", 128, True),
    ("int6", 256, False),
    ("int8", 128, True),
    ("int8", 64, True),
)
"""Format, group size, whether transformed: integers whose step has a sign."""


class Case(NamedTuple):
    """A configuration and what runs in it."""

    config: CodecConfig
    """Of the codec."""
    dtype: torch.dtype
    """Of the tensor."""
    into: tuple[CodecConfig, ...]
    """What sums are encoded with."""
    decoded: bool
    """Whether sums are decoded."""


def another(config: CodecConfig) -> CodecConfig:
    """Return the config in another format."""
    if config.format == "int8":
        return replace(config, format="int6")
    return replace(config, format="int8")


def case_of(format: str, group_size: int) -> Case:
    """Return the case of a format and group size, not with signed scales.

    Encode and decode always run, the sums in turn. Over all cases every pair of format, group size,
    scales, dtype and operation occurs.
    """
    i = FORMATS.index(format)
    j = GROUP_SIZES.index(group_size)
    scales = ("dual", "single")[(i + j) % 2]
    config = CodecConfig(format, group_size, scales)
    into, decoded = (
        ((config,), True),
        ((config, another(config)), False),
        ((another(config),), True),
    )[(i // 2 + j) % 3]
    return Case(config, DTYPES[(i + j) % 3], into, decoded)
