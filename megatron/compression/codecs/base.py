"""The codec contract: rows of values to payloads of bytes, and back."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from megatron.compression.codecs.recipes import NAMED
from megatron.compression.codecs.registry import CODECS, GRADIENT_COMPRESSORS
from megatron.compression.errors import CompressionConfigError, setting

if TYPE_CHECKING:
    from taco_kernels.taco import CodecConfig

Shape = Sequence[int]


class Codec(abc.ABC):
    """Turns each row of a tensor into a uint8 payload of a size that is known beforehand, and back.

    A codec is pure: no communication, no state, no host synchronisation. Subclasses are frozen dataclasses,
    entered with ``@register_codec``; three methods are enough (``payload_bytes``, ``encode``, ``decode``),
    the others have slower definitions here. A row has any shape and any number of values (a codec pads
    inside). Values that share a scale with a NaN or an infinity decode to numbers that are not finite."""

    @property
    def sees_shape(self) -> bool:
        """Whether a payload depends on the row's shape (tokens, channels), and not on its values in order
        alone: collectives then cut tensors along the first dimension only."""
        return False

    @property
    def block(self) -> int:
        """Values that are encoded together; collectives cut flat tensors at its multiples."""
        return 1

    @property
    def name(self) -> str:
        """The spec that parses back to this codec."""
        return CODECS.spec(self)

    @property
    def hops(self) -> tuple[Codec, Codec]:
        """What encodes in the first and in the second exchange of a collective.

        All-reduce: partial sums, their sum. Data parallelism over nodes: inside a node, between nodes.
        """
        return self, self

    @property
    def one_exchange(self) -> bool:
        """Whether an all-reduce between two ranks is one exchange: both exchanges have the same codec."""
        first, second = self.hops
        return first is second or first == second

    @property
    def backward(self) -> Codec:
        """What encodes the gradients of what this codec encodes, where nobody chooses another one."""
        return self

    @property
    def fused_config(self) -> CodecConfig | None:
        """The settings under which ``taco_kernels.symmetric_memory`` does this codec's collectives in one
        kernel; None: it cannot."""
        return None

    lossless: ClassVar[bool] = False
    """Whether every bit comes back. Then a payload is of the dtype that was encoded, which is what it can be
    decoded to, and it may overflow: ``overflow_flag``."""

    def overflow_flag(self, payloads: torch.Tensor) -> torch.Tensor:
        """uint8 ``[]`` of uint8 ``[rows, bytes]`` that one call has encoded: 1 where the values of a row did
        not fit, which then decodes to zeros. Asked of lossless codecs only."""
        raise NotImplementedError(f"{self.name} does not overflow")

    def message_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """``payload_bytes`` of a row of ``dtype``, where that matters."""
        return self.payload_bytes(shape)

    @abc.abstractmethod
    def payload_bytes(self, shape: Shape) -> int:
        """Exact bytes of the payload of one row of ``shape``."""

    @abc.abstractmethod
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """uint8 ``[rows, payload_bytes(shape)]``, contiguous, of ``x [rows, *shape]`` (bf16, fp16, fp32; any
        strides)."""

    @abc.abstractmethod
    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """``[rows, *shape]`` of ``dtype`` from uint8 ``[rows, bytes]``."""

    def decode_into(
        self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        """``decode``, in ``out`` if given (its dtype)."""
        if out is None:
            return self.decode(payloads, shape, dtype)
        return self.decode_sum(payloads[None], shape, dtype, out=out)

    def encode_grid(self, x: torch.Tensor) -> torch.Tensor:
        """uint8 ``[a, b, bytes]`` of ``x [a, b, n]``: rows that are not contiguous in memory."""
        return torch.stack([self.encode(rows) for rows in x])

    def decode_sum(
        self,
        payloads: torch.Tensor,
        shape: Shape,
        dtype: torch.dtype,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``scale`` times the sum over S of uint8 ``[S, rows, bytes]``: ``[rows, *shape]``, or ``out``.

        Summed in fp32 in the order of S, then scaled, then rounded to ``dtype`` (or that of ``out``).
        """
        rows = None if out is None else _rows_of(out)
        if rows is None:
            target, values = dtype if out is None else out.dtype, math.prod(shape)
            rows = torch.empty(payloads.shape[1], values, dtype=target, device=payloads.device)
            self.sum_into(payloads, shape, dtype, scale, rows)
            return rows.view(-1, *shape) if out is None else out.copy_(rows.view(out.shape))
        self.sum_into(payloads, shape, dtype, scale, rows)
        return out

    def sum_into(
        self,
        payloads: torch.Tensor,
        shape: Shape,
        dtype: torch.dtype,
        scale: float,
        rows: torch.Tensor,
    ) -> None:
        """Write ``decode_sum`` into ``rows [rows, n]``, whose rows are contiguous, in their dtype."""
        single = len(payloads) == 1 and scale == 1.0
        total = self.decode(payloads[0], shape, rows.dtype if single else torch.float32)
        for sender in payloads[1:]:
            total = total + self.decode(sender, shape, torch.float32)
        if scale != 1.0:
            total = total * scale
        rows.copy_(total.view(rows.shape))

    def decode_sum_encode(self, payloads: torch.Tensor, shape: Shape, into: Codec) -> torch.Tensor:
        """The sum over S of uint8 ``[S, rows, bytes]``, as ``into`` encodes it: uint8 ``[rows, bytes']``."""
        return into.encode(self.decode_sum(payloads, shape, torch.float32))

    def encode_difference(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """uint8 ``[bytes]`` of what turns ``old`` into ``new``, both ``[n]``; subtracted in fp32."""
        return self.encode((new.float() - old.float())[None])[0]

    def add_decoded(self, payloads: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Add differences, uint8 ``[rows, bytes]``, to ``weights [rows, n]`` in place; added in fp32."""
        change = self.decode(payloads, weights.shape[1:], torch.float32)
        return weights.copy_(weights.float() + change)

    def bits_per_value(self, shape: Shape = (2**20,)) -> float:
        """What a value of a row of ``shape`` costs, scales and padding included."""
        return 8 * self.payload_bytes(shape) / math.prod(shape)


@dataclass(frozen=True)
class TwoHops(Codec):
    """``int5/int6``: ``first`` for partial sums and single messages, ``second`` for what is sent of sums."""

    first: Codec
    second: Codec

    def __post_init__(self) -> None:
        if self.first.lossless or self.second.lossless:
            raise CompressionConfigError(
                f"{self.name}: together with another codec, lossless keeps bits of a lossy sum; give it alone"
            )
        if self.first.sees_shape != self.second.sees_shape or self.first.block != self.second.block:
            raise CompressionConfigError(
                f"{self.name}: the two codecs cut a tensor differently; give them the same group size"
            )

    @property
    def name(self) -> str:
        return f"{self.first.name}/{self.second.name}"

    @property
    def sees_shape(self) -> bool:
        return self.first.sees_shape

    @property
    def block(self) -> int:
        return self.first.block

    @property
    def hops(self) -> tuple[Codec, Codec]:
        return self.first, self.second

    def payload_bytes(self, shape: Shape) -> int:
        return self.first.payload_bytes(shape)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first.encode(x)

    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return self.first.decode(payloads, shape, dtype)


def offered(dimension: str = "") -> list[str]:
    """The names that a dimension's setting takes where settings of the codec do not decide: codecs, the
    dimension's recipes and, for data parallelism, compressors of gradients. Without a dimension all codecs."""
    names = []
    for name in CODECS.names():
        codec = CODECS.parse(name)
        if dimension == "expert_parallel" and codec.lossless:
            continue  # a row of tokens has no room for values that do not fit
        if dimension in ("data_parallel", "expert_parallel") and codec.sees_shape:
            continue  # there are no tokens and channels in a bucket, and single tokens in a row
        names.append(name)
    if dimension == "data_parallel":
        names += GRADIENT_COMPRESSORS.names()
    return names + [name for name, (owner, _) in NAMED.items() if owner == dimension]


@functools.cache
def parse_codec(text: str, dimension: str = "") -> Codec:
    """The codec that a spec names; ``FIRST/SECOND`` for one each in the two exchanges of a collective.

    Args:
        text: the spec, such as ``int6:group=64``.
        dimension: the dimension whose setting takes the spec (``tensor_parallel``), so that an error lists
            what that setting takes.

    Raises: CompressionConfigError: an unknown name or setting, or a value that the codec refuses.
    """
    if "/" in text:
        first, _, second = text.partition("/")
        return TwoHops(parse_codec(first, dimension), parse_codec(second, dimension))
    name = text.partition(":")[0]
    if CODECS.entry(name) is None and GRADIENT_COMPRESSORS.entry(name) is not None:
        raise CompressionConfigError(
            f"{name} compresses gradients only; give it to {setting('data_parallel.compression')}"
        )
    codec = CODECS.parse(text, functools.partial(offered, dimension))
    if not isinstance(codec, Codec):
        raise CompressionConfigError(
            f"{text}: {type(codec).__qualname__} is no megatron.compression.Codec"
        )
    return codec


def _rows_of(out: torch.Tensor) -> torch.Tensor | None:
    """``out`` as ``[rows, n]`` if that is a view with contiguous rows."""
    if out.dim() == 2 and (out.stride(1) == 1 or out.shape[1] < 2):
        return out
    return out.view(len(out), -1) if out.is_contiguous() else None


def stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[rows, ...]`` of a codec's results; a single one is not copied."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(tuple(rows))


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, values]`` of ``[rows, *shape]``, whose bytes can be viewed as another dtype.

    ``contiguous`` leaves a tensor of one value a row as it is, whatever its stride, and such a tensor has no
    view of another dtype.
    """
    rows = x.reshape(len(x), -1).contiguous()
    if rows.stride(-1) != 1:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows
