"""Puts our sites into Transformer Engine's layers: each says when it runs, and its collectives are
ours.

TE's linear layers call ``allreduce``, ``reduce_scatter_along_first_dim`` and
``gather_along_first_dim`` of their own module. Each returns ``(tensor, handle)``, where the handle,
None unless ``async_op``, is waited for once. The functions get a process group and no layer, so
hooks note before a layer's forward and backward that it runs. The notes are the process's, of
whichever run a layer is: several runs may share process groups.

TE computes a layer's weight gradient right where its backward comes to it: that of a
column-parallel layer overlaps with the all-reduce or reduce-scatter of its input gradient, none
with a row-parallel layer's all-gather. TE can also defer a weight gradient (its ``wgrad_store``).
Here that is done for one exchange: a deferred weight gradient overlaps with the next exchange of
the backward pass.

    row-parallel     gather the output gradient  [weight gradient of the layer above]
                     input gradient; the weight gradient is deferred
    column-parallel  input gradient, sum it      [the row-parallel layer's weight gradient]
                     its own: overlaps with the sum's second exchange, or deferred with sequence
                     parallelism

The gradient is added to ``main_grad``, in which autograd has no part, so it may come late: whatever
waits is computed before a bucket is reduced and at the end of the backward pass. Cost in memory:
the inputs of one weight gradient live that much longer.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from megatron.compression.communication import Work
from megatron.compression.communication.site import CommSite, Message, Run
from megatron.compression.patches import communication, running

_DEEPEST = 4
"""Nodes between a layer's output and its autograd function: an added bias, a view."""

_OUTSIDE = -1
"""What torch calls the graph task where no backward pass is under way."""

Result = tuple[torch.Tensor, Any]
"""A tensor, and the handle whose ``wait`` fills it: torch.distributed's, Transformer Engine's or
ours; None: filled already."""


def _graph_task() -> int:
    """Return the number of the backward pass in which the caller runs; ``_OUTSIDE``: in none."""
    return torch._C._current_graph_task_id()


class WeightGradients(deque[Callable[[], object]]):
    """Deferred weight gradients of one run, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self._task = _OUTSIDE  # the backward pass at whose end they are computed

    def put(self, compute: Callable[[], object]) -> None:
        """Defer one; called in a backward pass, at whose end it will have been computed."""
        task = _graph_task()
        # Once a backward pass; a pass within a pass (recomputation) has an end of its own.
        if task != self._task or not self:
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
            self._task = task
        self.append(compute)

    def compute_one(self) -> None:
        """Launch the oldest."""
        self.popleft()()

    def flush(self) -> None:
        """Launch all."""
        while self:
            self.compute_one()


class DeferredStore:
    """A layer's ``wgrad_store`` (TE's contract: ``delay_wgrad_compute``, ``put``) that defers to
    the queue, where its gradient ``may_come_late``."""

    def __init__(self, queue: WeightGradients, may_come_late: Callable[[], bool]) -> None:
        self._queue = queue
        self.delay_wgrad_compute = may_come_late

    def put(self, tensors: list, compute: Callable) -> None:
        """Defer ``compute(*tensors)``: TE's own call in the layer's backward."""
        self._queue.put(lambda: compute(*tensors))


class ActiveSite(NamedTuple):
    """A layer that runs."""

    site: CommSite
    traffic: str
    """Its direction: tp.forward or tp.backward."""
    weight_gradients: WeightGradients
    """Those that its run has deferred."""


_active: dict[int, list[ActiveSite]] = {}
"""The layers that run, the innermost last, by the backward pass in which they run (``_OUTSIDE``: in
none).

A forward may run inside a backward (recomputation). By pass, because one that raises leaves its
layers behind: torch calls no hook after a node that failed. Passes have numbers of their own, so
nobody looks there again.
"""

_last_run: "weakref.ref[Run] | None" = None
"""The run of the layer that ran last, for what TE sends between layers."""


def _enter(active: ActiveSite) -> None:
    _active.setdefault(_graph_task(), []).append(active)


def _leave() -> None:
    task = _graph_task()
    # Hooks come in pairs: what ends is the innermost.
    layers = _active[task]
    layers.pop()
    if not layers:
        del _active[task]


def _active_site(group: Any) -> ActiveSite | None:
    """Return the innermost running layer, if ``group`` is the one whose ranks share it."""
    layers = _active.get(_graph_task())
    if layers and layers[-1].site.group == group:
        return layers[-1]
    return None


class TransformerEngineLayers:
    """The layers of one run: while one runs, TE's collectives of its group go through its site.
    Where the run compresses gradients and TE adds weights' to ``main_grad``, those are deferred to
    overlap with an exchange."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.weight_gradients = WeightGradients()
        run.before_gradient_sync.append(self.weight_gradients.flush)

    def follow_engine(self) -> None:
        """Have Transformer Engine's layers of this process call our collectives. Idempotent."""
        communication.through_exchanges(all_reduce, reduce_scatter, gather)
        communication.before_gradient_sync()
        communication.on_magnitude_reduction(_count_magnitudes)
        communication.skip_in_layer_graphs()

    def attach(self, module: torch.nn.Module, name: str, layer: int | str | None) -> None:
        """Give one of ``communicating``'s layers its site and its traffic classes.

        Args:
            module: a layer of Transformer Engine; ``site``, ``traffic`` and hooks are put on it.
            name: the site's name (see ``CommSite``).
            layer: what ``--tp-compression-layers`` calls the layer.
        """
        module.site = CommSite(name, module.tp_group, self.run, layer)
        is_row_parallel = module.parallel_mode == "row"
        # With sequence parallelism a layer gathers or scatters in both passes. Without it a
        # row-parallel layer's output is summed, and the gradient of a column-parallel one's input.
        if module.sequence_parallel:
            module.traffic = ("tp.forward", "tp.backward")
        elif is_row_parallel:
            module.traffic = ("tp.forward",)
        else:
            module.traffic = ("tp.backward",)
        module.register_forward_pre_hook(self._begin)
        # always_call: a forward that raises has ended, too.
        module.register_forward_hook(self._end, always_call=True)
        if self._can_defer(module, is_row_parallel or module.sequence_parallel):
            module.wgrad_store = DeferredStore(
                self.weight_gradients, partial(self._may_come_late, module)
            )

    @staticmethod
    def _can_defer(module: torch.nn.Module, exchange_follows: bool) -> bool:
        """Return whether a layer's weight gradient may be computed during the next layer's
        exchange."""
        # TE returns the gradient of a bias that its GEMM adds with the weight's: that one cannot
        # come late.
        has_bias = getattr(module, "use_bias", False) and getattr(module, "apply_bias", True)
        config = getattr(module, "config", None)
        # TE's own graphs hold deferred weight gradients separately, taken from a store of its own;
        # so does the schedule of --delay-wgrad-compute.
        in_graphs = getattr(config, "cuda_graph_impl", "none") == "transformer_engine"
        by_schedule = getattr(config, "delay_wgrad_compute", False)
        if has_bias or in_graphs or by_schedule:
            return False
        return exchange_follows and getattr(module, "fuse_wgrad_accumulation", False)

    def _may_come_late(self, module: torch.nn.Module) -> bool:
        """Return whether there is compression to schedule for, and autograd has no part in the
        gradient."""
        if not self.run.policy.rule("tp.backward").codecs:
            return False
        return all(hasattr(getattr(module, name), "main_grad") for name in module.weight_names)

    @communication.eager_only
    def _begin(self, module: torch.nn.Module, args: tuple) -> None:
        """Note that a layer's forward begins."""
        if _graph_task() == _OUTSIDE:
            # No backward pass is under way: what one has left is of one that raised. Its deferred
            # weight gradients belong to a step that the loop has given up.
            self.weight_gradients.clear()
            for task in [task for task in _active if task != _OUTSIDE]:
                del _active[task]
        _enter(ActiveSite(module.site, "tp.forward", self.weight_gradients))

    def _end(
        self, module: torch.nn.Module, args: tuple, output: torch.Tensor | tuple | None
    ) -> None:
        """Note that a layer's forward has ended, also by an exception, and have its backward
        noted."""
        global _last_run
        _leave()
        _last_run = weakref.ref(self.run)
        first = output[0] if isinstance(output, tuple) else output
        node = None if first is None else _layer_node(first.grad_fn)
        if node is not None:
            backward = ActiveSite(module.site, "tp.backward", self.weight_gradients)
            # On the layer's own autograd function: its backward runs between these two.
            node.register_prehook(lambda grad_outputs: _enter(backward))
            node.register_hook(lambda grad_inputs, grad_outputs: _leave())


def all_reduce(original: Callable[..., Result]) -> Callable[..., Result]:
    """Return what stands for ``allreduce(inp, tp_group, async_op)``."""

    def allreduce(inp, tp_group=None, async_op=False, **engine_options):
        """Sum over the ranks: the output of a row-parallel layer, or the input gradient of a
        column-parallel one.

        Args:
            inp: this rank's addend, ``[s, b, h]``; it may come to hold the sum.
            tp_group: the ranks.
            async_op: return a handle, which TE waits for after the weight gradient.
            engine_options: what other versions of TE pass as well.
        """
        # None: no layer of ours runs, or the group is another's, such as attention's context
        # parallelism.
        active = _active_site(tp_group)
        if active is None:
            return original(inp, tp_group, async_op, **engine_options)
        message = _compressed(active, "all_reduce", inp, inp.nbytes)
        if message is None:
            return _uncompressed(
                active, original, inp, tp_group, async_op=async_op, **engine_options
            )
        out = torch.empty_like(inp, memory_format=torch.contiguous_format)
        return _result(active, out, message.start(inp, out), async_op)

    return allreduce


def reduce_scatter(original: Callable[..., Result]) -> Callable[..., Result]:
    """Return what stands for ``reduce_scatter_along_first_dim(inp, tp_group, async_op,
    output)``."""

    def reduce_scatter_along_first_dim(
        inp, tp_group, async_op=False, output=None, **engine_options
    ):
        """Sum over the ranks under sequence parallelism: each keeps its tokens of the sum.

        Args:
            inp: this rank's addend, ``[s, b, h]``.
            tp_group: the ranks.
            async_op: return a handle, which TE waits for after the weight gradient.
            output: ``[s / W, b, h]``; None: a new tensor.
            engine_options: what other versions of TE pass as well.
        """
        active = _active_site(tp_group)
        if active is None:
            return original(inp, tp_group, async_op, output, **engine_options)
        message = _compressed(active, "reduce_scatter", inp, inp.nbytes)
        if message is None:
            engine_options["output"] = output
            return _uncompressed(
                active, original, inp, tp_group, async_op=async_op, **engine_options
            )
        if output is None:
            output = inp.new_empty((inp.shape[0] // tp_group.size(), *inp.shape[1:]))
        return _result(active, output, message.start(inp, output), async_op)

    return reduce_scatter_along_first_dim


def gather(original: Callable[..., Result]) -> Callable[..., Result]:
    """Return what stands for ``gather_along_first_dim(inp, process_group, async_op, quantizer,
    ...)``.

    What TE gathers in its own fp8 passes as it is, and is counted.
    """

    def gather_along_first_dim(
        inp, process_group, async_op=False, quantizer=None, **engine_options
    ):
        """Gather the tokens of all ranks under sequence parallelism.

        Args:
            inp: this rank's tokens, ``[s / W, b, h]``.
            process_group: the ranks.
            async_op: return a handle: TE starts some gathers ahead of what it computes next.
            quantizer: TE's, which makes fp8 of the tokens before they are sent; None: bf16.
            engine_options: what other versions of TE pass as well, such as ``output_tensor``.
        """
        active = _active_site(process_group)
        options = {"quantizer": quantizer, **engine_options}
        if active is None:
            return original(inp, process_group, async_op, **options)
        # Under an fp8 recipe TE quantises first: the gathered bytes are fp8 already.
        quantized = quantizer is not None or type(inp) not in (torch.Tensor, torch.nn.Parameter)
        message = None
        if not quantized and engine_options.get("output_tensor") is None:
            nbytes = inp.nbytes * process_group.size()
            message = _compressed(active, "all_gather", inp, nbytes)
        if message is None:
            result = _uncompressed(
                active, original, inp, process_group, async_op=async_op, **options
            )
            if quantized:
                nbytes = gathered_bytes(result[0])
                active.site.count(active.traffic, "fp8", "all_gather", nbytes)
            return result
        out = inp.new_empty((inp.shape[0] * process_group.size(), *inp.shape[1:]))
        work = message.start(inp, out)
        return _result(active, out, work, async_op, overlap=not async_op)

    return gather_along_first_dim


def _compressed(
    active: ActiveSite, operation: str, tensor: torch.Tensor, nbytes: int
) -> Message | None:
    """Return the message that is about to be sent, counted; None: the caller sends it
    uncompressed."""
    if not tensor.is_floating_point():
        active.site.count(active.traffic, "exact", operation, nbytes)
        return None
    message = active.site.message(active.traffic, operation, nbytes)
    return message if message.codec is not None else None


def _uncompressed(
    active: ActiveSite,
    original: Callable[..., Result],
    inp: torch.Tensor,
    group: Any,
    *,
    async_op: bool,
    **options: Any,
) -> Result:
    """Let TE exchange, overlapped with a weight gradient where one is deferred.

    A gather that TE itself starts ahead overlaps with what TE computes next.
    """
    starts_ahead = async_op and "quantizer" in options
    deferred = active.weight_gradients
    if active.traffic != "tp.backward" or starts_ahead or not deferred:
        return original(inp, group, async_op=async_op, **options)
    # Asynchronous whatever TE asks for, so that the deferred weight gradient runs meanwhile.
    result, handle = original(inp, group, async_op=True, **options)
    deferred.compute_one()
    if async_op or handle is None:
        return result, handle
    handle.wait()
    return result, None


def _result(
    active: ActiveSite, out: torch.Tensor, work: Work, async_op: bool, overlap: bool = True
) -> Result:
    """Overlap a weight gradient, and give TE the tensor that the handle fills."""
    if active.traffic == "tp.backward" and overlap:
        if active.weight_gradients:
            active.weight_gradients.compute_one()
        if work.exchanges > 1:
            # Its second exchange overlaps with the weight gradient that TE computes next.
            work.advance()
    if async_op:
        return out, work
    # TE waits where it has asked for an asynchronous exchange.
    work.wait()
    return out, None


def _count_magnitudes(nbytes: int, ranks: int) -> None:
    """Count a reduction of magnitudes, which TE does inside a layer's backward or after a forward:
    of the outermost layer's run, of the run at work, or of the run whose layer ran last."""
    layers = _active.get(_graph_task())
    if layers:
        # The outermost layer is of the model whose pass this is.
        run = layers[0].site.run
    else:
        run = running.current(otherwise=_last_run() if _last_run is not None else None)
    if run is not None:
        run.ledger.record_uncompressed("tp.other", "exact", "all_reduce", nbytes, ranks)


def communicating(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (path, module) of a chunk's layers of Transformer Engine whose ranks share a
    product."""
    engine = sys.modules.get("transformer_engine.pytorch")
    if engine is None:  # no layer of it can have been built
        return
    for path, module in chunk.named_modules():
        if not isinstance(module, engine.module.base.TransformerEngineBaseModule):
            continue
        if module.tp_size > 1 and getattr(module, "parallel_mode", None) is not None:
            yield path, module


def why_not_covered(module: torch.nn.Module) -> str | None:
    """Return why a layer's traffic could not be compressed, for an error's message; None: it
    can."""
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


def _layer_node(node: torch.autograd.graph.Node | None) -> torch.autograd.graph.Node | None:
    """Return the layer's autograd function among the last nodes of its graph, or None."""
    for _ in range(_DEEPEST):
        if node is None or isinstance(node, BackwardCFunction):
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def gathered_bytes(gathered: Any) -> int:
    """Return the bytes of a gathered fp8 tensor: its data, and the scales of formats that have them
    by block."""
    if getattr(gathered, "_data", None) is not None:
        return gathered._data.nbytes
    names = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
    tensors = [getattr(gathered, name, None) for name in names]
    if all(tensor is None for tensor in tensors):
        raise TypeError(
            f"a gathered {type(gathered).__name__} of Transformer Engine is not known here"
        )
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
