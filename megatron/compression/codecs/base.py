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
"""The shape of one row: what is encoded is ``[rows, *shape]``."""


class Codec(abc.ABC):
    """Turns each row of a tensor into a uint8 payload of a size that is known beforehand, and back.

    A codec is pure: no communication, no state, no host synchronisation, so it can be captured in a
    CUDA graph. Subclasses are frozen dataclasses, entered with ``@register_codec``; three methods
    are enough (``payload_bytes``, ``encode``, ``decode``), the others have slower definitions here.
    A row has any shape and any number of values (a codec pads inside). Values that share a scale
    with a NaN or an infinity decode to numbers that are not finite. ``contract.check_contract``
    tries a user's own codec when a run begins.
    """

    @property
    def sees_shape(self) -> bool:
        """True where a payload depends on the row's shape (tokens, channels), and not on its values
        in order alone: collectives then cut tensors along the first dimension only."""
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
        """The codecs of the first and of the second exchange of a collective.

        An all-reduce sends partial sums and then their sum; data parallelism over nodes sends
        inside a node and then between nodes.
        """
        return self, self

    @property
    def one_exchange(self) -> bool:
        """True where an all-reduce between two ranks is one exchange: both exchanges have the same
        codec."""
        first, second = self.hops
        return first is second or first == second

    @property
    def backward(self) -> Codec:
        """The codec of the gradients of what this one encodes, where nobody chooses another one."""
        return self

    @property
    def fused_config(self) -> CodecConfig | None:
        """The settings under which ``taco_kernels.symmetric_memory`` does this codec's collectives
        in one kernel; None: it cannot."""
        return None

    lossless: ClassVar[bool] = False
    """Whether every bit comes back. Then a payload is of the dtype that was encoded, which is what
    it can be decoded to, and it may overflow: ``overflow_flag``."""

    def overflow_flag(self, payloads: torch.Tensor) -> torch.Tensor:
        """Return uint8 ``[]``: 1 if the values of some row did not fit, which then decodes to
        zeros.

        Only lossless codecs are asked. The flag stays on the device.

        Args:
            payloads: uint8 ``[rows, bytes]``, encoded by one call.
        """
        raise NotImplementedError(f"{self.name} does not overflow")

    def message_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """Return ``payload_bytes`` of a row of ``dtype``, where the dtype matters."""
        return self.payload_bytes(shape)

    @abc.abstractmethod
    def payload_bytes(self, shape: Shape) -> int:
        """Return the exact bytes of the payload of one row of ``shape``."""

    @abc.abstractmethod
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the payloads of a tensor's rows: uint8 ``[rows, payload_bytes(shape)]``,
        contiguous.

        Args:
            x: ``[rows, *shape]``, bf16, fp16 or fp32, any strides; left as it is.
        """

    @abc.abstractmethod
    def decode(self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return what payloads hold: ``[rows, *shape]`` of ``dtype``.

        Args:
            payloads: uint8 ``[rows, bytes]``.
            shape: one row's.
            dtype: the result's.
        """

    def decode_into(
        self, payloads: torch.Tensor, shape: Shape, dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``decode``, in ``out`` if that is given.

        Args:
            payloads: uint8 ``[rows, bytes]``.
            shape: one row's.
            dtype: the result's, where ``out`` is None.
            out: ``[rows, *shape]``, any strides, of the result's dtype.
        """
        if out is None:
            return self.decode(payloads, shape, dtype)
        # A sum of one sender, which writes into memory of any strides.
        return self.decode_sum(payloads[None], shape, dtype, out=out)

    def encode_grid(self, x: torch.Tensor) -> torch.Tensor:
        """Return uint8 ``[a, b, bytes]`` of ``x [a, b, n]``, whose rows need not be contiguous in
        memory."""
        return torch.stack([self.encode(rows) for rows in x])

    def encode_into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write ``encode`` of one row ``x [1, *shape]`` into ``out`` and return that.

        A codec whose kernel can write anywhere overrides it and saves a copy.

        Args:
            x: as of ``encode``.
            out: contiguous uint8 ``[1, payload_bytes(shape)]``, at a multiple of 16 bytes where that
                divides ``payload_bytes``.
        """
        return out.copy_(self.encode(x))

    def decode_sum(
        self,
        payloads: torch.Tensor,
        shape: Shape,
        dtype: torch.dtype,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the scaled sum of what several senders have encoded: ``[rows, *shape]``, or
        ``out``.

        The sum is formed in fp32 in the order of senders, then scaled, then rounded once.

        Args:
            payloads: uint8 ``[senders, rows, bytes]``.
            shape: one row's.
            dtype: the result's, where ``out`` is None; the dtype that was encoded, for lossless
                codecs.
            scale: multiplies the sum.
            out: ``[rows, *shape]``, any strides and dtype.
        """
        # Memory whose rows are contiguous is written directly. Another target gets a copy at the
        # end.
        rows = None if out is None else _rows_of(out)
        if rows is not None:
            self.sum_into(payloads, shape, dtype, scale, rows)
            return out
        result_dtype = dtype if out is None else out.dtype
        rows = torch.empty(
            payloads.shape[1], math.prod(shape), dtype=result_dtype, device=payloads.device
        )
        self.sum_into(payloads, shape, dtype, scale, rows)
        if out is None:
            return rows.view(-1, *shape)
        return out.copy_(rows.view(out.shape))

    def sum_into(
        self,
        payloads: torch.Tensor,
        shape: Shape,
        dtype: torch.dtype,
        scale: float,
        rows: torch.Tensor,
    ) -> None:
        """Write ``decode_sum`` into memory.

        Args:
            payloads: uint8 ``[senders, rows, bytes]``.
            shape: one row's.
            dtype: the dtype that was encoded, for lossless codecs.
            scale: multiplies the sum.
            rows: ``[rows, n]`` of any dtype, whose rows are contiguous.
        """
        # One sender without a scale is decoded to the result's dtype at once. A sum is fp32 until
        # copy_ rounds it, once.
        is_plain_copy = len(payloads) == 1 and scale == 1.0
        total_dtype = rows.dtype if is_plain_copy else torch.float32
        total = self.decode(payloads[0], shape, total_dtype)
        # In the order of senders: ranks that form the same sum get the same bits.
        for sender in payloads[1:]:
            total = total + self.decode(sender, shape, torch.float32)
        if scale != 1.0:
            total = total * scale
        rows.copy_(total.view(rows.shape))

    def decode_sum_encode(self, payloads: torch.Tensor, shape: Shape, into: Codec) -> torch.Tensor:
        """Return the sum of what several senders have encoded, encoded again: uint8
        ``[rows, bytes]``.

        Args:
            payloads: uint8 ``[senders, rows, bytes]``.
            shape: one row's.
            into: the codec of the sum.
        """
        # Through values. Codecs whose sums need no inverse transform in between have a method of
        # their own.
        return into.encode(self.decode_sum(payloads, shape, torch.float32))

    def encode_difference(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Return uint8 ``[bytes]`` of what turns ``old`` into ``new``, both ``[n]``; subtracted in
        fp32."""
        return self.encode((new.float() - old.float())[None])[0]

    def add_decoded(self, payloads: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Add differences, uint8 ``[rows, bytes]``, to ``weights [rows, n]`` in place; added in
        fp32."""
        change = self.decode(payloads, weights.shape[1:], torch.float32)
        return weights.copy_(weights.float() + change)

    def bits_per_value(self, shape: Shape = (2**20,)) -> float:
        """Return the bits that a value of a row of ``shape`` costs, scales and padding included."""
        return 8 * self.payload_bytes(shape) / math.prod(shape)


@dataclass(frozen=True)
class TwoHops(Codec):
    """Two codecs, ``int5/int6``, for the two exchanges of a collective."""

    first: Codec
    """Encodes partial sums and single messages."""
    second: Codec
    """Encodes sums."""

    def __post_init__(self) -> None:
        if self.first.lossless or self.second.lossless:
            raise CompressionConfigError(
                f"{self.name}: together with another codec, lossless keeps bits of a lossy sum; "
                "give it alone"
            )
        # A collective cuts a tensor once, for both exchanges.
        if self.first.sees_shape != self.second.sees_shape or self.first.block != self.second.block:
            raise CompressionConfigError(
                f"{self.name}: the two codecs cut a tensor differently; give them the same group "
                "size"
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
    """Return the names that a dimension's setting takes at their default settings.

    These are codecs, the dimension's recipes and, for data parallelism, compressors of gradients.
    Without a dimension: all codecs.
    """
    names = []
    for name in CODECS.names():
        codec = CODECS.parse(name)
        if dimension == "expert_parallel" and codec.lossless:
            continue  # it codes whole messages, which may overflow; tokens are sent one by one
        if dimension in ("data_parallel", "expert_parallel") and codec.sees_shape:
            continue  # a bucket has no tokens and channels, and a single token no others beside it
        names.append(name)
    if dimension == "data_parallel":
        names += GRADIENT_COMPRESSORS.names()
    return names + [name for name, (owner, _) in NAMED.items() if owner == dimension]


@functools.cache
def parse_codec(text: str, dimension: str = "") -> Codec:
    """Return the codec that a spec names; ``FIRST/SECOND`` names one for each exchange of a
    collective.

    Args:
        text: the spec, such as ``int6:group=64``.
        dimension: the dimension whose setting takes the spec (``tensor_parallel``), so that an
            error lists what that setting takes.

    Raises:
        CompressionConfigError: an unknown name or setting, or a value that the codec refuses.
    """
    if "/" in text:
        first, _, second = text.partition("/")
        return TwoHops(parse_codec(first, dimension), parse_codec(second, dimension))
    name = text.partition(":")[0]
    # A name of both registries (sdp4bit) is the codec here.
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
    """Return ``out`` as a view ``[rows, n]`` with contiguous rows, or None: there is no such
    view."""
    # Rows may lie at any distance, such as a piece of every rank's shard of a bucket.
    if out.dim() == 2 and (out.stride(1) == 1 or out.shape[1] < 2):
        return out
    if out.is_contiguous():
        return out.view(len(out), -1)
    return None


def stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``[rows, ...]`` of a codec's results for single rows; one alone is not copied."""
    if len(rows) == 1:
        return rows[0].unsqueeze(0)
    return torch.stack(tuple(rows))


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, values]`` of ``[rows, *shape]``, whose bytes can be viewed as another dtype.

    ``contiguous`` leaves a tensor of one value a row as it is, whatever its stride, and such a
    tensor has no view of another dtype.
    """
    rows = x.reshape(len(x), -1).contiguous()
    if rows.stride(-1) != 1:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows
