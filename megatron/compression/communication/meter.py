"""The error meter: what codecs do to what each site sends, for the report and for the error bound.

Each rank encodes and decodes a sample of its own tensors, in the last iteration before a log line. With a
bound, the ranks that share a site add up their sums there and decide alike. Errors are also measured without
outliers, which hide them: a group that has lost the other 127 values has a relative error of 0.9 %.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.compression.codecs import Codec
from megatron.compression.communication.objects import gather_objects
from taco_kernels.taco.outliers import is_outlier

GROUP = 128
SAMPLE_VALUES = 2**18
"""At most so many values of a tensor are measured, whole groups at equal distances."""

SiteTraffic = tuple[str, str]
"""(name of the site, traffic class)."""


class ErrorMeter:
    """Relative L2 error of one encoding, by site and traffic class.

    Args:
        bound: ``--compression-error-bound``; a site's traffic whose error is larger goes uncompressed from
            then on: of all values or of those without outliers, whichever is larger. None: nothing does.
        interval: measure in the last of this many iterations (``--log-interval``); 0 never.
    """

    def __init__(self, bound: float | None = None, interval: int = 0) -> None:
        self.bound, self.interval = bound, interval
        self.also_first = False
        """Measure the first message of each kind as well: with CUDA graphs, since replays measure nothing."""
        self.tripped: dict[SiteTraffic, float] = {}
        """What goes uncompressed, with the error that decided it."""
        self._seen: dict[SiteTraffic, tuple[torch.Tensor, torch.Tensor, int]] = {}
        """``squares``, summed, the largest ``peak``, both on the device, and the number of samples."""
        self._undecided: dict[SiteTraffic, torch.Tensor] = {}
        self._last: dict[SiteTraffic, int] = {}

    def due(self, site: str, traffic: str, iteration: int) -> bool:
        """Return whether to measure this message: the first of its kind in the last of ``interval``
        iterations. ``Policy.measures`` asks, where measuring is possible at all."""
        if not self.interval:
            return False
        before = self._last.get((site, traffic))
        if not self.ends_interval(iteration) and not (self.also_first and before is None):
            return False
        self._last[site, traffic] = iteration
        return before != iteration

    def ends_interval(self, iteration: int) -> bool:
        """Whether an iteration, counted from 0, is the last of ``interval``."""
        return bool(self.interval) and (iteration + 1) % self.interval == 0

    def measure(
        self, site: str, traffic: str, tensor: torch.Tensor, codec: Codec, bounded: bool = True
    ) -> None:
        """Encode and decode a sample of ``tensor`` and keep the squared error and signal. Of two hops of a
        codec the larger error counts. Groups with a NaN or Inf are left out: they are the loss scaler's.
        ``bounded``: the bound concerns it, so every rank that shares the site measures it."""
        if codec.lossless or not tensor.numel():
            return
        tensor = tensor.detach()
        sample = (
            tensor
            if codec.sees_shape
            else _sample(tensor, codec.block if codec.block > 1 else GROUP)
        )
        finite = sample.isfinite()
        finite = finite.all() if codec.sees_shape else finite.all(dim=-1, keepdim=True)
        exact, found = sample.float(), []
        for hop in dict.fromkeys(codec.hops):
            decoded = hop.decode(hop.encode(sample[None]), sample.shape, sample.dtype)[0]
            both = (one.masked_fill(~finite, 0.0) for one in (exact, decoded.float() - exact))
            found.append(squares(*map(_in_groups, both)))
        measured = torch.stack(found).amax(0)
        total, largest, samples = measured, peak(tensor), 1
        if (before := self._seen.get((site, traffic))) is not None:
            total, largest = before[0] + measured, torch.maximum(before[1], largest)
            samples += before[2]
        self._seen[site, traffic] = total, largest, samples
        if bounded and self.bound is not None:
            self._undecided[site, traffic] = measured

    def kept(self) -> Callable[[], None]:
        """What forgets again whatever is measured from now on."""
        kept = dict(self._seen), dict(self._undecided), dict(self._last)

        def restore() -> None:
            self._seen, self._undecided, self._last = kept

        return restore

    def decide(
        self, sharing: dist.ProcessGroup | None = None, stages: dist.ProcessGroup | None = None
    ) -> dict[SiteTraffic, float]:
        """What goes uncompressed from now on, with its error: it has passed the bound since the last call.
        Collective over ``sharing``, the ranks that hold the same sites, and ``stages``, those that hold the
        others (None: this rank alone): every rank gets all decisions, since any may write the checkpoint."""
        new = self._over_bound(sharing)
        if stages is not None and stages.size() > 1:
            new_by_stage = gather_objects(new, stages)
            new = {site: error for part in new_by_stage for site, error in part.items()}
        self.tripped.update(new)
        return new

    def _over_bound(self, sharing: dist.ProcessGroup | None) -> dict[SiteTraffic, float]:
        measures, self._undecided = self._undecided, {}
        if not measures or self.bound is None:
            return {}
        order = sorted(measures)
        sums = torch.stack([measures[one] for one in order])
        if sharing is not None:
            dist.all_reduce(sums, group=sharing)
        error, signal = sums.unbind(-1)
        relative = (error / signal.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        relative = torch.where(relative.isnan().any(1), math.nan, relative.amax(1))
        found = zip(order, relative.tolist(), strict=True)
        # Not "> bound": a codec that makes NaN of finite values is past any bound.
        return {one: error for one, error in found if not error <= self.bound}

    def state(self) -> list[list]:
        """``tripped`` as plain lists, for a checkpoint."""
        return [[*one, error] for one, error in sorted(self.tripped.items())]

    def restore(self, state: Sequence[Sequence]) -> None:
        """Continue with the decisions that ``state`` gave."""
        self.tripped = {(site, traffic): error for site, traffic, error in state}

    def rows(self) -> list[dict]:
        """JSON-ready rows in the order of first measurement. ``ordinary_error`` is the relative error without
        outliers, ``peak`` the largest value over the median, None where the median was 0."""
        rows = []
        for (site, traffic), (sums, peaks, samples) in self._seen.items():
            relative, ordinary = (_relative(error, signal) for error, signal in sums.tolist())
            row = {
                "site": site,
                "traffic": traffic,
                "relative_error": relative,
                "ordinary_error": ordinary,
            }
            largest = float(peaks)
            rows.append(
                row | {"peak": largest if math.isfinite(largest) else None, "samples": samples}
            )
        return rows


def squares(exact: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """fp64 ``[2, 2]``: squared error and squared signal, of all values of ``[n, GROUP]`` and of those without
    outliers, of which there are none where all others of a group are zeros."""
    outliers = is_outlier(exact)
    outliers &= (exact.masked_fill(outliers, 0.0) != 0).any(-1, keepdim=True)
    both = torch.stack([difference, exact]).square()
    return torch.stack([both, both.masked_fill(outliers, 0.0)]).sum((2, 3), dtype=torch.float64)


def peak(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude over the median magnitude; infinite where more than half of the values are zeros."""
    flat = x.float().reshape(-1).abs()
    step = (flat.numel() // SAMPLE_VALUES) | 1  # odd: reaches every column of a row of 2^n values
    return flat.amax() / flat[::step].median()


def _in_groups(x: torch.Tensor) -> torch.Tensor:
    """``[n, GROUP]``, zeros after the last value; fewer values than a group as one row."""
    flat = x.reshape(-1)
    size = min(GROUP, flat.numel())
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def _sample(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Whole groups ``[n, size]`` at equal distances; a tensor smaller than a group as one row."""
    values = tensor.reshape(-1)
    groups = values.numel() // size
    if groups == 0:
        return values[None]
    stride = math.ceil(groups * size / SAMPLE_VALUES)
    while (
        math.gcd(stride, groups) > 1
    ):  # else the same columns of the hidden dimension, again and again
        stride += 1
    return values[: groups * size].view(groups, size)[::stride]


def _relative(error: float, signal: float) -> float:
    return (error / signal) ** 0.5 if signal > 0 else 0.0 if error == 0 else float("inf")
