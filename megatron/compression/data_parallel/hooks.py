"""Puts data-parallel compression into a run."""

from argparse import Namespace
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron.compression import patches
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.run import Run
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.data_parallel.bucket_group import CompressedBucketGroup, InFlight
from megatron.compression.data_parallel.checkpoint import GradientState
from megatron.compression.data_parallel.compressor import (
    Diagnostic,
    GradientBucket,
    GradientCompressor,
    GradientSync,
    ParameterSpan,
)
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.data_parallel.error_feedback import parse_error_feedback
from megatron.compression.data_parallel.replicas import Replicas, align_gradients, replicated_ranges
from megatron.compression.data_parallel.weights import ATTRIBUTE, BucketWeights, copy_masters


class Gradients:
    """Gradients and weights of one run: counted without compression, and compressed with it.

    Patches megatron-core: counts its collectives, takes over the masters' copy, aligns replicas.
    """

    def __init__(self, config: DataParallelConfig, run: Run) -> None:
        self.policy, self.ledger = run.policy, run.ledger
        self.adopt(config)
        self.syncs: list[tuple[GradientSync, GradientBucket]] = []
        """Every bucket's, as they are attached: what checkpoints carry the state of."""
        self._transports = run.transports
        self._topologies: dict[dist.ProcessGroup, Topology] = {}
        self._state: GradientState | None = None
        patches.on_gradient_sync(partial(record_uncompressed, self.ledger, "dp.gradient"))
        patches.on_parameter_sync(partial(record_uncompressed, self.ledger, "dp.weight"))
        patches.on_master_copy(copy_masters)
        record = partial(self.ledger.record_uncompressed, "tp.other", "exact", "all_reduce")
        patches.on_replicated_gradient_sync(record, align_gradients)

    def adopt(self, config: DataParallelConfig) -> None:
        """Take over settings, whose rules the policy has already; before anything is attached."""
        self.config = config
        self.compressor: GradientCompressor | None = self.policy.rule("dp.gradient").codec
        self._new_feedback = partial(parse_error_feedback(config.feedback), self._iteration)

    def _iteration(self) -> int:
        return self.policy.iteration()

    @property
    def diagnostics(self) -> list[Diagnostic]:
        """What the reporter asks at each log line."""
        return [] if self.compressor is None else list(self.compressor.diagnostics())

    def add_state(self, state_dict: dict[str, Any], is_loading: bool, args: Namespace) -> None:
        """Put error feedback into a checkpoint's state dict, or where to load it to."""
        self._carrier(args).add_to(state_dict, is_loading)

    def state_read(self, state_dict: dict[str, Any] | None, path: str | None, args: Namespace) -> None:
        """Take error feedback out of what has been read of a checkpoint; None: there is none."""
        self._carrier(args).loaded(state_dict, path)

    def _carrier(self, args: Namespace) -> GradientState:
        if self._state is None:
            name = None if self.compressor is None else self.compressor.name
            self._state = GradientState(args, name, self.config.feedback, self.syncs, print_on_first_rank)
        return self._state

    def attach(self, chunks: list) -> list:
        """Give every bucket group its gradient sync and its weights: a ``post_wrap_hook``. Collective over
        all ranks.

        Args:
            chunks: model chunks, wrapped by DDP.
        Returns: The same chunks.
        Raises: TypeError: another wrapper than Megatron's DistributedDataParallel.
        """
        if not self.config.enabled:
            return chunks
        start = self.policy.rule("dp.gradient").start_iteration
        if start > self.policy.rule("dp.weight").start_iteration:  # the compressor's own choice
            name = self.compressor.name
            print_on_first_rank(f"compression: {name}: gradients go uncompressed before iteration {start}")
        for chunk in chunks:
            if not isinstance(chunk, DistributedDataParallel):
                raise TypeError(
                    f"--dp-compression needs Megatron's DistributedDataParallel, not {type(chunk)}"
                )
            self.topology(chunk.intra_dp_cp_group)  # all ranks, also those without a bucket
            if chunk.config.num_moe_experts is not None:
                experts, dense = chunk.intra_expt_dp_group, chunk.intra_dp_cp_group.size()
                self.topology(experts, experts.size() / dense, "an expert's")
        for number, chunk in enumerate(chunks):
            prefix = f"chunk{number}." if len(chunks) > 1 else ""
            names = {parameter: prefix + name for name, parameter in chunk.module.named_parameters()}
            in_flight = InFlight()
            tensor_ranks = parallel_state.get_tensor_model_parallel_group()
            for group in chunk.bucket_groups:
                self._attach_group(group, names, in_flight, tensor_ranks)
            if chunk.expert_parallel_bucket_groups:
                tensor_ranks = parallel_state.get_expert_tensor_parallel_group()
            for group in chunk.expert_parallel_bucket_groups:
                self._attach_group(group, names, in_flight, tensor_ranks, experts=True)
        return chunks

    def _attach_group(
        self,
        group,
        names: dict[torch.nn.Parameter, str],
        in_flight: InFlight,
        tensor_ranks: dist.ProcessGroup,
        experts: bool = False,
    ) -> None:
        config = group.ddp_config
        sharded = config.use_distributed_optimizer
        ranks = group.intra_distributed_optimizer_instance_group if sharded else group.data_parallel_group
        if ranks.size() == 1:
            return
        topology = self.topology(ranks)
        patches.change_class(group, CompressedBucketGroup)
        group.policy, group.topology, group.in_flight = self.policy, topology, in_flight
        group.gradient_syncs, group.weights = [], []
        group.gradient_replicas, group.weight_replicas = [], []
        average = 1 / ranks.size() if config.average_in_collective else 1.0
        if self.compressor is not None:
            for bucket in group.buckets:
                scale = bucket.gradient_scaling_factor * average
                spans = spans_of(bucket, names)
                view = GradientBucket(bucket.grad_data, spans, scale, sharded, topology, self.ledger, experts)
                sync = self.compressor.build(view, self._new_feedback)
                group.gradient_syncs.append(sync)
                self.syncs.append((sync, view))
                first, values = 0, view.gradients
                if sharded:
                    first, values = topology.rank * view.shard.numel(), view.shard
                ranges = replicated_ranges(spans, first, first + values.numel(), gradients=True)
                group.gradient_replicas.append(Replicas(values, ranges, tensor_ranks, self.ledger))
        # fp32 parameters have no master apart from themselves, so there is no difference to send.
        masters = sharded and all(
            b.param_data.dtype in (torch.bfloat16, torch.float16) for b in group.buckets
        )
        if masters and self.policy.rule("dp.weight").codec is not None:
            nbytes = sum(bucket.param_data.nbytes for bucket in group.buckets)
            for bucket in group.buckets:
                weights = BucketWeights(bucket.param_data, self.policy, topology, self.ledger, nbytes)
                setattr(bucket, ATTRIBUTE, weights)
                group.weights.append(weights)
                flat, ranges = bucket.param_data.view(-1), replicated_ranges(spans_of(bucket, names))
                group.weight_replicas.append(Replicas(flat, ranges, tensor_ranks, self.ledger))

    def topology(self, ranks: dist.ProcessGroup, part: float = 1.0, whose: str = "a") -> Topology:
        """The topology of a data-parallel group, found once a group; the first time collectively.

        Args:
            part: how much of a node's data-parallel ranks are in it.
        """
        if ranks not in self._topologies:
            size = self.config.node_size
            topology = find_topology(ranks, size and max(1, int(size * part)), self._transports)
            self._topologies[ranks] = topology
            print_on_first_rank(f"compression: {whose} data-parallel group is {topology.describe()}")
        return self._topologies[ranks]


def spans_of(bucket, names: dict[torch.nn.Parameter, str]) -> tuple[ParameterSpan, ...]:
    """The parameters of a Megatron bucket, by position."""
    spans: Iterable[ParameterSpan] = (
        ParameterSpan(names[parameter], parameter, *bucket.param_to_index[parameter])
        for parameter in bucket.params_list
    )
    return tuple(sorted(spans, key=lambda span: span.start))


def record_uncompressed(
    ledger: Ledger, traffic: str, group, operation: str, buffer_bytes: int, world_size: int
) -> None:
    """Count an uncompressed collective of a bucket group, under the reason that an attached group gives."""
    kind = getattr(group, "uncompressed_kind", "off")
    topology = getattr(group, "topology", None)
    if topology is None:
        ledger.record_uncompressed(traffic, kind, operation, buffer_bytes, world_size)
    else:
        topology.record_uncompressed(ledger, traffic, kind, operation, buffer_bytes)


def print_on_first_rank(line: str) -> None:
    """On rank 0 of the job; anywhere without a job."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f" {line}", flush=True)
