"""What TAGC's sketches could not recover: counted on the device, read at log intervals."""

import torch

from taco_kernels.count_sketch import Decoded

WRONG = 0.3
"""Mean error of the median of three estimates, of the distance between the outer two: 0.23 to 0.32 was seen
from just above the bound to four times it."""


class TagcMonitor:
    """A ``Diagnostic``: what a rank's decodes counted since the last reading."""

    def __init__(self) -> None:
        self.sums = 0
        """Of buckets that were started: none while gradients go uncompressed."""
        self._host = [0.0, 0.0]  # values decoded, and what their unions could have been
        self._device: torch.Tensor | None = None

    def add(self, decoded: Decoded, numel: int, room: float) -> None:
        """Count one decode of ``numel`` values, whose union could have been ``room``; no synchronisation."""
        counted = torch.cat([decoded.counters.double(), decoded.estimates])
        self._device = counted if self._device is None else self._device + counted
        self._host = [self._host[0] + numel, self._host[1] + room]

    def read(self) -> torch.Tensor:
        """float64 ``[7]``: values decoded, what unions could have been, sums of buckets; values in the union,
        those left over, and the two sums of ``Decoded.estimates``. Resets; waits for the device."""
        counted = [0.0] * 4 if self._device is None else self._device.tolist()
        reading = torch.tensor([*self._host, self.sums, *counted], dtype=torch.float64)
        self.sums, self._host, self._device = 0, [0.0, 0.0], None
        return reading

    def lines(self, reading: torch.Tensor) -> list[str]:
        """What the log says of a reading summed over the ranks."""
        values, room, sums, union, leftovers = reading[:5].tolist()
        if not sums:
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
        values, room, _, union, leftovers = reading[:5].tolist()
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
    distance, size = reading[5:].tolist()
    return WRONG * distance / size if size else 0.0
