"""What to compress between pipeline stages, and how; validated once."""

from dataclasses import dataclass, fields
from typing import Literal

from megatron.compression.config_errors import CompressionConfigError, fill_in, flag_name

PIPELINE_CODECS = ("none", "tah-quant", "taco", "int8", "int6", "int5", "int4")
BACKWARD_BITS = (4, 5, 6, 8)
TACO_SETTINGS = ("pp_taco_format", "pp_taco_group_size")
INTEGER_SETTINGS = ("pp_scales", "pp_group_size")
RECOMMENDED_FORWARD = "int4"
RECOMMENDED_PIPELINE = {
    "pp_backward_compression": "tah-quant",
    "pp_normalize": "standardize",
    "pp_scales": "signed",
    "pp_group_size": 32,
    "pp_rounding": "nearest",
}
"""What ``--pp-compression auto`` means, with RECOMMENDED_FORWARD (docs/pipeline.md)."""


@dataclass(frozen=True, kw_only=True)
class PipelineParallelCompression:
    """Compression of the activations and their gradients that go from stage to stage.

    The defaults below ``pp_compression`` are the settings of the TAH-Quant paper (arXiv 2506.01352).
    """

    pp_compression: Literal["none", "tah-quant", "taco", "int8", "int6", "int5", "int4", "auto"] = "none"
    """Codec between pipeline stages: tah-quant = 3 and 4 bits by entropy, with pivot swap and Hadamard
    transform; taco = FP8 with the adaptive-scale Hadamard transform; int8 = 8 bits, one scale per 128
    values, no transform; int6, int5, int4 = as many bits, one scale per 64 values, no transform
    (--pp-group-size, --pp-scales); auto = what docs/pipeline.md recommends: int4 of standardized channels,
    groups of 32 with signed scales, gradients as in tah-quant."""

    pp_backward_compression: str | None = None
    """Codec of the gradients that go back: none, tah-quant (fixed point of --tah-backward-bits), taco, int8,
    int6, int5 or int4; by default that of --pp-compression."""

    pp_normalize: Literal["none", "center", "standardize"] = "none"
    """What is done to each channel of the activations, over a message's tokens, before they are encoded:
    center = subtract the mean; standardize = divide by the root mean square as well."""

    pp_scales: Literal["single", "signed"] = "single"
    """Scales of the int codecs: single = one bf16 for a group's values; signed = the same with a sign, which
    says at which end the group's extreme lies: all codes are used, a finer grid for the same bytes."""

    pp_group_size: int | None = None
    """Values that share a scale in the int codecs: 32, 64, 128, 256 or 512; by default 128 in int8 and 64 in
    the others."""

    pp_rounding: Literal["nearest", "stochastic", "dither"] = "nearest"
    """Rounding of activations by an int codec or taco: stochastic and dither (subtractive, integers only) are
    unbiased. TAH-Quant rounds to nearest."""

    pp_backward_rounding: Literal["nearest", "stochastic", "dither"] = "nearest"
    """Rounding of the gradients that go back, by any codec."""

    tah_tile_size: int = 64
    """Consecutive channels that share a scale and a zero point: 32, 64 or 128."""

    tah_high_bits: int = 4
    """Bits of activations of high entropy, 2 to 8."""

    tah_low_bits: int = 3
    """Bits of the other activations, 2 to --tah-high-bits."""

    tah_high_ratio: float = 0.8
    """Share of tokens (or tiles) that get --tah-high-bits, 0 to 1."""

    tah_allocation: Literal["token", "tile"] = "token"
    """What the entropy gives its bits to: token = whole tokens, inside each sequence; tile = tiles, inside
    each 256 consecutive ones."""

    tah_transform: Literal["pivot-hadamard", "none"] = "pivot-hadamard"
    """Before rounding, tiles with one outlier are rotated after a pivot swap; none = the control without."""

    tah_backward_bits: int = 6
    """Bits of the gradients' fixed-point grid: 4, 5, 6 or 8."""

    tah_backward_tile_size: int = 32
    """Gradient values that share a scale: 32, 64, 128, 256 or 512."""

    tah_start_iteration: int = 0
    """Iterations whose pipeline traffic goes uncompressed before compression starts, whatever the codec."""

    pp_taco_format: str = "fp8-e4m3"
    """Number format of taco between stages: fp8-e4m3, fp8-e5m2, int8, int6, int5 or int4."""

    pp_taco_group_size: int = 128
    """Values that share a transform and scales in taco between stages: 32, 64, 128, 256 or 512."""

    def __post_init__(self) -> None:
        if self.pp_compression == "auto":
            fill_in(self, RECOMMENDED_PIPELINE, "--pp-compression", RECOMMENDED_FORWARD)
        if self.pp_backward_compression not in (None, *PIPELINE_CODECS):
            raise CompressionConfigError(
                f"--pp-backward-compression {self.pp_backward_compression} is unknown; choose one of "
                f"{', '.join(PIPELINE_CODECS)}"
            )
        if self.tah_backward_bits not in BACKWARD_BITS:
            raise CompressionConfigError(
                f"--tah-backward-bits {self.tah_backward_bits} is not possible; choose one of "
                f"{', '.join(map(str, BACKWARD_BITS))}"
            )
        if self.tah_start_iteration < 0:
            raise CompressionConfigError(
                f"--tah-start-iteration {self.tah_start_iteration} must be an iteration >= 0"
            )
        if not self.enabled and self.pp_backward_compression is not None:
            raise CompressionConfigError(
                f"--pp-backward-compression {self.pp_backward_compression} given, but pipeline compression "
                "is off; add --pp-compression"
            )
        if self.forward == "tah-quant" and self.pp_rounding != "nearest":
            raise CompressionConfigError(
                f"--pp-rounding {self.pp_rounding} given, but the activations' codec, tah-quant, rounds to "
                "nearest; choose --pp-compression int8, int6, int5, int4 or taco"
            )
        self._check_codecs()
        self._refuse_idle_flags()
        self._refuse_idle_allocation()

    def _check_codecs(self) -> None:
        """Build what the flags describe, so that the codecs' own checks speak."""
        from megatron.compression.pipeline_parallel.codecs import backward_codec, forward_codec

        try:
            forward_codec(self)
            backward_codec(self)
        except ValueError as error:
            raise CompressionConfigError(f"the --pp-* or --tah-* flags do not fit: {error}") from None

    def _refuse_idle_flags(self) -> None:
        """A flag of a codec that nobody chose would silently do nothing."""
        chosen = {self.forward, self.backward}
        idle = {
            "tah_start_iteration": not self.enabled,
            "pp_normalize": not self.enabled,
            "pp_rounding": not self.enabled,
            "pp_backward_rounding": self.backward == "none",
        }
        for field in fields(self):
            if field.name.startswith("tah_backward_"):
                idle[field.name] = self.backward != "tah-quant"
            elif field.name.startswith("tah_"):
                idle.setdefault(field.name, self.forward != "tah-quant")
            elif field.name in TACO_SETTINGS:
                idle[field.name] = "taco" not in chosen
            elif field.name in INTEGER_SETTINGS:
                idle[field.name] = not any(codec.startswith("int") for codec in chosen)
        changed = [f.name for f in fields(self) if idle.get(f.name) and getattr(self, f.name) != f.default]
        if changed:
            remedies = {
                "pp_rounding": "--pp-compression int8, int6, int5, int4 or taco",
                "pp_backward_rounding": "--pp-backward-compression with a codec",
                **dict.fromkeys(TACO_SETTINGS, "--pp-compression taco"),
                **dict.fromkeys(INTEGER_SETTINGS, "--pp-compression int8, int6, int5 or int4"),
            }
            raise CompressionConfigError(
                f"{', '.join(map(flag_name, changed))} given, but nothing between pipeline stages uses it; "
                f"add {remedies.get(changed[0], '--pp-compression tah-quant')}"
            )

    def _refuse_idle_allocation(self) -> None:
        """With one width for all there is nothing to allocate."""
        settings = ("tah_high_ratio", "tah_allocation")
        changed = [f.name for f in fields(self) if f.name in settings and getattr(self, f.name) != f.default]
        if changed and self.tah_high_bits == self.tah_low_bits:
            raise CompressionConfigError(
                f"{', '.join(map(flag_name, changed))} given, but all activations get {self.tah_high_bits} "
                "bits: --tah-high-bits and --tah-low-bits are equal; lower --tah-low-bits, or drop it"
            )

    @property
    def enabled(self) -> bool:
        """Whether the activations between stages are to be compressed."""
        return self.pp_compression != "none"

    @property
    def forward(self) -> str:
        """The codec of the activations, by name."""
        return RECOMMENDED_FORWARD if self.pp_compression == "auto" else self.pp_compression

    @property
    def backward(self) -> str:
        """The codec of the gradients, by name."""
        return self.pp_backward_compression or self.forward
