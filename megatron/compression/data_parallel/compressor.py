"""What compresses data-parallel gradients: the contract, and any codec as one that keeps it.

    GradientCompressor    settings; ``build`` makes a GradientSync for each bucket of a DDP buffer
    GradientSync          sums one bucket's gradients over its data-parallel group; may keep state

State, such as error feedback, is handed over as flat fp32 tensors in the bucket's own coordinates;
checkpoint.py cuts them into parameters, saves them beside the optimizer's state and brings them back, also at
another data-parallel size.
"""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

from megatron.compression.codecs import CODECS, GRADIENT_COMPRESSORS, Codec, parse_codec
from megatron.compression.communication.ledger import Ledger, bytes_sent
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.transport import TorchTransport
from megatron.compression.communication.work import Work
from megatron.compression.data_parallel.error_feedback import ErrorFeedback
from megatron.compression.data_parallel.presets import PRESETS
from megatron.compression.errors import CompressionConfigError

NewFeedback = Callable[[], ErrorFeedback | None]
"""Makes the memory that ``--dp-error-feedback`` asks for; None without it."""


@dataclass(frozen=True)
class ParameterSpan:
    """Where a parameter lies in its bucket."""

    name: str
    """As in the model chunk's ``named_parameters``."""
    parameter: torch.nn.Parameter
    start: int
    end: int


@dataclass(frozen=True)
class GradientBucket:
    """What a ``GradientSync`` knows of its bucket."""

    gradients: torch.Tensor
    """[numel], bf16, fp16 or fp32: this rank's sum over micro-batches, and where the result goes."""
    spans: tuple[ParameterSpan, ...]
    """The parameters in it, by position; between them may be gaps of zeros."""
    scale: float
    """What the sum over all ranks is multiplied by (1 / ranks for an average), in fp32, after summing."""
    sharded: bool
    """With the distributed optimizer each rank needs its shard of the sum only, else all of it."""
    topology: Topology
    ledger: Ledger
    experts: bool = False
    """Whether these are parameters of experts, whose data-parallel group is one of their own."""

    @property
    def numel(self) -> int:
        """Values in the bucket, padding included."""
        return self.gradients.numel()

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard of ``gradients`` where ``sharded``: a W-th, in rank order."""
        size = self.numel // self.topology.world_size
        return self.gradients[self.topology.rank * size : (self.topology.rank + 1) * size]

    def transport(self, link: str | None = None) -> TorchTransport:
        """Exchanges counted as dp.gradient: over the whole group, or ``intra`` or ``inter`` ranks only."""
        return self.topology.transport(self.ledger, "dp.gradient", link)

    def all_reduce(
        self, values: torch.Tensor, kind: str = "compressed", op: dist.ReduceOp = dist.ReduceOp.SUM
    ) -> dist.Work | Work:
        """Start to sum ``values`` over the group, in place and in their own type.

        Args:
            values: nothing is sent of an empty tensor.
            kind: the ledger's: compressed, or why not.
        """
        if not values.numel():
            return Work.completed()
        sent = bytes_sent("all_reduce", values.nbytes, self.topology.world_size)
        for link, part in self.topology.split("all_reduce", sent).items():
            if part:
                plain = 0 if kind == "compressed" else part
                self.ledger.record("dp.gradient", kind, "all_reduce", part, plain, link)
        return dist.all_reduce(values, op=op, group=self.topology.group, async_op=True)

    def record_plain(self, nbytes: int | None = None) -> None:
        """Say what the uncompressed collective would have sent: of the whole bucket, or of ``nbytes``."""
        operation = "reduce_scatter" if self.sharded else "all_reduce"
        nbytes = self.gradients.nbytes if nbytes is None else nbytes
        self.topology.record_plain(self.ledger, "dp.gradient", operation, nbytes)


class GradientSync(Protocol):
    """Sums one bucket's gradients over its data-parallel group."""

    @property
    def covering_ranks(self) -> int:
        """Ranks whose state covers the same value: what is pending of the sum may be split among so many."""

    def start(self) -> Work:
        """Start summing ``bucket.gradients`` as they are now.

        The work's ``wait`` leaves the scaled sum in ``bucket.shard`` (``sharded``) or in all of
        ``bucket.gradients``, where every rank then holds the same bits. Non-finite gradients of any rank
        show in the result. Called once an iteration, on every rank, in the same order of buckets.
        """
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """What must survive a restart, by slot: fp32 ``[numel]`` each, added over all ranks the pending part
        of the gradients' sum. Empty where there is none."""
        ...

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what ``state`` gave (fp32 ``[numel]``; a slot that is missing is zero)."""
        ...


class Diagnostic(Protocol):
    """Something to say of a run's compression at each log line."""

    def read(self) -> torch.Tensor:
        """float64 ``[n]`` since the last reading, to be summed over all ranks; resets."""
        ...

    def lines(self, reading: torch.Tensor) -> list[str]:
        """For the log, of a summed reading."""
        ...

    def scalars(self, reading: torch.Tensor) -> dict[str, float]:
        """For TensorBoard and the report, of a summed reading."""
        ...


class GradientCompressor(abc.ABC):
    """How ``--dp-compression`` sums gradients. Subclasses are frozen dataclasses whose fields are settings.

    Named by ``@register_gradient_compressor``, an entry point, or MODULE:CLASS.
    """

    default_error_feedback: ClassVar[str] = "none"
    """What ``--dp-error-feedback`` is where nobody says; other than none, it cannot be left out."""

    @property
    def name(self) -> str:
        """The spec that parses back to this compressor."""
        return GRADIENT_COMPRESSORS.spec(self)

    @abc.abstractmethod
    def build(self, bucket: GradientBucket, feedback: NewFeedback) -> GradientSync:
        """What sums this bucket. Called on every rank for the same buckets in the same order.

        Args:
            feedback: call it for each memory that is wanted; one that has its own needs none.
        """

    def default_start_iteration(self, train_iters: int | None) -> int:
        """Iterations whose gradients go uncompressed where ``--compression-start-iteration`` is not given."""
        return 0

    def diagnostics(self) -> Sequence[Diagnostic]:
        """What the log and the report say of it."""
        return ()

    def describe(self) -> str:
        """For the log: how gradients travel."""
        return f"gradients {self.name}"


@dataclass(frozen=True)
class CodecGradients(GradientCompressor):
    """Any codec: its first hop inside a node, its second between nodes; sums in fp32."""

    codec: Codec

    @property
    def name(self) -> str:
        """The codec's."""
        return self.codec.name

    @property
    def lossless(self) -> bool:
        """Whether error feedback has nothing to remember."""
        return self.codec.lossless

    def build(self, bucket: GradientBucket, feedback: NewFeedback) -> GradientSync:
        from megatron.compression.data_parallel.codec_gradients import CodecGradientSync

        return CodecGradientSync(bucket, self.codec, feedback())

    def describe(self) -> str:
        first, second = self.codec.hops
        if first == second:
            return f"gradients {self.name}"
        return f"gradients {first.name} inside a node, {second.name} between nodes"


def parse_gradient_compressor(text: str) -> GradientCompressor:
    """What a spec of ``--dp-compression`` names: a gradient compressor, a codec, or that of a preset.

    Raises: CompressionConfigError: an unknown name or setting, or a value that it refuses.
    """
    if text in PRESETS:
        text = PRESETS[text].gradients
    name = text.partition(":")[0]
    if name in PRESETS and CODECS.entry(name) is None:
        raise CompressionConfigError(
            f"--dp-compression {text}: {name} has no settings; it stands for {PRESETS[name].gradients}, "
            "the second value and --dp-error-feedback, which have"
        )
    if GRADIENT_COMPRESSORS.entry(name) is None and ("/" in text or CODECS.entry(name) is not None):
        return CodecGradients(parse_codec(text))
    if GRADIENT_COMPRESSORS.entry(name) is None and ":" not in text:
        known = sorted({*GRADIENT_COMPRESSORS.names(), *CODECS.names(), *PRESETS})
        raise CompressionConfigError(
            f"--dp-compression {text} is unknown; choose one of {', '.join(known)}, or MODULE:CLASS"
        )
    made = GRADIENT_COMPRESSORS.parse(text)
    if isinstance(made, Codec):
        return CodecGradients(made)
    if not isinstance(made, GradientCompressor):
        raise CompressionConfigError(
            f"--dp-compression {text}: {type(made).__qualname__} is neither a GradientCompressor nor a Codec"
        )
    return made
