"""Recomputation inside interleaved halves: what the backward of a block computes again.

megatron-core recomputes a module in a backward of its own, nested in the outer one. With two halves
there would be two of them for each weight, and DDP's hook would take a gradient as complete after
the first. Here the graph of a block stays whole. Only the tensors that its nodes save are left out,
by torch's hooks for saved tensors:

    forward     a node saves        what is kept
                a parameter         the parameter
                the block's input   the input, or its shape where the norm is recomputed
                a payload           the payload: codes take half of the input or less
                anything else       the tensor, or its number where the module is recomputed

    backward    a shape is asked for       the norm runs again, on the residual stream
                a number is asked for      the module runs again, without its sums, and what its
                                           nodes save is numbered in the same order

Nothing is drawn at random in a norm or an MLP, so both runs save the same values. The recomputation
of core attention is megatron-core's own: it has no weights.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks


class _OfInput(NamedTuple):
    """Stands for a view of the block's input."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Number(NamedTuple):
    """Stands for a tensor that the module saves when it runs again."""

    value: int


Saves = Callable[[torch.Tensor], None]
"""Is given each tensor that a run of the module saves, in order."""


class Recomputation:
    """What one run of a block leaves out of its graph, and how it is computed again.

    Args:
        y: the block's input ``[s, b, h]``.
        x: the residual stream ``[s, b, h]``, from which the norm computes the input again; None:
            the input is kept.
        norm: the norm.
        parameters: of the module, which are kept.
        run_again: runs the module once more on an input, and gives every tensor that is saved to
            its second argument; None: what the module saves is kept.
    """

    def __init__(
        self,
        y: torch.Tensor,
        x: torch.Tensor | None,
        norm: torch.nn.Module,
        parameters: list[torch.nn.Parameter],
        run_again: Callable[[torch.Tensor, Saves], None] | None,
    ) -> None:
        self._x = x
        self._norm = norm
        self._run_again = run_again
        self._requires_grad = y.requires_grad
        self._y: torch.Tensor | None = y.detach()
        self._parameters = {_memory_of(parameter) for parameter in parameters}
        self._count = 0
        """Tensors that stand as numbers."""
        self._saved_again: dict[int, torch.Tensor] | None = None
        """Those that the backward has not asked for yet, once the module has run again."""

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which the block runs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def ran(self) -> None:
        """Forget the input after the run, where the norm computes it again."""
        if self._x is not None:
            self._y = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Return what a node keeps of a tensor that it saves."""
        if _memory_of(tensor) == _memory_of(self._y):
            # The input shares its memory with all its views.
            if self._x is None:
                return tensor
            return _OfInput(tensor.size(), tensor.stride(), tensor.storage_offset())
        if self._run_again is None or self._is_kept(tensor):
            return tensor
        self._count += 1
        return _Number(self._count - 1)

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        """Return whether a node keeps a tensor that is no view of the block's input."""
        # Payloads are uint8; a parameter is there anyway.
        return tensor.dtype == torch.uint8 or _memory_of(tensor) in self._parameters

    def _unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that a node has saved, or one of the same values."""
        if isinstance(packed, _OfInput):
            return self._input().as_strided(packed.size, packed.stride, packed.offset)
        if isinstance(packed, _Number):
            if self._saved_again is None:
                self._saved_again = self._save_again()
            # Each is asked for once a backward, and is the node's then.
            return self._saved_again.pop(packed.value)
        return packed

    @torch.no_grad()
    def _input(self) -> torch.Tensor:
        """Return the block's input; the norm computes it once more where it was not kept."""
        if self._y is None:
            self._y = self._norm(self._x)
        return self._y

    def _save_again(self) -> dict[int, torch.Tensor]:
        """Run the module once more and return what it saves, by number."""
        # A leaf, so that a graph is built; what its nodes save is ours, and the graph is dropped.
        y = self._input().detach().requires_grad_(self._requires_grad)
        saved: dict[int, torch.Tensor] = {}

        def save(tensor: torch.Tensor) -> None:
            if _memory_of(tensor) != _memory_of(y) and not self._is_kept(tensor):
                saved[len(saved)] = tensor.detach()

        with torch.enable_grad(), saved_tensors_hooks(save, _never):
            self._run_again(y, save)
        if len(saved) != self._count:
            raise RuntimeError(
                f"a block saved {self._count} tensors in its forward and {len(saved)} when it was "
                "computed again; drop --recompute-modules mlp"
            )
        return saved


def outside_hooks(function: Callable[[], None]) -> None:
    """Call a function of the other half while a block runs: what that saves is not this block's."""
    with saved_tensors_hooks(_same, _same):
        function()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, which its views share."""
    return tensor.untyped_storage().data_ptr()


def _never(packed: None) -> torch.Tensor:
    raise RuntimeError("the graph of a module that runs again has no backward")
