"""Puts data-parallel compression into a run: Megatron's bucket groups with compressed
collectives."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.transformer import MegatronModule

from megatron.compression.codecs import Codec
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.communication.work import InFlight, Work, join
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
    copy_masters,
    replicated_parts,
)
from megatron.compression.dimension import Dimension
from megatron.compression.patches import communication, gaps, running, symbols
from megatron.compression.replicated_parameters import sharded_without_mark


@dataclass
class BucketGroupPlan:
    """How one bucket group of Megatron's sends its gradients and weights."""

    run: Run
    topology: Topology
    """The data-parallel ranks, of one optimizer instance where there are several."""
    tensor_ranks: dist.ProcessGroup
    """Tensor-parallel ranks, or the experts'."""
    in_flight: InFlight
    """Shared by the groups of a kind in a model chunk."""
    gradient_syncs: list[GradientSync] = field(default_factory=list)
    """One a bucket; empty: gradients are not compressed."""
    outer: list[GradientBucket] = field(default_factory=list)
    """One a bucket, this rank's shard between optimizer instances; empty: there is one instance."""
    outer_syncs: list[GradientSync] = field(default_factory=list)
    """One for each of ``outer``; empty: it goes uncompressed."""
    weights: list[BucketWeights] = field(default_factory=list)
    """One a bucket; empty: weights are not compressed."""
    gradient_replicas: list[list[torch.Tensor]] = field(default_factory=list)
    """By bucket: reduced gradients that ``tensor_ranks`` hold alike; empty where nothing is
    lossy."""
    weight_replicas: list[list[torch.Tensor]] = field(default_factory=list)
    """By bucket of ``weights``: the parts that ``tensor_ranks`` hold alike."""
    uncompressed_reason: str = "off"
    """The ledger's reason of Megatron's next collective."""

    def reason(
        self, traffic: str, syncs: list[GradientSync], nbytes: int, force_all_reduce: bool | None
    ) -> str:
        """Return "compressed", or the ledger's reason why a reduction is not.

        Args:
            traffic: dp.gradient or dp.outer.
            syncs: what would compress it; empty: nothing.
            nbytes: uncompressed, of the whole group.
            force_all_reduce: the iteration saves its full gradients (--save-wgrads-interval).
        """
        if not syncs:
            return "off"
        if force_all_reduce:
            return "exact"
        return self.run.policy.decide(traffic, nbytes).reason


class CompressedBucketGroup(_ParamAndGradBucketGroup):
    """A bucket group whose class was changed after building; Megatron's own calls drive it.

    What it does not compress goes through megatron-core's methods. The outer hop, between optimizer
    instances, is always its own: megatron-core sees one instance, and gives a handle of the inner
    hop.
    """

    plan: BucketGroupPlan

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Start reducing the group's gradients, compressed where this iteration compresses them."""
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return  # megatron-core's rule: dispatched already, by hand, in the first batch
        # One decision a group, by all of its bytes: its buckets are sent together or not at all.
        plan = self.plan
        nbytes = sum(bucket.grad_data.nbytes for bucket in self.buckets)
        reason = plan.reason("dp.gradient", plan.gradient_syncs, nbytes, force_all_reduce)
        plan.uncompressed_reason = reason
        if reason == "compressed":
            self._prepare_gradients()
            with torch.no_grad():
                work = join([sync.start() for sync in plan.gradient_syncs])
        else:
            # Megatron scales, reduces and counts; it finds the reason in the plan.
            super().start_grad_sync(force_all_reduce)
            if not plan.outer:
                return
            # None without overlap: then the inner hop is complete, and the outer one follows at
            # once.
            work = Work(self.grad_reduce_handle)
        if plan.outer:
            nbytes = sum(bucket.gradients.nbytes for bucket in plan.outer)
            outer_reason = plan.reason("dp.outer", plan.outer_syncs, nbytes, force_all_reduce)
            work = work.then(lambda _: self._start_outer(outer_reason))
        if self.ddp_config.overlap_grad_reduce:
            plan.in_flight.add(work)
            # Megatron waits for it in finish_grad_sync, as for a handle of torch.distributed.
            self.grad_reduce_handle = work
        else:
            work.wait()

    def _start_outer(self, reason: str) -> Work:
        """Start to sum this rank's shards over the optimizer instances."""
        plan = self.plan
        if reason == "compressed":
            return join([sync.start() for sync in plan.outer_syncs])
        op = dist.ReduceOp.AVG if self.ddp_config.average_in_collective else dist.ReduceOp.SUM
        works = [bucket.all_reduce(bucket.gradients, reason, op) for bucket in plan.outer]
        return join([Work(work) for work in works])

    def _prepare_gradients(self) -> None:
        """Do what megatron-core does before a reduction, but for scaling, which waits for the fp32
        sum."""
        parameters = (parameter for bucket in self.buckets for parameter in bucket.params_list)
        events = [
            getattr(parameter, "_cudagraph_wgrad_ready_event", None) for parameter in parameters
        ]
        for replay in dict.fromkeys(events):
            # of a layer's CUDA graph, which may still add to these gradients
            if replay is not None:
                torch.cuda.current_stream().wait_event(replay)
        for bucket in self.buckets:
            # gradients that live elsewhere, in another type, go into the buffer first
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
        """Complete this group's reduction; the second exchanges of its kind are on their way
        meanwhile."""
        self.plan.in_flight.advance()
        super().finish_grad_sync(force_all_reduce)

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gather the updated weights: compressed after an optimizer step, as they are at any other
        time."""
        plan = self.plan
        if not plan.weights or any(weights.pending is None for weights in plan.weights):
            # Nothing has changed since the last gather (a skipped step, a checkpoint), Megatron has
            # copied the weights itself (warm-up), or a gather is under way and is to be waited for.
            plan.uncompressed_reason = "off"
            if plan.weights:
                plan.uncompressed_reason = plan.weights[0].uncompressed_reason
            super().start_param_sync(force_sync)
            for weights in plan.weights:
                weights.uncompressed_reason = "exact"
            return
        # Aligned after the gather: every rank has decoded by then, the first tensor-parallel one
        # too.
        work = join([weights.start() for weights in plan.weights]).then(self._align_weights)
        if self.ddp_config.overlap_param_gather and not force_sync:
            self.param_gather_handle = work
        else:
            work.wait()
        self.param_gather_dispatched = True

    def _align_weights(self, _: None) -> None:
        for replicas in self.plan.weight_replicas:
            align(replicas, self.plan.tensor_ranks, self.plan.run.ledger)


class Gradients(Dimension):
    """Gradients and weights of one run under Megatron's DDP: counted, and compressed.

    What torch's FSDP2 sends is in fsdp2/hooks.py, which goes on from here.
    """

    def __init__(self, config: DataParallelConfig, run: Run, *arguments: Any) -> None:
        super().__init__(config, run, *arguments)
        self.policy = run.policy
        self.ledger = run.ledger
        self.adopt(config)
        self.syncs: list[tuple[GradientSync, GradientBucket]] = []
        """Every bucket's, as they are attached."""
        self._topologies: dict[dist.ProcessGroup, Topology] = {}
        self.memory = GradientMemory(None, [], self.log)
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
        communication.on_replicated_gradient_sync(align_gradients)

    def attach_wrapped(self, chunks: list[torch.nn.Module]) -> None:
        """Give every bucket group of chunks wrapped by DDP its gradient syncs and its weights.

        Collective over all ranks. Chunks that are not wrapped are only evaluated, which is logged.
        """
        self.attach(chunks)  # again: the wrapped chunks are marked with the run, too
        for chunk in chunks:
            if isinstance(chunk, DistributedDataParallel):
                for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                    running.mark(group, self.run)
        if not self.config.enabled:
            return
        if all(_is_not_wrapped(chunk) for chunk in chunks):
            self.log(
                "compression: --dp-compression has nothing to compress: the model is not wrapped "
                "by DistributedDataParallel, as under --skip-train"
            )
            return
        self._log_late_gradients()
        self._attach_replicas(chunks)

    def _attach_replicas(self, chunks: list[torch.nn.Module]) -> None:
        """Attach wrapped chunks; data parallelism is compressed."""
        # First the topologies, which all ranks find together: one may have no bucket.
        for chunk in chunks:
            if not isinstance(chunk, DistributedDataParallel):
                raise TypeError(f"--dp-compression needs Megatron's DDP, not {type(chunk)}")
            self.config.check_wrapped(chunk.ddp_config)
            check_memory(self.compressor, chunk.config)
            self._find_topologies(chunk)
        for number, chunk in enumerate(chunks):
            prefix = f"chunk{number}." if len(chunks) > 1 else ""
            # Names of the whole rank's model: two virtual stages both have a decoder.layers.0.
            names = {
                parameter: prefix + name for name, parameter in chunk.module.named_parameters()
            }
            cut = self.cut(chunk.module)
            dense = InFlight()
            tensor_ranks = parallel_state.get_tensor_model_parallel_group()
            for group in chunk.bucket_groups:
                self._attach_group(group, names, dense, tensor_ranks, cut)
            experts = InFlight()
            for group in chunk.expert_parallel_bucket_groups:
                tensor_ranks = parallel_state.get_expert_tensor_parallel_group()
                self._attach_group(group, names, experts, tensor_ranks, cut)
        if self.compressor is not None and self.compressor.has_memory:
            self.memory = GradientMemory(self.compressor.name, self.syncs, self.log)

    def _log_late_gradients(self) -> None:
        start = self.policy.rule("dp.gradient").start_iteration
        if start > self.policy.rule("dp.weight").start_iteration:  # the compressor's own choice
            name = self.compressor.name
            self.log(f"compression: {name}: gradients go uncompressed up to iteration {start}")

    def _find_topologies(self, chunk: DistributedDataParallel) -> None:
        """Find the topologies of a chunk's process groups. Collective over all ranks of the job."""
        dense_ranks = chunk.intra_dp_cp_group.size()
        self.topology(chunk.intra_dp_cp_group)
        if chunk.config.num_moe_experts is not None:
            experts = chunk.intra_expt_dp_group
            self.topology(experts, experts.size() / dense_ranks, "an expert's")
        instances = chunk.ddp_config.num_distributed_optimizer_instances
        self.config.check_instances(instances)
        if instances > 1:
            self.topology(chunk.inter_dist_opt_group, 1 / dense_ranks, "the outer")

    def add_state(self, state_dict: dict[str, Any], is_loading: bool) -> None:
        if "optimizer" in state_dict:
            self.memory.add_to(state_dict, is_loading)

    def loaded(self, state_dict: dict[str, Any]) -> None:
        self.memory.loaded(state_dict)

    def cut(self, module: torch.nn.Module, data_shards: int = 1) -> Collection[torch.nn.Parameter]:
        """Find the parameters that tensor parallelism cuts without Megatron's mark, and log their
        names.

        Args:
            module: a model chunk, not wrapped.
            data_shards: as for ``sharded_without_mark``.
        """
        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            return ()
        cut = sharded_without_mark(module, data_shards)
        if cut:
            self.log(
                "compression: these parameters are split over tensor-parallel ranks but lack the "
                "mark tensor_model_parallel, so they are not treated as replicas: "
                f"{', '.join(cut.values())}"
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
        """Plan how a bucket group of Megatron's sends, and make it a ``CompressedBucketGroup``.

        What a group may have, by the sizes of its process groups and the distributed optimizer:

            instances               1                           more
            ranks 1                 nothing is sent             outer
            ranks more              gradients [, weights]       gradients, outer [, weights]

        With the distributed optimizer (``sharded``) a bucket's sum is this rank's shard, and the
        outer hop sums that shard; without it every rank holds all of the sum, and there is one
        instance.

        Args:
            group: megatron-core's.
            names: of the parameters, in the whole model of this rank.
            in_flight: shared by the groups of its kind.
            tensor_ranks: hold some parameters alike.
            cut: parameters that they do not hold alike, without Megatron's mark.
        """
        config = group.ddp_config
        sharded = config.use_distributed_optimizer
        if sharded:
            ranks = group.intra_distributed_optimizer_instance_group
        else:
            ranks = group.data_parallel_group
        instances = config.num_distributed_optimizer_instances
        if ranks.size() == 1 and instances == 1:
            return
        plan = BucketGroupPlan(self.run, self.topology(ranks), tensor_ranks, in_flight)
        for bucket in group.buckets:
            self._plan_gradients(plan, group, bucket, ranks.size(), names, cut)
        if ranks.size() > 1:
            self._plan_weights(plan, group, names, cut)
        # Last, so that a group is either Megatron's own or complete.
        group.plan = plan
        symbols.change_class(group, CompressedBucketGroup)
        if instances > 1:  # its class does the outer hop
            group.ddp_config = replace(config, num_distributed_optimizer_instances=1)

    def _plan_gradients(
        self,
        plan: BucketGroupPlan,
        group,
        bucket,
        ranks: int,
        names: dict[torch.nn.Parameter, str],
        cut: Collection[torch.nn.Parameter],
    ) -> None:
        """Plan the sums of one bucket's gradients; ``ranks``: of an optimizer instance."""
        config = group.ddp_config
        # Megatron scales gradients before it sums; here the factor is applied to the fp32 sum.
        average = 1 / ranks if config.average_in_collective else 1.0
        view = GradientBucket(
            bucket.grad_data,
            spans_of(bucket, names),
            bucket.gradient_scaling_factor * average,
            config.use_distributed_optimizer,
            plan.topology,
            self.ledger,
        )
        if ranks > 1 and self.compressor is not None:
            plan.gradient_syncs.append(self._build_sync(view))
        if config.num_distributed_optimizer_instances > 1:
            self._plan_outer(plan, group, view)
        if plan.gradient_syncs or plan.outer_syncs:
            plan.gradient_replicas.append(_reduced_replicas(view, cut))

    def _build_sync(self, view: GradientBucket) -> GradientSync:
        """Return what sums a bucket's gradients inside an optimizer instance."""
        sync = self.compressor.build(view)
        # A memory that is not announced would be lost in checkpoints, and scaled by a loss scale.
        if sync.state() and not self.compressor.has_memory:
            raise TypeError(
                f"{type(self.compressor)} has syncs with a state; set has_memory = True"
            )
        self.syncs.append((sync, view))
        return sync

    def _plan_outer(self, plan: BucketGroupPlan, group, view: GradientBucket) -> None:
        """Plan the sum of this rank's shard of a bucket over the optimizer instances."""
        config = group.ddp_config
        instances = config.num_distributed_optimizer_instances
        average = 1 / instances if config.average_in_collective else 1.0
        between = self.topology(group.inter_distributed_optimizer_instance_group)
        # Not sharded: every instance needs all of this rank's shard. It has no spans, since a shard
        # may begin in the middle of a parameter; codecs do not ask for them.
        outer = GradientBucket(view.shard, (), average, False, between, self.ledger, "dp.outer")
        plan.outer.append(outer)
        if self.outer_codec is not None:
            plan.outer_syncs.append(CodecGradientSync(outer, self.outer_codec))

    def _plan_weights(
        self,
        plan: BucketGroupPlan,
        group,
        names: dict[torch.nn.Parameter, str],
        cut: Collection[torch.nn.Parameter],
    ) -> None:
        """Plan the gather of updated weights, where there are masters apart from what is sent."""
        # fp32 parameters have no separate master, so there is no difference to send.
        half = (torch.bfloat16, torch.float16)
        config = group.ddp_config
        mixed = config.use_distributed_optimizer and all(
            bucket.param_data.dtype in half for bucket in group.buckets
        )
        if not mixed or self.policy.rule("dp.weight").codec is None:
            return
        nbytes = sum(bucket.param_data.nbytes for bucket in group.buckets)
        for bucket in group.buckets:
            weights = BucketWeights(
                bucket.param_data,
                self.policy,
                plan.topology,
                self.ledger,
                nbytes,
                update_waits=config.overlap_param_gather,
            )
            setattr(bucket, ATTRIBUTE, weights)
            plan.weights.append(weights)
            flat = bucket.param_data.view(-1)
            plan.weight_replicas.append(replicated_parts(flat, spans_of(bucket, names), cut))

    def topology(
        self, ranks: dist.ProcessGroup, share: float = 1.0, article: str = "a"
    ) -> Topology:
        """Return the topology of a group; collective over all ranks of the job the first time.

        Args:
            ranks: the group.
            share: how much of a node's data-parallel ranks are in it, for ``node_size``.
            article: begins the line of the log.
        """
        if ranks not in self._topologies:
            size = self.config.node_size
            # Of a node's data-parallel ranks an expert's group has a part, the outer group one.
            node_size = None if size is None else max(1, int(size * share))
            topology = find_topology(ranks, node_size, self.run.transports)
            self._topologies[ranks] = topology
            self.log(f"compression: {article} data-parallel group is {topology.describe()}")
        return self._topologies[ranks]


def _is_not_wrapped(chunk: torch.nn.Module) -> bool:
    return isinstance(chunk, MegatronModule) and not isinstance(chunk, _BaseDataParallel)


def spans_of(bucket, names: dict[torch.nn.Parameter, str]) -> tuple[ParameterSpan, ...]:
    """Return the parameters of a Megatron bucket, by position."""
    spans: Iterable[ParameterSpan] = (
        ParameterSpan(names[parameter], parameter, *bucket.param_to_index[parameter])
        for parameter in bucket.params_list
    )
    return tuple(sorted(spans, key=lambda span: span.start))


def _reduced_replicas(
    view: GradientBucket, cut: Collection[torch.nn.Parameter]
) -> list[torch.Tensor]:
    """Return what tensor-parallel ranks hold alike of a bucket's reduced gradients on this rank."""
    if not view.sharded:
        return replicated_parts(view.gradients, view.spans, cut, gradients=True)
    first = view.topology.rank * view.shard.numel()
    return replicated_parts(view.shard, view.spans, cut, first, gradients=True)


def align_gradients(run: Run, chunks: Iterable[torch.nn.Module]) -> None:
    """Give tensor-parallel ranks the same gradients of what they hold alike, dense and experts'.

    Called after all reductions and sums over tensor-parallel ranks.

    Args:
        run: that of the chunks.
        chunks: DDP-wrapped ones; of others there is nothing.
    """
    for chunk in chunks:
        for attribute in ("bucket_groups", "expert_parallel_bucket_groups"):
            for group in getattr(chunk, attribute, ()):
                plan = getattr(group, "plan", None)
                for replicas in plan.gradient_replicas if plan is not None else ():
                    align(replicas, plan.tensor_ranks, run.ledger)


def record_uncompressed(
    run: Run, traffic: str, group, operation: str, buffer_bytes: int, world_size: int
) -> None:
    """Count a collective that megatron-core sends for a bucket group, uncompressed.

    A group that compresses has a plan, which says why this message is not compressed, and knows
    which bytes cross nodes.

    Args:
        run: the run of the group's model.
        traffic: the ledger's class, such as ``dp.gradient``.
        group: megatron-core's bucket group.
        operation: the collective, as the ledger calls it.
        buffer_bytes: bytes of the whole buffer, over all ranks.
        world_size: the number of ranks; a group with a plan knows its own.
    """
    plan = getattr(group, "plan", None)
    if plan is None:
        # "off": no codec was chosen for this traffic.
        run.ledger.record_uncompressed(traffic, "off", operation, buffer_bytes, world_size)
    else:
        plan.topology.record_uncompressed(
            run.ledger, traffic, plan.uncompressed_reason, operation, buffer_bytes
        )
