"""Reductions of FSDP2's gradients over a codec or a gradient compressor, in the place of FSDP's own.

FSDP gives a module's gradients as ``[ranks, n]``: row r holds rank r's piece of every parameter, one after the
other. For a ``GradientCompressor`` this is a bucket whose shards are the rows. Under HSDP the sum over the
replicas is a second bucket, this rank's row. FSDP would all-reduce it itself, before it calls the all-reduce
hook: so the module's mesh is set to the dimension of the shards alone, and the hook sums over the replicas.
"""

from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology
from megatron.compression.data_parallel.codec_gradients import CodecGradients
from megatron.compression.data_parallel.compressor import (
    GradientBucket,
    GradientCompressor,
    GradientSync,
    ParameterSpan,
)
from megatron.compression.errors import CompressionConfigError
from megatron.compression.fsdp2.weights import PlainMemory

TRAFFIC = "dp.gradient"


class GradientSums:
    """Sums of a parameter group's gradients over one process group, by a compressor.

    Args:
        names: of the group's parameters.
        sharded: each rank keeps its row of the sum; else every rank has one row and keeps all of it.
    """

    def __init__(
        self,
        names: list[str],
        group: FSDPParamGroup,
        compressor: GradientCompressor,
        topology: Topology,
        ledger: Ledger,
        sharded: bool,
    ) -> None:
        self.names, self.group, self.compressor = names, group, compressor
        self.topology, self.ledger, self.sharded = topology, ledger, sharded
        self._built: dict[int, tuple[GradientSync, GradientBucket]] = {}

    @cached_property
    def spans(self) -> tuple[ParameterSpan, ...]:
        """Every rank's piece of every parameter that has gradients; a parameter of a span is that piece."""
        spans, position = [], 0
        for _ in range(self.topology.world_size if self.sharded else 1):
            for name, own in zip(self.names, self.group.fsdp_params, strict=True):
                if own.sharded_param.requires_grad:
                    piece = torch.nn.Parameter(torch.empty(own.padded_sharded_param_size, device="meta"))
                    spans.append(ParameterSpan(name, piece, position, position + piece.numel()))
                    position = spans[-1].end
        return tuple(spans)

    def built(self, numel: int | None = None) -> tuple[GradientSync, GradientBucket]:
        """What sums ``numel`` gradients; None: those of all parameters.

        Raises: CompressionConfigError: fewer than all, for a compressor that is no codec.
        """
        every = self.spans[-1].end if self.spans else 0
        numel = every if numel is None else numel
        if numel not in self._built:
            if numel != every and not isinstance(self.compressor, CodecGradients):
                raise CompressionConfigError(
                    f"reduce={self.compressor.name}: a backward pass gave {numel} of the {every} gradients of "
                    f"{', '.join(self.names)}; it needs all of them in each pass, so choose a codec such as "
                    "int8"
                )
            nothing = torch.empty(1, device=self.group.device).expand(numel)
            bucket = GradientBucket(nothing, self.spans, 1.0, self.sharded, self.topology, self.ledger)
            self._built[numel] = self.compressor.build(bucket), bucket
        return self._built[numel]

    def sum(self, gradients: torch.Tensor, scale: float) -> torch.Tensor:
        """``scale`` times the sum, in place: this rank's row of ``gradients``, or all of them."""
        sync, bucket = self.built(gradients.numel())
        nothing = bucket.gradients
        bucket.gradients, bucket.scale = gradients, scale
        try:
            sync.start().wait()
            return bucket.shard if self.sharded else gradients
        finally:
            bucket.gradients = nothing  # FSDP frees them

    def state(self) -> dict[str, torch.Tensor]:
        """The compressor's memory, which is made now if it has not been used."""
        return self.built()[0].state() if self.spans else {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what ``state`` gave."""
        self.built()[0].load_state(state)

    def buffer_bytes(self) -> int:
        """Of the payloads of one reduction, sent and received; 0 where they are not a codec's."""
        codec = getattr(self.compressor, "codec", None)
        if codec is None or not self.spans:
            return 0
        ranks = self.topology.world_size
        return 2 * ranks * codec.payload_bytes((-(-self.spans[-1].end // ranks),))


class GradientReduce(PlainMemory, ReduceScatter):
    """The reduce-scatters of one parameter group, and the all-reduces between its replicas.

    Args:
        topology, replicas: of the shards' ranks and of the replicas'; None: HSDP is off.
    """

    def __init__(
        self,
        names: list[str],
        group: FSDPParamGroup,
        topology: Topology,
        replicas: Topology | None,
        run: Run,
    ) -> None:
        self.group, self.topology, self.replicas, self.run = group, topology, replicas, run
        compressor = run.policy.rule(TRAFFIC).codec
        self.sums: list[GradientSums] = []
        """Over the shards' ranks, and over the replicas; empty: gradients are not compressed."""
        self._partial: torch.Tensor | None = None
        if compressor is not None:
            for where in filter(None, (topology, replicas)):
                args = names, group, compressor, where, run.ledger, where is topology
                self.sums.append(GradientSums(*args))
        if replicas is None:
            return
        if compressor is None:
            group._all_reduce_hook = self._count_all_reduce
            return
        group._all_reduce_hook = self._all_reduce
        own = group.mesh_info
        assert isinstance(own, HSDPMeshInfo)
        shards = FSDPMeshInfo(own.mesh, own.shard_mesh_dim)
        if group.post_forward_mesh_info is own:
            group.post_forward_mesh_info = shards
        group.mesh_info = shards

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum ``[W * n]`` over the ranks into this rank's ``[n]``, on the current stream."""
        decision = self.run.policy.decide(TRAFFIC, input_tensor.nbytes)
        if decision.codec is None:
            self.topology.record_uncompressed(
                self.run.ledger, TRAFFIC, decision.why, "reduce_scatter", input_tensor.nbytes
            )
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise CompressionConfigError(
                "set_gradient_divide_factor() has NCCL scale before it adds, which no codec does; call "
                "set_force_sum_reduction_for_comms(True) as well, or attach with reduce='none'"
            )
        scale = 1 / self.topology.world_size if op == dist.ReduceOp.AVG else 1.0
        output_tensor.copy_(self.sums[0].sum(input_tensor, scale))
        return None

    def _all_reduce(self, gradients: torch.Tensor) -> None:
        """Average this rank's row over the replicas, in place; what FSDP does under HSDP, over the codec."""
        assert self.replicas is not None
        if gradients.is_cuda:  # FSDP keeps them for its own all-reduce only
            gradients.record_stream(torch.cuda.current_stream())
        if not self.group.all_reduce_grads:  # a later backward's all-reduce sends them, too
            self._partial = gradients.clone() if self._partial is None else self._partial.add_(gradients)
            gradients.zero_()
            return
        if self._partial is not None:
            gradients += self._partial
            self._partial = None
        given = self.group.gradient_divide_factor is not None  # by which FSDP divides already
        decision = self.run.policy.decide(TRAFFIC, gradients.nbytes)
        if decision.codec is None:
            self._count_all_reduce(gradients, decision.why)
            op = dist.ReduceOp.SUM if given else dist.ReduceOp.AVG
            dist.all_reduce(gradients, op, self.replicas.group)
        else:
            self.sums[1].sum(gradients, 1.0 if given else 1 / self.replicas.world_size)

    def _count_all_reduce(self, gradients: torch.Tensor, why: str = "off") -> None:
        assert self.replicas is not None
        self.replicas.record_uncompressed(self.run.ledger, TRAFFIC, why, "all_reduce", gradients.nbytes)
