"""All-gathers of FSDP2's weights over a codec, in the place of ``fully_shard``'s own.

What is sent is encoded from the present weights in every gather, so that nothing can be out of date. Whether
lossless payloads fit is known before: all shards are encoded once after the weights have changed, the ranks
gather the flags in one collective, and the host reads them once (``Fsdp2Compression.refresh``). A shard that
did not fit goes uncompressed on all ranks until the weights change again.
"""

from collections.abc import Callable, Sequence
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


class PlainMemory:
    """FSDP's buffers as torch allocates them."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See torch's ``Comm.allocate``."""
        return torch.empty(*size, dtype=dtype, device=device)


class WeightGather(PlainMemory, AllGather):
    """The all-gathers of one parameter group.

    Args:
        name: of its first parameter.
        refresh: called before a gather that has to know whether its payload fits; sets ``fits``.
    """

    def __init__(
        self,
        name: str,
        group: FSDPParamGroup,
        topology: Topology,
        run: Run,
        refresh: "Callable[[WeightGather], None]",
    ) -> None:
        self.name, self.group, self.topology, self.run = name, group, topology, run
        self.fits: bool | None = None
        """Whether lossless payloads of the present weights fit, on all ranks; None: nobody has asked."""
        self.noted = torch.zeros((), dtype=torch.uint8, device=group.device)
        """uint8 ``[]``, on the device: 1 where a payload was sent that did not fit: weights changed unnoticed."""
        self.buffer_bytes = 0
        self._refresh = refresh

    def decide(self) -> Decision:
        """How this iteration gathers, but for overflows."""
        nbytes = sum(p.padded_sharded_param_size.numel() for p in self.group.fsdp_params)
        return self.run.policy.decide(TRAFFIC, nbytes * self.dtype.itemsize * self.topology.world_size)

    @property
    def dtype(self) -> torch.dtype:
        """That in which weights are gathered."""
        return self.group.mp_policy.param_dtype or self.group.fsdp_params[0].sharded_param.dtype

    def overflow(self, codec: Codec) -> torch.Tensor:
        """uint8 ``[]`` on the device: 1 where this rank's shard does not fit its payload."""
        parts = [parameter._sharded_param_data.to(self.dtype) for parameter in self.group.fsdp_params]
        return codec.overflow_flag(codec.encode(torch.cat(parts)[None])).clone()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``[n]`` of every rank into ``[W * n]``, of which it is a part, on the current stream."""
        decision = self.decide()
        if group is not self.topology.group:  # reshard_after_forward=N: a smaller group's backward
            self.run.ledger.record_uncompressed(
                TRAFFIC, "exact", "all_gather", output_tensor.nbytes, group.size()
            )
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        if decision.codec is not None and decision.codec.lossless:
            if self.group._training_state is not TrainingState.PRE_BACKWARD:  # the same weights there
                self._refresh(self)
            if not self.fits:
                decision = Decision(None, "overflow")
        if decision.codec is None:
            self.topology.record_uncompressed(
                self.run.ledger, TRAFFIC, decision.why, "all_gather", output_tensor.nbytes
            )
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        work = self._start(output_tensor, input_tensor, decision.codec)
        if async_op:
            return _Pending(work)
        work.wait()
        return None

    def _start(self, output: torch.Tensor, own: torch.Tensor, codec: Codec) -> Work:
        self.topology.record_plain(self.run.ledger, TRAFFIC, "all_gather", output.nbytes)
        payload = codec.encode(own[None])
        if codec.lossless:
            self.noted = self.noted | codec.overflow_flag(payload)
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
