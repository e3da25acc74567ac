"""Data parallelism of a few ranks on one device, with the arithmetic of the real one.

Each rank has its share of a batch. Their gradients are summed as ``--dp-compression`` sums them
(megatron.compression.data_parallel.codec_gradients): quantised inside each node, again between
nodes, and without the distributed optimizer once more. Weights stay fp32 where they are trained.
What all ranks compute with is bf16, and changes by what the codec of the weights makes of the
difference (megatron.compression.data_parallel.weights).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.compression.codecs import Codec
from megatron.compression.data_parallel.codec_gradients import ALIGNMENT
from scripts.accuracy.model import GPT
from scripts.accuracy.settings import RANKS, Setting

NODES = 2
"""Nodes that the ranks are on: SDP4Bit sends 8 bits inside of a node and 4 bits between them."""


def sum_gradients(
    rows: Tensor,
    hops: tuple[Codec, Codec],
    scale: float,
    unsharded: bool = False,
    nodes: int = NODES,
) -> Tensor:
    """Sum the ranks' gradients as compressed collectives do.

    Args:
        rows: the gradients, [ranks, n], n a multiple of 4096.
        hops: the codecs inside a node and between nodes.
        scale: what the sum is multiplied by.
        unsharded: whether the sum is encoded once more, to be gathered; of several nodes alone.
        nodes: nodes that the ranks are on, each the same number of ranks, of which there are two
            and more.

    Returns:
        The scaled sum, fp32 [n].
    """
    inside, between = hops
    shape = rows.shape[1:]
    if nodes == 1:
        # One exchange: every rank decodes and sums its shard of what all have sent.
        assert not unsharded, "a sum of one node that all ranks keep is not simulated"
        return inside.decode_sum(inside.encode(rows)[:, None], shape, torch.float32, scale)[0]
    payloads = inside.encode(rows).view(nodes, len(rows) // nodes, 1, -1)
    # Each node decodes and sums what its ranks have sent, and encodes that for the other nodes.
    sums = [inside.decode_sum_encode(of_node, shape, between) for of_node in payloads]
    sums = torch.cat(sums)
    if unsharded:
        sums = between.decode_sum_encode(sums[:, None], shape, between)
    return between.decode_sum(sums[:, None], shape, torch.float32, scale)[0]


class DataParallel:
    """Trains a model's parameters as data-parallel ranks do: sums gradients, and updates what ranks
    hold.

    Parameters are fp32 tensors. They hold the values that the ranks compute with, except while the
    optimizer steps: then they hold the fp32 masters.

    Args:
        setting: says how gradients and weights are sent.
        parameters: of the model.
    """

    def __init__(self, setting: Setting, parameters: Sequence[torch.nn.Parameter]) -> None:
        gradients = setting.codecs["gradients"]
        self.hops = None if gradients is None else gradients.hops
        self.weight_codec = setting.codecs["weights"]
        self.unsharded = setting.unsharded
        self.parameters = list(parameters)
        self.sizes = [parameter.numel() for parameter in self.parameters]
        if self.weight_codec is not None:
            self.masters = [parameter.detach().clone() for parameter in self.parameters]
            # They begin with the masters, rounded.
            self.rank_weights = self._flatten(self.masters).bfloat16()
            """What every rank holds, in bf16."""
            self._copy_rank_weights_into_parameters()

    def backward(self, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
        """Leave a batch's gradients in ``grad``, and return its mean loss.

        Args:
            model: the model.
            ids: tokens, [B, S].
            targets: the tokens that follow them, [B, S].
        """
        if self.hops is None:
            loss = model(ids, targets).mean()
            loss.backward()
            return loss.detach()
        losses = []
        rows = []
        for rank_ids, rank_targets in zip(ids.chunk(RANKS), targets.chunk(RANKS), strict=True):
            loss = model(rank_ids, rank_targets).mean()
            # Gradients of one rank: autograd.grad adds nothing to ``grad``.
            rows.append(self._flatten(torch.autograd.grad(loss, self.parameters)))
            losses.append(loss.detach())
        total = sum_gradients(torch.stack(rows), self.hops, 1 / RANKS, self.unsharded)
        for parameter, gradient in zip(self.parameters, self._split(total), strict=True):
            parameter.grad = gradient
        return torch.stack(losses).mean()

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer change the fp32 masters, and send the ranks the change.

        Without a codec of weights the parameters themselves are the masters.
        """
        if self.weight_codec is None:
            optimizer.step()
            return
        # The optimizer holds the parameters, in which the ranks' bf16 weights lie: the masters take
        # their place for the step.
        torch._foreach_copy_(self.parameters, self.masters)
        optimizer.step()
        torch._foreach_copy_(self.masters, self.parameters)
        new_weights = self._flatten(self.masters).bfloat16()
        # Error feedback: ranks add what they decode to what they hold, so what this payload rounds
        # off is in the next step's difference.
        payload = self.weight_codec.encode_difference(new_weights, self.rank_weights)
        self.weight_codec.add_decoded(payload[None], self.rank_weights[None])
        self._copy_rank_weights_into_parameters()

    def _copy_rank_weights_into_parameters(self) -> None:
        """Let the model compute with what the ranks hold, in bf16."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self._split(self.rank_weights))

    def _flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return all values one after the other, with zeros up to the codecs' alignment."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % (RANKS * ALIGNMENT)))

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Return what ``_flatten`` has joined, in the parameters' shapes."""
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        pairs = zip(pieces, self.parameters, strict=True)
        return [piece.view_as(parameter) for piece, parameter in pairs]
