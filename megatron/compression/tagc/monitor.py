"""What TAGC's sketches could not recover: counted on the device, read at log intervals."""

import torch

from taco_kernels.count_sketch import Decoded

WRONG = 0.3
"""Mean error of the median of three estimates, of the distance between the outer two: 0.23 to 0.32 was seen
from just above the bound to four times it."""


class TagcMonitor:
    """A ``Diagnostic``: counters of a rank's decodes since the last reading."""

    def __init__(self) -> None:
        self._buckets = 0
        self._reset()

    def _reset(self) -> None:
        self.sums = 0
        """Of buckets that were started: none while gradients go uncompressed."""
        self._counters: torch.Tensor | None = None
        self._estimates: torch.Tensor | None = None
        self._values = 0
        self._room = 0.0

    def first_bucket(self) -> bool:
        """Whether this is the first call."""
        self._buckets += 1
        return self._buckets == 1

    def add(self, decoded: Decoded, numel: int, room: float) -> None:
        """Take in what one decode counted, of ``numel`` values; no synchronisation.

        ``room`` is how many of them the union could have been.
        """
        if self._counters is None:
            device = decoded.counters.device
            self._counters = torch.zeros(2, dtype=torch.int64, device=device)
            self._estimates = torch.zeros(2, dtype=torch.float64, device=device)
        self._counters += decoded.counters
        self._estimates += decoded.estimates
        self._values += numel
        self._room += room

    def read(self) -> torch.Tensor:
        """float64 ``[7]``: values decoded, in the union, left over, what unions could have been, the two sums
        of ``Decoded.estimates``, and sums of buckets; resets.

        Waits for the device.
        """
        union, leftovers = self._counters.tolist() if self._counters is not None else (0, 0)
        estimates = self._estimates.tolist() if self._estimates is not None else (0, 0)
        numbers = [self._values, union, leftovers, self._room, *estimates, self.sums]
        self._reset()
        return torch.tensor(numbers, dtype=torch.float64)

    def lines(self, reading: torch.Tensor) -> list[str]:
        """What the log says of a reading summed over the ranks."""
        values, union, leftovers, room = reading[:4].tolist()
        if not reading[6]:
            return []
        if not values:
            return ["tagc: nothing was compressed; the shards are too small, or none is of its layers"]
        line = f"tagc: density of the summed gradients {union / values:.4f}, exact up to {room / values:.4f}"
        if not leftovers:
            return [f"{line}; all {union:.0f} values recovered exactly"]
        line += f"; {leftovers:.0f} of {union:.0f} values were estimated, not recovered, and are wrong by "
        return [f"{line}about {100 * _relative_error(reading):.0f} % of their size"]

    def scalars(self, reading: torch.Tensor) -> dict[str, float]:
        """The same as scalars, for TensorBoard and the report's history; empty where nothing was decoded."""
        values, union, leftovers, room = reading[:4].tolist()
        if not values:
            return {}
        return {
            "tagc/density of the sum": union / values,
            "tagc/exact density": room / values,
            "tagc/values estimated": leftovers,
            "tagc/relative error of estimates": _relative_error(reading),
        }


def _relative_error(reading: torch.Tensor) -> float:
    """Of the values that were estimated, about, in sums of magnitudes; 0 where all were recovered."""
    apart, size = reading[4:6].tolist()
    return WRONG * apart / size if size else 0.0
