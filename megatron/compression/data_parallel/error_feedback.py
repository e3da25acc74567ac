"""Error feedback: what the compression of a gradient lost is added to the next gradient.

Kept by the rank that did the compressing, in the units of the gradients' sum (before scaling). In fp32, or in
8 bits with a moving average (LoCo, arXiv 2407.04480):

    sent_t = C(g_t + m_t)    lost_t = g_t + m_t - sent_t    m_(t+1) = (1 - a) m_t + a lost_t

where a = 1 keeps the newest error only, so that nothing is ever lost. LoCo also forgets m every so many
iterations (``reset``). A rank that encodes a sum again adds that error to lost_t. A value whose error is not
finite keeps what it remembered: the step of such a gradient is skipped. Finite values of such a step, and
other ranks', are sent and remembered as ever, and what they sent of their memory is lost with the step:
keeping the memory until the step is known to be taken would double it.

It survives a restart, also on another number of ranks (checkpoint.py). It is lost where nothing is left to
compress: a run that goes on on one data-parallel rank drops what the others held back, and says so.
"""

import math
from collections.abc import Callable

import torch

from megatron.compression.codecs import Codec
from megatron.compression.codecs.sdp4bit import Sdp4bitCodec
from megatron.compression.errors import CompressionConfigError
from taco_kernels import error_feedback

INT8 = Sdp4bitCodec(intra=8, inter=8, hadamard=False)
"""How ``--dp-error-feedback int8`` keeps values: in groups of 128, never rotated."""


class ErrorFeedback:
    """The memory of one bucket's compression.

    Args:
        average: weight of the newest error, in (0, 1].
        store: the codec that keeps the values; None keeps fp32.
        reset: iterations after which everything is forgotten; 0: never.
        iteration: the zero-based training iteration; needed where there is a ``reset``.
    """

    def __init__(
        self,
        average: float = 1.0,
        store: Codec | None = None,
        reset: int = 0,
        iteration: Callable[[], int] | None = None,
    ) -> None:
        if reset and iteration is None:
            raise ValueError(f"reset={reset} needs to be told the iteration")
        self.average = average
        self.store = store
        self._reset, self._iteration = reset, iteration
        self._held: list[torch.Tensor] = []
        self._widths: list[int] = []

    def allocate(self, rows: int, pieces: list[tuple[int, int]], device: torch.device) -> None:
        """Start from zeros for ``rows`` shards that are compressed in ``pieces`` (begin, end)."""
        self._widths = [end - begin for begin, end in pieces]
        self._held = [self._kept(torch.zeros(rows, width, device=device)) for width in self._widths]

    def compensated(self, piece: int, values: torch.Tensor) -> torch.Tensor:
        """fp32 ``[rows, n]``: ``values`` (any float type) plus what is remembered for this piece.

        Once an iteration for each piece.
        """
        if self._iteration and self._reset and self._iteration() % self._reset == 0:
            zeros = torch.zeros(len(values), self._widths[piece], device=values.device)
            self._held[piece] = self._kept(zeros)
        held = self._decoded(piece, self._held[piece])
        return held + values if self.store is None else held.add_(values)

    def remember(self, piece: int, total: torch.Tensor, decoded: torch.Tensor) -> None:
        """Take in the error of this piece's compression: what was to be sent less what arrives, both fp32
        ``[rows, n]``."""
        held = self._decoded(piece, self._held[piece])
        error_feedback.remember(held, total, decoded, 1.0 - self.average, self.average)
        self._held[piece] = self._kept(held)

    def replace(self, piece: int, lost: torch.Tensor, spoiled: torch.Tensor) -> None:
        """Remember ``lost`` as it is, fp32 ``[rows, n]``, unless ``spoiled``, a bool scalar on the device."""
        self._held[piece] = torch.where(spoiled, self._held[piece], self._kept(lost))

    def add(self, piece: int, row: int, total: torch.Tensor, decoded: torch.Tensor | None = None) -> None:
        """Take in a second error of one row, of n values, after ``remember`` or ``replace``: what was to be
        sent less what arrives, or (None) the error itself."""
        kept = self._held[piece][row : row + 1]
        held = self._decoded(piece, kept)
        error_feedback.remember(held, total, decoded, 1.0, self.average)
        if self.store is not None:
            kept.copy_(self._kept(held))

    def values(self) -> torch.Tensor:
        """Everything remembered, fp32 ``[rows, shard]``."""
        return torch.cat([self._decoded(piece, held) for piece, held in enumerate(self._held)], dim=1)

    def set_values(self, values: torch.Tensor) -> None:
        """Replace everything, by fp32 ``[rows, shard]``."""
        parts = values.split(self._widths, dim=1)
        self._held = [self._kept(part.clone(memory_format=torch.contiguous_format)) for part in parts]

    def _kept(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.store is None else self.store.encode(values)

    def _decoded(self, piece: int, held: torch.Tensor) -> torch.Tensor:
        """fp32 ``[rows, n]``: the memory itself, or a copy where it is stored otherwise."""
        if self.store is None:
            return held
        return self.store.decode(held, (self._widths[piece],), torch.float32)


def parse_error_feedback(text: str) -> Callable[..., ErrorFeedback | None]:
    """What makes the memories that ``--dp-error-feedback`` asks for: none, fp32, or int8, the last two with
    ``:average=A,reset=N`` or one of these. Its argument is ``ErrorFeedback``'s ``iteration``.

    Raises: CompressionConfigError: something else.
    """
    kind, _, settings = text.partition(":")
    values = dict(part.partition("=")[::2] for part in filter(None, settings.split(",")))
    if kind not in ("none", "fp32", "int8") or not values.keys() <= {"average", "reset"}:
        raise CompressionConfigError(
            f"--dp-error-feedback {text} must be none, fp32 or int8; :average=A,reset=N can follow the last "
            "two"
        )
    if kind == "none" and settings:
        raise CompressionConfigError(f"--dp-error-feedback {text}: none has no settings; give fp32 or int8")
    try:
        average, reset = float(values.get("average", 1)), int(values.get("reset", 0))
    except ValueError:
        average, reset = math.nan, 0
    if not 0 < average <= 1 or reset < 0:
        raise CompressionConfigError(
            f"--dp-error-feedback {text}: average must lie in (0, 1], and reset be a whole number"
        )
    if kind == "none":
        return lambda iteration=None: None
    store = INT8 if kind == "int8" else None
    return lambda iteration=None: ErrorFeedback(average, store, reset, iteration)
