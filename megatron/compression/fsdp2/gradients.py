"""Reductions of FSDP2's gradients over a codec or a gradient compressor, in the place of FSDP's
own.

FSDP gives a module's gradients as ``[ranks, n]``: to a ``GradientCompressor`` a bucket whose shards
are the rows. Under HSDP this rank's row is a second bucket, summed over the replicas by FSDP's
all-reduce hook.
"""

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.work import Work
from megatron.compression.data_parallel.codec_gradients import CodecGradients
from megatron.compression.data_parallel.compressor import (
    GradientBucket,
    GradientSync,
    ParameterSpan,
)
from megatron.compression.errors import CompressionConfigError
from megatron.compression.fsdp2.copies import Copies, IsCopy, copies_in
from megatron.compression.fsdp2.parameter_group import (
    DefaultAllocMixin,
    ParameterGroup,
    ReduceScatter,
)
from taco_kernels.common import ceil_div

TRAFFIC = "dp.gradient"


class GradientSums:
    """Sums of a parameter group's gradients over one process group."""

    def __init__(
        self,
        group: ParameterGroup,
        topology: Topology,
        run: Run,
        sharded: bool,
        is_copy: IsCopy,
    ) -> None:
        """Prepare the sums of a group.

        Args:
            group: the parameters.
            topology: the ranks that sum.
            run: policy, ledger and transports.
            sharded: each rank keeps its row of the sum; else every rank has one row and keeps all
                of it.
            is_copy: tells parameters that ranks outside FSDP's mesh hold as well.
        """
        self.group = group
        self.topology = topology
        self.run = run
        self.sharded = sharded
        self._is_copy = is_copy
        self._built: dict[int, tuple[GradientSync, GradientBucket]] = {}
        """By the number of gradients."""
        self._copies: dict[tuple[bool, ...], Copies] = {}
        """By which parameters are trained."""

    def copies(self, numel: int) -> Copies | None:
        """Return where the copies lie in a row of a pass; None: that cannot be known.

        FSDP leaves out frozen parameters, and those that a pass has not used, and does not say
        which.

        Args:
            numel: gradients of the pass, over all rows.
        """
        trained = tuple(parameter.requires_grad for parameter in self.group.parameters)
        if trained not in self._copies:
            self._copies[trained] = copies_in(
                self.group,
                self._is_copy,
                self.topology,
                self.run.ledger,
                TRAFFIC,
                with_gradients=True,
            )
        copies = self._copies[trained]
        sizes = zip(self.group.shard_sizes, trained, strict=True)
        expected = sum(size for size, is_trained in sizes if is_trained)
        rows = self.topology.world_size if self.sharded else 1
        if copies and numel != rows * expected:
            return None
        return copies

    @cached_property
    def spans(self) -> tuple[ParameterSpan, ...]:
        """Every rank's piece of every parameter that has gradients; a parameter of a span is that
        piece."""
        rows = self.topology.world_size if self.sharded else 1
        spans: list[ParameterSpan] = []
        position = 0
        for _ in range(rows):
            pieces = zip(
                self.group.names, self.group.parameters, self.group.piece_shapes, strict=True
            )
            for name, parameter, shape in pieces:
                if not parameter.requires_grad:
                    continue
                piece = torch.nn.Parameter(torch.empty(shape, device="meta"))
                end = position + piece.numel()
                spans.append(ParameterSpan(name, piece, position, end))
                position = end
        return tuple(spans)

    @property
    def numel(self) -> int:
        """Gradients of all parameters, over all rows."""
        return self.spans[-1].end if self.spans else 0

    def compresses(self, operation: str, gradients: Tensor) -> bool:
        """Return whether a sum is compressed now; one that is not is counted.

        Args:
            operation: the uncompressed one, ``reduce_scatter`` or ``all_reduce``.
            gradients: all that it is given.
        """
        codec, reason = self.run.policy.decide(TRAFFIC, gradients.nbytes)
        if codec is not None and not self._can_compress(gradients.numel()):
            codec = None
            reason = "exact"
        if codec is None:
            self.topology.record_uncompressed(
                self.run.ledger, TRAFFIC, reason, operation, gradients.nbytes
            )
        return codec is not None

    def _can_compress(self, numel: int) -> bool:
        return numel > 0 and self.copies(numel) is not None

    def built(self, numel: int) -> tuple[GradientSync, GradientBucket]:
        """Return what sums ``numel`` gradients, made at its first use.

        Raises:
            CompressionConfigError: these are fewer than all, and the compressor is not a codec.
        """
        # A codec has no state, so it may be built for each number that passes give.
        if numel not in self._built:
            compressor = self.run.policy.rule(TRAFFIC).codec
            if numel != self.numel and not isinstance(compressor, CodecGradients):
                raise CompressionConfigError(
                    f"reduce={compressor.name}: a pass gave {numel} gradients, the first "
                    f"{self.numel}, of "
                    f"{', '.join(self.group.names)}; it needs the same in each, so choose a codec "
                    "such as int8"
                )
            dtype = self.group.gradient_dtype
            device = self.group.device
            # one value's memory: FSDP makes and frees gradients in each pass
            of_their_kind = torch.empty(1, dtype=dtype, device=device).expand(numel)
            bucket = GradientBucket(
                of_their_kind, self.spans, 1.0, self.sharded, self.topology, self.run.ledger
            )
            self._built[numel] = compressor.build(bucket), bucket
        return self._built[numel]

    def sum(self, gradients: Tensor, scale: float) -> Tensor:
        """Sum over the ranks in place, and return this rank's row of ``gradients``, or all of them.

        Args:
            gradients: ``[W * n]``, or ``[n]`` where every rank keeps the sum.
            scale: what the sum is multiplied by.
        """
        sync, bucket = self.built(gradients.numel())
        bucket.scale = scale
        copies = self.copies(gradients.numel())
        exact = None
        if copies:
            # Started first: it reads the gradients, which the sum overwrites.
            exact = self._sum_copies(copies, gradients, scale)
        # FSDP runs this on its own stream, and overlaps it there: nothing is gained by waiting
        # later.
        sync.start(gradients).wait()
        total = bucket.shard_of(gradients) if self.sharded else gradients
        if copies and exact is not None:
            copies.write(exact.wait(), total)
        return total

    def _sum_copies(self, copies: Copies, gradients: Tensor, scale: float) -> Work:
        """Start to add up the copies, exactly."""
        if self.sharded:
            return copies.sum_to_owners(gradients.view(self.topology.world_size, -1), scale)
        return copies.sum_everywhere(gradients, scale)

    def buffer_bytes(self) -> int:
        """Bytes of one reduction's payloads, sent and received; 0 where they are not a codec's."""
        codec = getattr(self.run.policy.rule(TRAFFIC).codec, "codec", None)
        ranks = self.topology.world_size
        if codec is None or ranks == 1 or not self.numel:
            return 0
        return 2 * ranks * codec.payload_bytes((ceil_div(self.numel, ranks),))


class GradientReduce(DefaultAllocMixin, ReduceScatter):
    """The reduce-scatters of one parameter group, and under HSDP the sums over its replicas."""

    def __init__(
        self, group: ParameterGroup, over_shards: GradientSums, over_replicas: GradientSums | None
    ) -> None:
        self.group = group
        self.over_shards = over_shards
        self.over_replicas = over_replicas
        """Under HSDP."""
        self.next_hook = group.all_reduce_hook if over_replicas is not None else None
        """What the user had given to ``set_all_reduce_hook``, which FSDP calls after its own
        sum."""
        self._partial: Tensor | None = None

    @property
    def sums(self) -> list[GradientSums]:
        """Over the shards' ranks and, under HSDP, over the replicas."""
        return [sums for sums in (self.over_shards, self.over_replicas) if sums is not None]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum ``[W * n]`` over the ranks into this rank's ``[n]``, on the current stream."""
        if not self.over_shards.compresses("reduce_scatter", input_tensor):
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        if op == dist.ReduceOp.AVG:
            divisor = group.size()
        elif op == dist.ReduceOp.SUM:
            divisor = 1
        else:  # NCCL's, which multiplies before it adds
            divisor = self.group.divide_factor
        # The sum is in fp32 and rounded once; FSDP would divide by parts before and after.
        output_tensor.copy_(self.over_shards.sum(input_tensor, 1 / divisor))
        return None

    def sum_replicas(self, row: Tensor) -> None:
        """Average this rank's row ``[n]`` over the replicas, in place, as FSDP does under HSDP."""
        if row.is_cuda:
            # FSDP keeps it for its own all-reduce alone
            row.record_stream(torch.cuda.current_stream())
        if self._partial is not None:
            row += self._partial  # of passes that were reduced over the shards alone
            self._partial = None
        if not self.group.sums_all_replicas:
            self._partial = row.clone()  # a later pass sends it as well
            row.zero_()
            return
        # With set_gradient_divide_factor the reduce-scatter has divided by all of it already.
        has_whole_divisor = self.group.divide_factor is not None
        replicas = self.over_replicas
        assert replicas is not None, "the hook is set under HSDP alone"
        if replicas.compresses("all_reduce", row):
            replicas.sum(row, 1.0 if has_whole_divisor else 1 / replicas.topology.world_size)
        else:
            op = dist.ReduceOp.SUM if has_whole_divisor else dist.ReduceOp.AVG
            dist.all_reduce(row, op, replicas.topology.group)
        if self.next_hook is not None:
            self.next_hook(row)
