"""Anchor, momentum, residual memory and what is in flight, in this data centre's checkpoints.

Megatron saves the weights, which hold the anchor while it saves, and the inner optimizer with its
masters, moments and learning rate. Beside them each rank saves its own shard of:

    anchor, velocity    the outer optimizer's; the same in all data centres
    residual            what encodings have lost, this data centre's own
    weights             the local weights, as bytes: between two rounds they are not the anchor
    flight.N            payloads of all data centres that have arrived and are not yet applied

They fit the ranks, and parallel sizes, that saved them. At others a run begins from the anchor.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

KEY = "local_steps"
"""In a checkpoint's state dict: this rank's tensors."""
MADE_BY = "local_steps_state"
"""In a checkpoint's state dict: how many data centres, in which layout; plain values."""


class StateInCheckpoints:
    """Puts tensors of this rank into checkpoints, and takes them back.

    Megatron reads twice: the plain values alone, then everything that the state dict asks for.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self.saved: dict[str, Any] | None = None
        """The plain values of the checkpoint that was read; None: it has none."""
        self.tensors: dict[str, torch.Tensor] | None = None
        """This rank's tensors of that checkpoint; None: not asked for, or not read yet."""
        self._requested = False

    def save(
        self, state_dict: dict[str, Any], tensors: dict[str, torch.Tensor], plain: dict[str, Any]
    ) -> None:
        """Put this rank's tensors into a state dict that is saved.

        Args:
            state_dict: Megatron's.
            tensors: by name.
            plain: the same on all ranks, JSON-ready.
        """
        state_dict[MADE_BY] = plain
        state_dict[KEY] = self._sharded(tensors)

    def request(self, state_dict: dict[str, Any], templates: dict[str, torch.Tensor]) -> None:
        """Ask for this rank's tensors in a state dict that is loaded into."""
        state_dict[KEY] = self._sharded(templates)
        self._requested = True

    def loaded(self, state_dict: dict[str, Any]) -> None:
        """Take what has been read."""
        if not self._requested:
            self.saved = state_dict.get(MADE_BY)
            return
        self.tensors = dict(state_dict.get(KEY, {}))
        self._requested = False

    @staticmethod
    def _sharded(tensors: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
        """Return tensors under keys of this rank's own: Megatron's sharding has no name for
        them."""
        prefix = f"{KEY}.rank{dist.get_rank()}"
        return {
            name: ShardedTensor.from_rank_offsets(f"{prefix}.{name}", tensor.detach())
            for name, tensor in tensors.items()
            if tensor.numel()
        }
