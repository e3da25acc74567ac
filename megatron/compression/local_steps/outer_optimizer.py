"""The outer optimizer: Nesterov momentum on the weights that all data centres have in common.

Source: DiLoCo (arXiv 2311.08105, algorithm 1). After some local steps, data centre c has the
weights w_c. The outer gradient is the mean of what the data centres have moved away from the
anchor a; each sends its part encoded, with what its earlier encodings have lost:

    d_c = a - w_c + e_c         e_c: the residual memory, zero at first
    payload_c = encode(d_c)     e_c = d_c - decode(payload_c)
    g = mean over c of decode(payload_c)
    v = m v + g                 m: the outer momentum
    a = a - lr (g + m v)        Nesterov's form, as torch.optim.SGD has it

Two data centres send each other all of it. More of them would send too much so: each would send
everything to every other one. There each difference is cut into pieces, one a data centre. Every
data centre sums the pieces that are its own, with a residual memory of the sum as well, and sends
the sum to all (``encode_pieces``, ``encode_sum``, ``step_sums``):

    difference of data centre c    | piece for 0 | piece for 1 | piece for 2 |
    sum, by data centre               0             1             2

Every data centre decodes the same payloads in the same order, so all have the same bits of the
anchor and of the momentum. Residual memories are a data centre's own.
"""

from collections.abc import Sequence

import torch

from megatron.compression.codecs import Codec
from megatron.compression.codecs.identity import IdentityCodec
from taco_kernels.common import ceil_div


class OuterOptimizer:
    """Anchor, momentum and residual memory of one rank's shard: three fp32 values a parameter.

    Args:
        anchor: fp32 ``[n]``, the weights that all data centres start from; copied.
        codec: encodes differences; None sends them in fp32, exactly.
        learning_rate: of the outer optimizer; 1 without momentum averages the weights.
        momentum: Nesterov's; 0 is none.
        data_centres: how many there are.
        spans: begin and end of what is exchanged together; needed for more than two data centres.
    """

    def __init__(
        self,
        anchor: torch.Tensor,
        codec: Codec | None,
        learning_rate: float,
        momentum: float,
        data_centres: int = 2,
        spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.codec = IdentityCodec() if codec is None else codec
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.anchor = anchor.detach().clone()
        self.velocity = torch.zeros_like(self.anchor)
        """The momentum's sum of outer gradients, v."""
        self.data_centres = data_centres
        self.residual: torch.Tensor | None = None
        """What encodings have lost so far, e_c; None: nothing is ever lost."""
        self.sum_residuals: dict[int, torch.Tensor] = {}
        """What encodings of sums have lost, by the begin of their span: of this data centre's
        piece."""
        if not isinstance(self.codec, IdentityCodec):
            self.residual = torch.zeros_like(self.anchor)
            for begin, end in spans if data_centres > 2 else ():
                self.sum_residuals[begin] = self.anchor.new_zeros(
                    ceil_div(end - begin, data_centres)
                )

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a resume needs, by name: the tensors themselves."""
        tensors = {"anchor": self.anchor, "velocity": self.velocity}
        if self.residual is not None:
            tensors["residual"] = self.residual
        for begin, residual in self.sum_residuals.items():
            tensors[f"sum_residual.{begin}"] = residual
        return tensors

    def encode(self, weights: torch.Tensor, begin: int) -> torch.Tensor:
        """Return the payload of this data centre, and remember what it loses.

        Args:
            weights: fp32 ``[k]``, the local weights at positions ``begin`` to ``begin + k``.
            begin: their first position in the shard.

        Returns:
            uint8 ``[bytes]``.
        """
        return self._encode_rows(weights, begin, 1)[0]

    def encode_pieces(self, weights: torch.Tensor, begin: int) -> torch.Tensor:
        """Return a payload for each data centre, of the piece that it sums: uint8
        ``[data centres, bytes]``.

        Args:
            weights: as for ``encode``.
            begin: their first position in the shard.
        """
        return self._encode_rows(weights, begin, self.data_centres)

    def _encode_rows(self, weights: torch.Tensor, begin: int, count: int) -> torch.Tensor:
        """Return the difference's payloads in ``count`` rows of equal length, zero padded, and
        remember what they lose."""
        values = len(weights)
        end = begin + values
        size = ceil_div(values, count)
        rows = self.anchor.new_zeros(count * size)
        difference = rows[:values]
        torch.sub(self.anchor[begin:end], weights, out=difference)
        if self.residual is None:
            return self.codec.encode(rows.view(count, size))
        difference += self.residual[begin:end]
        payloads = self.codec.encode(rows.view(count, size))
        decoded = self.codec.decode(payloads, (size,), torch.float32).flatten()[:values]
        torch.sub(difference, decoded, out=self.residual[begin:end])
        return payloads

    def encode_sum(self, payloads: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return the payload of this data centre's piece of the outer gradient, and remember what
        it loses: uint8 ``[bytes]``.

        Args:
            payloads: uint8 ``[data centres, bytes]``, that piece of every data centre's difference.
            begin: the first position of the span.
            end: the one after its last.
        """
        size = ceil_div(end - begin, self.data_centres)
        scale = 1 / self.data_centres
        mean = self.codec.decode_sum(payloads[:, None], (size,), torch.float32, scale)
        residual = self.sum_residuals.get(begin)
        if residual is None:
            return self.codec.encode(mean)[0]
        mean[0] += residual
        payload = self.codec.encode(mean)
        decoded = self.codec.decode(payload, (size,), torch.float32)
        torch.sub(mean[0], decoded[0], out=residual)
        return payload[0]

    def step_sums(self, payloads: torch.Tensor, begin: int, end: int) -> None:
        """Move the anchor by the outer gradient's pieces.

        Args:
            payloads: uint8 ``[data centres, bytes]``, the piece that each data centre has summed.
            begin: the first position of the span.
            end: the one after its last.
        """
        size = ceil_div(end - begin, self.data_centres)
        pieces = self.codec.decode(payloads, (size,), torch.float32)
        self._move(pieces.flatten()[: end - begin], begin, end)

    def step(self, payloads: torch.Tensor, begin: int, end: int) -> None:
        """Move the anchor by what all data centres have sent.

        Args:
            payloads: uint8 ``[data centres, bytes]``, in the order of the data centres.
            begin: the first position that they are of.
            end: the one after the last.
        """
        scale = 1 / len(payloads)
        shape = (end - begin,)
        gradient = self.codec.decode_sum(payloads[:, None], shape, torch.float32, scale)[0]
        self._move(gradient, begin, end)

    def _move(self, gradient: torch.Tensor, begin: int, end: int) -> None:
        """Step along an outer gradient, which is overwritten."""
        if self.momentum:
            velocity = self.velocity[begin:end]
            velocity.mul_(self.momentum).add_(gradient)
            gradient.add_(velocity, alpha=self.momentum)
        self.anchor[begin:end].add_(gradient, alpha=-self.learning_rate)
