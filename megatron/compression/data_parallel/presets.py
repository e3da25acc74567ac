"""Set-ups of data parallelism that a name stands for: what others' systems send, made of what is here."""

from typing import NamedTuple


class Preset(NamedTuple):
    """What a name given alone to ``--dp-compression`` means; each part has a flag that wins over it."""

    gradients: str
    weights: str = "none"
    """Of the distributed optimizer, where it has 16-bit weights."""
    error_feedback: str | None = None
    """None: the compressor's own choice."""


PRESETS = {
    "sdp4bit": Preset("sdp4bit", "sdp4bit:intra=4,group=2048,hadamard=off"),
    "lossless": Preset("lossless", "lossless"),
    "loco": Preset("sdp4bit:intra=4,hadamard=off", error_feedback="int8:average=0.2,reset=1024"),
    "zero++": Preset("sdp4bit:intra=4,hadamard=off", "sdp4bit:intra=8,inter=8,group=2048,hadamard=off"),
}
"""``sdp4bit``: gradients and weight changes as in arXiv 2410.15526.

``loco`` (arXiv 2407.04480): 4-bit gradients in both exchanges, errors in 8 bits as a moving average that is
forgotten at times; numbers as in DeepSpeed, which keeps 0.8 of the old error and forgets after 1024 steps.
There the exchange inside a node has a memory, too.

``zero++`` (arXiv 2306.10209): 4-bit gradients in both exchanges (qgZ) and 8-bit weights (qwZ), which here are
their changes. Its secondary shards (hpZ) are for weights that the forward pass gathers: ZeRO-3's.
"""
