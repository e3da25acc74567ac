"""The error probe: how wrong compressed collectives were."""

from dataclasses import dataclass, field

import torch


@dataclass
class ErrorProbe:
    """Relative L2 error of the compressed collectives, per site and direction.

    Sums stay on the device until ``rows`` is called, so that observing never synchronises with the host.
    """

    interval: int = 0
    """Observe in every ``interval``-th iteration; 0 never."""
    sums: dict[tuple[str, str], tuple[torch.Tensor | float, torch.Tensor | float, int]] = field(
        default_factory=dict
    )
    """By site and traffic class: squared error, squared signal, samples."""
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
        difference = approximate.float() - exact
        error, signal, samples = self.sums.get((site, traffic), (0.0, 0.0, 0))
        error = error + difference.square().sum(dtype=torch.float64)
        signal = signal + exact.square().sum(dtype=torch.float64)
        self.sums[site, traffic] = error, signal, samples + 1

    def rows(self) -> list[dict]:
        """JSON-ready rows in the order of first observation; synchronises with the device."""
        rows = []
        for (site, traffic), (*sums, samples) in self.sums.items():
            error, signal = map(float, sums)
            relative = (error / signal) ** 0.5 if signal > 0 else 0.0 if error == 0 else float("inf")
            rows.append({"site": site, "traffic": traffic, "relative_error": relative, "samples": samples})
        return rows
