"""What TAGC's sketches could not recover: counted on the device, read at log intervals."""

import torch


class TagcMonitor:
    """Counters of a rank's decodes since the last reading."""

    def __init__(self) -> None:
        self._counters: torch.Tensor | None = None
        self._values = 0
        self._room = 0.0

    def add(self, counters: torch.Tensor, numel: int, room: float) -> None:
        """Take in one decode's ``[union, leftovers]``, of ``numel`` values; no synchronisation.

        ``room`` is how many of them the union could have been.
        """
        if self._counters is None:
            self._counters = torch.zeros(2, dtype=torch.int64, device=counters.device)
        self._counters += counters
        self._values += numel
        self._room += room

    def take(self) -> torch.Tensor:
        """float64 ``[4]``: values decoded, in the union, left over, and what unions could have been; resets.

        Waits for the device.
        """
        union, leftovers = self._counters.tolist() if self._counters is not None else (0, 0)
        reading = torch.tensor([self._values, union, leftovers, self._room], dtype=torch.float64)
        self.__init__()
        return reading


def monitor_line(reading: torch.Tensor) -> str:
    """What the log says of a reading summed over the ranks."""
    values, union, leftovers, room = reading.tolist()
    if not values:
        return "tagc: nothing was compressed; the shards are too small, or none is of --tagc-layers"
    line = f"tagc: density of the summed gradients {union / values:.4f}, exact up to {room / values:.4f}"
    if leftovers:
        return f"{line}; {leftovers:.0f} of {union:.0f} values were estimated, not recovered"
    return f"{line}; all {union:.0f} values recovered exactly"


def monitor_scalars(reading: torch.Tensor | None) -> dict[str, float]:
    """The same as scalars, for TensorBoard and the report's history; empty where nothing was decoded."""
    values, union, leftovers, room = reading.tolist() if reading is not None else (0, 0, 0, 0)
    if not values:
        return {}
    return {
        "tagc/density of the sum": union / values,
        "tagc/exact density": room / values,
        "tagc/values estimated": leftovers,
    }
