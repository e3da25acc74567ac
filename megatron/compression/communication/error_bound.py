"""The error bound: measures what the codec does to each site's traffic and takes out what it hurts.

Each rank measures its own tensors, on the device, in the iteration before a log line; at the log line the
ranks that share the site add their measures up and decide alike. Nothing waits for the host in between.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.compression.codecs import Codec
from megatron.compression.communication import massive

SAMPLE_VALUES = 2**18
"""At most so many values of a tensor are measured: whole groups at equal distances."""

SiteTraffic = tuple[str, str]
"""(name of the site, traffic class)."""


class ErrorBound:
    """Relative L2 error of one encoding by site and traffic class, and the sites that passed the bound.

    Of all values, or of those that are not massive, whichever is larger: a massive value hides what its
    neighbours lose.

    Args:
        bound: ``--compression-error-bound``; a site's traffic whose error is larger goes uncompressed
            from then on.
        interval: measure in the last of this many iterations (``--log-interval``); 0 never.
    """

    def __init__(self, bound: float, group_size: int, interval: int = 0) -> None:
        self.bound = bound
        self.group_size = group_size
        self.interval = interval
        self.tripped: dict[SiteTraffic, float] = {}
        """What goes uncompressed, with the error that decided it."""
        self._measures: dict[SiteTraffic, torch.Tensor] = {}

    def due(self, site: str, traffic: str, iteration: int) -> bool:
        """Whether to measure this call: the first of the site's traffic before a log line."""
        last = self.interval and (iteration + 1) % self.interval == 0
        return bool(last) and (site, traffic) not in self._measures

    def measure(self, site: str, traffic: str, tensor: torch.Tensor, codec: Codec) -> None:
        """Encode and decode a sample of ``tensor`` and keep the squared error and signal.

        Groups with a NaN or Inf are left out: an overflow of fp16, which the loss scaler handles, is no fault
        of the codec.

        Args:
            tensor: what the site is about to encode; bf16, fp16 or fp32.
            codec: what encodes it. Of two hops that differ, the one with the larger error counts.
        """
        sample = self._sample(tensor)
        exact = sample.double()
        finite = exact.isfinite().all(dim=-1, keepdim=True)
        exact = torch.where(finite, exact, 0.0)
        found = []
        for hop in dict.fromkeys(codec.hops):
            decoded = hop.decode(hop.encode(sample[None]), sample.shape, sample.dtype)[0]
            found.append(massive.squares(exact, torch.where(finite, decoded.double() - exact, 0.0)))
        self._measures[site, traffic] = torch.stack(found).amax(0)

    def kept(self) -> Callable[[], None]:
        """What forgets again whatever is measured from now on."""
        measures = dict(self._measures)

        def restore() -> None:
            self._measures = measures

        return restore

    def decide(self, group: dist.ProcessGroup | None = None) -> dict[SiteTraffic, float]:
        """Reduce the measures over the ranks that hold the same sites, and take out what passed the bound.

        Synchronises with the device. Call it at every log line, on all ranks.

        Args:
            group: the tensor- and data-parallel ranks of this pipeline stage; None for this rank alone.
        Returns: What was taken out just now, with its error.
        """
        measures, self._measures = self._measures, {}
        if not measures:
            return {}
        order = sorted(measures)
        squares = torch.stack([measures[one] for one in order])
        if group is not None:
            dist.all_reduce(squares, group=group)
        error, signal = squares.unbind(-1)
        relative = (error / signal.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        relative = torch.where(relative.isnan().any(1), math.nan, relative.amax(1))
        # Not "> bound": a codec that makes NaN of finite values is past any bound.
        new = {
            one: error for one, error in zip(order, relative.tolist(), strict=True) if not error <= self.bound
        }
        self.tripped.update(new)
        return new

    def on_training_log(self, iteration: int, interval: int) -> list[str]:
        """Behind an iteration, counted from 1: decide at the log interval, in all pipeline stages.

        Any rank may write the checkpoint, so each takes over what the others' stages have decided.
        Returns: A line for each site's traffic that goes uncompressed from now on.
        """
        self.interval = interval
        if iteration % interval:
            return []
        new = self.decide(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        stages = parallel_state.get_pipeline_model_parallel_group()
        if stages.size() > 1:
            parts: list[dict] = [{}] * stages.size()
            dist.all_gather_object(parts, new, group=stages)
            new = {one: error for part in parts for one, error in part.items()}
        self.tripped.update(new)
        past = (
            f"past --compression-error-bound {self.bound:g}; it goes uncompressed after iteration {iteration}"
        )
        return [
            f"{site} {kind} has a relative error of {error:.4g}, {past}"
            for (site, kind), error in sorted(new.items())
        ]

    def state(self) -> list[list]:
        """``tripped`` as plain lists, for a checkpoint."""
        return [[*one, error] for one, error in sorted(self.tripped.items())]

    def restore(self, state: Sequence[Sequence]) -> None:
        """Continue with the decisions that ``state`` gave."""
        self.tripped = {(site, traffic): error for site, traffic, error in state}

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        """Whole groups ``[n, group_size]`` at equal distances; a tensor smaller than a group as one row."""
        values = tensor.detach().reshape(-1)
        groups = values.numel() // self.group_size
        if groups == 0:
            return values[None]
        stride = math.ceil(groups * self.group_size / SAMPLE_VALUES)
        while math.gcd(stride, groups) > 1:  # else the same columns of the hidden dimension, again and again
            stride += 1
        return values[: groups * self.group_size].view(groups, self.group_size)[::stride]
