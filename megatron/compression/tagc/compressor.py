"""What the TAGC flags may say."""

from megatron.compression.config_errors import CompressionConfigError, changed_flags, flag_name

LAYERS = {
    "mlp": (".mlp.",),
    "embedding": ("embedding.", "output_layer."),
    "attention": (".self_attention.", ".cross_attention."),
}
"""What ``--tagc-layers`` names, and how their parameters' names are told."""
DENSEST, SPARSEST = 0.5, 0.98
"""Sparsities between which the sketch is smaller than the gradients and larger than its index."""
WARMUP_SHARE, LONGEST_WARMUP = 0.2, 1000
"""Iterations whose gradients go uncompressed first, of --train-iters, and their most. Not of the paper."""
SDP4BIT_GRADIENTS = (
    "quantized_gradients",
    "gradient_quantization_bits_intra",
    "gq_group_size_intra",
    "gradient_quantization_bits_inter",
    "gq_group_size_inter",
    "hadamard_transform",
    "gradient_alltoall_pipeline",
    "dp_error_feedback_average",
)
"""Flags that say nothing to TAGC, which has its own way with gradients and keeps errors as they are."""


def default_warmup(train_iters: int | None) -> int:
    """Iterations whose gradients go uncompressed where nobody says how many; 0 in a run of unknown length."""
    return min(int(WARMUP_SHARE * (train_iters or 0)), LONGEST_WARMUP)


def parse_tagc_layers(text: str) -> frozenset[str]:
    """``mlp,embedding`` or ``all`` as names of LAYERS; all of them mean every matrix, also of other layers.

    Raises:
        CompressionConfigError: something else.
    """
    if text == "all":
        return frozenset(LAYERS)
    names = frozenset(part.strip() for part in text.split(","))
    if unknown := sorted(names - set(LAYERS)):
        raise CompressionConfigError(
            f"--tagc-layers {text}: {', '.join(map(repr, unknown))} is unknown; give {', '.join(LAYERS)}, "
            "separated by commas, or all"
        )
    return names


def check_tagc(settings) -> None:
    """Validate the ``tagc_`` fields of a ``DataParallelCompression``.

    Raises:
        CompressionConfigError: an impossible value, another system's flag, ``tagc_`` fields without TAGC.
    """
    changed = changed_flags(settings)
    if settings.dp_compression != "tagc":
        if idle := [flag for flag in changed if flag.startswith("--tagc-")]:
            raise CompressionConfigError(f"{', '.join(idle)} given without TAGC; add --dp-compression tagc")
        return
    if idle := [flag for flag in changed if flag in map(flag_name, SDP4BIT_GRADIENTS)]:
        raise CompressionConfigError(
            f"{', '.join(idle)} given, but --dp-compression tagc has its own way with gradients; drop them "
            "or use --dp-compression sdp4bit"
        )
    if not DENSEST <= settings.tagc_sparsity <= SPARSEST:
        raise CompressionConfigError(
            f"--tagc-sparsity {settings.tagc_sparsity} must lie in [{DENSEST}, {SPARSEST}]: denser gradients "
            "are larger as a sketch than as they are, sparser ones are nearly all index"
        )
    ratio = settings.tagc_sketch_ratio
    if ratio is not None and settings.tagc_wire != "sketch":
        raise CompressionConfigError(
            "--tagc-sketch-ratio given, but --tagc-wire packed has no sketch; add --tagc-wire sketch, or "
            "drop it"
        )
    if ratio is not None and not 1 <= ratio <= 64:
        raise CompressionConfigError(f"--tagc-sketch-ratio {ratio} must lie in [1, 64] values a cell")
    allowed = (16, 32) if settings.tagc_wire == "sketch" else (8, 16, 32)
    if settings.tagc_bits not in allowed:
        raise CompressionConfigError(
            f"--tagc-bits {settings.tagc_bits} must be {', '.join(map(str, allowed))} with --tagc-wire "
            f"{settings.tagc_wire}"
        )
    parse_tagc_layers(settings.tagc_layers)
