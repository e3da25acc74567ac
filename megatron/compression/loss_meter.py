"""The loss meter: what compression costs the model that trains, in percent of its loss.

Every N iterations, between the passes of a training step and the optimizer's step, the last
micro-batch passes forward twice more: once with the codecs (loss C) and once without (loss U), with
the same weights and random numbers, without gradients. Over all such pairs

    cost            R = sum(C - U) / sum(U)
    standard error  sqrt(n / (n - 1) * sum((C - U - R U)^2)) / sum(U)

which is the ratio estimator: losses are sums over the tokens of a micro-batch, so a pair counts as
many tokens as it has. Each data-parallel replica has a micro-batch, and so a pair, of its own.

The meter sees codecs of activations: of tensor, context, pipeline and expert parallelism. It does
not see codecs of gradients, neither of those that go back nor of data parallelism's, nor what
rounding does to the weights over time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.compression.communication.site import Run
from megatron.compression.extra_passes import RandomStates, no_trace
from megatron.compression.loss_settings import SHARE
from megatron.compression.names import ACTIVATIONS, PARALLELISMS

LEAST_PAIRS = 16
"""Fewer pairs decide nothing: their standard error is itself too uncertain."""
MOST_PAIRS = 8192
"""From so many pairs on all sums are halved, so that the pairs of a long run's beginning fade."""

TOGETHER = "all"
"""The name of the pass with the codecs of all dimensions."""


@dataclass(frozen=True)
class LossCost:
    """What codecs cost, by the pairs of passes so far."""

    percent: float
    """Of the loss without codecs."""
    standard_error: float
    """Of ``percent``."""
    pairs: int
    broken: int = 0
    """Further pairs whose loss was finite without codecs and is NaN or infinite with them."""

    def __str__(self) -> str:
        text = f"{self.percent:+.3f} +- {self.standard_error:.3f} % of loss ({self.pairs} pairs)"
        if self.broken:
            text += f", and {self.broken} more pairs are NaN or infinite with the codecs alone"
        return text

    def is_above(self, budget: float) -> bool:
        """Return whether the cost is above a budget in percent, beyond two standard errors."""
        if self.broken:
            return True
        return self.pairs >= LEAST_PAIRS and self.percent - 2 * self.standard_error > budget

    def asdict(self) -> dict[str, float]:
        """Return the figures for a report."""
        return {
            "percent": self.percent,
            "standard_error": self.standard_error,
            "pairs": self.pairs,
            "broken_pairs": self.broken,
        }


class PairSums:
    """Sums over pairs of losses, on the device: the host does not wait for a measurement.

    In order: pairs, U, C - U, (C - U)^2, (C - U) U, U^2, broken pairs; all in fp64.
    """

    def __init__(self, sums: torch.Tensor) -> None:
        self.sums = sums

    def add(self, compressed: torch.Tensor, uncompressed: torch.Tensor) -> None:
        """Add pairs.

        Args:
            compressed: fp64 ``[n]``, losses with the codecs.
            uncompressed: fp64 ``[n]``, losses without; 0 where there is no pair.
        """
        # A micro-batch without a token that counts has a loss of 0. A loss that is not finite
        # without codecs says nothing about them; one that is so with them alone says a lot.
        is_pair = uncompressed.isfinite() & (uncompressed != 0)
        is_broken = is_pair & ~compressed.isfinite()
        counts = is_pair & ~is_broken
        base = uncompressed.where(counts, 0.0)
        difference = (compressed - uncompressed).where(counts, 0.0)
        # A row for each of the sums, in their order.
        terms = [
            counts,
            base,
            difference,
            difference.square(),
            difference * base,
            base.square(),
            is_broken,
        ]
        self.sums += torch.stack([term.double() for term in terms]).sum(1)
        # Halved, all sums say the same by half as many pairs. Compared on the device, so that the
        # host does not wait.
        self.sums *= torch.where(self.sums[0] >= MOST_PAIRS, 0.5, 1.0)

    def cost(self) -> LossCost:
        """Return what the sums say. The host waits for the device."""
        values = self.sums.tolist()
        count, base, difference, squares, products, base_squares, broken = values
        pairs = round(count)
        if pairs < 2 or base == 0:
            percent = 100 * difference / base if base else math.nan
            return LossCost(percent, math.nan, pairs, round(broken))
        # R of the formula above, and the residuals C - U - R U, squared and summed.
        ratio = difference / base
        # Sums of squares of nearly equal numbers may come out a little below zero.
        residuals = max(0.0, squares - 2 * ratio * products + ratio**2 * base_squares)
        error = math.sqrt(pairs / (pairs - 1) * residuals) / abs(base)
        return LossCost(100 * ratio, 100 * error, pairs, round(broken))


class LossMeter:
    """Measures every N iterations, and keeps what was measured under the present settings.

    Args:
        interval: N; ``auto``: as often as takes ``SHARE`` of the time.
        run: whose codecs are measured.
    """

    def __init__(self, interval: int | str, run: Run) -> None:
        self.interval = interval
        self.apart: tuple[str, ...] = ()
        """Dimensions whose codecs are measured by themselves as well."""
        self._run = run
        self._sums: dict[str, PairSums] = {}
        """By dimension, and ``TOGETHER``."""
        self._in_force = ""
        """What the sums were measured under."""
        self._has_news = False

    def due(self, iteration: int, share: float) -> bool:
        """Return whether an iteration measures; the same on all ranks.

        Args:
            iteration: counted from 0.
            share: part of the iteration's time that one measurement takes.
        """
        interval = self.interval
        if isinstance(interval, str):
            interval = max(1, math.ceil(share / SHARE))
        return (iteration + 1) % interval == 0 and self._compresses()

    def _compresses(self) -> bool:
        """Return whether any activation that the meter sees has a codec by now."""
        policy = self._run.policy
        iteration = policy.iteration()
        for traffic, rule in policy.rules.items():
            is_forward = traffic.endswith(".forward")
            if is_forward and rule.codecs and iteration >= rule.start_iteration:
                return True
        return False

    def measure(
        self,
        forward: Callable[[], Sequence[torch.Tensor]],
        micro_batches: int,
        chunks: Sequence[torch.nn.Module],
    ) -> None:
        """Pass forward with and without codecs, and add the pairs. Collective over all ranks.

        Args:
            forward: runs one forward pass of these micro-batches; returns their losses on the last
                pipeline stage, each of one value or of a sum and the number of its tokens.
            micro_batches: how many these are, at most.
            chunks: the model chunks of this pipeline stage, as they are wrapped.
        """
        policy = self._run.policy
        ledger = self._run.ledger
        in_force = codecs_in_force(self._run)
        if in_force != self._in_force:
            # The pairs so far were of other settings.
            self._sums = {}
            self._in_force = in_force
        prefixes = {TOGETHER: tuple(_prefix(name) for name in ACTIVATIONS)}
        prefixes |= {name: (_prefix(name),) for name in self.apart}
        losses: list[Sequence[torch.Tensor]] = []
        # Its bytes are neither training's nor an evaluation's.
        phase = ledger.phase
        with no_trace(chunks):
            states = RandomStates()
            ledger.phase = "meter"
            try:
                # The last pass is the one without codecs.
                for compressed in (*prefixes.values(), ()):
                    # Every pass draws the same numbers, for dropout and routers.
                    states.restore()
                    with policy.only(compressed):
                        losses.append(forward())
            finally:
                ledger.phase = phase
            table = _losses_of_all_ranks(losses, micro_batches)
        for column, name in enumerate(prefixes):
            if name not in self._sums:
                self._sums[name] = PairSums(table.new_zeros(7))
            self._sums[name].add(table[:, column], table[:, -1])
        self._has_news = True

    def measure_apart(self, dimensions: tuple[str, ...]) -> None:
        """Measure these dimensions by themselves from now on, each from no pair on."""
        self.apart = dimensions
        for name in dimensions:
            self._sums.pop(name, None)

    def news(self) -> LossCost | None:
        """Return the cost of all codecs together, if there are new pairs since the last call.

        None also where there are fewer than two pairs, which tell no error. Collective over all
        ranks: all go on with the first rank's sums.
        """
        if not self._has_news:
            return None
        self._has_news = False
        for sums in self._sums.values():
            dist.broadcast(sums.sums, src=0)
        cost = self.cost(TOGETHER)
        if cost.pairs < 2 and not cost.broken:
            return None
        return cost

    def cost(self, name: str) -> LossCost:
        """Return the cost of a dimension's codecs, or of ``TOGETHER``. The host waits."""
        if name not in self._sums:
            return LossCost(math.nan, math.nan, 0)
        return self._sums[name].cost()

    def state(self) -> dict[str, Any]:
        """Return what a resume goes on with: plain values, the same on every rank."""
        sums = {name: sums.sums.tolist() for name, sums in self._sums.items()}
        return {"in_force": self._in_force, "sums": sums}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on with what ``state`` gave; the first measurement under other settings forgets it."""
        self._in_force = state["in_force"]
        device = torch.cuda.current_device()
        self._sums = {
            name: PairSums(torch.tensor(sums, dtype=torch.float64, device=device))
            for name, sums in state["sums"].items()
        }


def _prefix(dimension: str) -> str:
    """Return how a dimension's traffic classes begin."""
    return PARALLELISMS[dimension].traffic


def codecs_in_force(run: Run) -> str:
    """Return which codecs the activations of a run have now, as one text; pairs that were measured
    under another one say nothing about it."""
    policy = run.policy
    parts = []
    for traffic, rule in sorted(policy.rules.items()):
        if not traffic.endswith(".forward") or policy.iteration() < rule.start_iteration:
            continue
        if rule.codecs and not (policy.left_out is not None and policy.left_out(traffic)):
            codecs = " ".join(str(codec.name) for codec in rule.codecs)
            parts.append(f"{traffic} {codecs} from {rule.min_bytes} bytes")
    parts += [f"{site} {traffic} guarded" for site, traffic in sorted(policy.meter.tripped)]
    return "; ".join(parts)


def _losses_of_all_ranks(
    losses: Sequence[Sequence[torch.Tensor]], micro_batches: int
) -> torch.Tensor:
    """Return every replica's losses, the same on all ranks. Collective.

    Args:
        losses: of each pass, by micro-batch; empty but on the last pipeline stage.
        micro_batches: of a pass, the same on all ranks.

    Returns:
        fp64 ``[pairs, passes]``; zeros where there is no pair.
    """
    # Every rank fills a table of all replicas, with zeros where others know; their sum is complete.
    passes = len(losses)
    replicas = parallel_state.get_data_parallel_world_size()
    device = torch.cuda.current_device()
    # A last column says whether losses are single values.
    table = torch.zeros(replicas, micro_batches, passes + 1, dtype=torch.float64, device=device)
    # Tensor-parallel ranks have the same loss: one of them tells it. Context-parallel ranks have a
    # part of the tokens each, which the sum puts together.
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        local = table[parallel_state.get_data_parallel_rank()]
        for column, losses_of_pass in enumerate(losses):
            for micro_batch, loss in enumerate(losses_of_pass):
                # One value, or the sum over tokens and their number.
                values = loss.detach().double().reshape(-1)
                local[micro_batch, column] = values[0]
                local[micro_batch, -1] = float(values.numel() == 1)
    dist.all_reduce(table)
    values = table[..., :-1]
    # A single value may be a mean over replicas already: all replicas together are one pair then.
    means = torch.zeros_like(values)
    means[0] = values.mean(0)
    are_single = table[..., -1].sum() > 0
    return torch.where(are_single, means, values).reshape(-1, passes)
