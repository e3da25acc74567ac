"""What TAGC's sketches could not recover: counted on the device, read at log intervals."""

from collections.abc import Callable

import torch

from taco_kernels.homomorphic import Decoded

WRONG = 0.3
"""Mean error of the median of three estimates, of the distance between the outer two: 0.23 to 0.32 was seen
from just above the bound to four times it."""


class TagcMonitor:
    """Counters of a rank's decodes since the last reading."""

    def __init__(self) -> None:
        self._counters: torch.Tensor | None = None
        self._estimates: torch.Tensor | None = None
        self._values = 0
        self._room = 0.0

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

    def take(self) -> torch.Tensor:
        """float64 ``[6]``: values decoded, in the union, left over, what unions could have been, and the two
        sums of ``Decoded.estimates``; resets.

        Waits for the device.
        """
        union, leftovers = self._counters.tolist() if self._counters is not None else (0, 0)
        estimates = self._estimates.tolist() if self._estimates is not None else (0, 0)
        numbers = [self._values, union, leftovers, self._room, *estimates]
        reading = torch.tensor(numbers, dtype=torch.float64)
        self.__init__()
        return reading


class SketchDiagnostic:
    """The monitor as the reporter takes it.

    Args:
        monitor: counts.
        kind: how gradients travel now; before they are compressed there is nothing to say.
    """

    def __init__(self, monitor: TagcMonitor, kind: Callable[[], str]) -> None:
        self.monitor, self.kind = monitor, kind

    def read(self) -> torch.Tensor:
        """See ``TagcMonitor.take``."""
        return self.monitor.take()

    def lines(self, reading: torch.Tensor) -> list[str]:
        """See ``monitor_line``."""
        return [monitor_line(reading)] if self.kind() == "compressed" else []

    def scalars(self, reading: torch.Tensor) -> dict[str, float]:
        """See ``monitor_scalars``."""
        return monitor_scalars(reading)


def monitor_line(reading: torch.Tensor) -> str:
    """What the log says of a reading summed over the ranks."""
    values, union, leftovers, room = reading[:4].tolist()
    if not values:
        return "tagc: nothing was compressed; the shards are too small, or none is of --tagc-layers"
    line = f"tagc: density of the summed gradients {union / values:.4f}, exact up to {room / values:.4f}"
    if leftovers:
        line += f"; {leftovers:.0f} of {union:.0f} values were estimated, not recovered, and are wrong by "
        return f"{line}about {100 * _relative_error(reading):.0f} % of their size"
    return f"{line}; all {union:.0f} values recovered exactly"


def monitor_scalars(reading: torch.Tensor) -> dict[str, float]:
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
    apart, size = reading[4:].tolist()
    return WRONG * apart / size if size else 0.0
