"""What a run compresses and how: the names of the results, each with the specs that it stands for."""

import re
import statistics
from dataclasses import asdict, dataclass

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig

RANKS = 4
"""Simulated ranks."""
MESSAGE = (1024, 4, 768)
"""Tokens, samples and channels of a message, by which bits a value are counted."""
LEGS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
"""Of expert parallelism, in the order in which a token and its gradient take them."""
_SPECS: dict[str, str | tuple[str, str]] = {
    "none": "none",
    "none-tp2": "none",  # two ranks: the same mathematics, other roundings: the null comparison
    "paper": "taco",
    "paper-forward": ("taco", "none"),
    "paper-backward": ("none", "taco"),
    "fp8-plain": "taco:hadamard=off",
    "int6655-nearest": ("int6:scales=single", "int5:scales=single"),
    "int5655-nearest": ("int5:scales=single/int6:scales=single", "int5:scales=single"),
    "int6655-signed": ("int6", "int5"),
    "int5655-signed": ("int5/int6", "int5"),
    **{
        f"int{bits}-{name}": f"int{bits}{spec}"
        for bits in (8, 6, 5, 4)
        for name, spec in {
            "nearest": ":scales=single",
            "nearest-g32": ":group=32,scales=single",
            "signed": "",
            "signed-g64": ":group=64",
            "signed-g32": ":group=32",
        }.items()
    },
    "int6655-quadratic": ("int6:grid=quadratic", "int5:grid=quadratic"),
    "int5655-quadratic": ("int5:grid=quadratic/int6:grid=quadratic", "int5:grid=quadratic"),
    **{
        f"int{bits}-quadratic{name}": f"int{bits}:{group}grid=quadratic"
        for bits in (6, 5, 4)
        for name, group in {"": "", "-g64": "group=64,", "-g256": "group=256,"}.items()
    },
}
"""A setting's name to its spec, or to those of the forward and the backward."""
_ON_LEGS = {"": LEGS, "-dispatch": ("dispatch",), "-to-experts": ("dispatch", "combine_backward")}
"""What stands behind ``ep-CODEC``: which legs of expert parallelism go through the codec. DeepSeek-V3 (arXiv
2412.19437, section 3.3.2) has fp8 on the two that lead to the experts."""


@dataclass(frozen=True)
class Setting:
    """A form of parallelism and the codecs of its exchanges; see exchange.py for what they encode."""

    name: str
    forward: str = "none"
    """Spec of the activations' codec; ``FIRST/SECOND`` for one each in the two hops."""
    backward: str = "none"
    """The same of the gradients."""
    sequence_parallel: bool = False
    world_size: int = RANKS
    pipeline: bool = False
    """Whether the codecs encode what pipeline stages send each other instead."""
    dispatch: str = "none"
    """Specs of the legs of expert parallelism."""
    combine: str = "none"
    combine_backward: str = "none"
    dispatch_backward: str = "none"

    def __post_init__(self) -> None:
        _ = self.codecs

    @property
    def codecs(self) -> dict[str, Codec | None]:
        """By direction and leg; None: uncompressed."""
        specs = {way: getattr(self, way) for way in ("forward", "backward", *LEGS)}
        return {way: None if spec == "none" else parse_codec(spec) for way, spec in specs.items()}

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


def setting_of(name: str) -> Setting:
    """The setting of a name of the results (``-sp``: with sequence parallelism), or of any spec; behind
    ``ep-``, of the legs of expert parallelism.

    ``-pp`` behind a spec of ``--pp-compression``: between pipeline stages. Gradients go as that flag says, or
    as a second spec behind ``,,`` does.

    Raises:
        CompressionConfigError: neither.
    """
    if name.endswith("-pp"):
        there, _, back = name.removesuffix("-pp").partition(",,")
        config = PipelineParallelConfig(compression=there, backward=back or None)
        backward = config.backward_codec
        return Setting(name, config.compression, backward.name if backward else "none", pipeline=True)
    if name.startswith("ep-"):
        suffix = next(end for end in reversed(_ON_LEGS) if name.endswith(end))
        spec = name.removeprefix("ep-").removesuffix(suffix)
        return Setting(name, **dict.fromkeys(_ON_LEGS[suffix], "taco" if spec == "fp8" else spec))
    base = name.removesuffix("-sp")
    found = _SPECS.get(base, base)
    forward, backward = (found, found) if isinstance(found, str) else found
    return Setting(name, forward, backward, base != name, 2 if base == "none-tp2" else RANKS)


def bits_of(setting: dict) -> float:
    """Mean bits a value over the hops of both directions, or over the four legs, of the setting of a record.

    Records of 2026 spell codecs ``int6:128:single:dither``, one a hop, some with what there is no more.
    """
    if "forward1" in setting:
        hops = ("forward1", "forward2", "backward1", "backward2")
        return statistics.fmean(_old_bits(setting[hop]) for hop in hops)
    codecs = Setting(**setting).codecs
    if any(codecs[leg] for leg in LEGS):
        hops = [codecs[leg] for leg in LEGS]
    else:
        ways = codecs["forward"], codecs["backward"]
        hops = [hop for codec in ways for hop in (codec.hops if codec else (None, None))]
    return statistics.fmean(hop.bits_per_value(MESSAGE) if hop else 16.0 for hop in hops)


def _old_bits(codec: str) -> float:
    if codec in ("none", "fp8-tensor"):
        return 16.0 if codec == "none" else 8.0
    bits, group, scales = re.match(r"(?:int|fp)(\d)\S*?:(\d+):(\w+)", codec).groups()
    return int(bits) + (64 if scales == "dual" else 16) / int(group)
