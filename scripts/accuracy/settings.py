"""What a run compresses and how: the names of the results, each with the specs that it stands for."""

import re
import statistics
from dataclasses import asdict, dataclass

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.context_parallel.config import ContextParallelConfig
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.errors import CompressionConfigError
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig

RANKS = 4
"""Simulated ranks."""
MESSAGE = (1024, 4, 768)
"""Tokens, samples and channels of a message, by which bits a value are counted."""
LEGS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
"""Of expert parallelism, in the order in which a token and its gradient take them."""
PAIRS = tuple((f"{of}forward", f"{of}backward") for of in ("", "stage_", "context_"))
_FLAT = (*PAIRS[2], "gradients", "weights")
"""Ways whose messages are simulated as rows of values, without tokens and channels."""
_SENT_ONCE = {"-pp": (PipelineParallelConfig, PAIRS[1]), "-cp": (ContextParallelConfig, PAIRS[2])}
WAYS = (*(way for pair in PAIRS for way in pair), "gradients", "weights", *LEGS)
"""Everything that has a codec of its own."""
_SPECS: dict[str, str | tuple[str, str]] = {
    "none": "none",
    "none-tp2": "none",  # two ranks: the same mathematics, other roundings: the null comparison
    "paper": "taco",
    "fp8-plain": "taco:hadamard=off",
    "int6655-nearest": ("int6:scales=single", "int5:scales=single"),
    "int5655-nearest": ("int5:scales=single/int6:scales=single", "int5:scales=single"),
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
    "int6655-quadratic": ("int6", "int5"),
    "int5655-quadratic": ("int5/int6", "int5"),
    **{f"int{bits}-quadratic": f"int{bits}" for bits in (6, 5, 4)},
}
"""A setting's name to its spec, or to those of the forward and the backward."""
_ON_LEGS = {"": LEGS, "-dispatch": ("dispatch",), "-to-experts": ("dispatch", "combine_backward")}
"""What stands behind ``ep-CODEC``: which legs of expert parallelism go through the codec. DeepSeek-V3 (arXiv
2412.19437, section 3.3.2) has fp8 on the two that lead to the experts."""


@dataclass(frozen=True)
class Setting:
    """The codecs of each kind of parallelism's exchanges; exchange.py and data_parallel.py say what they
    encode."""

    name: str
    forward: str = "none"
    """Spec of the tensor-parallel activations' codec; ``FIRST/SECOND`` for one each in the two hops."""
    backward: str = "none"
    """The same of their gradients."""
    sequence_parallel: bool = False
    world_size: int = RANKS
    stage_forward: str = "none"
    """Specs of what pipeline stages send each other."""
    stage_backward: str = "none"
    gradients: str = "none"
    """Specs of what data parallelism sends: the gradients, and the changes of the weights."""
    weights: str = "none"
    unsharded: bool = False
    """Without the distributed optimizer: the gradients' sum is encoded once more and gathered."""
    context_forward: str = "none"
    """Specs of the keys and values that ranks with parts of a sequence gather, and of their gradients."""
    context_backward: str = "none"
    dispatch: str = "none"
    """Specs of the legs of expert parallelism."""
    combine: str = "none"
    combine_backward: str = "none"
    dispatch_backward: str = "none"

    def __post_init__(self) -> None:
        for way, codec in self.codecs.items():
            if codec is not None and codec.lossless:
                raise CompressionConfigError(f"{self.name}: {codec.name} changes no bit; leave it out")
            if codec is not None and codec.sees_shape and way in _FLAT:
                raise CompressionConfigError(
                    f"{self.name}: {codec.name} sees messages' shapes, which are not simulated; give another"
                )

    @property
    def codecs(self) -> dict[str, Codec | None]:
        """By direction, leg and what else has one; None: uncompressed."""
        specs = {way: getattr(self, way) for way in WAYS}
        return {way: None if spec == "none" else parse_codec(spec) for way, spec in specs.items()}

    @property
    def context_parallel(self) -> bool:
        """Whether ranks share sequences."""
        return any(getattr(self, way) != "none" for way in PAIRS[2])

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


def setting_of(name: str, ranks: int = RANKS) -> Setting:
    """The setting of a name of the results, or of any spec: of tensor parallelism (``-sp``: with sequence
    parallelism); behind ``ep-``, of the legs of expert parallelism; before ``-pp``, ``-cp`` and ``-dp``, of
    those flags (``-ddp``: without the distributed optimizer). Several kinds are joined by ``+``.

    What goes back, and data-parallel weights, go as those flags say, or as a second spec behind ``,,``.

    Args:
        ranks: of tensor parallelism.

    Raises:
        CompressionConfigError: none of these, one kind of parallelism twice, or what is not simulated.
    """
    kinds: set[str] = set()
    fields: dict = {"name": name, "world_size": ranks}
    for part in re.split(r"(?<!\+)\+(?=[a-z])", name):
        kind, found = _one_kind(part)
        if kind in kinds:
            raise CompressionConfigError(f"{name} has one kind of parallelism twice; leave one of them out")
        kinds.add(kind)
        fields |= found
    if "-cp" in kinds and len(kinds) > 1:
        raise CompressionConfigError(f"{name}: context parallelism is simulated alone; leave the others out")
    return Setting(**fields)


def _one_kind(name: str) -> tuple[str, dict]:
    """A kind of parallelism, and the fields of ``Setting`` that it sets."""
    unsharded = name.endswith("-ddp")
    kind = "-dp" if unsharded else name[-3:]
    there, _, other = name.removesuffix("-ddp" if unsharded else kind).partition(",,")
    if kind in _SENT_ONCE:
        config, pair = _SENT_ONCE[kind]
        sent = config(compression=there, backward=other or None)
        back = sent.backward_codec.name if sent.backward_codec else "none"
        return kind, dict(zip(pair, (sent.compression, back), strict=True))
    if kind == "-dp":
        if unsharded and other:
            raise CompressionConfigError(f"{name}: without the distributed optimizer no weights travel")
        replicas = DataParallelConfig(compression=there, weights="none" if unsharded else other or None)
        gradients, weights = getattr(replicas.compressor, "codec", None), replicas.weight_codec
        if replicas.feedback != "none" or (gradients is None and there != "none"):
            raise CompressionConfigError(f"{name}: error feedback is not simulated; give a codec without")
        names = (codec.name if codec else "none" for codec in (gradients, weights))
        return kind, dict(zip(("gradients", "weights"), names, strict=True)) | {"unsharded": unsharded}
    if name.startswith("ep-"):
        suffix = next(end for end in reversed(_ON_LEGS) if name.endswith(end))
        spec = name.removeprefix("ep-").removesuffix(suffix)
        return "ep", dict.fromkeys(_ON_LEGS[suffix], "taco" if spec == "fp8" else spec)
    base = name.removesuffix("-sp")
    found = _SPECS.get(base, base)
    forward, backward = (found, found) if isinstance(found, str) else found
    one = {"forward": forward, "backward": backward, "sequence_parallel": base != name}
    return "tp", one | ({"world_size": 2} if base == "none-tp2" else {})


def bits_of(setting: dict) -> float:
    """Mean bits a value of the setting of a record: over the hops of both directions, or over the four legs;
    of several kinds of parallelism, over those that are compressed."""
    codecs = Setting(**setting).codecs
    kinds = [[codecs[way] for way in kind] for kind in (*PAIRS, ("gradients", "weights"), LEGS)]
    compressed = [kind for kind in kinds if any(kind)]
    return statistics.fmean(statistics.fmean(map(_bits, kind)) for kind in compressed or [[None]])


def _bits(codec: Codec | None) -> float:
    return 16.0 if codec is None else statistics.fmean(hop.bits_per_value(MESSAGE) for hop in codec.hops)
