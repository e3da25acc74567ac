"""What a running job shares between its hooks: settings, codec, ledger, probe, and the current iteration."""

from dataclasses import dataclass, field

from megatron.compression.codecs import Codec, build_codec
from megatron.compression.config import CompressionConfig, TensorParallelCompression
from megatron.compression.telemetry import ErrorProbe, Ledger


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

    def __post_init__(self) -> None:
        if self.tensor_parallel_codec is None:
            self.tensor_parallel_codec = tensor_parallel_codec(self.config.tensor_parallel)

    def choose_tensor_parallel_codec(self, message_bytes: int) -> tuple[Codec | None, str]:
        """The codec for a tensor-parallel message, and the ledger's kind for it.

        Args:
            message_bytes: size of the uncompressed tensor.

        Returns:
            ``(codec, "compressed")``, or None with the reason why the message goes uncompressed.
        """
        settings = self.config.tensor_parallel
        if self.tensor_parallel_codec is None:
            return None, "off"
        if self.iteration < settings.taco_start_iteration:
            return None, "warmup"
        if message_bytes < settings.min_message_bytes:
            return None, "small"
        return self.tensor_parallel_codec, "compressed"


def tensor_parallel_codec(settings: TensorParallelCompression) -> Codec | None:
    """The codec that ``--tp-compression`` and the ``--taco-*`` flags describe; None when it is off."""
    if not settings.enabled:
        return None
    return build_codec(
        "taco",
        format=settings.taco_format,
        group_size=settings.taco_group_size,
        scales=settings.taco_scales,
        rounding=settings.taco_rounding,
    )
