"""Puts our sites into Transformer Engine's layers: each says when it runs, and its collectives are ours.

TE's linear layers call ``allreduce``, ``reduce_scatter_along_first_dim`` and ``gather_along_first_dim`` of
their own module. Each returns ``(tensor, handle)``, where the handle, None unless ``async_op``, is waited for
once. The functions get a process group and no layer, so hooks note before a layer's forward and backward that
it runs.

TE computes a layer's weight gradient right where its backward comes to it: that of a column-parallel layer
overlaps with the all-reduce or reduce-scatter of its input gradient, none with a row-parallel layer's
all-gather. TE can also defer a weight gradient (its ``wgrad_store``). Here that is done for one exchange: a
deferred weight gradient overlaps with the next exchange of the backward pass.

    row-parallel     gather the output gradient  [weight gradient of the layer above]
                     input gradient; the weight gradient is deferred
    column-parallel  input gradient, sum it      [the row-parallel layer's weight gradient]
                     its own: overlaps with the sum's second exchange, or deferred with sequence parallelism

The gradient is added to ``main_grad``, in which autograd has no part, so it may come late: whatever waits is
computed before a bucket is reduced and at the end of the backward pass. Cost in memory: the inputs of one
weight gradient live that much longer.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from megatron.compression.communication import Work
from megatron.compression.communication.site import CommSite, Message, Run
from megatron.compression.patches import communication

_DEEPEST = 4
"""Nodes between a layer's output and its autograd function: an added bias, a view."""

Result = tuple[torch.Tensor, Any]
"""A tensor, and the handle whose ``wait`` fills it: torch.distributed's, Transformer Engine's or ours; None:
filled already."""


class WeightGradients(deque[Callable[[], object]]):
    """Deferred ones, oldest first."""

    def put(self, compute: Callable[[], object]) -> None:
        """Defer one; called in a backward pass, at whose end it will have been computed."""
        if not self:
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
        self.append(compute)

    def compute_one(self) -> None:
        """Launch the oldest."""
        self.popleft()()

    def flush(self) -> None:
        """Launch all."""
        while self:
            self.compute_one()


class DeferredStore:
    """A layer's ``wgrad_store`` (TE's contract: ``delay_wgrad_compute``, ``put``) that defers to the queue,
    where its gradient ``may_come_late``."""

    def __init__(self, queue: WeightGradients, may_come_late: Callable[[], bool]) -> None:
        self._queue, self.delay_wgrad_compute = queue, may_come_late

    def put(self, tensors: list, compute: Callable) -> None:
        """TE's own call in the layer's backward."""
        self._queue.put(lambda: compute(*tensors))


class Place(NamedTuple):
    """The layer that runs, and in which direction."""

    site: CommSite
    traffic: str


class TransformerEngineLayers:
    """The layers of one run: while one runs, TE's collectives of its group go through its site. Where the run
    compresses gradients and TE adds weights' to ``main_grad``, those are deferred to overlap with an
    exchange."""

    def __init__(self, run: Run) -> None:
        self.run, self.weight_gradients = run, WeightGradients()
        self._running: list[Place] = []
        """The last began last: a forward may run inside a backward (recomputation)."""
        self._patched = False

    def attach(self, module: torch.nn.Module, name: str, layer: int | str | None) -> None:
        """Give one of ``communicating``'s layers its site (see ``CommSite``) and its traffic classes."""
        if not self._patched:
            communication.through_exchanges(self)
            communication.before_gradient_sync(self.weight_gradients.flush)
            record = partial(self.run.ledger.record_uncompressed, "tp.other", "exact", "all_reduce")
            communication.on_magnitude_reduction(record)
            begin = TransformerEngineLayers._begin
            communication.skip_in_layer_graphs(
                lambda hook: getattr(hook, "__func__", None) is begin
            )
            self._patched = True
        module.site = CommSite(name, module.tp_group, self.run, layer)
        one_way = ("tp.forward",) if module.parallel_mode == "row" else ("tp.backward",)
        module.traffic = ("tp.forward", "tp.backward") if module.sequence_parallel else one_way
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)
        # TE returns the gradient of a bias that its GEMM adds with the weight's: that one cannot come late.
        bias = getattr(module, "use_bias", False) and getattr(module, "apply_bias", True)
        late = module.parallel_mode == "row" or module.sequence_parallel
        # TE's own graphs hold deferred weight gradients separately, taken from a store of its own; so does
        # the schedule of --delay-wgrad-compute.
        config = getattr(module, "config", None)
        late = late and getattr(config, "cuda_graph_impl", "none") != "transformer_engine"
        late = late and not getattr(config, "delay_wgrad_compute", False)
        if late and not bias and getattr(module, "fuse_wgrad_accumulation", False):
            module.wgrad_store = DeferredStore(
                self.weight_gradients, partial(self._may_come_late, module)
            )

    def _may_come_late(self, module: torch.nn.Module) -> bool:
        """Whether there is compression to schedule for, and autograd has no part in the gradient."""
        weights = (getattr(module, name) for name in module.weight_names)
        compresses = bool(self.run.policy.rule("tp.backward").codecs)
        return compresses and all(hasattr(weight, "main_grad") for weight in weights)

    def _begin(self, module: torch.nn.Module, args: tuple) -> None:
        self._running.append(Place(module.site, "tp.forward"))

    def _end(
        self, module: torch.nn.Module, args: tuple, output: torch.Tensor | tuple | None
    ) -> None:
        self._running.pop()
        first = output[0] if isinstance(output, tuple) else output
        node = None if first is None else _own_node(first.grad_fn)
        if node is not None:
            place = Place(module.site, "tp.backward")

            def leave(*_: Any) -> None:
                self._running.pop()

            node.register_prehook(lambda _: self._running.append(place))
            node.register_hook(leave)

    def all_reduce(self, original: Callable[..., Result]) -> Callable[..., Result]:
        """In place of ``allreduce(inp, tp_group, async_op)``."""

        def allreduce(inp, tp_group=None, async_op=False, **others):
            place = self._place(tp_group)
            if place is None:
                return original(inp, tp_group, async_op, **others)
            message = self._compressed(place, "all_reduce", inp, inp.nbytes)
            if message is None:
                return self._uncompressed(
                    place, original, inp, tp_group, async_op=async_op, **others
                )
            out = torch.empty_like(inp, memory_format=torch.contiguous_format)
            return self._result(place, out, message.start(inp, out), async_op)

        return allreduce

    def reduce_scatter(self, original: Callable[..., Result]) -> Callable[..., Result]:
        """In place of ``reduce_scatter_along_first_dim(inp, tp_group, async_op, output)``."""

        def reduce_scatter_along_first_dim(inp, tp_group, async_op=False, output=None, **others):
            place = self._place(tp_group)
            if place is None:
                return original(inp, tp_group, async_op, output, **others)
            message = self._compressed(place, "reduce_scatter", inp, inp.nbytes)
            if message is None:
                others["output"] = output
                return self._uncompressed(
                    place, original, inp, tp_group, async_op=async_op, **others
                )
            if output is None:
                output = inp.new_empty((inp.shape[0] // tp_group.size(), *inp.shape[1:]))
            return self._result(place, output, message.start(inp, output), async_op)

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
                result = self._uncompressed(
                    place, original, inp, process_group, async_op=async_op, **given
                )
                place.site.count(place.traffic, "fp8", "all_gather", gathered_bytes(result[0]))
                return result
            message = None
            if others.get("output_tensor") is None:
                message = self._compressed(
                    place, "all_gather", inp, inp.nbytes * process_group.size()
                )
            if message is None:
                return self._uncompressed(
                    place, original, inp, process_group, async_op=async_op, **given
                )
            out = inp.new_empty((inp.shape[0] * process_group.size(), *inp.shape[1:]))
            return self._result(place, out, message.start(inp, out), async_op, overlap=not async_op)

        return gather_along_first_dim

    def _place(self, group: Any) -> Place | None:
        """The running layer, if ``group`` is the one whose ranks share it."""
        place = self._running[-1] if self._running else None
        return place if place is not None and place.site.group == group else None

    def _compressed(
        self, place: Place, operation: str, tensor: torch.Tensor, nbytes: int
    ) -> Message | None:
        """What is about to be sent, counted; None: uncompressed, by the caller."""
        if not tensor.is_floating_point():
            place.site.count(place.traffic, "exact", operation, nbytes)
            return None
        message = place.site.message(place.traffic, operation, nbytes)
        return message if message.codec is not None else None

    def _uncompressed(
        self,
        place: Place,
        original: Callable[..., Result],
        inp: torch.Tensor,
        group: Any,
        **given: Any,
    ) -> Result:
        """TE's own exchange, overlapped with a weight gradient where one is deferred, but for a gather that
        TE itself starts ahead."""
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

    def _result(
        self, place: Place, out: torch.Tensor, work: Work, asynchronous: bool, overlap: bool = True
    ) -> Result:
        """Overlap a weight gradient, and give TE the tensor that the handle fills."""
        if place.traffic == "tp.backward" and overlap:
            if self.weight_gradients:
                self.weight_gradients.compute_one()
            if work.exchanges > 1:
                work.advance()  # its second exchange overlaps with the weight gradient that TE computes next
        if asynchronous:
            return out, work
        work.wait()
        return out, None


def communicating(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(path, module) of a chunk's layers of Transformer Engine whose ranks share a product."""
    engine = sys.modules.get("transformer_engine.pytorch")
    if engine is None:  # no layer of it can have been built
        return
    for path, module in chunk.named_modules():
        if not isinstance(module, engine.module.base.TransformerEngineBaseModule):
            continue
        if module.tp_size > 1 and getattr(module, "parallel_mode", None) is not None:
            yield path, module


def why_not_covered(module: torch.nn.Module) -> str | None:
    """Why a layer's traffic could not be compressed, for an error's message; None: it can."""
    engine = sys.modules["transformer_engine.pytorch"]
    if not isinstance(module, engine.Linear | engine.LayerNormLinear):
        return f"{type(module).__name__} of Transformer Engine is none of Megatron's layers"
    if getattr(module, "symmetric_ar_type", None) is not None:
        return "--symmetric-ar-type sums past NCCL and past this project; drop it"
    if any(
        value
        for name, value in vars(module).items()
        if name.startswith("ub_") and name != "ub_name"
    ):
        return "--tp-comm-overlap sends over userbuffers, past NCCL and past this project; drop it"
    return None


def _own_node(node: torch.autograd.graph.Node | None) -> torch.autograd.graph.Node | None:
    """The layer's autograd function among the last nodes of its graph."""
    for _ in range(_DEEPEST):
        if node is None or isinstance(node, BackwardCFunction):
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def gathered_bytes(gathered: Any) -> int:
    """Bytes of a gathered fp8 tensor: its data, and the scales of formats that have them by block."""
    if getattr(gathered, "_data", None) is not None:
        return gathered._data.nbytes
    names = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
    parts = [getattr(gathered, name, None) for name in names]
    if all(part is None for part in parts):
        raise TypeError(
            f"a gathered {type(gathered).__name__} of Transformer Engine is not known here"
        )
    return sum(part.nbytes for part in parts if part is not None)
