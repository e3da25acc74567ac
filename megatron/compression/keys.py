"""64-bit keys of random number streams."""

_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mixed_key(*numbers: int) -> int:
    """One key of up to three numbers; those that differ in a number do not come out near each other."""
    pairs = zip(numbers, _FACTORS[: len(numbers)], strict=True)
    return sum(number * factor for number, factor in pairs) & (2**64 - 1)
