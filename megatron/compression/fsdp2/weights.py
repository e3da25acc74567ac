"""All-gathers of FSDP2's weights over a codec, in the place of ``fully_shard``'s own.

Each gather encodes the weights as they are. Whether lossless payloads fit is known before: at
agreed moments (attach.py) all shards are encoded, and the host reads the ranks' flags once. A shard
that did not fit goes uncompressed on all ranks until the next such moment.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.compression.codecs import Codec
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.work import Work, join
from megatron.compression.fsdp2.copies import IsCopy, copies_in
from megatron.compression.fsdp2.parameter_group import (
    AllGatherOfCompression,
    GatherPart,
    ParameterGroup,
    is_bw,
)

TRAFFIC = "dp.weight"


class WeightGather(AllGatherOfCompression):
    """The all-gathers of one parameter group."""

    def __init__(
        self,
        group: ParameterGroup,
        topology: Topology,
        run: Run,
        is_copy: IsCopy,
        before: "Callable[[WeightGather], None]",
    ) -> None:
        """Prepare the gathers of a group.

        Args:
            group: the parameters.
            topology: the ranks that have a shard each.
            run: policy, ledger and transports.
            is_copy: tells parameters that ranks outside FSDP's mesh hold as well.
            before: called before each gather outside the backward pass; sets ``fits`` where the
                codec is lossless.
        """
        self.group = group
        self.topology = topology
        self.run = run
        self.before = before
        self.copies = copies_in(group, is_copy, topology, run.ledger, TRAFFIC)
        self.fits: bool | None = None
        """Whether the lossless payload fits, on all ranks; None: nobody has asked."""
        self.buffer_bytes = 0
        """Of one gather's payloads, sent and received."""
        self.misfit = torch.zeros((), dtype=torch.uint8, device=group.device)
        """uint8 ``[]``: 1 where a payload was sent that did not fit, since weights had changed
        unnoticed."""
        self._versions: list[tuple[int, int, int]] = []

    @property
    def numel(self) -> int:
        """Values of this rank's shard, padding included."""
        return sum(self.group.shard_sizes)

    def overflow(self, codec: Codec) -> Tensor:
        """Encode this rank's shard: uint8 ``[]`` on the device, 1 where it does not fit its
        payload."""
        # What is looked at now counts as known.
        self._versions = self.group.versions()
        flags = [codec.overflow_flag(codec.encode(values[None])) for values in self.group.shards()]
        return torch.stack(flags).amax()

    def check_alone(self, codec: Codec) -> None:
        """Look whether weights that were changed since they were asked about still fit.

        torch counts a change on the rank that makes it, which may be this one alone; so no rank is
        asked. The host waits for the device where there was a change.

        Raises:
            RuntimeError: this rank's shard does not fit its payload.
        """
        if self.group.versions() == self._versions:
            return
        # A module that did not fit before is gathered uncompressed, whatever it holds.
        if self.fits and bool(self.overflow(codec)):
            raise RuntimeError(
                f"weights of {self.group} were changed between two passes without a step of their "
                "optimizer, and do not fit a lossless payload any more; call weights_changed() on "
                "all ranks after the change"
            )

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``[n]`` of every rank into ``[W * n]``, of which it is a part, on the current
        stream."""
        ledger = self.run.ledger
        nbytes = output_tensor.nbytes
        if group is not self.topology.group:
            # reshard_after_forward=N gathers from N ranks in the backward
            ledger.record_uncompressed(TRAFFIC, "exact", "all_gather", nbytes, group.size())
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        if not is_bw():  # in the backward pass as in the forward pass
            self.before(self)
        # What may leave this gather uncompressed: the policy, an empty module, weights that did
        # not fit when the ranks were last asked.
        codec, reason = self.run.policy.decide(TRAFFIC, nbytes)
        if codec is not None and not nbytes:
            codec = None
            reason = "exact"
        if codec is not None and codec.lossless and not self.fits:
            codec = None
            reason = "overflow"
        if codec is None:
            self.topology.record_uncompressed(ledger, TRAFFIC, reason, "all_gather", nbytes)
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        work = self._start(codec, input_tensor, output_tensor.view(self.topology.world_size, -1))
        if async_op:
            return _Pending(work)
        work.wait()
        return None

    def _start(self, codec: Codec, shard: Tensor, rows: Tensor) -> Work:
        """Start to gather every rank's ``[n]`` by a codec into ``[W, n]``, of which ``shard`` is a
        row."""
        self.topology.record_plain(self.run.ledger, TRAFFIC, "all_gather", rows.nbytes)
        self.buffer_bytes = 0
        copies = None
        if self.copies and not codec.lossless:
            # taken before the payload is decoded, which rounds the shard in its row
            copies = self.copies.gather(shard, rows)
        if rows.dtype == torch.uint8:  # FSDP gives a row of several types as bytes
            works = self._start_by_type(codec, shard, rows)
        else:
            works = [self._start_values(codec, shard, rows)]
        if copies is not None:
            works.append(copies)  # last: copies are written over what was decoded
        return works[0] if len(works) == 1 else join(works)

    def _start_by_type(self, codec: Codec, shard: Tensor, rows: Tensor) -> list[Work]:
        """Start a gather for each type of a row of several.

        A LoRA adapter in fp32 beside frozen weights in bf16 is such a row: a codec encodes values of
        one type, so each type is a message of its own.

        Args:
            codec: encodes the values of each type.
            shard: uint8 ``[bytes]``, this rank's row.
            rows: uint8 ``[W, bytes]``, of which ``shard`` is a row.
        """
        works = []
        for part in self._parts:
            values = part.values(shard)
            # Decoded by themselves first: in the row another type may lie between two shards.
            gathered = values.new_empty((len(rows), len(values)))
            work = self._start_values(codec, values, gathered)
            works.append(Work(work, partial(part.write, gathered, rows)))
        return works

    @cached_property
    def _parts(self) -> list[GatherPart]:
        """Of a row of several types; they do not change after the first pass."""
        return self.group.gather_parts()

    def _start_values(self, codec: Codec, values: Tensor, rows: Tensor) -> Work:
        """Start to gather every rank's ``[n]`` by a codec into ``[W, n]`` of the same type."""
        # One row: the shard is encoded as a whole, over the ends of its parameters.
        payload = codec.encode(values[None])
        if codec.lossless:
            # read with the next question to the ranks: no gather waits for the host
            self.misfit |= codec.overflow_flag(payload)
        gathered, pending = self.topology.transport(self.run.ledger, TRAFFIC).all_gather(payload)
        self.buffer_bytes += payload.nbytes + gathered.nbytes
        shape = values.shape
        return Work(pending, lambda: codec.decode_into(gathered, shape, rows.dtype, rows))


class _Pending(dist.Work):
    """A gather of ``unshard(async_op=True)``: FSDP waits for torch's works alone."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True
