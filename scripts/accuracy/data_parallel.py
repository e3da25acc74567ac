"""Data parallelism of a few ranks on one device, with the arithmetic of the real one.

Each rank has its share of a batch. Their gradients are summed as ``--dp-compression`` sums them: quantised
inside each node, again between nodes, and without the distributed optimizer once more. Weights stay fp32
where they are trained; what all ranks compute with is bf16 and changes by the codec's difference.
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
"""That the ranks are on: SDP4Bit sends 8 bits inside of them and 4 between them."""


def sum_gradients(
    rows: Tensor, hops: tuple[Codec, Codec], scale: float, unsharded: bool = False
) -> Tensor:
    """fp32 [n], ``scale`` times the sum of the ranks' gradients [RANKS, n], n a multiple of 4096, by the
    codecs inside a node and between nodes; ``unsharded``: the sum is encoded once more, to be gathered."""
    first, last = hops
    payloads, shape = first.encode(rows).view(NODES, RANKS // NODES, 1, -1), rows.shape[1:]
    nodes = torch.cat([first.decode_sum_encode(node, shape, last) for node in payloads])
    if unsharded:
        nodes = last.decode_sum_encode(nodes[:, None], shape, last)
    return last.decode_sum(nodes[:, None], shape, torch.float32, scale)[0]


class DataParallel:
    """What trains a model's parameters from now on: gradients over the ranks, and the weights they hold.

    Parameters are fp32 and hold what the ranks compute with, but while the optimizer steps.
    """

    def __init__(self, setting: Setting, parameters: Sequence[torch.nn.Parameter]) -> None:
        gradients, self.codec = setting.codecs["gradients"], setting.codecs["weights"]
        self.hops = None if gradients is None else gradients.hops
        self.unsharded = setting.unsharded
        self.parameters = list(parameters)
        self.sizes = [parameter.numel() for parameter in self.parameters]
        if self.codec is not None:
            self.masters = [parameter.detach().clone() for parameter in self.parameters]
            self.held = self._flat(self.masters).bfloat16()
            self._hold()

    def backward(self, model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
        """Leave a batch's gradients in ``grad``; the mean loss."""
        if self.hops is None:
            loss = model(ids, targets).mean()
            loss.backward()
            return loss.detach()
        losses, rows = [], []
        for own in zip(ids.chunk(RANKS), targets.chunk(RANKS), strict=True):
            loss = model(*own).mean()
            rows.append(self._flat(torch.autograd.grad(loss, self.parameters)))
            losses.append(loss.detach())
        total = sum_gradients(torch.stack(rows), self.hops, 1 / RANKS, self.unsharded)
        for parameter, gradient in zip(self.parameters, self._split(total), strict=True):
            parameter.grad = gradient
        return torch.stack(losses).mean()

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer change the fp32 weights, and tell the ranks."""
        if self.codec is None:
            optimizer.step()
            return
        torch._foreach_copy_(self.parameters, self.masters)
        optimizer.step()
        torch._foreach_copy_(self.masters, self.parameters)
        payload = self.codec.encode_difference(self._flat(self.masters).bfloat16(), self.held)
        self.codec.add_decoded(payload[None], self.held[None])
        self._hold()

    def _hold(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self._split(self.held))

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """All values one after the other, zero padded."""
        flat = torch.cat([one.flatten() for one in tensors])
        return F.pad(flat, (0, -len(flat) % (RANKS * ALIGNMENT)))

    def _split(self, flat: Tensor) -> list[Tensor]:
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        return [piece.view_as(one) for piece, one in zip(pieces, self.parameters, strict=True)]
