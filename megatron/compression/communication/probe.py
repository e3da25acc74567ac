"""The error probe: how wrong compressed collectives were."""

from dataclasses import dataclass, field

import torch


@dataclass
class _ErrorSum:
    error_squares: torch.Tensor | float = 0.0
    signal_squares: torch.Tensor | float = 0.0
    samples: int = 0

    def add(self, error_squares: torch.Tensor, signal_squares: torch.Tensor) -> None:
        self.error_squares = self.error_squares + error_squares
        self.signal_squares = self.signal_squares + signal_squares
        self.samples += 1


@dataclass
class ErrorProbe:
    """Relative L2 error of the compressed collectives, per site and direction.

    Sums stay on the device until ``rows`` is called, so that observing never synchronises with the host.
    """

    interval: int = 0
    """Observe in every ``interval``-th iteration; 0 never."""
    sums: dict[tuple[str, str], _ErrorSum] = field(default_factory=dict)
    _last_seen: dict[tuple[str, str], int] = field(default_factory=dict)

    def due(self, site: str, traffic: str, iteration: int) -> bool:
        """Whether this call is the one to observe: the site's first in an iteration that is due."""
        if (
            not self.interval
            or iteration % self.interval
            or self._last_seen.get((site, traffic)) == iteration
        ):
            return False
        self._last_seen[site, traffic] = iteration
        return True

    def observe(self, site: str, traffic: str, exact: torch.Tensor, approximate: torch.Tensor) -> None:
        """Add one pair of tensors (any dtype, same shape); the error is taken in fp32."""
        exact = exact.float()
        difference = approximate.float() - exact
        self.sums.setdefault((site, traffic), _ErrorSum()).add(
            difference.square().sum(dtype=torch.float64), exact.square().sum(dtype=torch.float64)
        )

    def rows(self) -> list[dict]:
        """JSON-ready rows in the order of first observation; synchronises with the device."""
        rows = []
        for (site, traffic), sums in self.sums.items():
            signal = float(sums.signal_squares)
            error = float(sums.error_squares)
            relative = (error / signal) ** 0.5 if signal > 0 else 0.0 if error == 0 else float("inf")
            rows.append(
                {"site": site, "traffic": traffic, "relative_error": relative, "samples": sums.samples}
            )
        return rows
