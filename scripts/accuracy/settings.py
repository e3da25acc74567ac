"""What a run compresses and how: a codec for each hop of each direction, written as short strings.

A codec is ``format[:option...]`` with the options of taco_kernels.CodecConfig in any order: a group size
(``128``), ``dual``, ``single`` or ``signed`` scales, ``nearest``, ``stochastic`` or ``dither`` rounding,
``plain`` for no Hadamard transform. ``fp8-tensor`` is fp8-e4m3 with one scale a tensor. ``none`` is no
compression.
"""

from dataclasses import asdict, dataclass

from taco_kernels import FORMATS, SCALES, CodecConfig

TENSOR_FP8 = "fp8-tensor"


def parse_codec(text: str) -> CodecConfig | str | None:
    """``int6:128:single:dither`` -> its CodecConfig; None for none; TENSOR_FP8 as it is.

    Raises:
        ValueError: an unknown option.
    """
    if text in ("none", TENSOR_FP8):
        return None if text == "none" else text
    number_format, *options = text.split(":")
    fields: dict = {"format": number_format}
    for option in options:
        if option.isdigit():
            fields["group_size"] = int(option)
        elif option in SCALES:
            fields["scales"] = option
        elif option == "plain":
            fields["hadamard"] = False
        else:
            fields["rounding"] = option
    return CodecConfig(**fields)


@dataclass(frozen=True)
class Setting:
    """A form of tensor parallelism and the codecs of its exchanges.

    Hop 1 encodes each rank's partial sum. Hop 2 of the two-shot form encodes their sum; with sequence
    parallelism it encodes what is all-gathered: the normalised activations (forward), and the gradients of
    the row-parallel outputs (backward).
    """

    name: str
    forward1: str = "none"
    forward2: str = "none"
    backward1: str = "none"
    backward2: str = "none"
    sequence_parallel: bool = False
    remove_mean: bool = False
    """Take the mean over the tokens out of what hop 2 encodes; it travels in bf16 beside it."""
    world_size: int = 4

    def __post_init__(self) -> None:
        for codec in self.codecs():
            parse_codec(codec)

    def codecs(self) -> tuple[str, str, str, str]:
        """Forward hop 1 and 2, backward hop 1 and 2."""
        return self.forward1, self.forward2, self.backward1, self.backward2

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


def everywhere(name: str, codec: str, **changes) -> Setting:
    """The same codec in both hops of both directions."""
    return Setting(name, codec, codec, codec, codec, **changes)


def bits_a_value(codec: str) -> float:
    """Bits on the wire for each value, scales included; 16 for none."""
    config = parse_codec(codec)
    if config is None:
        return 16.0
    if config == TENSOR_FP8:
        return 8.0
    return 8.0 * config.bytes_per_group() / config.group_size


PAPER = "fp8-e4m3:128:dual"
BITS = tuple(bits for bits in (8, 6, 5, 4, 3) if f"int{bits}" in FORMATS)


def _table() -> dict[str, Setting]:
    settings = [
        Setting("none"),
        Setting("none-tp2", world_size=2),  # the same mathematics, other roundings: the null comparison
        everywhere("paper", PAPER),
        everywhere("fp8-plain", "fp8-e4m3:128:dual:plain"),
        everywhere("fp8-tensor", TENSOR_FP8),
        everywhere("fp8-stochastic", "fp8-e4m3:128:dual:stochastic"),
        Setting("paper-forward", PAPER, PAPER),
        Setting("paper-backward", backward1=PAPER, backward2=PAPER),
        Setting("paper-hop1", forward1=PAPER, backward1=PAPER),
        Setting("paper-hop2", forward2=PAPER, backward2=PAPER),
        everywhere("paper-meanfree", PAPER, remove_mean=True),
    ]
    for bits in BITS:
        nearest, dither = f"int{bits}:128:single", f"int{bits}:128:single:dither"
        stochastic = f"int{bits}:128:single:stochastic"
        settings += [
            everywhere(f"int{bits}-nearest", nearest),
            everywhere(f"int{bits}-dither", dither),
            everywhere(f"int{bits}-stochastic", stochastic),
            everywhere(f"int{bits}-meanfree", nearest, remove_mean=True),
            everywhere(f"int{bits}-dither-meanfree", dither, remove_mean=True),
            Setting(f"int{bits}-dither-hop2", nearest, dither, nearest, dither),
            Setting(f"int{bits}-stochastic-hop2", nearest, stochastic, nearest, stochastic),
            Setting(f"int{bits}-nearest-forward", nearest, nearest),
            Setting(f"int{bits}-dither-forward", dither, dither),
            Setting(f"int{bits}-dither-backward", backward1=dither, backward2=dither),
        ]
        settings += [
            everywhere(f"int{bits}-{rounding}-g{group}", f"int{bits}:{group}:single:{rounding}")
            for rounding in ("nearest", "dither")
            for group in (32, 64, 256)
        ]
        settings += [
            everywhere(f"int{bits}-signed{suffix}", f"int{bits}:{group}:signed")
            for group, suffix in ((128, ""), (64, "-g64"), (32, "-g32"))
        ]
    for first in BITS:  # hop 1 coarse, hop 2 fine, or the other way round
        for second in BITS:
            if first != second:
                a, b = f"int{first}:128:single:dither", f"int{second}:128:single:dither"
                settings.append(Setting(f"int{first}-int{second}-dither", a, b, a, b))
    for hops in ("6655", "5655", "5645"):  # bits of forward hop 1 and 2, backward hop 1 and 2
        for name, options in (("nearest", "single:nearest"), ("signed", "signed")):
            settings.append(Setting(f"int{hops}-{name}", *(f"int{bits}:128:{options}" for bits in hops)))
    settings += [
        Setting(f"{s.name}-sp", *s.codecs(), sequence_parallel=True, remove_mean=s.remove_mean)
        for s in settings
        if s.world_size == 4
    ]
    return {s.name: s for s in settings}


SETTINGS = _table()
"""Every setting by name; ``-sp`` is the same with sequence parallelism."""
