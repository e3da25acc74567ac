"""What a run compresses and how: the specs of each kind of parallelism, from one name."""

import re
import statistics
from dataclasses import asdict, dataclass

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.codecs.recipes import expand
from megatron.compression.context_parallel.config import ContextParallelConfig
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.errors import CompressionConfigError
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig

RANKS = 4
"""Simulated ranks."""
MESSAGE = (1024, 4, 768)
"""Tokens, samples and channels of a message, by which bits a value are counted."""
PAIRS = {
    "": ("forward", "backward"),
    "-pp": ("stage_forward", "stage_backward"),
    "-cp": ("context_forward", "context_backward"),
    "-dp": ("gradients", "weights"),
}
"""By the end of a name: the two messages of a kind of parallelism."""


@dataclass(frozen=True)
class Setting:
    """Specs of the codecs of every message; exchange.py and data_parallel.py say what is encoded."""

    name: str
    forward: str = "none"
    """Of the tensor-parallel activations; ``FIRST/SECOND`` for one each in the two hops."""
    backward: str = "none"
    """Of their gradients."""
    sequence_parallel: bool = False
    world_size: int = RANKS
    """Of tensor parallelism."""
    stage_forward: str = "none"
    """Of what pipeline stages send each other."""
    stage_backward: str = "none"
    gradients: str = "none"
    """Of what data parallelism sends: the gradients, and the changes of the weights."""
    weights: str = "none"
    unsharded: bool = False
    """Without the distributed optimizer: the gradients' sum is encoded once more and gathered."""
    context_forward: str = "none"
    """Of the keys and values that ranks with parts of a sequence gather, and of their gradients."""
    context_backward: str = "none"

    def __post_init__(self) -> None:
        for way, codec in self.codecs.items():
            if codec is not None and codec.lossless:
                raise CompressionConfigError(
                    f"{self.name}: {codec.name} changes no bit; leave it out"
                )
            if codec is not None and codec.sees_shape and way in PAIRS["-cp"]:
                raise CompressionConfigError(
                    f"{self.name}: {codec.name} sees messages' shapes, which are not simulated; give another"
                )

    @property
    def codecs(self) -> dict[str, Codec | None]:
        """By message; None: uncompressed."""
        specs = {way: getattr(self, way) for pair in PAIRS.values() for way in pair}
        return {way: None if spec == "none" else parse_codec(spec) for way, spec in specs.items()}

    @property
    def context_parallel(self) -> bool:
        """Whether ranks share sequences."""
        return any(getattr(self, way) != "none" for way in PAIRS["-cp"])

    @property
    def bits(self) -> float:
        """Mean bits a value over the compressed kinds of parallelism, both messages and all hops of each."""
        codecs = self.codecs
        kinds = [[codecs[way] for way in pair] for pair in PAIRS.values()]
        means = [statistics.fmean(map(_bits, kind)) for kind in kinds if any(kind)]
        return statistics.fmean(means or [16.0])

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


def _bits(codec: Codec | None) -> float:
    return (
        16.0
        if codec is None
        else statistics.fmean(hop.bits_per_value(MESSAGE) for hop in codec.hops)
    )


def setting_of(name: str, ranks: int = RANKS) -> Setting:
    """The setting of specs joined by ``+``: ``SPEC`` of tensor parallelism (``-sp``: with sequence
    parallelism; ``none-tp2``: two uncompressed ranks), and with ``-pp``, ``-cp``, ``-dp`` at its end of those
    flags (``-ddp``: without the distributed optimizer). ``SPEC,,SPEC`` has a second one of what goes back, or
    of data-parallel weights; without it these are sent as the flags would.

    Raises: CompressionConfigError: not a spec, one kind of parallelism twice, or what is not simulated.
    """
    kinds: set[str] = set()
    fields: dict = {"name": name, "world_size": ranks}
    for part in re.split(r"(?<!\+)\+(?=[a-z])", name):
        kind, found = _one_kind(part)
        if kind in kinds:
            raise CompressionConfigError(
                f"{name} has one kind of parallelism twice; leave one of them out"
            )
        kinds.add(kind)
        fields |= found
    if "-cp" in kinds and len(kinds) > 1:
        raise CompressionConfigError(
            f"{name}: context parallelism is simulated alone; leave the others out"
        )
    return Setting(**fields)


def _one_kind(name: str) -> tuple[str, dict]:
    """A kind of parallelism, and the fields of ``Setting`` that it sets."""
    if name == "none-tp2":
        return "", {"world_size": 2}
    unsharded = name.endswith("-ddp")
    kind = "-dp" if unsharded else name[-3:] if name[-3:] in PAIRS else ""
    end = "-ddp" if unsharded else kind or "-sp"
    there, _, other = name.removesuffix(end).partition(",,")
    if kind == "-dp":
        if unsharded and other:
            raise CompressionConfigError(
                f"{name}: without the distributed optimizer no weights are sent"
            )
        replicas = DataParallelConfig(
            compression=there, weights="none" if unsharded else other or None
        )
        gradients = getattr(replicas.compressor, "codec", None)
        if gradients is None and there != "none":
            raise CompressionConfigError(
                f"{name}: only codecs of gradients are simulated; give one"
            )
        codecs = (gradients, replicas.weight_codec)
        more = {"unsharded": unsharded}
    elif kind:
        config = {"-pp": PipelineParallelConfig, "-cp": ContextParallelConfig}[kind]
        sent = config(compression=there, backward=other or None)
        codecs, more = (sent.forward_codec, sent.backward_codec), {}
    else:
        there, backward = expand("tensor_parallel", there, other or None)
        specs = there, backward or there
        codecs = tuple(None if spec == "none" else parse_codec(spec) for spec in specs)
        more = {"sequence_parallel": name.endswith("-sp")}
    names = (codec.name if codec else "none" for codec in codecs)
    return kind, dict(zip(PAIRS[kind], names, strict=True)) | more
