"""The memories of gradient compressors in checkpoints: each rank saves its own and restores it.

That needs the layout that saved them: the same ranks, nodes, buckets and parameters. In another one
memories start from zero, and the log says so: they hold what a few iterations left out, which a run
can spare.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron.compression.communication.objects import gather_objects
from megatron.compression.data_parallel.compressor import GradientBucket, GradientSync

KEY = "data_parallel_compression"
"""In a checkpoint's state dict: the memories of this rank."""
MADE_BY = "data_parallel_memory"
"""In a checkpoint's state dict: which compressor made them, in which layout; plain values."""

Syncs = list[tuple[GradientSync, GradientBucket]]


class GradientMemory:
    """Puts the memories of this rank's gradient syncs into checkpoints, and restores them."""

    def __init__(self, compressor: str | None, syncs: Syncs, log: Callable[[str], None]) -> None:
        """Note whose memories these are. Collective over all ranks of the job.

        Args:
            compressor: spec of what compresses gradients; None: nothing with a memory.
            syncs: every bucket's.
            log: prints a line.
        """
        self._log = log
        self._compressor = compressor
        self._syncs: Syncs = []
        self._made_by: dict[str, Any] = {}
        if compressor is not None:
            self._syncs = syncs
            layout = layout_of(syncs)
            if layout is not None:
                self._made_by = {"compression": compressor, "layout": layout}
        self._saved: dict[str, Any] = {}
        """What the checkpoint that is being loaded says of its memories."""
        self._requested = False
        """Memories have been asked of that checkpoint."""

    def add_to(self, state_dict: dict[str, Any], is_loading: bool) -> None:
        """Put what is to be saved, or where to load it to, into a checkpoint's state dict."""
        # A memory is of its ranks: in another layout nothing is asked for, and it starts from zero.
        if is_loading and self._saved != self._made_by:
            self._log(f"data-parallel compression: {self._difference()}")
            return
        if not self._made_by:
            return
        rows = {}
        for number, (sync, _) in enumerate(self._syncs):
            for name, values in sync.state().items():
                target = torch.zeros_like(values) if is_loading else values.detach()
                # each rank's own, under a key of its own; Megatron's sharding has no name for it
                key = f"{KEY}.rank{dist.get_rank()}.bucket{number}.{name}"
                rows[f"{number}.{name}"] = ShardedTensor.from_rank_offsets(key, target)
        state_dict[KEY] = rows
        if not is_loading:
            state_dict[MADE_BY] = self._made_by
        self._requested = is_loading

    def loaded(self, state_dict: dict[str, Any]) -> None:
        """Take what has been read. Megatron reads twice: the plain values alone, then
        everything."""
        if not self._requested:
            self._saved = state_dict.get(MADE_BY, {})
            return
        rows = state_dict.get(KEY, {})
        for number, (sync, _) in enumerate(self._syncs):
            state = {name: rows[f"{number}.{name}"] for name in sync.state()}
            if state:
                sync.load_state(state)
        self._requested = False
        self._log(f"data-parallel compression: {self._compressor}: every rank restored its memory")

    def _difference(self) -> str:
        """Say why what the checkpoint holds is not what this run has."""
        before = self._saved.get("compression")
        if not self._made_by:
            return f"the memory that {before} saved is dropped"
        if before is None:
            reason = "the checkpoint holds no memory of gradients"
        elif before == self._compressor:
            reason = "the checkpoint was made with other ranks, nodes, buckets or parameters"
        else:
            reason = f"{before} saved its memory"
        return f"{reason}: the memory of {self._compressor} starts from zero"


def layout_of(syncs: Syncs) -> str | None:
    """Return a hash of which rank remembers what of which parameters, over all ranks of the job.

    Collective over all of them. None: no rank has a memory.
    """
    described = []
    for sync, bucket in syncs:
        shapes = {name: tuple(values.shape) for name, values in sync.state().items()}
        if shapes:
            spans = [(span.name, span.start, span.end) for span in bucket.spans]
            topology = bucket.topology
            described.append(
                (shapes, spans, bucket.numel, bucket.sharded, topology.nodes, topology.local)
            )
    digest = _digest(repr(described)) if described else ""
    # Of all ranks: a rank restores only if every other one can, too.
    digests = gather_objects(digest)
    return _digest("".join(digests)) if any(digests) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
