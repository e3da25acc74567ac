"""All-gathers of FSDP2's weights over a codec, in the place of ``fully_shard``'s own.

Each gather encodes the weights as they are. Whether lossless payloads fit is known before: after a change of
the weights all shards are encoded, and the host reads the ranks' flags once. A shard that did not fit goes
uncompressed on all ranks until the next change.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_common import is_bw
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from megatron.compression.codecs import Codec
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.work import Work

TRAFFIC = "dp.weight"


@dataclass(eq=False)
class WeightGather(DefaultAllocMixin, AllGather):
    """The all-gathers of one parameter group."""

    group: FSDPParamGroup
    topology: Topology
    run: Run
    before: "Callable[[WeightGather], None]"
    """Called before each gather outside the backward pass; sets ``fits`` where the codec is lossless."""
    fits: bool | None = None
    """Whether the lossless payload fits, on all ranks; None: nobody has asked."""
    buffer_bytes: int = 0
    """Of one gather's payloads, sent and received."""
    _versions: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.misfit = torch.zeros((), dtype=torch.uint8, device=self.group.device)
        """uint8 ``[]``: 1 where a payload was sent that did not fit, since weights had changed unnoticed."""

    def changed(self) -> bool:
        """Whether torch has counted a change of the weights since this was last asked."""
        weights, before = [one.sharded_param for one in self.group.fsdp_params], self._versions
        self._versions = [(id(one), one._version, one._local_tensor._version) for one in weights]
        return before != self._versions

    def overflow(self, codec: Codec) -> Tensor:
        """uint8 ``[]`` on the device: 1 where this rank's shard does not fit its payload."""
        self.changed()
        own = self.group.fsdp_params
        dtype = self.group.mp_policy.param_dtype or own[0].sharded_param.dtype
        shard = torch.cat([one._sharded_param_data.to(dtype) for one in own])
        return codec.overflow_flag(codec.encode(shard[None])).clone()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``[n]`` of every rank into ``[W * n]``, of which it is a part, on the current stream."""
        ledger, nbytes = self.run.ledger, output_tensor.nbytes
        if (
            group is not self.topology.group
        ):  # reshard_after_forward=N gathers from N ranks in the backward
            ledger.record_uncompressed(TRAFFIC, "exact", "all_gather", nbytes, group.size())
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        if not is_bw():  # else as in the forward
            self.before(self)
        codec, why = self.run.policy.decide(TRAFFIC, nbytes)
        if codec is not None and codec.lossless and not self.fits:
            codec, why = None, "overflow"
        if codec is None:
            self.topology.record_uncompressed(ledger, TRAFFIC, why, "all_gather", nbytes)
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        self.topology.record_plain(ledger, TRAFFIC, "all_gather", nbytes)
        payload = codec.encode(input_tensor[None])
        if codec.lossless:
            self.misfit |= codec.overflow_flag(payload)
        gathered, pending = self.topology.transport(ledger, TRAFFIC).all_gather(payload)
        self.buffer_bytes = payload.nbytes + gathered.nbytes
        shape, rows = input_tensor.shape, output_tensor.view(self.topology.world_size, -1)
        work = Work(pending, lambda: codec.decode_into(gathered, shape, rows.dtype, rows))
        if async_op:
            return _Pending(work)
        work.wait()
        return None


class _Pending(dist.Work):
    """A gather of ``unshard(async_op=True)``: FSDP waits for torch's works alone."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True
