"""The memories of gradient compressors in checkpoints: each rank saves its own and restores it.

That needs the layout that saved them: the same ranks, nodes, buckets and parameters. In another one memories
start from zero, and the log says so: they hold what a few iterations left out, which a run can spare.
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
    """Puts the memories of this rank's gradient syncs into checkpoints, and restores them. Built
    collectively; a ``compressor`` of None has no memory."""

    def __init__(self, compressor: str | None, syncs: Syncs, say: Callable[[str], None]) -> None:
        self._say, self._compressor = say, compressor
        self._syncs = syncs if compressor is not None else []
        layout = layout_of(self._syncs) if compressor is not None else None
        self._made_by = {"compression": compressor, "layout": layout} if layout else {}
        self._saved: dict[str, Any] = {}
        self._requested = False

    def add_to(self, state_dict: dict[str, Any], is_loading: bool) -> None:
        """Put what is to be saved, or where to load it to, into a checkpoint's state dict."""
        if is_loading and self._saved != self._made_by:
            self._say(f"data-parallel compression: {self._difference()}")
            return
        if not self._made_by:
            return
        rows = {}
        for number, (sync, _) in enumerate(self._syncs):
            for name, values in sync.state().items():
                place = torch.zeros_like(values) if is_loading else values.detach()
                key = f"{KEY}.rank{dist.get_rank()}.bucket{number}.{name}"
                rows[f"{number}.{name}"] = ShardedTensor.from_rank_offsets(key, place)
        state_dict[KEY] = rows
        if not is_loading:
            state_dict[MADE_BY] = self._made_by
        self._requested = is_loading

    def loaded(self, state_dict: dict[str, Any]) -> None:
        """Called with every state dict that has been read: the plain values alone, then everything."""
        if not self._requested:
            self._saved = state_dict.get(MADE_BY, {})
            return
        rows = state_dict.get(KEY, {})
        for number, (sync, _) in enumerate(self._syncs):
            if state := {name: rows[f"{number}.{name}"] for name in sync.state()}:
                sync.load_state(state)
        self._requested = False
        self._say(f"data-parallel compression: {self._compressor}: every rank restored its memory")

    def _difference(self) -> str:
        """Why what the checkpoint holds is not what this run has."""
        before = self._saved.get("compression")
        if not self._made_by:
            return f"the memory that {before} saved is dropped"
        reason = {
            None: "the checkpoint holds no memory of gradients",
            self._compressor: "the checkpoint was made with other ranks, nodes, buckets or parameters",
        }.get(before, f"{before} saved its memory")
        return f"{reason}: the memory of {self._compressor} starts from zero"


def layout_of(syncs: Syncs) -> str | None:
    """A hash of which rank remembers what of which parameters, over all ranks; None: no rank has a memory.
    Collective over all ranks of the job."""
    own = []
    for sync, bucket in syncs:
        shapes = {name: tuple(values.shape) for name, values in sync.state().items()}
        if shapes:
            spans = [(span.name, span.start, span.end) for span in bucket.spans]
            topology = bucket.topology
            own.append(
                (shapes, spans, bucket.numel, bucket.sharded, topology.nodes, topology.local)
            )
    every = gather_objects(hashlib.sha256(repr(own).encode()).hexdigest() if own else "")
    return hashlib.sha256("".join(every).encode()).hexdigest() if any(every) else None
