"""What a simulated run compresses and how: the codecs of each kind of parallelism, from one name."""

import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

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
UNCOMPRESSED_BITS = 16.0
"""Bits a value of bf16."""
PAIRS = {
    "": ("forward", "backward"),
    "-pp": ("stage_forward", "stage_backward"),
    "-cp": ("context_forward", "context_backward"),
    "-dp": ("gradients", "weights"),
}
"""By the end of a name: the two messages of a kind of parallelism, which are fields of ``Setting``.
"""


@dataclass(frozen=True)
class Setting:
    """The codecs of every message, as specs. exchange.py and data_parallel.py say what is encoded."""

    name: str
    forward: str = "none"
    """Codec of the tensor-parallel activations; ``FIRST/SECOND``: one for each of the two hops."""
    backward: str = "none"
    """Codec of their gradients."""
    sequence_parallel: bool = False
    world_size: int = RANKS
    """Ranks of tensor parallelism."""
    stage_forward: str = "none"
    """Codec of the activations that pipeline stages send."""
    stage_backward: str = "none"
    """Codec of their gradients."""
    gradients: str = "none"
    """Codec of the gradients that data-parallel ranks sum."""
    weights: str = "none"
    """Codec of the changes of the weights, which data-parallel ranks gather."""
    unsharded: bool = False
    """Without the distributed optimizer: the gradients' sum is encoded once more and gathered."""
    context_forward: str = "none"
    """Codec of the keys and values that ranks with parts of a sequence gather."""
    context_backward: str = "none"
    """Codec of their gradients."""

    def __post_init__(self) -> None:
        for message, codec in self.codecs.items():
            if codec is None:
                continue
            if codec.lossless:
                raise CompressionConfigError(
                    f"{self.name}: {codec.name} changes no bit; leave it out"
                )
            if codec.sees_shape and message in PAIRS["-cp"]:
                raise CompressionConfigError(
                    f"{self.name}: {codec.name} sees messages' shapes, which are not simulated; give another"
                )

    @property
    def codecs(self) -> dict[str, Codec | None]:
        """The codec of each message, by its field of this class; None: uncompressed."""
        codecs: dict[str, Codec | None] = {}
        for pair in PAIRS.values():
            for message in pair:
                spec = getattr(self, message)
                codecs[message] = None if spec == "none" else parse_codec(spec)
        return codecs

    @property
    def context_parallel(self) -> bool:
        """Return whether ranks share sequences."""
        return any(getattr(self, message) != "none" for message in PAIRS["-cp"])

    @property
    def bits(self) -> float:
        """Mean bits a value over the compressed kinds of parallelism: both messages and all hops of
        each."""
        codecs = self.codecs
        means = []
        for pair in PAIRS.values():
            of_kind = [codecs[message] for message in pair]
            # A kind of parallelism that is not compressed does not count.
            if any(of_kind):
                means.append(statistics.fmean(bits_of(codec) for codec in of_kind))
        if not means:
            return UNCOMPRESSED_BITS
        return statistics.fmean(means)

    def as_dict(self) -> dict:
        """Return the fields, for JSON."""
        return asdict(self)


def bits_of(codec: Codec | None) -> float:
    """Return the mean bits a value over the hops of a codec."""
    if codec is None:
        return UNCOMPRESSED_BITS
    return statistics.fmean(hop.bits_per_value(MESSAGE) for hop in codec.hops)


def setting_of(name: str, ranks: int = RANKS) -> Setting:
    """Return the setting of a name: specs joined by ``+``, one for each kind of parallelism.

        SPEC        tensor parallelism            SPEC-sp     with sequence parallelism
        SPEC-pp     pipeline parallelism          SPEC-cp     context parallelism
        SPEC-dp     data parallelism              SPEC-ddp    without the distributed optimizer
        none-tp2    two uncompressed ranks; none-tp3: three

    ``SPEC,,SPEC`` has a second codec: of gradients that go back, or of data-parallel weights.
    Without it these are sent as the flags of a real run would have them.

    Args:
        name: the name.
        ranks: of tensor parallelism.

    Raises:
        CompressionConfigError: not a spec, one kind of parallelism twice, or what is not simulated.
    """
    kinds: set[str] = set()
    fields: dict[str, Any] = {"name": name, "world_size": ranks}
    # A + that begins another part stands before a letter, and not behind a + of a codec's own.
    for part in re.split(r"(?<!\+)\+(?=[a-z])", name):
        kind, part_fields = fields_of(part)
        if kind in kinds:
            raise CompressionConfigError(
                f"{name} has one kind of parallelism twice; leave one of them out"
            )
        kinds.add(kind)
        fields |= part_fields
    if "-cp" in kinds and len(kinds) > 1:
        raise CompressionConfigError(
            f"{name}: context parallelism is simulated alone; leave the others out"
        )
    return Setting(**fields)


def fields_of(part: str) -> tuple[str, dict[str, Any]]:
    """Return the kind of parallelism of a part of a name, a key of PAIRS, and the fields that it
    sets.

    Raises:
        CompressionConfigError: not a spec, or what is not simulated.
    """
    if part in ("none-tp2", "none-tp3"):
        return "", {"world_size": int(part[-1])}
    # Data parallelism has two endings; this one is longer than those of PAIRS.
    if part.endswith("-ddp"):
        return "-dp", data_parallel_fields(part, part.removesuffix("-ddp"), unsharded=True)
    kind = part[-3:]
    if kind not in PAIRS:
        # Tensor parallelism has no ending, or -sp. A recipe's name stands for both codecs; one
        # codec alone serves both directions.
        sequence_parallel = part.endswith("-sp")
        first, _, second = part.removesuffix("-sp").partition(",,")
        forward, backward = expand("tensor_parallel", first, second or None)
        specs = (forward, backward or forward)
        codecs = [None if spec == "none" else parse_codec(spec) for spec in specs]
        return "", {**names_of("", codecs), "sequence_parallel": sequence_parallel}
    specs_text = part.removesuffix(kind)
    if kind == "-dp":
        return kind, data_parallel_fields(part, specs_text, unsharded=False)
    first, _, second = specs_text.partition(",,")
    config_class = PipelineParallelConfig if kind == "-pp" else ContextParallelConfig
    # The configs know which codec goes back where the name does not say it.
    config = config_class(compression=first, backward=second or None)
    return kind, names_of(kind, [config.forward_codec, config.backward_codec])


def data_parallel_fields(part: str, specs: str, unsharded: bool) -> dict[str, Any]:
    """Return the fields of a part for data parallelism.

    Args:
        part: the part of the name, for errors.
        specs: its codec or two.
        unsharded: without the distributed optimizer.

    Raises:
        CompressionConfigError: not a spec, or what is not simulated.
    """
    first, _, second = specs.partition(",,")
    weights: str | None = second or None
    if unsharded:
        if second:
            raise CompressionConfigError(
                f"{part}: without the distributed optimizer no weights are sent"
            )
        weights = "none"
    config = DataParallelConfig(compression=first, weights=weights)
    # Compressors that are not codecs, such as tagc, have none.
    gradients = getattr(config.compressor, "codec", None)
    if gradients is None and first != "none":
        raise CompressionConfigError(f"{part}: only codecs of gradients are simulated; give one")
    return {**names_of("-dp", [gradients, config.weight_codec]), "unsharded": unsharded}


def names_of(kind: str, codecs: Iterable[Codec | None]) -> dict[str, str]:
    """Return the fields of the two messages of a kind of parallelism: the codecs' full names."""
    names = [codec.name if codec else "none" for codec in codecs]
    return dict(zip(PAIRS[kind], names, strict=True))
