"""What stands in for Transformer Engine's three communication functions.

TE's linear layers call ``allreduce``, ``reduce_scatter_along_first_dim`` and ``gather_along_first_dim`` of
their own module. Each returns ``(tensor, handle)``, where the handle, None unless ``async_op``, is waited for
once. The functions are told a process group and no layer, so a layer says before its forward and its backward
that it is the one (``Exchanges.enter``).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from megatron.compression.communication import Work
from megatron.compression.communication.site import CommSite
from megatron.compression.transformer_engine.weight_gradients import WeightGradients


class Handle(Protocol):
    """Of communication under way: torch.distributed's, Transformer Engine's or ours."""

    def wait(self) -> Any:
        """Let the current stream go on when it is done."""


Result = tuple[torch.Tensor, Handle | None]


class Place(NamedTuple):
    """Which layer runs, and in which direction."""

    site: CommSite
    traffic: str


class Exchanges:
    """Communication of the layers that are marked as running; of others it is left alone.

    Args:
        weight_gradients: what waits to be computed behind an exchange of the backward pass.
    """

    def __init__(self, weight_gradients: WeightGradients) -> None:
        self.weight_gradients = weight_gradients
        self._places: list[Place] = []

    def enter(self, site: CommSite, traffic: str) -> None:
        """A layer begins; a forward may run inside a backward (recomputation)."""
        self._places.append(Place(site, traffic))

    def leave(self) -> None:
        """The layer that began last has ended."""
        self._places.pop()

    def all_reduce(self, original: Callable[..., Result]) -> Callable[..., Result]:
        """In place of ``allreduce(inp, tp_group, async_op)``."""

        def allreduce(inp, tp_group=None, async_op=False, **others):
            place = self._place(tp_group)
            if place is None:
                return original(inp, tp_group, async_op, **others)
            if not self._compresses(place, "all_reduce", inp, inp.nbytes):
                return self._behind(place, original, inp, tp_group, async_op=async_op, **others)
            out = torch.empty_like(inp, memory_format=torch.contiguous_format)
            return self._hand_over(place, out, place.site.all_reduce(inp, place.traffic, out), async_op)

        return allreduce

    def reduce_scatter(self, original: Callable[..., Result]) -> Callable[..., Result]:
        """In place of ``reduce_scatter_along_first_dim(inp, tp_group, async_op, output)``."""

        def reduce_scatter_along_first_dim(inp, tp_group, async_op=False, output=None, **others):
            place = self._place(tp_group)
            if place is None:
                return original(inp, tp_group, async_op, output, **others)
            if not self._compresses(place, "reduce_scatter", inp, inp.nbytes):
                given = {"output": output} | others
                return self._behind(place, original, inp, tp_group, async_op=async_op, **given)
            if output is None:
                output = inp.new_empty((inp.shape[0] // tp_group.size(), *inp.shape[1:]))
            work = place.site.reduce_scatter(inp, place.traffic, output)
            return self._hand_over(place, output, work, async_op)

        return reduce_scatter_along_first_dim

    def gather(self, original: Callable[..., Result]) -> Callable[..., Result]:
        """In place of ``gather_along_first_dim(inp, process_group, async_op, quantizer, ...)``.

        What TE gathers in its own fp8 passes as it is, and is counted.
        """

        def gather_along_first_dim(inp, process_group, async_op=False, quantizer=None, **others):
            place = self._place(process_group)
            given = {"quantizer": quantizer} | others
            if place is None:
                return original(inp, process_group, async_op, **given)
            if quantizer is not None or type(inp) not in (torch.Tensor, torch.nn.Parameter):
                result = self._behind(place, original, inp, process_group, async_op=async_op, **given)
                place.site.count_uncompressed(place.traffic, "all_gather", gathered_bytes(result[0]), "fp8")
                return result
            nbytes = inp.nbytes * process_group.size()
            if others.get("output_tensor") is not None or not self._compresses(
                place, "all_gather", inp, nbytes
            ):
                return self._behind(place, original, inp, process_group, async_op=async_op, **given)
            out = inp.new_empty((inp.shape[0] * process_group.size(), *inp.shape[1:]))
            work = place.site.all_gather(inp, place.traffic, out)
            return self._hand_over(place, out, work, async_op, hide=not async_op)

        return gather_along_first_dim

    def _place(self, group: Any) -> Place | None:
        """The running layer, if ``group`` is the one whose ranks share it."""
        place = self._places[-1] if self._places else None
        return place if place is not None and place.site.group == group else None

    def _compresses(self, place: Place, operation: str, tensor: torch.Tensor, nbytes: int) -> bool:
        """Whether a message is compressed; if not it is counted as what the caller will send."""
        if tensor.is_floating_point() and place.site.compresses(nbytes, place.traffic):
            return True
        place.site.count_uncompressed(place.traffic, operation, nbytes)
        return False

    def _behind(
        self, place: Place, original: Callable[..., Result], inp: torch.Tensor, group: Any, **given: Any
    ) -> Result:
        """TE's own exchange, with a weight gradient behind it where one waits.

        A gather that TE itself starts ahead is left to run behind the GEMM that TE has for it.
        """
        asynchronous = given.pop("async_op")
        ahead = asynchronous and "quantizer" in given
        if place.traffic != "tp.backward" or ahead or not self.weight_gradients:
            return original(inp, group, async_op=asynchronous, **given)
        result, handle = original(inp, group, async_op=True, **given)
        self.weight_gradients.compute_one()
        if asynchronous or handle is None:
            return result, handle
        handle.wait()
        return result, None

    def _hand_over(
        self, place: Place, out: torch.Tensor, work: Work, asynchronous: bool, hide: bool = True
    ) -> Result:
        """Hide what is hidden best here, and give TE the tensor that the handle fills."""
        if place.traffic == "tp.backward" and hide:
            if self.weight_gradients:
                self.weight_gradients.compute_one()
            if work.exchanges > 1:
                work.advance()  # its second exchange runs behind the weight gradient that TE computes next
        if asynchronous:
            return out, work
        work.wait()
        return out, None


def gathered_bytes(gathered: Any) -> int:
    """Bytes of a gathered fp8 tensor: its data, and the scales of formats that have them by block.

    Raises: TypeError: a tensor whose parts are not known.
    """
    if getattr(gathered, "_data", None) is not None:
        return gathered._data.nbytes
    names = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
    parts = [getattr(gathered, name, None) for name in names]
    if all(part is None for part in parts):
        raise TypeError(f"a gathered {type(gathered).__name__} of Transformer Engine is not known here")
    return sum(part.nbytes for part in parts if part is not None)
