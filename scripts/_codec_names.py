"""How the scripts name a setting of TACO in a word: ``fp8-e4m3``, ``int8:single``, ``int6:single:dither``."""

from taco_kernels import ROUNDINGS, SCALES


def parse_codec(text: str) -> dict[str, str]:
    """The codec's arguments (``build_codec("taco", **arguments)``) from its name.

    A format, then what differs from the defaults: scales, rounding; two with a comma for the two hops.

    Raises:
        ValueError: a part that is neither.
    """
    number_format, *options = text.split(":")
    codec = {"format": number_format}
    for option in options:
        if option in SCALES:
            codec["scales"] = option
        elif all(part in ROUNDINGS for part in option.split(",")):
            codec["rounding"] = option
        else:
            raise ValueError(f"{option} in {text}: choose from {', '.join(SCALES + ROUNDINGS)}")
    return codec


def taco_flags(text: str) -> list[str]:
    """The flags of a run that compresses every tensor-parallel message so; none for ``none``."""
    if text == "none":
        return []
    options = [word for name, value in parse_codec(text).items() for word in (f"--taco-{name}", value)]
    return ["--taco", *options, "--taco-min-message-mb", "0"]
