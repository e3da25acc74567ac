"""Puts our sites into Transformer Engine's layers: each says when it runs, and its collectives are ours."""

import sys
from collections.abc import Iterator
from functools import partial

import torch
from torch.autograd.function import BackwardCFunction

from megatron.compression import patches
from megatron.compression.communication.site import CommSite, Run
from megatron.compression.transformer_engine.exchanges import DeferredStore, Exchanges, WeightGradients

_DEEPEST = 4
"""Nodes between a layer's output and its autograd function: an added bias, a view."""


class TransformerEngineLayers:
    """The layers of one run.

    Args:
        run: whose policy and ledger the sites take. Where it compresses gradients and TE adds weights' to
            ``main_grad``, those are deferred to overlap with an exchange.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.weight_gradients = WeightGradients()
        self.exchanges = Exchanges(self.weight_gradients)
        self._patched = False

    def attach(self, module: torch.nn.Module, name: str, layer: int | str | None) -> None:
        """Give a layer, one of ``communicating``'s, its site.

        Args:
            name, layer: as ``CommSite`` takes them.
        """
        if not self._patched:
            patches.through_exchanges(self.exchanges)
            patches.before_gradient_sync(self.weight_gradients.flush)
            record = partial(self.run.ledger.record_uncompressed, "tp.other", "exact", "all_reduce")
            patches.on_magnitude_reduction(record)
            self._patched = True
        module.site = CommSite(name, module.tp_group, self.run, layer)
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)
        # TE returns the gradient of a bias that its GEMM adds with the weight's: that one cannot come late.
        bias = getattr(module, "use_bias", False) and getattr(module, "apply_bias", True)
        late = module.parallel_mode == "row" or module.sequence_parallel
        if late and not bias and getattr(module, "fuse_wgrad_accumulation", False):
            module.wgrad_store = DeferredStore(self.weight_gradients, partial(self._may_come_late, module))

    def _may_come_late(self, module: torch.nn.Module) -> bool:
        """Whether there is compression to schedule for, and autograd has no part in the gradient."""
        weights = (getattr(module, name) for name in module.weight_names)
        compresses = bool(self.run.policy.rule("tp.backward").codecs)
        return compresses and all(hasattr(weight, "main_grad") for weight in weights)

    def _begin(self, module: torch.nn.Module, args: tuple) -> None:
        self.exchanges.enter(module.site, "tp.forward")

    def _end(self, module: torch.nn.Module, args: tuple, output: torch.Tensor | tuple | None) -> None:
        self.exchanges.leave()
        first = output[0] if isinstance(output, tuple) else output
        node = None if first is None else _own_node(first.grad_fn)
        if node is not None:
            node.register_prehook(lambda _: self.exchanges.enter(module.site, "tp.backward"))
            node.register_hook(lambda *_: self.exchanges.leave())


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


def traffic_of(module: torch.nn.Module) -> tuple[str, ...]:
    """The traffic classes of the messages of a layer, one of ``communicating``'s."""
    if module.sequence_parallel:
        return "tp.forward", "tp.backward"
    return ("tp.forward",) if module.parallel_mode == "row" else ("tp.backward",)


def why_not_covered(module: torch.nn.Module) -> str | None:
    """Why a layer's traffic could not be compressed, for an error's message; None: it can."""
    engine = sys.modules["transformer_engine.pytorch"]
    if not isinstance(module, engine.Linear | engine.LayerNormLinear):
        return f"{type(module).__name__} of Transformer Engine is none of Megatron's layers"
    if getattr(module, "symmetric_ar_type", None) is not None:
        return "--symmetric-ar-type sums past NCCL and past this project; drop it"
    if any(value for name, value in vars(module).items() if name.startswith("ub_") and name != "ub_name"):
        return "--tp-comm-overlap sends over userbuffers, past NCCL and past this project; drop it"
    return None


def _own_node(node: torch.autograd.graph.Node | None) -> torch.autograd.graph.Node | None:
    """The layer's autograd function among the last nodes of its graph."""
    for _ in range(_DEEPEST):
        if node is None or isinstance(node, BackwardCFunction):
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None
