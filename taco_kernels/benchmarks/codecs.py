"""What each codec's operations take on the device, against a device copy of the same run."""

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
    """Normal values, the first ``large`` odd ones of 4096 a thousand times as large."""
    x = torch.randn(numel, device="cuda")
    x[: numel // 4096 * 4096].view(-1, 4096)[:, 1 : 2 * large : 2] *= 1000
    return x.to(dtype)


def round_trip(
    name: str, encode: Operation, decode: Operation, make: Callable[[], torch.Tensor]
) -> Iterator[Case]:
    """encode and decode of what ``make`` makes."""
    x = make()
    wire = encode(x)
    figures = 8 * wire.nbytes / x.numel(), relative_error(decode(wire).view(x.shape), x)
    yield case(name, "encode", encode, lambda: (make(),), *figures)
    yield case(name, "decode", decode, lambda: (encode(make()),), *figures)


def add_taco_arguments(parser: ArgumentParser) -> None:
    """Options of ``taco_cases``."""
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--group-sizes", type=int, nargs="+", choices=GROUP_SIZES, default=[128])
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=["dual"])
    parser.add_argument("--outliers", nargs="+", choices=("off", "on"), default=["off"])
    parser.add_argument(
        "--large-values", type=int, default=0, help="of 4096, a thousand times as large"
    )
    parser.add_argument(
        "--row", type=int, default=0, help="values of a payload, as of a token; 0: of all"
    )


def taco_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """TACO's and the integers' encode, decode, decode_sum and decode_sum_encode."""
    tokens = numel // options.row if options.row else 1
    numel = numel // tokens * tokens
    make = partial(values, numel, dtype, options.large_values)
    settings = product(options.formats, options.group_sizes, options.scales, options.outliers)
    for format, group, scales, outliers in settings:
        if scales == "signed" and not format.startswith("int"):
            continue
        config = CodecConfig(format, group, scales, outliers=outliers == "on")
        name = f"{format} {group} {scales}{' outliers' * config.outliers}"
        encode = partial(taco.encode, config=config, chunks=tokens)
        decoded = dict(config=config, shape=(numel,), dtype=dtype)
        yield from round_trip(name, encode, partial(taco.decode, **decoded), make)
        if not options.row:
            many = lambda encode=encode: (torch.cat([encode(make()) for _ in range(SENDERS)]),)  # noqa: E731
            yield case(name, "decode_sum", partial(taco.decode_sum, **decoded), many)
            encoded = partial(taco.decode_sum_encode, config=config, numel=numel)
            yield case(name, "decode_sum_encode", encoded, many)


def lossless_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """Lossless encode, decode and the sum of pieces."""
    whole, piece = (lossless.LosslessLayout(n, dtype) for n in (numel, numel // SENDERS))
    make = lambda: values(numel, dtype).view(1, -1)  # noqa: E731
    yield from round_trip(
        "lossless",
        partial(lossless.encode, layout=whole),
        partial(lossless.decode, layout=whole),
        make,
    )
    pieces = lambda: (lossless.encode(make().view(SENDERS, -1), piece)[:, None],)  # noqa: E731
    decode_sum = partial(lossless.decode_sum, layout=piece, dtype=dtype)
    yield case("lossless", f"decode_sum of {SENDERS}", decode_sum, pieces)


def sdp4bit_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """SDP4Bit on a bucket of gradients: quantised whole, summed at its shard; weights' differences."""
    shard, pairs = numel // SENDERS, SENDERS // 2
    intra, inter, weights = (
        GroupFormat(8, 128, True),
        GroupFormat(4, 128, True),
        GroupFormat(4, 2048),
    )

    def gradients() -> torch.Tensor:
        return values(SENDERS * shard, dtype).view(SENDERS, shard)

    def dequantize(wires: torch.Tensor, format: GroupFormat) -> torch.Tensor:
        out = torch.empty(wires.shape[1], shard, device=wires.device, dtype=dtype)
        return sdp4bit.sum_dequantize(wires, format, out)

    for format in (intra, inter):
        name, quantize = f"int{format.bits} 128 rotated", partial(sdp4bit.quantize, format=format)
        x = gradients()
        error = relative_error(dequantize(quantize(x)[None], format), x)
        yield case(
            name,
            "quantize",
            quantize,
            lambda: (gradients(),),
            8 * format.wire_bytes(shard) / shard,
            error,
        )
        sent = lambda quantize=quantize: (quantize(gradients())[:, None],)  # noqa: E731
        yield case(name, f"sum {SENDERS}, dequantize", partial(dequantize, format=format), sent)
    arrived = lambda: (sdp4bit.quantize(gradients(), intra).view(pairs, SENDERS // pairs, -1),)  # noqa: E731
    requantize = partial(sdp4bit.sum_requantize, format=intra, numel=shard, target=inter)
    yield case("int8 to int4", f"sum {pairs}, requantize", requantize, arrived)

    def versions() -> tuple[torch.Tensor, torch.Tensor]:
        old = values(numel, torch.bfloat16)
        return old + 1e-3 * torch.randn_like(old), old

    subtract = partial(sdp4bit.quantize_difference, format=weights)
    yield case(
        "int4 2048", "subtract, quantize", subtract, versions, 8 * weights.wire_bytes(numel) / numel
    )
    changes = lambda: (subtract(*versions()), values(numel, torch.bfloat16).view(1, -1))  # noqa: E731
    add = lambda wires, replica: sdp4bit.add_dequantized(wires, weights, replica)  # noqa: E731
    yield case("int4 2048", "dequantize, add", add, changes)


def activations(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Gaussian values, each 64th token stronger, an outlier in every third tile of 64."""
    x = torch.randn(shape, device="cuda")
    x[::64] *= 8
    x.view(-1)[5::192] *= 20
    return x.to(dtype)


def pipeline_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """Codecs between pipeline stages on [tokens, 4096]: TAH-Quant, normalised channels, plain integers."""
    shape = (numel // HIDDEN, HIDDEN)
    make = partial(activations, shape, dtype)
    single = {
        f"int{bits}": CodecConfig(f"int{bits}", 32, "single", hadamard=False) for bits in (6, 8)
    }
    tah = {f"tah {name}": tah_quant.TahConfig(allocation=name) for name in tah_quant.ALLOCATIONS}
    for name, config in (tah | single).items():
        codec = tah_quant if name in tah else taco
        decode = partial(codec.decode, config=config, shape=shape, dtype=dtype)
        yield from round_trip(name, partial(codec.encode, config=config), decode, make)
    signed = CodecConfig("int4", 32, "signed", hadamard=False)
    layout = channel_norm.ChannelNormLayout(*shape, signed)
    decode = partial(channel_norm.decode, layout=layout, dtype=dtype)
    yield from round_trip(
        "int4 standardized", partial(channel_norm.encode, layout=layout), decode, make
    )


def bitmap_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """TAGC's packed values of fp32 shards, sparsity 0.8: pack, unpack and sum, choose a threshold and repack.

    ``choose, repack`` is what a node sends on: that sum chosen from and packed again as the ranks' union.
    """
    layout = BitmapLayout(numel, 0.2, 16)
    union = BitmapLayout(numel, 1 - (1 - layout.share) ** SENDERS, 16)
    threshold = share_threshold(torch.randn(1, numel, device="cuda"), layout.share)

    def shard() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(1, numel, device="cuda")
        return x, torch.empty_like(x)

    def pack(x: torch.Tensor, remainder: torch.Tensor | None = None) -> torch.Tensor:
        return bitmap_sparse.encode(x, threshold, layout, remainder)

    def repack(x: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
        return bitmap_sparse.encode(x, share_threshold(x, union.share), union, remainder)

    unpack = partial(bitmap_sparse.decode_sum, layout=layout)
    wires = lambda: (torch.cat([pack(shard()[0]) for _ in range(SENDERS)]),)  # noqa: E731
    sums = lambda: (unpack(*wires())[None], torch.empty(1, numel, device="cuda"))  # noqa: E731
    yield case("packed", "pack", pack, shard, 8 * layout.wire_bytes / numel)
    yield case("packed", "unpack, sum", unpack, wires)
    yield case("packed", "choose, repack", repack, sums, 8 * union.wire_bytes / numel)
