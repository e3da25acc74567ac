"""The error meter: what codecs do to what each site sends, for the report and for the error bound.

Each rank encodes and decodes a sample of its own tensors, in the last iteration before a log line.
With a bound, the ranks that share a site add up their sums there, so that all decide the same.

Errors are also measured without outliers, values of 10^3 to 10^4 times the others' magnitude. They
hide the error of the rest: a group of 128 that has kept its outlier and lost the other 127 values
has a relative error of 0.9 %.
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
"""Values among which outliers are looked for."""
SAMPLE_VALUES = 2**18
"""At most so many values of a tensor are measured, whole groups at equal distances."""

SiteTraffic = tuple[str, str]
"""(name of the site, traffic class)."""


class ErrorMeter:
    """Relative L2 error of one encoding, by site and traffic class.

    Args:
        bound: ``--compression-error-bound``; a site's traffic whose error is larger goes
            uncompressed from then on: of all values or of those without outliers, whichever is
            larger. None: nothing does.
        interval: measure in the last of this many iterations (``--log-interval``); 0: never.
    """

    def __init__(self, bound: float | None = None, interval: int = 0) -> None:
        self.bound = bound
        self.interval = interval
        self.also_first = False
        """Measure the first message of each kind as well: with CUDA graphs, since replays measure
        nothing."""
        self.tripped: dict[SiteTraffic, float] = {}
        """What goes uncompressed, with the error that decided it."""
        self._seen: dict[SiteTraffic, tuple[torch.Tensor, torch.Tensor, int]] = {}
        """Sum of ``squares`` and largest ``peak``, both on the device, and the number of
        samples."""
        self._undecided: dict[SiteTraffic, torch.Tensor] = {}
        """``squares`` of the last measurement that the bound concerns, until ``decide``."""
        self._last: dict[SiteTraffic, int] = {}
        """Iteration of the last measurement."""

    def due(self, site: str, traffic: str, iteration: int) -> bool:
        """Return whether to measure this message: the first of its kind in the last of ``interval``
        iterations.

        ``Policy.measures`` asks, where measuring is possible at all.

        Args:
            site: name of the site.
            traffic: class of the message.
            iteration: the present one, counted from 0.
        """
        if not self.interval:
            return False
        last = self._last.get((site, traffic))
        # In graphs the first message may be the only one that is seen.
        is_first = self.also_first and last is None
        if not is_first and not self.ends_interval(iteration):
            return False
        # Of several micro-batches of an iteration the first is measured.
        self._last[site, traffic] = iteration
        return last != iteration

    def ends_interval(self, iteration: int) -> bool:
        """Return whether an iteration, counted from 0, is the last of ``interval``."""
        return bool(self.interval) and (iteration + 1) % self.interval == 0

    def measure(
        self, site: str, traffic: str, tensor: torch.Tensor, codec: Codec, bounded: bool = True
    ) -> None:
        """Encode and decode a sample of a message, and add its squared error and signal to the
        site's.

        The host does not wait: sums stay on the device until a log line asks for ``rows``.

        Args:
            site: name of the site.
            traffic: class of the message.
            tensor: what is sent.
            codec: encodes it; of two hops the larger error counts.
            bounded: the error bound concerns the message, so every rank that shares the site
                measures it.
        """
        if codec.lossless or not tensor.numel():
            return
        tensor = tensor.detach()
        if codec.sees_shape:
            sample = tensor
            is_finite = sample.isfinite().all()
        else:
            sample = _sample(tensor, codec.block if codec.block > 1 else GROUP)
            is_finite = sample.isfinite().all(dim=-1, keepdim=True)
        # Groups with a NaN or Inf are left out: they are the loss scaler's business.
        exact = sample.float().masked_fill(~is_finite, 0.0)
        squares_by_hop = []
        # Twice the same hop is measured once.
        for hop in dict.fromkeys(codec.hops):
            decoded = hop.decode(hop.encode(sample[None]), sample.shape, sample.dtype)[0]
            error = (decoded.float() - sample.float()).masked_fill(~is_finite, 0.0)
            squares_by_hop.append(squares(_in_groups(exact), _in_groups(error)))
        # The signal is the same for all hops, so the largest squared error decides.
        measured = torch.stack(squares_by_hop).amax(0)
        largest = peak(tensor)
        if (site, traffic) in self._seen:
            total, largest_before, samples = self._seen[site, traffic]
            largest = torch.maximum(largest_before, largest)
            self._seen[site, traffic] = total + measured, largest, samples + 1
        else:
            self._seen[site, traffic] = measured, largest, 1
        if bounded and self.bound is not None:
            self._undecided[site, traffic] = measured

    def snapshot(self) -> Callable[[], None]:
        """Return a function that forgets again whatever is measured from now on."""
        seen = dict(self._seen)
        undecided = dict(self._undecided)
        last = dict(self._last)

        def restore() -> None:
            self._seen = seen
            self._undecided = undecided
            self._last = last

        return restore

    def decide(
        self, sharing: dist.ProcessGroup | None = None, stages: dist.ProcessGroup | None = None
    ) -> dict[SiteTraffic, float]:
        """Return what goes uncompressed from now on, with its error: it has passed the bound since
        the last call.

        Collective. Every rank gets all decisions, since any may write the checkpoint.

        Args:
            sharing: the ranks that hold the same sites; None: this rank alone.
            stages: the ranks that hold the other sites; None: there are none.
        """
        new = self._over_bound(sharing)
        if stages is not None and stages.size() > 1:
            new_by_stage = gather_objects(new, stages)
            new = {site: error for part in new_by_stage for site, error in part.items()}
        self.tripped.update(new)
        return new

    def _over_bound(self, sharing: dist.ProcessGroup | None) -> dict[SiteTraffic, float]:
        """Return the sites that have passed the bound, with their errors. Collective."""
        measures, self._undecided = self._undecided, {}
        if self.bound is None:
            return {}
        measured = set(measures)
        if sharing is not None:
            # A replica with shorter sequences may have sent a site's messages uncompressed, and
            # measured nothing there: the ranks sum over what any of them has measured.
            measured = set().union(*gather_objects(sorted(measures), sharing))
        if not measured:
            return {}
        order = sorted(measured)
        device = "cpu"
        if sharing is not None and dist.get_backend(sharing) == "nccl":
            device = "cuda"
        for squared in measures.values():
            device = squared.device
        nothing = torch.zeros(2, 2, dtype=torch.float64, device=device)
        sums = torch.stack([measures.get(key, nothing) for key in order])
        if sharing is not None:
            dist.all_reduce(sums, group=sharing)
        error, signal = sums.unbind(-1)
        relative = (error / signal.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        # Of all values or of those without outliers: the larger error decides, and a NaN before any
        # other.
        largest = torch.where(relative.isnan().any(1), math.nan, relative.amax(1))
        errors = dict(zip(order, largest.tolist(), strict=True))
        # Not "> bound": a codec that makes NaN of finite values is past any bound.
        return {key: error for key, error in errors.items() if not error <= self.bound}

    def state(self) -> list[list]:
        """Return ``tripped`` as plain lists, for a checkpoint."""
        return [[site, traffic, error] for (site, traffic), error in sorted(self.tripped.items())]

    def restore(self, state: Sequence[Sequence]) -> None:
        """Continue with the decisions that ``state`` gave."""
        self.tripped = {(site, traffic): error for site, traffic, error in state}

    def rows(self) -> list[dict]:
        """Return JSON-ready rows in the order of first measurement. The host waits for the device.

        ``ordinary_error`` is the relative error without outliers; ``peak`` the largest value over
        the median, None where the median was 0.
        """
        rows = []
        for (site, traffic), (sums, largest, samples) in self._seen.items():
            of_all, without_outliers = sums.tolist()
            peak_value = float(largest)
            row = {
                "site": site,
                "traffic": traffic,
                "relative_error": _relative(*of_all),
                "ordinary_error": _relative(*without_outliers),
                "peak": peak_value if math.isfinite(peak_value) else None,
                "samples": samples,
            }
            rows.append(row)
        return rows


def squares(exact: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """Return the squared error and signal of all values, and of those that are no outliers.

    Args:
        exact: the values, ``[n, GROUP]``.
        difference: decoded minus exact values, ``[n, GROUP]``.

    Returns: fp64 ``[2, 2]``: a row for all values and one without outliers, of (error, signal).
    """
    outliers = is_outlier(exact)
    # Where all others of a group are zeros the outliers are all that it says.
    outliers &= (exact.masked_fill(outliers, 0.0) != 0).any(-1, keepdim=True)
    both = torch.stack([difference, exact]).square()
    return torch.stack([both, both.masked_fill(outliers, 0.0)]).sum((2, 3), dtype=torch.float64)


def peak(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude over the median; infinite where more than half of the values are
    zeros."""
    flat = x.float().reshape(-1).abs()
    # The median of a sample. An odd step reaches every column of a row of 2^n values.
    step = (flat.numel() // SAMPLE_VALUES) | 1
    return flat.amax() / flat[::step].median()


def _in_groups(x: torch.Tensor) -> torch.Tensor:
    """Return ``[n, GROUP]`` of any tensor, zeros after the last value; fewer values than a group as
    one row."""
    flat = x.reshape(-1)
    size = min(GROUP, flat.numel())
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def _sample(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return whole groups ``[n, size]`` at equal distances; a tensor smaller than a group as one
    row."""
    values = tensor.reshape(-1)
    groups = values.numel() // size
    if groups == 0:
        return values[None]
    stride = math.ceil(groups * size / SAMPLE_VALUES)
    # Without a common divisor: else the same columns of the hidden dimension come again and again.
    while math.gcd(stride, groups) > 1:
        stride += 1
    return values[: groups * size].view(groups, size)[::stride]


def _relative(error: float, signal: float) -> float:
    """Return the relative L2 error of a squared error and a squared signal."""
    if signal > 0:
        return (error / signal) ** 0.5
    return 0.0 if error == 0 else math.inf
