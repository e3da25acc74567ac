"""What each codec's operations take on the device, against a device copy of the same run."""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from taco_kernels import bitmap_sparse, channel_norm, lossless, sdp4bit, taco, tah_quant
from taco_kernels.benchmarks.timing import Case, buffers_for, relative_error
from taco_kernels.bitmap_sparse import BitmapLayout
from taco_kernels.count_sketch.selection import share_threshold
from taco_kernels.sdp4bit import GroupFormat
from taco_kernels.taco import FORMATS, GROUP_SIZES, SCALES, CodecConfig

ESCAPES = 0.07
"""Share of values outside the window of exponents that a lossless payload has room for."""
HIDDEN = 4096
"""Channels of what pipeline stages send."""


def values(numel: int, dtype: torch.dtype, outliers: int = 0) -> torch.Tensor:
    """Normal values, the first ``outliers`` odd ones of 4096 a thousand times as large."""
    x = torch.randn(numel, device="cuda")
    x[: numel // 4096 * 4096].view(-1, 4096)[:, 1 : 2 * outliers : 2] *= 1000
    return x.to(dtype)


def add_taco_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``taco_cases``."""
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--group-sizes", type=int, nargs="+", choices=GROUP_SIZES, default=[128])
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=["dual"])
    parser.add_argument("--outliers", nargs="+", choices=("off", "on"), default=["off"])
    parser.add_argument("--massive", type=int, default=0, help="outliers among 4096 values")
    parser.add_argument("--row", type=int, default=0, help="values of a payload, as of a token; 0: of all")


def taco_cases(numel: int, dtype: torch.dtype, options: argparse.Namespace) -> Iterator[Case]:
    """TACO's and the integers' encode, decode, decode_sum and decode_sum_encode.

    The errors of encode and decode are those of the round trip, that of decode_sum is against the sum of
    separate decodes, that of decode_sum_encode against decode_sum.
    """
    for format, group, scales, outliers in product(
        options.formats, options.group_sizes, options.scales, options.outliers
    ):
        if scales == "signed" and not format.startswith("int"):
            continue
        config = CodecConfig(format, group, scales, outliers=outliers == "on")
        name = f"{format} {group} {scales}{' outliers' * config.outliers}"
        cases = _taco_rows if options.row else _taco_cases
        yield from cases(name, config, numel, dtype, options)


def _taco_cases(name, config, numel, dtype, options) -> Iterator[Case]:
    shape, fp32, senders = (numel,), torch.float32, options.senders
    size, wire = numel * dtype.itemsize, config.wire_bytes(numel)
    count = buffers_for(size + wire)
    xs = [values(numel, dtype, options.massive) for _ in range(count)]
    outs = [torch.empty_like(x) for x in xs]
    wires = [taco.encode(x, config) for x in xs]
    sums = max(2, -(-count // senders))
    many = [torch.cat([wires[(m + w) % count] for w in range(senders)]) for m in range(sums)]
    round_trip = relative_error(taco.decode(wires[0], config, shape, fp32), xs[0])
    separate = sum(taco.decode(many[0][w : w + 1], config, shape, fp32) for w in range(senders))
    total = taco.decode_sum(many[0], config, shape, fp32)
    again = taco.decode(taco.decode_sum_encode(many[0], config, numel)[None], config, shape, fp32)
    bits = 8 * wire / numel

    def encode(i: int) -> torch.Tensor:
        return taco.encode(xs[i], config, 1, wires[i])

    def decode(i: int) -> torch.Tensor:
        return taco.decode(wires[i], config, shape, dtype, outs[i])

    def decode_sum(i: int) -> torch.Tensor:
        return taco.decode_sum(many[i], config, shape, dtype, outs[i])

    def decode_sum_encode(i: int) -> torch.Tensor:
        return taco.decode_sum_encode(many[i], config, numel, wires[i][0])

    yield Case(name, "encode", encode, count, size + wire, bits, round_trip)
    yield Case(name, "decode", decode, count, size + wire, bits, round_trip)
    summed = relative_error(total, separate)
    yield Case(name, "decode_sum", decode_sum, sums, size + senders * wire, bits, summed)
    moved = (senders + 1) * wire
    yield Case(name, "decode_sum_encode", decode_sum_encode, sums, moved, bits, relative_error(again, total))


def _taco_rows(name, config, numel, dtype, options) -> Iterator[Case]:
    """encode and decode of rows of their own, as the tokens of experts are."""
    tokens = numel // options.row
    shape = (tokens, options.row)
    yield from round_trip(
        f"{name} rows of {options.row}",
        lambda x: taco.encode(x.view(shape), config, tokens),
        lambda wire: taco.decode(wire, config, shape, dtype),
        lambda: values(tokens * options.row, dtype),
    )


def round_trip(
    name: str,
    encode: Callable[[torch.Tensor], torch.Tensor],
    decode: Callable[[torch.Tensor], torch.Tensor],
    make: Callable[[], torch.Tensor],
) -> Iterator[Case]:
    """encode and decode of what ``make`` makes."""
    x = make()
    wire = encode(x)
    moved = x.nbytes + wire.nbytes
    xs = [x, *[make() for _ in range(buffers_for(moved) - 1)]]
    wires = [wire, *[encode(x) for x in xs[1:]]]
    error = relative_error(decode(wire).view(x.shape), x)
    bits = 8 * wire.nbytes / x.numel()
    yield Case(name, "encode", lambda i: encode(xs[i]), len(xs), moved, bits, error)
    yield Case(name, "decode", lambda i: decode(wires[i]), len(xs), moved, bits, error)


def lossless_cases(numel: int, dtype: torch.dtype, options: argparse.Namespace) -> Iterator[Case]:
    """Lossless encode, decode and the sum of pieces; every bit is checked."""
    layout = lossless.layout_of(numel, dtype, ESCAPES)
    piece = lossless.layout_of(numel // options.senders, dtype, ESCAPES)
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    x = values(numel, dtype)
    back = lossless.decode(lossless.encode(x[None], layout), layout)
    assert torch.equal(back.view(-1).view(integers), x.view(integers))
    yield from round_trip(
        "lossless",
        lambda x: lossless.encode(x[None], layout),
        lambda wire: lossless.decode(wire, layout),
        lambda: values(numel, dtype),
    )
    count = buffers_for(x.nbytes)
    pieces = [
        lossless.encode(values(numel, dtype).view(options.senders, -1), piece)[:, None] for _ in range(count)
    ]
    moved = pieces[0].nbytes + x.nbytes // options.senders
    bits = 8 * pieces[0].nbytes / numel
    call = lambda i: lossless.decode_sum(pieces[i], piece, dtype)  # noqa: E731
    yield Case("lossless", f"decode_sum of {options.senders}", call, count, moved, bits, 0.0)


def sdp4bit_cases(numel: int, dtype: torch.dtype, options: argparse.Namespace) -> Iterator[Case]:
    """SDP4Bit on a bucket of gradients: quantised whole, summed at its shard; and the weights' differences.

    The errors of sums are against the sum of the exact shards.
    """
    ranks = options.senders
    shard = numel // ranks
    pairs = ranks // 2 or 1
    intra, inter, weights = GroupFormat(8, 128, True), GroupFormat(4, 128, True), GroupFormat(4, 2048)
    w8, w4, ww = (format.wire_bytes(shard) for format in (intra, inter, weights))
    count = buffers_for(numel * dtype.itemsize)
    gradients = [values(ranks * shard, dtype).view(ranks, shard) for _ in range(count)]
    size, exact = gradients[0].nbytes, gradients[0].float().sum(0, keepdim=True)
    outs = [torch.empty(1, shard, device="cuda", dtype=dtype) for _ in range(count)]
    wires = {format: [sdp4bit.quantize(g, format) for g in gradients] for format in (intra, inter)}

    def add(format: GroupFormat, wires: torch.Tensor) -> float:
        out = torch.empty(1, shard, device="cuda")
        return relative_error(sdp4bit.sum_dequantize(wires, format, out), exact)

    for format, own in ((intra, w8), (inter, w4)):
        name, sent = f"int{format.bits} 128 rotated", wires[format]
        bits = format.bits_per_value(shard)
        summed = add(format, sent[0][:, None])
        quantize = lambda i, f=format, w=sent: sdp4bit.quantize(gradients[i], f, w[i])  # noqa: E731
        yield Case(name, "quantize", quantize, count, size + ranks * own, bits, summed)
        dequantize = lambda i, f=format, w=sent: sdp4bit.sum_dequantize(w[i][:, None], f, outs[i])  # noqa: E731
        moved = ranks * own + outs[0].nbytes
        yield Case(name, f"sum {ranks}, dequantize", dequantize, count, moved, bits, summed)

    def requantize(i: int) -> torch.Tensor:
        arrived = wires[intra][i].view(pairs, ranks // pairs, -1)
        return sdp4bit.sum_requantize(arrived, intra, shard, inter)

    error = add(inter, sdp4bit.sum_requantize(wires[intra][0][:, None], intra, shard, inter)[None])
    moved = ranks * w8 + ranks // pairs * w4
    bits = inter.bits_per_value(shard)
    yield Case("int8 to int4", f"sum {pairs}, requantize", requantize, count, moved, bits, error)

    old = [values(numel, torch.bfloat16) for _ in range(count)]
    new = [(o.float() + 1e-3 * torch.randn_like(o, dtype=torch.float32)).bfloat16() for o in old]
    changes = [sdp4bit.quantize_difference(n, o, weights) for n, o in zip(new, old, strict=True)]
    replicas = [o.view(1, -1).clone() for o in old]
    updated = sdp4bit.add_dequantized(changes[0], weights, replicas[0].clone()).view(-1)
    error = relative_error(updated.float() - old[0].float(), new[0].float() - old[0].float())
    bits, moved = weights.bits_per_value(numel), 4 * numel + ranks * ww
    subtract = lambda i: sdp4bit.quantize_difference(new[i], old[i], weights)  # noqa: E731
    yield Case("int4 2048", "subtract, quantize", subtract, count, moved, bits, error)
    dequantize_add = lambda i: sdp4bit.add_dequantized(changes[i], weights, replicas[i])  # noqa: E731
    yield Case("int4 2048", "dequantize, add", dequantize_add, count, moved, bits, error)


def activations(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Gaussian values, each 64th token stronger, an outlier in every third tile of 64."""
    x = torch.randn(shape, device="cuda")
    x[::64] *= 8
    x.view(-1)[5::192] *= 20
    return x.to(dtype)


def pipeline_cases(numel: int, dtype: torch.dtype, options: argparse.Namespace) -> Iterator[Case]:
    """Codecs between pipeline stages on [tokens, 1, 4096]: TAH-Quant, normalised channels, plain integers."""
    shape = (numel // HIDDEN, 1, HIDDEN)
    make = partial(activations, shape, dtype)
    for allocation in tah_quant.ALLOCATIONS:
        config = tah_quant.TahConfig(allocation=allocation)
        encode = partial(tah_quant.encode, config=config)
        yield from round_trip(
            f"tah {allocation}", encode, lambda w, c=config: tah_quant.decode(w, c, shape, dtype), make
        )
    config = CodecConfig("int4", 32, "signed", hadamard=False)
    layout = channel_norm.ChannelNormLayout(math.prod(shape[:-1]), HIDDEN, config)
    yield from round_trip(
        "int4 standardized",
        lambda x: channel_norm.encode(x.view(-1, HIDDEN), layout),
        lambda wire: channel_norm.decode(wire, layout, dtype),
        make,
    )
    for bits in (6, 8):
        config = CodecConfig(f"int{bits}", 32, "single", hadamard=False)
        encode = partial(taco.encode, config=config)
        yield from round_trip(f"int{bits}", encode, lambda w, c=config: taco.decode(w, c, shape, dtype), make)


def bitmap_cases(numel: int, dtype: torch.dtype, options: argparse.Namespace) -> Iterator[Case]:
    """TAGC's packed values of fp32 shards, sparsity 0.8: choose a threshold, pack, unpack and sum, repack.

    ``choose`` has no bytes of its own: it looks at a sample. ``choose, repack`` is what a node sends on, that
    sum chosen from and packed again as the ranks' union.
    """
    layout, senders, size = BitmapLayout(numel, 0.2, 16), options.senders, 4 * numel
    count = max(senders, buffers_for(size))
    xs = [torch.randn(1, numel, device="cuda") for _ in range(count)]
    rests = [torch.empty_like(x) for x in xs]
    threshold = share_threshold(xs[0], layout.share)
    wires = torch.cat([bitmap_sparse.encode(x, threshold, layout) for x in xs[:senders]])
    many = [wires.clone() for _ in range(buffers_for(wires.numel()))]
    total = bitmap_sparse.decode_sum(wires, layout)
    union = BitmapLayout(numel, 1 - (1 - layout.share) ** senders, 16)
    sums = [total[None].clone() for _ in range(buffers_for(size))]

    def repack(i: int) -> torch.Tensor:
        return bitmap_sparse.encode(sums[i], share_threshold(sums[i], union.share), union, rests[i])

    bits = 8 * layout.wire_bytes / numel
    packed, unpacked = 2 * size + layout.wire_bytes, wires.numel() + size
    for operation, call, buffers, moved in (
        ("choose", lambda i: share_threshold(xs[i], layout.share), count, 0),
        ("pack", lambda i: bitmap_sparse.encode(xs[i], threshold, layout, rests[i]), count, packed),
        ("unpack, sum", lambda i: bitmap_sparse.decode_sum(many[i], layout), len(many), unpacked),
        ("choose, repack", repack, len(sums), 2 * size + union.wire_bytes),
    ):
        yield Case("packed", operation, call, buffers, moved, bits)
