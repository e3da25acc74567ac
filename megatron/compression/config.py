"""What to compress and how: one frozen dataclass a channel, validated once.

The command-line flags are generated from these fields (see arguments.py), so a field's name is its flag and
the string under it is the flag's help.
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from megatron.compression.config_errors import CompressionConfigError, fill_in, flag_name
from megatron.compression.data_parallel.config import DataParallelCompression
from megatron.compression.pipeline_parallel.config import PipelineParallelCompression

__all__ = [
    "CompressionConfig",
    "CompressionConfigError",
    "DataParallelCompression",
    "PipelineParallelCompression",
    "ReportSettings",
    "TensorParallelCompression",
    "flag_name",
    "parse_layers",
]

TACO_FORMATS = ("fp8-e4m3", "fp8-e5m2", "int8", "int6", "int5", "int4")
TACO_ROUNDINGS = ("nearest", "stochastic", "dither")
TACO_GROUP_SIZES = (32, 64, 128, 256, 512)
NAMED_LAYERS = ("embedding", "output")
"""What ``--taco-layers`` calls the layers outside the transformer's numbered ones."""


@functools.cache
def parse_layers(text: str) -> frozenset[int | str] | None:
    """``0,4-6,output`` -> the layers it names: {0, 4, 5, 6, "output"}; None for ``all``.

    Raises:
        CompressionConfigError: something else than numbers, ranges, embedding, output.
    """
    if text == "all":
        return None
    layers: set[int | str] = set()
    for part in text.split(","):
        part = part.strip()
        found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part, re.ASCII)
        if part in NAMED_LAYERS:
            layers.add(part)
        elif found and int(found[1]) <= int(found[2] or found[1]):
            layers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
        else:
            raise CompressionConfigError(
                f"--taco-layers {text}: {part!r} is not a layer; give numbers from 0, ranges such as 2-29, "
                "embedding and output, separated by commas, or all"
            )
    return frozenset(layers)


def hop_names(flag: str, text: str, allowed: Sequence[str]) -> tuple[str, str]:
    """``int6,int8`` -> the names for hop 1 and hop 2; a single name is that of both.

    Raises:
        CompressionConfigError: a name that is not ``allowed``, or more than two; names ``flag``.
    """
    names = text.split(",")
    for name in names:
        if name not in allowed:
            what = name if len(names) == 1 else f"{text}: {name}"
            raise CompressionConfigError(f"{flag} {what} is unknown; choose one of {', '.join(allowed)}")
    if len(names) > 2:
        raise CompressionConfigError(
            f"{flag} {text} has {len(names)} names; give one, or two: for hop 1 and for hop 2"
        )
    return names[0], names[-1]


RECOMMENDED = {
    "taco_format": "int6",
    "taco_group_size": 128,
    "taco_scales": "signed",
    "taco_rounding": "nearest",
    "taco_backward_format": None,
}
"""What ``--tp-compression auto`` means: few bits for little loss (docs/accuracy.md)."""


@dataclass(frozen=True, kw_only=True)
class TensorParallelCompression:
    """Compression of the activations and their gradients that tensor parallelism sends.

    The defaults below ``tp_compression`` are the settings of the TACO paper (arXiv 2604.24088).
    """

    tp_compression: Literal["none", "taco", "auto"] = "none"
    """Codec of the tensor-parallel collectives: taco = the adaptive-scale Hadamard transform as the --taco-*
    flags say, by default as in the paper (FP8); auto = the same with the format, group size, scales and
    rounding of docs/accuracy.md: few bytes for little loss."""

    taco_format: str = "fp8-e4m3"
    """Number format on the wire: fp8-e4m3 (the paper's), fp8-e5m2, int8, int6, int5 or int4. For the same
    bits an integer grid is more accurate after the Hadamard transform than fp8. Two, as in int6,int8: the
    first for the ranks' partial sums (all-reduce, reduce-scatter), the second for what is sent after that:
    the sum (all-reduce), the slices (all-gather)."""

    taco_group_size: int = 128
    """Values that share one Hadamard transform and one pair of scales: 32, 64, 128, 256 or 512."""

    taco_scales: Literal["dual", "single", "signed"] = "dual"
    """Scales sent with each group: dual = two fp32 (the paper's), single = one bf16, signed = one bf16 whose
    sign says at which end the group's extreme lies: integers use all their codes then, a finer grid for the
    same bytes."""

    taco_rounding: str = "nearest"
    """Rounding to the grid: nearest (the paper's), stochastic (unbiased), or dither (subtractive: unbiased
    with no more error than nearest; integer formats only). Two, as in nearest,dither: for hop 1 and hop 2 of
    --taco-format."""

    taco_min_message_mb: float = 8.0
    """Tensors of fewer MiB (uncompressed) are sent uncompressed: below some size compression costs more time
    than it saves. 0 compresses everything."""

    taco_transport: Literal["auto", "collective", "symmetric", "copies"] = "auto"
    """How payloads travel: collective = torch.distributed; symmetric = one kernel a collective over the
    memory of the ranks' devices, on one host with peer access; copies = the same, but what runs behind a GEMM
    is moved by the devices' copy engines; auto = symmetric where it can be had. The results have the same
    bits."""

    taco_communicators: int = 0
    """Communicators over which torch.distributed carries each payload, a share on each: one alone does not
    fill a TCP link. 0 takes 2 where the links are TCP (several hosts without InfiniBand, or NCCL_P2P_DISABLE
    and NCCL_SHM_DISABLE on one) and 1 elsewhere."""

    taco_start_iteration: int = 0
    """Iterations that run uncompressed before compression starts."""

    taco_overlap_chunks: int = 1
    """Pieces of the sequence in which a row-parallel layer computes and sends its output, and a
    column-parallel one its input gradient: a piece's exchange runs behind the next piece's GEMM. 1 sends them
    whole; smaller messages cost more each, so it pays where the link is slow. The backward's exchange runs
    behind the weight gradients in any case. (Where --taco-transport is symmetric, a collective is one kernel
    that fills the device, and nothing runs behind anything.)"""

    taco_layers: str = "all"
    """Transformer layers that compress, counted from 0, such as 2-29 or 0,1,4-7; the embedding and the output
    layer are named embedding and output. The others go uncompressed."""

    taco_backward_format: str | None = None
    """Number format for the gradients (tp.backward); by default that of --taco-format. Activations that
    sequence parallelism gathers again in the backward keep --taco-format."""

    taco_error_bound: float | None = None
    """Relative error of one encoding (L2; of two formats the worse one's) beyond which a layer's traffic goes
    uncompressed, forward and backward each by itself, from the next --log-interval on. Measured once in a log
    interval."""

    def __post_init__(self) -> None:
        if self.tp_compression == "auto":
            fill_in(self, RECOMMENDED, "--tp-compression")
        formats = {
            flag_name(field): hop_names(flag_name(field), text, TACO_FORMATS)
            for field in ("taco_format", "taco_backward_format")
            if (text := getattr(self, field)) is not None
        }
        if self.taco_group_size not in TACO_GROUP_SIZES:
            raise CompressionConfigError(
                f"--taco-group-size {self.taco_group_size} is not possible; it must be a power of two "
                f"from 32 to 512: {', '.join(map(str, TACO_GROUP_SIZES))}"
            )
        roundings = hop_names("--taco-rounding", self.taco_rounding, TACO_ROUNDINGS)
        for flag, hops in formats.items():
            if (
                self.enabled
                and self.taco_scales == "signed"
                and not all(hop.startswith("int") for hop in hops)
            ):
                raise CompressionConfigError(
                    f"--taco-scales signed needs integer formats, not {flag} "
                    f"{','.join(dict.fromkeys(hops))}; choose an int format, or --taco-scales single"
                )
            for number_format, rounding in zip(hops, roundings, strict=True):
                if rounding == "dither" and not number_format.startswith("int"):
                    raise CompressionConfigError(
                        f"--taco-rounding dither needs a uniform grid, not {flag} {number_format}; "
                        "choose an int format, or --taco-rounding stochastic"
                    )
        if not (math.isfinite(self.taco_min_message_mb) and self.taco_min_message_mb >= 0):
            raise CompressionConfigError(
                f"--taco-min-message-mb {self.taco_min_message_mb} must be a number of MiB >= 0"
            )
        if self.taco_overlap_chunks < 1:
            raise CompressionConfigError(
                f"--taco-overlap-chunks {self.taco_overlap_chunks} must be a number of pieces >= 1"
            )
        if self.taco_communicators < 0:
            raise CompressionConfigError(
                f"--taco-communicators {self.taco_communicators} must be a number >= 1, or 0 for a choice"
            )
        if self.taco_start_iteration < 0:
            raise CompressionConfigError(
                f"--taco-start-iteration {self.taco_start_iteration} must be an iteration >= 0"
            )
        if self.taco_error_bound is not None and not (
            math.isfinite(self.taco_error_bound) and self.taco_error_bound > 0
        ):
            raise CompressionConfigError(
                f"--taco-error-bound {self.taco_error_bound} must be a relative error > 0, such as 0.05"
            )
        parse_layers(self.taco_layers)
        if not self.enabled:
            self._refuse_idle_flags()

    def _refuse_idle_flags(self) -> None:
        """A --taco-* flag without --taco would silently do nothing."""
        changed = [
            one.name
            for one in fields(self)
            if one.name.startswith("taco_") and getattr(self, one.name) != one.default
        ]
        if changed:
            raise CompressionConfigError(
                f"{', '.join(map(flag_name, changed))} given, but tensor-parallel compression is off; "
                "add --taco (or --tp-compression taco)"
            )

    @property
    def enabled(self) -> bool:
        """Whether any tensor-parallel traffic is to be compressed."""
        return self.tp_compression != "none"

    @property
    def layers(self) -> frozenset[int | str] | None:
        """The parsed ``--taco-layers``: numbers, ``embedding``, ``output``; None for all."""
        return parse_layers(self.taco_layers)

    @property
    def min_message_bytes(self) -> int:
        """The threshold of ``--taco-min-message-mb`` in bytes of the uncompressed tensor."""
        return math.ceil(self.taco_min_message_mb * 2**20)


@dataclass(frozen=True, kw_only=True)
class CaatNetSettings:
    """Partially synchronised tensor parallelism (CAAT-Net, arXiv 2506.19645): another model, less traffic."""

    caat_net_sync_fraction: float = 1.0
    """Part of the channels of each row-parallel output (attention projection, fc2) that tensor-parallel ranks
    sum; the others stay private to a rank. 0.5 is the paper's; 1 is ordinary tensor parallelism. A checkpoint
    belongs to its fraction and tensor-parallel size."""

    def __post_init__(self) -> None:
        if not 0 < self.caat_net_sync_fraction <= 1:  # NaN too
            raise CompressionConfigError(
                f"--caat-net-sync-fraction {self.caat_net_sync_fraction:g} must be a part of the channels: "
                "above 0, at most 1 (ordinary tensor parallelism)"
            )

    @property
    def enabled(self) -> bool:
        """Whether some channels stay private."""
        return self.caat_net_sync_fraction < 1

    def shared_channels(self, hidden_size: int) -> int:
        """How many of ``hidden_size`` channels are summed, the first ones.

        Raises:
            CompressionConfigError: none.
        """
        shared = int(hidden_size * self.caat_net_sync_fraction)
        if shared == 0:
            raise CompressionConfigError(
                f"--caat-net-sync-fraction {self.caat_net_sync_fraction:g} shares none of {hidden_size} "
                f"channels; give at least {1 / hidden_size:g}"
            )
        return shared


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Where the byte ledger's report goes."""

    compression_report: str | None = None
    """Folder for report.json, report.md and PNG plots (loss, bytes, error per layer), written at the end."""


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Everything that the command line says about compression."""

    tensor_parallel: TensorParallelCompression = TensorParallelCompression()
    pipeline_parallel: PipelineParallelCompression = field(default_factory=PipelineParallelCompression)
    caat_net: CaatNetSettings = CaatNetSettings()
    data_parallel: DataParallelCompression = field(default_factory=DataParallelCompression)
    report: ReportSettings = ReportSettings()
    validate_uncompressed: bool = False
    """Evaluation sends activations uncompressed, whatever training does."""

    def __post_init__(self) -> None:
        if self.validate_uncompressed and not (
            self.tensor_parallel.enabled or self.pipeline_parallel.enabled
        ):
            raise CompressionConfigError(
                "--validate-uncompressed given, but no activations are compressed; add --taco or "
                "--pp-compression, or drop it"
            )
