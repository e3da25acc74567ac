"""Times of each codec's operations on the device, against a device copy of the same run."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from taco_kernels import bitmap_sparse, channel_norm, lossless, sdp4bit, taco, tah_quant
from taco_kernels.benchmarks.timing import Case, Operation, case, relative_error
from taco_kernels.bitmap_sparse import BitmapLayout
from taco_kernels.count_sketch.selection import share_threshold
from taco_kernels.sdp4bit import GroupFormat
from taco_kernels.taco import FORMATS, GROUP_SIZES, SCALES, CodecConfig

SENDERS = 4
"""Wires that sums add up."""
HIDDEN = 4096
"""Channels of what pipeline stages send."""


def values(numel: int, dtype: torch.dtype, large: int = 0) -> torch.Tensor:
    """Normal values, the first ``large`` odd ones of each 4096 a thousand times as large.

    Args:
        numel: how many.
        dtype: of the values.
        large: how many of 4096 are large.
    """
    x = torch.randn(numel, device="cuda")
    x[: numel // 4096 * 4096].view(-1, 4096)[:, 1 : 2 * large : 2] *= 1000
    return x.to(dtype)


def round_trip(
    name: str, encode: Operation, decode: Operation, make: Callable[[], torch.Tensor]
) -> Iterator[Case]:
    """Cases of a codec's encode and decode.

    Args:
        name: of the codec.
        encode: takes a tensor.
        decode: takes a wire.
        make: returns a new tensor.
    """
    x = make()
    wire = encode(x)
    bits = 8 * wire.nbytes / x.numel()
    error = relative_error(decode(wire).view(x.shape), x)
    yield case(name, "encode", encode, lambda: (make(),), bits, error)
    yield case(name, "decode", decode, lambda: (encode(make()),), bits, error)


def add_taco_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``taco_cases``."""
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--group-sizes", type=int, nargs="+", choices=GROUP_SIZES, default=[128])
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=["dual"])
    parser.add_argument("--outliers", nargs="+", choices=("off", "on"), default=["off"])
    parser.add_argument(
        "--large-values",
        type=int,
        default=0,
        help="how many of 4096 values are a thousand times as large (default: 0)",
    )
    parser.add_argument(
        "--row",
        type=int,
        default=0,
        help="values of a payload, such as a token's (default: 0, the whole tensor)",
    )


def taco_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """TACO's and the integers' encode, decode, decode_sum and decode_sum_encode.

    Args:
        numel: values of the tensor.
        dtype: of the tensor.
        options: of ``add_taco_arguments``.
    """
    tokens = numel // options.row if options.row else 1
    numel = numel // tokens * tokens  # payloads of one size
    make = partial(values, numel, dtype, options.large_values)
    settings = product(options.formats, options.group_sizes, options.scales, options.outliers)
    for format, group_size, scales, outliers in settings:
        if scales == "signed" and not format.startswith("int"):
            continue
        config = CodecConfig(format, group_size, scales, outliers=outliers == "on")
        name = f"{format} {group_size} {scales}"
        if config.outliers:
            name += " outliers"
        encode = partial(taco.encode, config=config, chunks=tokens)
        decoded = dict(config=config, shape=(numel,), dtype=dtype)
        yield from round_trip(name, encode, partial(taco.decode, **decoded), make)
        if options.row:
            continue  # sums are of whole tensors

        # The default binds this setting's encode: the case is run after the loop has gone on.
        def wires_of_senders(encode: Operation = encode) -> tuple[torch.Tensor]:
            return (torch.cat([encode(make()) for _ in range(SENDERS)]),)

        decode_sum = partial(taco.decode_sum, **decoded)
        yield case(name, "decode_sum", decode_sum, wires_of_senders)
        encoded = partial(taco.decode_sum_encode, config=config, numel=numel)
        yield case(name, "decode_sum_encode", encoded, wires_of_senders)


def lossless_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """Lossless encode, decode and the sum of pieces.

    Args:
        numel: values of the tensor.
        dtype: of the tensor: bf16 or fp32.
        options: not used.
    """
    row_layout = lossless.LosslessLayout(numel, dtype)
    piece_layout = lossless.LosslessLayout(numel // SENDERS, dtype)

    def row() -> torch.Tensor:
        return values(numel, dtype).view(1, -1)

    def pieces() -> tuple[torch.Tensor]:
        return (lossless.encode(row().view(SENDERS, -1), piece_layout)[:, None],)

    encode = partial(lossless.encode, layout=row_layout)
    decode = partial(lossless.decode, layout=row_layout)
    yield from round_trip("lossless", encode, decode, row)
    decode_sum = partial(lossless.decode_sum, layout=piece_layout, dtype=dtype)
    yield case("lossless", f"decode_sum of {SENDERS}", decode_sum, pieces)


def gradient_cases(numel: int, dtype: torch.dtype) -> Iterator[Case]:
    """SDP4Bit on a bucket of gradients: quantised as a whole, summed at its shard, sent on between
    nodes."""
    shard = numel // SENDERS
    pairs = SENDERS // 2
    intra = GroupFormat(8, 128, True)  # inside a node
    inter = GroupFormat(4, 128, True)  # between nodes

    def gradients() -> torch.Tensor:
        return values(SENDERS * shard, dtype).view(SENDERS, shard)

    def dequantize(wires: torch.Tensor, format: GroupFormat) -> torch.Tensor:
        out = torch.empty(wires.shape[1], shard, device=wires.device, dtype=dtype)
        return sdp4bit.sum_dequantize(wires, format, out)

    for format in (intra, inter):
        name = f"int{format.bits} 128 rotated"
        quantize = partial(sdp4bit.quantize, format=format)
        x = gradients()
        bits = 8 * format.wire_bytes(shard) / shard
        error = relative_error(dequantize(quantize(x)[None], format), x)
        yield case(name, "quantize", quantize, lambda: (gradients(),), bits, error)

        def wires_of_senders(quantize: Operation = quantize) -> tuple[torch.Tensor]:
            return (quantize(gradients())[:, None],)

        summed = partial(dequantize, format=format)
        yield case(name, f"sum {SENDERS}, dequantize", summed, wires_of_senders)

    def wires_of_pairs() -> tuple[torch.Tensor]:
        return (sdp4bit.quantize(gradients(), intra).view(pairs, SENDERS // pairs, -1),)

    requantize = partial(sdp4bit.sum_requantize, format=intra, numel=shard, target=inter)
    yield case("int8 to int4", f"sum {pairs}, requantize", requantize, wires_of_pairs)


def weight_cases(numel: int) -> Iterator[Case]:
    """SDP4Bit on a bucket of bf16 weights: what an optimizer's step changed, and adding that to a
    replica."""
    format = GroupFormat(4, 2048)
    subtract = partial(sdp4bit.quantize_difference, format=format)

    def versions() -> tuple[torch.Tensor, torch.Tensor]:
        old = values(numel, torch.bfloat16)
        return old + 1e-3 * torch.randn_like(old), old

    def changes() -> tuple[torch.Tensor, torch.Tensor]:
        return subtract(*versions()), values(numel, torch.bfloat16).view(1, -1)

    def add(wires: torch.Tensor, replica: torch.Tensor) -> torch.Tensor:
        return sdp4bit.add_dequantized(wires, format, replica)

    bits = 8 * format.wire_bytes(numel) / numel
    yield case("int4 2048", "subtract, quantize", subtract, versions, bits)
    yield case("int4 2048", "dequantize, add", add, changes)


def sdp4bit_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """SDP4Bit on a bucket of gradients: quantised whole, summed at its shard; weights' differences.

    Args:
        numel: values of the bucket.
        dtype: of the gradients; weights are bf16.
        options: not used.
    """
    yield from gradient_cases(numel, dtype)
    yield from weight_cases(numel)


def activations(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Gaussian values, each 64th token stronger, an outlier in every third tile of 64."""
    x = torch.randn(shape, device="cuda")
    x[::64] *= 8
    x.view(-1)[5::192] *= 20
    return x.to(dtype)


def pipeline_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """Codecs between pipeline stages on [tokens, 4096]: TAH-Quant, normalised channels, plain
    integers.

    Args:
        numel: values of the message.
        dtype: of the message.
        options: not used.
    """
    shape = (numel // HIDDEN, HIDDEN)
    make = partial(activations, shape, dtype)
    for allocation in tah_quant.ALLOCATIONS:
        config = tah_quant.TahConfig(allocation=allocation)
        encode = partial(tah_quant.encode, config=config)
        decode = partial(tah_quant.decode, config=config, shape=shape, dtype=dtype)
        yield from round_trip(f"tah {allocation}", encode, decode, make)
    for format in ("int6", "int8"):
        config = CodecConfig(format, 32, "single", hadamard=False)
        encode = partial(taco.encode, config=config)
        decode = partial(taco.decode, config=config, shape=shape, dtype=dtype)
        yield from round_trip(format, encode, decode, make)
    config = CodecConfig("int4", 32, "signed", hadamard=False)
    layout = channel_norm.ChannelNormLayout(*shape, config)
    encode = partial(channel_norm.encode, layout=layout)
    decode = partial(channel_norm.decode, layout=layout, dtype=dtype)
    yield from round_trip("int4 standardized", encode, decode, make)


def bitmap_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """TAGC's packed values of fp32 shards, sparsity 0.8: pack, unpack and sum, choose a threshold
    and repack.

    ``choose, repack`` is what a node sends on: that sum chosen from and packed again as the ranks'
    union.

    Args:
        numel: values of the shard.
        dtype: not used: it is fp32.
        options: not used.
    """
    layout = BitmapLayout(numel, 0.2, 16)
    # Independent choices of the senders: what none of them sends is (1 - share)^SENDERS of the
    # values.
    union = BitmapLayout(numel, 1 - (1 - layout.share) ** SENDERS, 16)
    threshold = share_threshold(torch.randn(1, numel, device="cuda"), layout.share)

    unpack = partial(bitmap_sparse.decode_sum, layout=layout)

    def shard() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(1, numel, device="cuda")
        return x, torch.empty_like(x)

    def pack(x: torch.Tensor, remainder: torch.Tensor | None = None) -> torch.Tensor:
        return bitmap_sparse.encode(x, threshold, layout, remainder)

    def repack(x: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
        return bitmap_sparse.encode(x, share_threshold(x, union.share), union, remainder)

    def wires_of_senders() -> tuple[torch.Tensor]:
        return (torch.cat([pack(shard()[0]) for _ in range(SENDERS)]),)

    def sums() -> tuple[torch.Tensor, torch.Tensor]:
        return unpack(*wires_of_senders())[None], torch.empty(1, numel, device="cuda")

    yield case("packed", "pack", pack, shard, 8 * layout.wire_bytes / numel)
    yield case("packed", "unpack, sum", unpack, wires_of_senders)
    yield case("packed", "choose, repack", repack, sums, 8 * union.wire_bytes / numel)
