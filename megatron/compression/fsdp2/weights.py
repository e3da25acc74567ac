"""All-gathers of FSDP2's weights over a codec, in the place of ``fully_shard``'s own.

Each gather encodes the weights as they are, so that nothing can be out of date; without a change the payload
is the same. Whether lossless payloads fit is known before: once the weights have changed all shards are
encoded, the ranks gather the flags in one collective, and the host reads them once. A shard that did not fit
goes uncompressed on all ranks until the next change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from megatron.compression.codecs import Codec
from megatron.compression.communication.policy import Decision
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.work import Work

TRAFFIC = "dp.weight"


class OwnMemory:
    """FSDP's buffers, as torch allocates them."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See torch's ``Comm``."""
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass(eq=False)
class WeightGather(OwnMemory, AllGather):
    """The all-gathers of one parameter group."""

    name: str
    """Of its first parameter."""
    group: FSDPParamGroup
    topology: Topology
    run: Run
    refresh: "Callable[[WeightGather], None]"
    """Called before a gather that may have to know whether its payload fits; sets ``fits``."""
    fits: bool | None = None
    """Whether the lossless payload fits, on all ranks; None: nobody has asked."""
    buffer_bytes: int = 0
    """Of the payloads of one gather, sent and received."""

    def __post_init__(self) -> None:
        self.misfit = torch.zeros((), dtype=torch.uint8, device=self.group.device)
        """uint8 ``[]``: 1 where a payload was sent that did not fit, since weights had changed unnoticed."""

    @property
    def dtype(self) -> torch.dtype:
        """That in which weights are gathered."""
        return self.group.mp_policy.param_dtype or self.group.fsdp_params[0].sharded_param.dtype

    def decide(self) -> Decision:
        """How this iteration gathers, but for overflows."""
        numel = sum(one.padded_sharded_param_size.numel() for one in self.group.fsdp_params)
        return self.run.policy.decide(TRAFFIC, numel * self.dtype.itemsize * self.topology.world_size)

    def overflow(self, codec: Codec) -> torch.Tensor:
        """uint8 ``[]`` on the device: 1 where this rank's shard does not fit its payload."""
        shard = torch.cat([one._sharded_param_data.to(self.dtype) for one in self.group.fsdp_params])
        return codec.overflow_flag(codec.encode(shard[None])).clone()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``[n]`` of every rank into ``[W * n]``, of which it is a part, on the current stream."""
        codec, why = self.decide()
        if codec is not None and codec.lossless:
            if self.group._training_state is not TrainingState.PRE_BACKWARD:  # else as in the forward
                self.refresh(self)
            codec, why = (codec, why) if self.fits else (None, "overflow")
        if group is not self.topology.group:  # reshard_after_forward=N gathers from N ranks in the backward
            self.run.ledger.record_uncompressed(
                TRAFFIC, "exact", "all_gather", output_tensor.nbytes, group.size()
            )
        elif codec is None:
            self.topology.record_uncompressed(
                self.run.ledger, TRAFFIC, why, "all_gather", output_tensor.nbytes
            )
        else:
            work = self._start(output_tensor, input_tensor, codec)
            if async_op:
                return _Pending(work)
            work.wait()
            return None
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

    def _start(self, output: torch.Tensor, own: torch.Tensor, codec: Codec) -> Work:
        self.topology.record_plain(self.run.ledger, TRAFFIC, "all_gather", output.nbytes)
        payload = codec.encode(own[None])
        if codec.lossless:
            self.misfit = self.misfit | codec.overflow_flag(payload)
        gathered, pending = self.topology.transport(self.run.ledger, TRAFFIC).all_gather(payload)
        self.buffer_bytes = payload.nbytes + gathered.nbytes
        rows = output.view(self.topology.world_size, -1)
        return Work(pending, lambda: codec.decode_into(gathered, own.shape, output.dtype, rows))


class _Pending(dist.Work):
    """A gather of ``unshard(async_op=True)``: FSDP waits for torch's works alone."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True
