"""Codecs by site and layer, in one text: ``int6;fc2=int5;@0-1=int8;fc1@2-29,output=none``.

The first part is for every site that no later one names. A later part is SITE=SPEC, @LAYERS=SPEC or
SITE@LAYERS=SPEC, with SITE one of SITES and LAYERS as in ``--tp-compression-layers``; of several that name a
site the last counts.
"""

import functools
import re

from megatron.compression.codecs import Codec
from megatron.compression.communication.policy import SITES, Choice
from megatron.compression.dimension import codec_of
from megatron.compression.errors import CompressionConfigError

NAMED_LAYERS = ("embedding", "output")
"""What ``--tp-compression-layers`` calls the layers outside the transformer's numbered ones."""


@functools.cache
def parse_layers(text: str, flag: str = "--tp-compression-layers") -> frozenset[int | str] | None:
    """``0,4-6,output`` -> the layers it names: {0, 4, 5, 6, "output"}; None for ``all``.

    Raises: CompressionConfigError: something else than numbers, ranges, embedding, output.
    """
    if text == "all":
        return None
    layers: set[int | str] = set()
    for part in text.split(","):
        part = part.strip()
        found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part, re.ASCII)
        if part in NAMED_LAYERS:
            layers.add(part)
        elif found and int(found[1]) <= int(found[2] or found[1]):
            layers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
        else:
            raise CompressionConfigError(
                f"{flag} {text}: {part!r} is not a layer; give numbers from 0, ranges such as 2-29, "
                "embedding and output, separated by commas, or all"
            )
    return frozenset(layers)


@functools.cache
def parse_choices(text: str, flag: str) -> tuple[Codec | None, tuple[Choice, ...]]:
    """The codec of all sites, and those of some, last first.

    Raises: CompressionConfigError: a part that is none; the message names the flag.
    """
    first, *others = text.split(";")
    choices = []
    for part in others:
        where, equals, spec = part.strip().partition("=")
        site, at, layers = where.partition("@")
        if not equals or (not site and not at) or (site and site not in SITES):
            raise CompressionConfigError(
                f"{flag} {text}: {part.strip()!r} must be SITE=SPEC, @LAYERS=SPEC or SITE@LAYERS=SPEC, SITE "
                f"one of {', '.join(SITES)}"
            )
        codec = codec_of(spec, flag)
        choices.append(Choice(codec, site or None, parse_layers(layers, flag) if at else None))
    return codec_of(first.strip(), flag), tuple(reversed(choices))
