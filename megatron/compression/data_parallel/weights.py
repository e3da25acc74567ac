"""What data-parallel and tensor-parallel replicas hold alike: weights gathered compressed, values
aligned.

Megatron copies the updated fp32 masters over the owner's shard of the parameter buffer and gathers
that. Here the masters' cast goes to a buffer of its own; its difference to the shard is encoded at
once and gathered when Megatron gathers. Every rank adds the decoded difference to its own copy. The
owner adds the decoded one as well, not the exact one: so replicas stay bit-identical, and what the
encoding lost is in the next difference (SDP4Bit, arXiv 2410.15526).

    step i      masters ---- cast ----> new [shard]
                               new - shard ---- encode ----> payload, which waits
    forward     payload ---- gather ----> all payloads, [ranks, bytes]
                weights [ranks, shard] += decode(all payloads)             on every rank alike

Where the gather overlaps with other work, the owner adds to its own row at the step already, and at
the gather to all other rows (``BucketWeights``).

Norms, biases and position embeddings are replicated over tensor-parallel ranks. A lossy codec
quantises them in groups with neighbours that differ from rank to rank, so that the copies would
drift. The first tensor-parallel rank's values are broadcast, exactly (``align``); next to the
matrices they are few.
"""

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist

from megatron.compression.codecs import Codec
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.overflow import OverflowFlags
from megatron.compression.communication.policy import Decision, Policy
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.work import Work
from megatron.compression.data_parallel.compressor import ParameterSpan

ATTRIBUTE = "compressed_weights"
"""Where a bucket of Megatron's keeps its ``BucketWeights``."""


class BucketWeights:
    """One bucket's weights, and the update that waits to be gathered.

    With ``--overlap-param-gather`` an update waits from the optimizer's step to the next forward
    pass. A loop may write the weights in between, as after a loss spike; then the update is out of
    date. To tell, this rank's shard has its update at once, as with Megatron itself:

        step        shard += decode(payload); its fingerprint is kept
        forward     another fingerprint, so it was written: send a change of nothing
                    all rows but this rank's += decode(all payloads)

    That is decided on the device, without the host. Values of the shard that were not written have
    their update with the next one, which is the difference of the masters to what they are.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        policy: Policy,
        topology: Topology,
        ledger: Ledger,
        nbytes: int | None = None,
        update_waits: bool = False,
    ) -> None:
        """Follow a bucket.

        Args:
            weights: ``[ranks * n]`` of bf16 or fp16, the bucket.
            policy: decides at each optimizer step how the update is sent.
            topology: the ranks that have a shard each.
            ledger: counts what is sent.
            nbytes: of all weights of the bucket's group, by which the policy decides; None: any
                size.
            update_waits: an update may wait while others write the weights.
        """
        self.weights = weights.view(topology.world_size, -1)
        self.nbytes = nbytes
        self.policy = policy
        self.topology = topology
        self.ledger = ledger
        self.pending: torch.Tensor | None = None
        """Payload of this rank's shard; None: every rank holds the weights already, or Megatron
        gathers."""
        self.uncompressed_reason = "exact"
        """The ledger's reason of Megatron's next gather: exact where nothing has changed."""
        self._codec: Codec | None = None
        self._update_waits = update_waits
        self._updated: torch.Tensor | None = None
        """Fingerprint of the shard with its own update; None: the shard is as all ranks hold it."""
        self._misfit: torch.Tensor | None = None
        """uint8 ``[]``, 1 where values were written that did not fit a lossless payload; None:
        never asked."""

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard, ``[n]``."""
        return self.weights[self.topology.rank]

    def decide(self) -> Decision:
        """Decide how the update of the last optimizer step is sent."""
        decision = self.policy.decide("dp.weight", self.nbytes)
        self.uncompressed_reason = "exact" if decision.codec is not None else decision.reason
        self._codec = decision.codec
        return decision

    def update(self, masters: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Encode an optimizer step's result.

        Args:
            masters: offset in the shard and master values, of any type, one pair a parameter.
        """
        # Between parameters there is padding, which has no master: it stays as it is.
        new = self.shard.clone()
        for start, master in masters:
            new[start : start + master.numel()].copy_(master.view(-1))
        self.pending = self._codec.encode_difference(new, self.shard)

    def update_shard(self) -> None:
        """Apply the pending update to this rank's shard, if it waits."""
        if self._update_waits and self.pending is not None:
            with torch.no_grad():
                # as every other rank will: the same payload, the same arithmetic, the same bits
                self._codec.add_decoded(self.pending[None], self.shard[None])
            self._updated = fingerprint(self.shard)

    @property
    def overflow_flag(self) -> torch.Tensor | None:
        """uint8 ``[]``, 1 where the pending payload's values did not fit; None: they always do."""
        return self._codec.overflow_flag(self.pending) if self._codec.lossless else None

    def take_misfit(self) -> torch.Tensor | None:
        """Return the flag of written values that did not fit, once; None: there were no such values
        to ask."""
        misfit, self._misfit = self._misfit, None
        return misfit

    def start(self) -> Work:
        """Start to gather the pending payloads; ``wait`` applies them."""
        codec = self._codec
        has_own_update = self._updated is not None
        payload = self._unless_written(self.pending) if has_own_update else self.pending
        self.pending = None
        # For the ledger: what the uncompressed gather would have sent.
        self.topology.record_plain(self.ledger, "dp.weight", "all_gather", self.weights.nbytes)
        transport = self.topology.transport(self.ledger, "dp.weight")
        gathered, pending = transport.all_gather(payload[None])

        def apply() -> torch.Tensor:
            with torch.no_grad():
                # ``update_shard`` has added this rank's own update already. Decoding adds to every
                # row, so a second time to this one: its values are put back afterwards.
                shard = self.shard.clone() if has_own_update else None
                codec.add_decoded(gathered, self.weights)
                if shard is not None:
                    self.shard.copy_(shard)
            return self.weights

        return Work(pending, apply)

    def _unless_written(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the payload, or where the shard was written since the step, that of no change to
        it."""
        was_written = (fingerprint(self.shard) != self._updated).any()
        self._updated = None
        no_change = self._codec.encode_difference(self.shard, self.shard)
        if self._codec.lossless:  # which encodes the values themselves
            self._misfit = self._codec.overflow_flag(no_change) * was_written
        # The choice is this rank's alone; payloads have one size, so the others need not know.
        return torch.where(was_written, no_change, payload)


_ROW = 1021
"""Values of a row of ``fingerprint``'s matrix; a prime, so that rows of weights do not lie in one
column."""


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Return int64 ``[m]`` of 16-bit values ``[n]``, others where values change or change places.

    A sum over all values would not see that some have changed places, as where rows of a matrix are
    exchanged. So the values are laid out as a matrix, and its rows and columns are summed:

        | v0     v1     ...  v1020 | sum
        | v1021  v1022  ...  v2041 | sum
          sum    sum         sum
        v2042  v2043                       what fills no row, as it is
    """
    # Integers: a sum of floats would miss small changes, and depend on the order of adding.
    bits = values.view(torch.int16)
    in_rows = len(bits) // _ROW * _ROW
    matrix = bits[:in_rows].view(-1, _ROW)
    row_sums = matrix.sum(1, dtype=torch.int64)
    column_sums = matrix.sum(0, dtype=torch.int64)
    return torch.cat([row_sums, column_sums, bits[in_rows:].long()])


def copy_masters(optimizer) -> bool:
    """Hand a distributed optimizer's updated masters to its buckets' ``BucketWeights``.

    This stands for ``_copy_main_params_to_model_params``. A master is one rank's piece of one
    parameter:

        buffer     | bucket 0            | bucket 1                  |
        shard of rank 1 |-----|          |            |-------|
        masters         |a |b |          |            |b  |c  |      ranges "gbuf_world_in_bucket"

    After it, every master is in exactly one place: in the pending payload of its bucket, or, where
    the bucket is not compressed in this step or its payload does not fit, cast into the bucket
    itself, for Megatron to gather. Both are decided alike on all ranks.

    Returns:
        False where no bucket is compressed in this step: nothing was done.
    """
    buckets = [bucket for buffer in optimizer.buffers for bucket in buffer.buckets]
    compressed = _compressed_now(buckets)
    if not compressed:
        return False
    # Encode before anything is written: a difference needs the weights that all ranks hold.
    masters = _masters_by_bucket(optimizer, buckets)
    for bucket_id, weights in compressed.items():
        shard_start = weights.topology.rank * weights.shard.numel()
        weights.update((start - shard_start, master) for start, master in masters[bucket_id])
    _leave_out_overflows([*compressed.values()])  # takes pending payloads back, on all ranks alike
    for weights in compressed.values():
        weights.update_shard()
    # The other buckets as Megatron does it: cast over the shard, which it gathers.
    for bucket in buckets:
        weights = compressed.get(id(bucket))
        if weights is None or weights.pending is None:
            flat = bucket.param_data.view(-1)
            for start, master in masters[id(bucket)]:
                flat[start : start + master.numel()].copy_(master.view(-1))
    return True


def _compressed_now(buckets: list) -> dict[int, BucketWeights]:
    """Decide for the buckets of an optimizer: the weights of those that are compressed, by
    ``id``."""
    compressed: dict[int, BucketWeights] = {}
    for bucket in buckets:
        weights = getattr(bucket, ATTRIBUTE, None)
        if weights is None:
            continue
        if weights.pending is not None:
            weights.start().wait()  # two steps without a forward pass between them
        if weights.decide().codec is not None:
            compressed[id(bucket)] = weights
    return compressed


def _masters_by_bucket(optimizer, buckets: list) -> dict[int, list[tuple[int, torch.Tensor]]]:
    """Return the start in its bucket and the values of each master, by the bucket's ``id``."""
    masters: dict[int, list[tuple[int, torch.Tensor]]] = {id(bucket): [] for bucket in buckets}
    groups = zip(
        optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups, strict=True
    )
    for shards, parameters in groups:
        for master, parameter in zip(shards, parameters, strict=True):
            buffer_index, _, bucket_index = optimizer.model_param_gbuf_map[parameter]
            bucket = optimizer.buffers[buffer_index].buckets[bucket_index]
            # the part of this parameter that is in this rank's shard
            in_bucket = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
            masters[id(bucket)].append((in_bucket.start, master))
    return masters


def _leave_out_overflows(updated: list[BucketWeights]) -> None:
    """Leave lossless buckets that overflow on any rank to Megatron, uncompressed, and all others of
    their topology. The host waits for the device once a topology.

    Raises:
        RuntimeError: weights written since the last step did not fit, and were gathered as zeros.
    """
    # All lossless buckets of a topology go compressed, or none: one question asks for all of them.
    lossless = [weights for weights in updated if weights.overflow_flag is not None]
    for topology in dict.fromkeys(weights.topology for weights in lossless):
        buckets = [weights for weights in lossless if weights.topology == topology]
        flags = OverflowFlags()
        for weights in buckets:
            flags.note("update", weights.overflow_flag)
            misfit = weights.take_misfit()
            if misfit is not None:
                flags.note("written", misfit)
        transport = topology.transport(buckets[0].ledger, "dp.weight")
        answers = flags.ask(transport.any_ranks)
        if answers.get("written"):
            raise RuntimeError(
                "weights written between an optimizer's step and the next forward pass did not fit "
                "a lossless payload; call start_param_sync(force_sync=True) of the wrapped model "
                "before writing them"
            )
        if answers["update"]:
            for weights in buckets:
                weights.pending = None
                weights.uncompressed_reason = "overflow"


def replicated_parts(
    flat: torch.Tensor,
    spans: Iterable[ParameterSpan],
    cut: Collection[torch.nn.Parameter],
    first: int = 0,
    gradients: bool = False,
) -> list[torch.Tensor]:
    """Return the parts of a bucket that every tensor-parallel rank holds alike, views of ``flat``.

    Args:
        flat: ``[n]``, values of the bucket from position ``first`` on: all of it, or this rank's
            shard.
        spans: the bucket's parameters, by position.
        cut: parameters that tensor parallelism cuts without Megatron's mark; they are none of the
            parts.
        first: the position of ``flat`` in the bucket.
        gradients: the values are gradients. Those that CAAT-Net sums over the ranks later differ
            still.
    """
    views = []
    for span in spans:
        parameter = span.parameter
        if getattr(parameter, "tensor_model_parallel", False) or parameter in cut:
            continue
        if gradients and getattr(parameter, "sees_rank_local_data", False):
            continue
        # a shard may hold the end of one parameter and the beginning of another
        start = max(span.start - first, 0)
        end = min(span.end - first, flat.numel())
        if start < end:
            views.append(flat[start:end])
    return views


def align(views: list[torch.Tensor], group: dist.ProcessGroup, ledger: Ledger) -> None:
    """Give all ranks of a group the first one's values, in place.

    Collective, in the same order on every rank.

    Args:
        views: values of any type, one type for all; the same sizes on every rank.
        group: the ranks.
        ledger: counts what is sent.
    """
    if not views or group.size() == 1:
        return
    with torch.no_grad():
        values = torch.cat(views)
        # one message for all parts; torch names the source by its rank in the job
        dist.broadcast(values, src=dist.get_global_rank(group, 0), group=group)
        if group.rank() == 0:
            ledger.record_uncompressed(
                "tp.other", "exact", "broadcast", values.nbytes, group.size()
            )
            return
        sizes = [view.numel() for view in views]
        for view, value in zip(views, values.split(sizes), strict=True):
            view.copy_(value)
