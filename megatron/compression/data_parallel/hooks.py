"""Puts data-parallel compression into a run: Megatron's bucket groups with compressed collectives."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, TorchFullyShardedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.transformer import MegatronModule

from megatron.compression.codecs import Codec
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.policy import Policy
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.communication.work import Work, join
from megatron.compression.data_parallel.checkpoint import GradientMemory
from megatron.compression.data_parallel.codec_gradients import CodecGradientSync
from megatron.compression.data_parallel.compressor import (
    GradientBucket,
    GradientCompressor,
    GradientSync,
    ParameterSpan,
)
from megatron.compression.data_parallel.config import DataParallelConfig, check_memory
from megatron.compression.data_parallel.weights import (
    ATTRIBUTE,
    BucketWeights,
    align,
    align_gradients,
    copy_masters,
    replicated_parts,
)
from megatron.compression.dimension import Dimension
from megatron.compression.fsdp2 import Fsdp2Compression
from megatron.compression.patches import communication, gaps, running, symbols
from megatron.compression.replicated_parameters import cut_without_mark


class InFlight:
    """Reductions that are under way. The hooks of later buckets start an earlier one's second exchange; the
    newest is left alone, so that the computation does not wait for an exchange that has just begun."""

    def __init__(self) -> None:
        self._works: list[Work] = []

    def add(self, work: Work) -> None:
        """Add a reduction that has just been started, and advance all but the newest of the others."""
        self.advance(self._works[:-1])
        self._works.append(work)

    def advance(self, works: list[Work] | None = None) -> None:
        """Advance these, or all: their second exchanges run while the first one's result is waited for."""
        for work in self._works if works is None else works:
            work.advance()
        self._works = [work for work in self._works if not work.done]


class CompressedBucketGroup(_ParamAndGradBucketGroup):
    """A bucket group whose class was changed after building; Megatron's own calls drive it.

    What it does not compress goes through megatron-core's methods. The outer hop, between optimizer
    instances, is always its own: megatron-core sees one instance, and gives a handle of the inner hop.
    """

    policy: Policy
    topology: Topology
    gradient_syncs: list[GradientSync]
    """One a bucket; empty: gradients are not compressed."""
    outer: list[GradientBucket]
    """One a bucket, this rank's shard between optimizer instances; empty: there is one instance."""
    outer_syncs: list[GradientSync]
    """One for each of ``outer``; empty: it goes uncompressed."""
    weights: list[BucketWeights]
    """One a bucket; empty: weights are not compressed."""
    gradient_replicas: list[list[torch.Tensor]]
    """By bucket of ``gradient_syncs``: what ``tensor_ranks`` hold alike; see ``align_gradients``."""
    weight_replicas: list[list[torch.Tensor]]
    """By bucket of ``weights``."""
    tensor_ranks: dist.ProcessGroup
    ledger: Ledger
    in_flight: InFlight
    """Shared by the groups of a model chunk."""
    uncompressed_kind: str = "off"

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Start reducing the group's gradients, compressed where this iteration compresses them."""
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return  # megatron-core's rule: dispatched already, by hand, in the first batch
        nbytes = sum(bucket.grad_data.nbytes for bucket in self.buckets)
        kind = self._kind("dp.gradient", self.gradient_syncs, nbytes, force_all_reduce)
        self.uncompressed_kind = kind
        if kind == "compressed":
            self._prepare_gradients()
            with torch.no_grad():
                work = join([sync.start() for sync in self.gradient_syncs])
        else:
            super().start_grad_sync(force_all_reduce)
            if not self.outer:
                return
            work = Work(self.grad_reduce_handle)
        if self.outer:
            nbytes = sum(bucket.gradients.nbytes for bucket in self.outer)
            kind = self._kind("dp.outer", self.outer_syncs, nbytes, force_all_reduce)
            work = work.then(lambda _: self._start_outer(kind))
        if self.ddp_config.overlap_grad_reduce:
            self.in_flight.add(work)
            self.grad_reduce_handle = work
        else:
            work.wait()

    def _kind(
        self, traffic: str, syncs: list[GradientSync], nbytes: int, force_all_reduce: bool | None
    ) -> str:
        if not syncs:
            return "off"
        if force_all_reduce:
            return "exact"  # the iteration saves its full gradients (--save-wgrads-interval)
        return self.policy.decide(traffic, nbytes).reason

    def _start_outer(self, kind: str) -> Work:
        """Start to sum this rank's shards over the optimizer instances."""
        if kind == "compressed":
            return join([sync.start() for sync in self.outer_syncs])
        op = dist.ReduceOp.AVG if self.ddp_config.average_in_collective else dist.ReduceOp.SUM
        return join([Work(bucket.all_reduce(bucket.gradients, kind, op)) for bucket in self.outer])

    def _prepare_gradients(self) -> None:
        """What megatron-core does before a reduction, but for scaling, which waits for the fp32 sum."""
        parameters = (parameter for bucket in self.buckets for parameter in bucket.params_list)
        for replay in dict.fromkeys(
            getattr(one, "_cudagraph_wgrad_ready_event", None) for one in parameters
        ):
            if (
                replay is not None
            ):  # of a layer's CUDA graph, which may still add to these gradients
                torch.cuda.current_stream().wait_event(replay)
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
        work = join([weights.start() for weights in self.weights]).then(self._align_weights)
        if self.ddp_config.overlap_param_gather and not force_sync:
            self.param_gather_handle = work
        else:
            work.wait()
        self.param_gather_dispatched = True

    def _align_weights(self, _: None) -> None:
        for parts in self.weight_replicas:
            align(parts, self.tensor_ranks, self.ledger)


class Gradients(Dimension):
    """Gradients and weights of one run: counted without compression, and compressed with it."""

    def __init__(self, config: DataParallelConfig, run: Run, *more: Any) -> None:
        super().__init__(config, run, *more)
        self.policy, self.ledger, self._say = run.policy, run.ledger, self.log
        self.adopt(config)
        self.syncs: list[tuple[GradientSync, GradientBucket]] = []
        """Every bucket's, as they are attached."""
        self.fsdp2: list[Fsdp2Compression] = []
        """Of chunks under --use-torch-fsdp2."""
        self._transports = run.transports
        self._topologies: dict[dist.ProcessGroup, Topology] = {}
        self.memory = GradientMemory(None, [], self._say)
        """Of the compressor, for checkpoints; that of the run's buckets once they are attached."""

    def adopt(self, config: DataParallelConfig) -> None:
        super().adopt(config)
        self.compressor: GradientCompressor | None = self.policy.rule("dp.gradient").codec
        self.outer_codec: Codec | None = self.policy.rule("dp.outer").codec

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        running.claim(chunks, self.run)
        communication.on_gradient_sync(record_uncompressed)
        communication.on_parameter_sync(record_uncompressed)
        gaps.on_master_copy(copy_masters)
        communication.on_replicated_gradient_sync(_align_gradients)

    def attach_wrapped(self, chunks: list[torch.nn.Module]) -> None:
        """Give every bucket group of chunks wrapped by DDP or torch's FSDP2 its gradient syncs and its
        weights; not wrapped, they are only evaluated, which is said. Collective over all ranks."""
        self.attach(chunks)  # again: the wrapped chunks are marked with the run, too
        for chunk in chunks:
            if isinstance(chunk, DistributedDataParallel):
                for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                    running.mark(group, self.run)
            if isinstance(chunk, TorchFullyShardedDataParallel):
                check_memory(self.compressor, chunk.config)
                topology = self.topology if self.config.enabled else find_topology
                cut = self._cut(chunk.module, chunk.process_group.size())
                is_copy = partial(_is_replicated, cut=cut)
                self.fsdp2.append(
                    Fsdp2Compression(chunk.module, self.run, topology, self._say, is_copy)
                )
        if not self.config.enabled:
            return
        if all(
            isinstance(one, MegatronModule) and not isinstance(one, _BaseDataParallel)
            for one in chunks
        ):
            self._say(
                "compression: --dp-compression has nothing to compress: the model is not wrapped by "
                "DistributedDataParallel, as under --skip-train"
            )
            return
        start = self.policy.rule("dp.gradient").start_iteration
        if start > self.policy.rule("dp.weight").start_iteration:  # the compressor's own choice
            name = self.compressor.name
            self._say(f"compression: {name}: gradients go uncompressed up to iteration {start}")
        if self.fsdp2:
            return
        for chunk in chunks:
            if not isinstance(chunk, DistributedDataParallel):
                raise TypeError(f"--dp-compression needs Megatron's DDP, not {type(chunk)}")
            check_memory(self.compressor, chunk.config)
            self.topology(chunk.intra_dp_cp_group)  # all ranks, also those without a bucket
            if chunk.config.num_moe_experts is not None:
                experts, dense = chunk.intra_expt_dp_group, chunk.intra_dp_cp_group.size()
                self.topology(experts, experts.size() / dense, "an expert's")
            instances = chunk.ddp_config.num_distributed_optimizer_instances
            self.config.check_instances(instances)
            if instances > 1:
                self.topology(
                    chunk.inter_dist_opt_group, 1 / chunk.intra_dp_cp_group.size(), "the outer"
                )
        for number, chunk in enumerate(chunks):
            prefix = f"chunk{number}." if len(chunks) > 1 else ""
            names = {
                parameter: prefix + name for name, parameter in chunk.module.named_parameters()
            }
            cut = self._cut(chunk.module)
            in_flight, sharing = InFlight(), parallel_state.get_expert_tensor_parallel_group
            groups = [
                (one, parallel_state.get_tensor_model_parallel_group())
                for one in chunk.bucket_groups
            ]
            groups += [(one, sharing()) for one in chunk.expert_parallel_bucket_groups]
            for group, ranks in groups:
                self._attach_group(group, names, in_flight, ranks, cut)
        if self.compressor is not None and self.compressor.has_memory:
            self.memory = GradientMemory(self.compressor.name, self.syncs, self._say)

    def add_state(self, state_dict: dict[str, Any], is_loading: bool) -> None:
        if "optimizer" in state_dict:
            self.memory.add_to(state_dict, is_loading)

    def loaded(self, state_dict: dict[str, Any]) -> None:
        self.memory.loaded(state_dict)

    def _cut(self, module: torch.nn.Module, data_shards: int = 1) -> Collection[torch.nn.Parameter]:
        """The parameters that are cut over tensor parallelism without Megatron's mark, named in the log."""
        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            return ()
        cut = cut_without_mark(module, data_shards)
        if cut:
            self._say(
                "compression: cut over tensor parallelism without tensor_model_parallel, and so not taken "
                f"for replicas: {', '.join(cut.values())}"
            )
        return cut

    def _attach_group(
        self,
        group,
        names: dict[torch.nn.Parameter, str],
        in_flight: InFlight,
        tensor_ranks: dist.ProcessGroup,
        cut: Collection[torch.nn.Parameter],
    ) -> None:
        config = group.ddp_config
        sharded = config.use_distributed_optimizer
        ranks = (
            group.intra_distributed_optimizer_instance_group
            if sharded
            else group.data_parallel_group
        )
        instances = config.num_distributed_optimizer_instances
        if ranks.size() == 1 and instances == 1:
            return
        topology = self.topology(ranks)
        symbols.change_class(group, CompressedBucketGroup)
        group.policy, group.topology, group.in_flight = self.policy, topology, in_flight
        group.tensor_ranks, group.ledger = tensor_ranks, self.ledger
        group.gradient_syncs, group.weights, group.outer, group.outer_syncs = [], [], [], []
        group.gradient_replicas, group.weight_replicas = [], []
        if instances > 1:
            group.ddp_config = replace(config, num_distributed_optimizer_instances=1)
        average = 1 / ranks.size() if config.average_in_collective else 1.0
        compressor = self.compressor if ranks.size() > 1 else None
        for bucket in group.buckets:
            scale = bucket.gradient_scaling_factor * average
            spans = spans_of(bucket, names)
            view = GradientBucket(bucket.grad_data, spans, scale, sharded, topology, self.ledger)
            if compressor is not None:
                sync = compressor.build(view)
                if sync.state() and not compressor.has_memory:
                    raise TypeError(
                        f"{type(compressor)} has syncs with a state; set has_memory = True"
                    )
                group.gradient_syncs.append(sync)
                self.syncs.append((sync, view))
            if instances > 1:
                between = self.topology(group.inter_distributed_optimizer_instance_group)
                average_outer = 1 / instances if config.average_in_collective else 1.0
                outer = GradientBucket(
                    view.shard, (), average_outer, False, between, self.ledger, "dp.outer"
                )
                group.outer.append(outer)
                if self.outer_codec is not None:
                    group.outer_syncs.append(CodecGradientSync(outer, self.outer_codec))
            if group.gradient_syncs or group.outer_syncs:
                first, values = 0, view.gradients
                if sharded:
                    first, values = topology.rank * view.shard.numel(), view.shard
                parts = replicated_parts(values, spans, cut, first, gradients=True)
                group.gradient_replicas.append(parts)
        # fp32 parameters have no separate master, so there is no difference to send.
        mixed = sharded and all(
            b.param_data.dtype in (torch.bfloat16, torch.float16) for b in group.buckets
        )
        if mixed and ranks.size() > 1 and self.policy.rule("dp.weight").codec is not None:
            nbytes = sum(bucket.param_data.nbytes for bucket in group.buckets)
            for bucket in group.buckets:
                weights = BucketWeights(
                    bucket.param_data, self.policy, topology, self.ledger, nbytes
                )
                setattr(bucket, ATTRIBUTE, weights)
                group.weights.append(weights)
                parts = replicated_parts(bucket.param_data.view(-1), spans_of(bucket, names), cut)
                group.weight_replicas.append(parts)

    def topology(self, ranks: dist.ProcessGroup, part: float = 1.0, whose: str = "a") -> Topology:
        """The topology of a group with ``part`` of a node's data-parallel ranks; at first collective."""
        if ranks not in self._topologies:
            size = self.config.node_size
            topology = find_topology(ranks, size and max(1, int(size * part)), self._transports)
            self._topologies[ranks] = topology
            self._say(f"compression: {whose} data-parallel group is {topology.describe()}")
        return self._topologies[ranks]


def _is_replicated(parameter: torch.nn.Parameter, cut: Collection[torch.nn.Parameter]) -> bool:
    """Whether every tensor-parallel rank holds a parameter in whole; ``cut`` lack Megatron's mark."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1 or parameter in cut:
        return False
    return not getattr(parameter, "tensor_model_parallel", False)


def spans_of(bucket, names: dict[torch.nn.Parameter, str]) -> tuple[ParameterSpan, ...]:
    """The parameters of a Megatron bucket, by position."""
    spans: Iterable[ParameterSpan] = (
        ParameterSpan(names[parameter], parameter, *bucket.param_to_index[parameter])
        for parameter in bucket.params_list
    )
    return tuple(sorted(spans, key=lambda span: span.start))


def _align_gradients(run: Run, chunks: list[torch.nn.Module]) -> None:
    align_gradients(chunks)


def record_uncompressed(
    run: Run, traffic: str, group, operation: str, buffer_bytes: int, world_size: int
) -> None:
    """Count an uncompressed collective of a bucket group, under the reason that an attached group gives."""
    kind = getattr(group, "uncompressed_kind", "off")
    topology = getattr(group, "topology", None)
    if topology is None:
        run.ledger.record_uncompressed(traffic, kind, operation, buffer_bytes, world_size)
    else:
        topology.record_uncompressed(run.ledger, traffic, kind, operation, buffer_bytes)
