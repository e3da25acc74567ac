"""Megatron's bucket group, with compressed collectives in place of its own."""

from collections import deque

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron.compression.communication.policy import Policy
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.work import Work, join
from megatron.compression.data_parallel.compressor import GradientSync
from megatron.compression.data_parallel.replicas import Replicas
from megatron.compression.data_parallel.weights import BucketWeights


class InFlight:
    """Moves older reductions on when a newer one has been started.

    During the backward pass only the hooks of later buckets give an earlier bucket the chance to start its
    second exchange and to free its buffers. The newest of them is left alone, so that the computation
    does not wait for an exchange that has just begun.
    """

    def __init__(self) -> None:
        self._works: deque[Work] = deque()

    def add(self, work: Work) -> None:
        """Take in a reduction that has just been started."""
        for older in list(self._works)[:-1]:
            older.advance()
        self._works = deque(older for older in self._works if not older.done)
        self._works.append(work)

    def advance(self) -> None:
        """Move all of them on: their second exchanges run while the first one's result is waited for."""
        for work in self._works:
            work.advance()
        self._works = deque(work for work in self._works if not work.done)


class CompressedBucketGroup(_ParamAndGradBucketGroup):
    """A bucket group whose class was changed after building (hooks.py); Megatron's own calls drive it.

    What it does not compress, it hands to megatron-core's methods, after saying why in ``uncompressed_kind``,
    under which the ledger counts it.
    """

    policy: Policy
    topology: Topology
    gradient_syncs: list[GradientSync]
    """One a bucket; empty: gradients are not compressed."""
    weights: list[BucketWeights]
    """One a bucket; empty: weights are not compressed."""
    gradient_replicas: list[Replicas]
    """One a bucket of ``gradient_syncs``; see replicas.align_gradients."""
    weight_replicas: list[Replicas]
    """One a bucket of ``weights``."""
    in_flight: InFlight
    """Shared by the groups of a model chunk."""
    uncompressed_kind: str = "off"

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Start reducing the group's gradients, compressed where this iteration compresses them."""
        self.uncompressed_kind = self._gradient_kind(force_all_reduce)
        if self.uncompressed_kind != "compressed":
            super().start_grad_sync(force_all_reduce)
            return
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return  # megatron-core's rule: dispatched already, by hand, in the first batch
        if self.grad_reduce_handle is not None:
            raise RuntimeError("a gradient reduction of this bucket group is still under way")
        self._prepare_gradients()
        with torch.no_grad():
            work = join([sync.start() for sync in self.gradient_syncs])
        if self.ddp_config.overlap_grad_reduce:
            self.in_flight.add(work)
            self.grad_reduce_handle = work
        else:
            work.wait()

    def _gradient_kind(self, force_all_reduce: bool | None) -> str:
        if not self.gradient_syncs:
            return "off"
        if force_all_reduce:
            return "exact"  # the iteration saves its full gradients (--save-wgrads-interval)
        nbytes = sum(bucket.grad_data.nbytes for bucket in self.buckets)
        return self.policy.decide("dp.gradient", nbytes).why

    def _prepare_gradients(self) -> None:
        """What megatron-core does before a reduction, but for scaling, which waits for the fp32 sum."""
        for bucket in self.buckets:
            for parameter in bucket.params_with_extra_main_grads:
                copy = getattr(parameter, "main_grad_copy_in_grad_buffer", None)
                if copy is not None:
                    copy.copy_(parameter.main_grad)
        if self.ddp_config.check_for_nan_in_grad or self.ddp_config.check_for_large_grads:
            self.check_grads(
                check_for_nan_or_inf=self.ddp_config.check_for_nan_in_grad,
                check_for_large=self.ddp_config.check_for_large_grads,
            )

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Complete this group's reduction; the second exchanges of all others are on their way meanwhile."""
        self.in_flight.advance()
        super().finish_grad_sync(force_all_reduce)

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gather the updated weights: compressed after an optimizer step, as they are at any other time."""
        if not self.weights or any(weights.pending is None for weights in self.weights):
            # Nothing has changed since the last gather (a skipped step, a checkpoint), Megatron has copied
            # the weights itself (warm-up), or a gather is under way and is to be waited for.
            self.uncompressed_kind = self.weights[0].uncompressed_kind if self.weights else "off"
            super().start_param_sync(force_sync)
            for weights in self.weights:
                weights.uncompressed_kind = "exact"
            return
        if self.param_gather_handle is not None:
            raise RuntimeError("a weight gather of this bucket group is still under way")
        work = join([weights.start() for weights in self.weights]).then(self._align_weights)
        if self.ddp_config.overlap_param_gather and not force_sync:
            self.param_gather_handle = work
        else:
            work.wait()
        self.param_gather_dispatched = True

    def _align_weights(self, _: None) -> None:
        for replicas in self.weight_replicas:
            replicas.align()
