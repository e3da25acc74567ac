"""Reductions of FSDP2's gradients over a codec or a gradient compressor, in the place of FSDP's own.

FSDP gives a module's gradients as ``[ranks, n]``: to a ``GradientCompressor`` a bucket whose shards are the
rows. Under HSDP this rank's row is a second bucket, summed over the replicas by FSDP's all-reduce hook. Its
own all-reduce would come before: so the module's mesh is set to the dimension of the shards alone.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology
from megatron.compression.data_parallel.codec_gradients import CodecGradients
from megatron.compression.data_parallel.compressor import (
    GradientBucket,
    GradientSync,
    ParameterSpan,
)
from megatron.compression.errors import CompressionConfigError

TRAFFIC = "dp.gradient"


@dataclass(eq=False)
class GradientSums:
    """Sums of a parameter group's gradients over one process group."""

    names: list[str]
    """Of the group's parameters."""
    group: FSDPParamGroup
    topology: Topology
    run: Run
    sharded: bool
    """Each rank keeps its row of the sum; else every rank has one row and keeps all of it."""
    _built: dict[int, tuple[GradientSync, GradientBucket]] = field(default_factory=dict)

    @cached_property
    def spans(self) -> tuple[ParameterSpan, ...]:
        """Every rank's piece of every parameter that has gradients; a parameter of a span is that piece."""
        spans, position = [], 0
        for _ in range(self.topology.world_size if self.sharded else 1):
            for name, own in zip(self.names, self.group.fsdp_params, strict=True):
                if own.sharded_param.requires_grad:
                    piece = torch.nn.Parameter(
                        torch.empty(own.padded_sharded_param_size, device="meta")
                    )
                    spans.append(ParameterSpan(name, piece, position, position + piece.numel()))
                    position = spans[-1].end
        return tuple(spans)

    @property
    def numel(self) -> int:
        """Gradients of all parameters, over all rows."""
        return self.spans[-1].end if self.spans else 0

    def built(self, numel: int) -> tuple[GradientSync, GradientBucket]:
        """What sums ``numel`` gradients; fewer than all are refused where the compressor is no codec."""
        if numel not in self._built:
            compressor = self.run.policy.rule(TRAFFIC).codec
            if numel != self.numel and not isinstance(compressor, CodecGradients):
                raise CompressionConfigError(
                    f"reduce={compressor.name}: a pass gave {numel} gradients, the first {self.numel}, of "
                    f"{', '.join(self.names)}; it needs the same in each, so choose a codec such as int8"
                )
            policy, device = self.group.mp_policy, self.group.device
            dtype = (
                policy.reduce_dtype
                or policy.param_dtype
                or self.group.fsdp_params[0].sharded_param.dtype
            )
            nothing = torch.empty(1, dtype=dtype, device=device).expand(numel)
            bucket = GradientBucket(
                nothing, self.spans, 1.0, self.sharded, self.topology, self.run.ledger
            )
            self._built[numel] = compressor.build(bucket), bucket
        return self._built[numel]

    def sum(self, gradients: Tensor, scale: float) -> Tensor:
        """``scale`` times the sum, in place: this rank's row of ``gradients``, or all of them."""
        sync, bucket = self.built(gradients.numel())
        nothing, bucket.gradients, bucket.scale = bucket.gradients, gradients, scale
        sync.start().wait()
        total = bucket.shard if self.sharded else gradients
        bucket.gradients = nothing  # FSDP frees them
        return total

    def buffer_bytes(self) -> int:
        """Of one reduction's payloads, sent and received; 0 where they are not a codec's."""
        codec, ranks = (
            getattr(self.run.policy.rule(TRAFFIC).codec, "codec", None),
            self.topology.world_size,
        )
        numel = self.numel if ranks > 1 else 0
        return 2 * ranks * codec.payload_bytes((-(-numel // ranks),)) if codec and numel else 0


@dataclass(eq=False)
class GradientReduce(DefaultAllocMixin, ReduceScatter):
    """The reduce-scatters of one parameter group, and under HSDP the all-reduces of its replicas."""

    group: FSDPParamGroup
    sums: list[GradientSums]
    """Over the shards' ranks and, under HSDP, over the replicas."""
    _partial: Tensor | None = None

    def __post_init__(self) -> None:
        own = self.group.mesh_info
        if isinstance(own, HSDPMeshInfo):
            self.group.mesh_info = FSDPMeshInfo(own.mesh, own.shard_mesh_dim)
            if self.group.post_forward_mesh_info is own:
                self.group.post_forward_mesh_info = self.group.mesh_info
            self.group.modules[0].set_all_reduce_hook(self._all_reduce)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op=False,
    ) -> dist.Work | None:
        """Sum ``[W * n]`` over the ranks into this rank's ``[n]``, on the current stream."""
        if not self._compresses(self.sums[0], "reduce_scatter", input_tensor):
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        divisor = group.size() if op == dist.ReduceOp.AVG else 1
        if op not in (
            dist.ReduceOp.AVG,
            dist.ReduceOp.SUM,
        ):  # NCCL's, which multiplies before it adds
            divisor = self.group.gradient_divide_factor
        output_tensor.copy_(self.sums[0].sum(input_tensor, 1 / divisor))
        return None

    def _all_reduce(self, row: Tensor) -> None:
        """Average this rank's row over the replicas, in place, as FSDP does under HSDP."""
        if row.is_cuda:
            row.record_stream(
                torch.cuda.current_stream()
            )  # FSDP keeps it for its own all-reduce alone
        if self._partial is not None:
            row += self._partial
        self._partial = None if self.group.all_reduce_grads else row.clone()
        if self._partial is not None:  # a later pass sends it as well
            row.zero_()
            return
        given = self.group.gradient_divide_factor is not None  # the whole divisor
        replicas = self.sums[1]
        if self._compresses(replicas, "all_reduce", row):
            replicas.sum(row, 1.0 if given else 1 / replicas.topology.world_size)
        else:
            op = dist.ReduceOp.SUM if given else dist.ReduceOp.AVG
            dist.all_reduce(row, op, replicas.topology.group)

    def _compresses(self, sums: GradientSums, operation: str, gradients: Tensor) -> bool:
        """Whether a reduction is compressed; one that is not is counted."""
        codec, why = sums.run.policy.decide(TRAFFIC, gradients.nbytes)
        if codec is None:
            sums.topology.record_uncompressed(
                sums.run.ledger, TRAFFIC, why, operation, gradients.nbytes
            )
        return codec is not None
