"""The outer optimizer: Nesterov momentum on the weights that all data centres have in common.

Source: DiLoCo (arXiv 2311.08105, algorithm 1). After some local steps, data centre c has the
weights w_c. The outer gradient is the mean of what the data centres have moved away from the
anchor a; each sends its part encoded, with what its earlier encodings have lost:

    d_c = a - w_c + e_c         e_c: the residual memory, zero at first
    payload_c = encode(d_c)     e_c = d_c - decode(payload_c)
    g = mean over c of decode(payload_c)
    v = m v + g                 m: the outer momentum
    a = a - lr (g + m v)        Nesterov's form, as torch.optim.SGD has it

Every data centre decodes the same payloads in the same order, so all have the same bits of the
anchor and of the momentum. The residual memory is a data centre's own.
"""

import torch

from megatron.compression.codecs import Codec
from megatron.compression.codecs.identity import IdentityCodec


class OuterOptimizer:
    """Anchor, momentum and residual memory of one rank's shard: three fp32 values a parameter.

    Args:
        anchor: fp32 ``[n]``, the weights that all data centres start from; copied.
        codec: encodes differences; None sends them in fp32, exactly.
        learning_rate: of the outer optimizer; 1 without momentum averages the weights.
        momentum: Nesterov's; 0 is none.
    """

    def __init__(
        self, anchor: torch.Tensor, codec: Codec | None, learning_rate: float, momentum: float
    ) -> None:
        self.codec = IdentityCodec() if codec is None else codec
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.anchor = anchor.detach().clone()
        self.velocity = torch.zeros_like(self.anchor)
        """The momentum's sum of outer gradients, v."""
        self.residual = None
        """What encodings have lost so far, e_c; None: nothing is ever lost."""
        if not isinstance(self.codec, IdentityCodec):
            self.residual = torch.zeros_like(self.anchor)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a resume needs, by name: the tensors themselves."""
        tensors = {"anchor": self.anchor, "velocity": self.velocity}
        if self.residual is not None:
            tensors["residual"] = self.residual
        return tensors

    def encode(self, weights: torch.Tensor, begin: int) -> torch.Tensor:
        """Return the payload of this data centre, and remember what it loses.

        Args:
            weights: fp32 ``[k]``, the local weights at positions ``begin`` to ``begin + k``.
            begin: their first position in the shard.

        Returns:
            uint8 ``[bytes]``.
        """
        end = begin + len(weights)
        difference = self.anchor[begin:end] - weights
        if self.residual is None:
            return self.codec.encode(difference[None])[0]
        difference += self.residual[begin:end]
        payload = self.codec.encode(difference[None])[0]
        decoded = self.codec.decode(payload[None], difference.shape, torch.float32)[0]
        torch.sub(difference, decoded, out=self.residual[begin:end])
        return payload

    def step(self, payloads: torch.Tensor, begin: int, end: int) -> None:
        """Move the anchor by what all data centres have sent.

        Args:
            payloads: uint8 ``[data centres, bytes]``, in the order of the data centres.
            begin: the first position that they are of.
            end: the one after the last.
        """
        scale = 1 / len(payloads)
        gradient = self.codec.decode_sum(payloads[:, None], (end - begin,), torch.float32, scale)[0]
        if self.momentum:
            velocity = self.velocity[begin:end]
            velocity.mul_(self.momentum).add_(gradient)
            gradient.add_(velocity, alpha=self.momentum)
        self.anchor[begin:end].add_(gradient, alpha=-self.learning_rate)
