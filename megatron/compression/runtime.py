"""What a running job shares between its hooks: settings, codec, ledger, probe, and the current iteration."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.compression.codecs import Codec, build_codec
from megatron.compression.collectives.choice import Transports
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.probe import ErrorProbe
from megatron.compression.config import CompressionConfig, TensorParallelCompression
from megatron.compression.data_parallel.bucket import GradientBucket, GradientSync, WeightCodec
from megatron.compression.data_parallel.codecs import data_parallel_codecs
from megatron.compression.tensor_parallel.guard import ErrorGuard


class Choice(NamedTuple):
    """How a message travels, and the ledger's kind for it."""

    codec: Codec | None
    """None: uncompressed, for the reason that ``kind`` gives."""
    kind: str


@dataclass
class CompressionRuntime:
    """Built once by the entrypoint and handed to everything that communicates; there is no global one."""

    config: CompressionConfig
    ledger: Ledger = field(default_factory=Ledger)
    probe: ErrorProbe = field(default_factory=ErrorProbe)
    iteration: int = 0
    """Zero-based training iteration; the forward step sets it."""
    tensor_parallel_codec: Codec | None = None
    """None: tensor-parallel compression is off."""
    backward_codec: Codec | None = None
    """For tp.backward where ``--taco-backward-format`` asks for another one; None: the same."""
    guard: ErrorGuard | None = None
    """Follows ``--taco-error-bound``; None without it."""
    transports: Transports | None = None
    """Carry the payloads, as ``--taco-transport`` says."""
    gradient_sync: Callable[[GradientBucket], GradientSync] | None = None
    """Builds what sums a bucket's gradients, as ``--dp-compression`` says; None: they go uncompressed."""
    weight_codec: WeightCodec | None = None
    """For the distributed optimizer's all-gather; None: weights go uncompressed."""
    gradient_syncs: list[tuple[GradientSync, GradientBucket]] = field(default_factory=list)
    """Every bucket's, as they are bound: what checkpoints carry the state of."""
    topologies: dict[Any, Any] = field(default_factory=dict)
    """data_parallel.topology.Topology by process group."""

    def __post_init__(self) -> None:
        settings = self.config.tensor_parallel
        if self.tensor_parallel_codec is None:
            self.tensor_parallel_codec = tensor_parallel_codec(settings, settings.taco_format)
            if settings.taco_backward_format is not None:
                self.backward_codec = tensor_parallel_codec(settings, settings.taco_backward_format)
        if self.transports is None:
            self.transports = Transports(settings.taco_transport, settings.taco_communicators)
        if self.config.data_parallel.enabled and self.gradient_sync is None and self.weight_codec is None:
            self.gradient_sync, self.weight_codec = data_parallel_codecs(self.config.data_parallel)
        if self.guard is None and settings.taco_error_bound is not None:
            self.guard = ErrorGuard(settings.taco_error_bound, settings.taco_group_size)

    def choose_tensor_parallel_codec(
        self, site: str, layer: int | str | None, channel: str, message_bytes: int | None
    ) -> Choice:
        """What to do with a tensor-parallel message.

        Args:
            site: the site's name.
            layer: what ``--taco-layers`` calls the site's layer.
            channel: tp.forward or tp.backward.
            message_bytes: size of the uncompressed tensor; None where the size does not matter any more.
        """
        settings = self.config.tensor_parallel
        if self.tensor_parallel_codec is None:
            return Choice(None, "off")
        if self.ledger.evaluating and self.config.validate_uncompressed:
            return Choice(None, "evaluation")
        if settings.layers is not None and layer not in settings.layers:
            return Choice(None, "excluded")
        if self.guard is not None and (site, channel) in self.guard.tripped:
            return Choice(None, "guarded")
        if self.iteration < settings.taco_start_iteration:
            return Choice(None, "warmup")
        if message_bytes is not None and message_bytes < settings.min_message_bytes:
            return Choice(None, "small")
        if channel == "tp.backward" and self.backward_codec is not None:
            return Choice(self.backward_codec, "compressed")
        return Choice(self.tensor_parallel_codec, "compressed")

    def gradient_kind(self) -> str:
        """How this iteration's data-parallel gradients travel: the ledger's kind."""
        if self.gradient_sync is None:
            return "off"
        if self.iteration < self.config.data_parallel.gradients_start_iteration:
            return "warmup"
        return "compressed"


def tensor_parallel_codec(settings: TensorParallelCompression, number_format: str) -> Codec | None:
    """The codec that ``--tp-compression`` and the ``--taco-*`` flags describe; None when it is off."""
    if not settings.enabled:
        return None
    return build_codec(
        "taco",
        format=number_format,
        group_size=settings.taco_group_size,
        scales=settings.taco_scales,
        rounding=settings.taco_rounding,
    )
