"""The error probe: how wrong compressed collectives were."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron.compression.communication import massive


@dataclass
class _Seen:
    """What was observed of a site's traffic; on the device."""

    squares: torch.Tensor
    """``massive.squares``, summed."""
    peak: torch.Tensor
    """The largest ``massive.peak``."""
    samples: int = 1


@dataclass
class ErrorProbe:
    """Relative L2 error of the compressed collectives, per site and direction, and their massive values.

    Sums stay on the device until ``rows`` is called, so that observing never synchronises with the host.
    """

    interval: int = 0
    """Observe in every ``interval``-th iteration; 0 never."""
    seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)
    """By site and traffic class."""
    _last_seen: dict[tuple[str, str], int] = field(default_factory=dict)

    def due(self, site: str, traffic: str, iteration: int) -> bool:
        """Whether this call is the one to observe: the site's first in an iteration that is due."""
        seen = self._last_seen.get((site, traffic)) == iteration
        if seen or not self.interval or iteration % self.interval:
            return False
        self._last_seen[site, traffic] = iteration
        return True

    def observe(self, site: str, traffic: str, exact: torch.Tensor, approximate: torch.Tensor) -> None:
        """Add one pair of tensors (any dtype, same shape); the error is taken in fp32."""
        exact = exact.float()
        difference = massive.in_groups(approximate.float() - exact)
        found = _Seen(massive.squares(massive.in_groups(exact), difference), massive.peak(exact))
        before = self.seen.get((site, traffic))
        if before is not None:
            found.squares = found.squares + before.squares
            found.peak, found.samples = torch.maximum(found.peak, before.peak), before.samples + 1
        self.seen[site, traffic] = found

    def kept(self) -> Callable[[], None]:
        """What forgets again whatever is observed from now on."""
        seen, last_seen = dict(self.seen), dict(self._last_seen)

        def restore() -> None:
            self.seen, self._last_seen = seen, last_seen

        return restore

    def rows(self) -> list[dict]:
        """JSON-ready rows in the order of first observation; synchronises with the device.

        ``ordinary_error`` is the relative error of the values that are not massive, ``peak`` the largest
        value over the median, None where the median was 0.
        """
        rows = []
        for (site, traffic), seen in self.seen.items():
            relative, ordinary = (_relative(error, signal) for error, signal in seen.squares.tolist())
            row = {"site": site, "traffic": traffic, "relative_error": relative, "ordinary_error": ordinary}
            peak = float(seen.peak)
            rows.append(row | {"peak": peak if math.isfinite(peak) else None, "samples": seen.samples})
        return rows


def _relative(error: float, signal: float) -> float:
    return (error / signal) ** 0.5 if signal > 0 else 0.0 if error == 0 else float("inf")
