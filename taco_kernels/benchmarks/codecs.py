"""What each codec's operations take on the device, against a device copy of the same run."""

import math
from argparse import ArgumentParser, Namespace
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
    bits, error = 8 * wire.nbytes / x.numel(), relative_error(decode(wire).view(x.shape), x)
    yield Case(name, "encode", lambda i: encode(xs[i]), len(xs), moved, bits, error)
    yield Case(name, "decode", lambda i: decode(wires[i]), len(xs), moved, bits, error)


def add_taco_arguments(parser: ArgumentParser) -> None:
    """Options of ``taco_cases``."""
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--group-sizes", type=int, nargs="+", choices=GROUP_SIZES, default=[128])
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=["dual"])
    parser.add_argument("--outliers", nargs="+", choices=("off", "on"), default=["off"])
    parser.add_argument("--large-values", type=int, default=0, help="of 4096, a thousand times as large")
    parser.add_argument("--row", type=int, default=0, help="values of a payload, as of a token; 0: of all")


def taco_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """TACO's and the integers' encode, decode, decode_sum and decode_sum_encode.

    The errors of encode and decode are those of the round trip, that of decode_sum is against the sum of
    separate decodes, that of decode_sum_encode against decode_sum.
    """
    settings = product(options.formats, options.group_sizes, options.scales, options.outliers)
    for format, group, scales, outliers in settings:
        if scales == "signed" and not format.startswith("int"):
            continue
        config = CodecConfig(format, group, scales, outliers=outliers == "on")
        name = f"{format} {group} {scales}{' outliers' * config.outliers}"
        if options.row:
            tokens = numel // options.row
            shape, name = (tokens, options.row), f"{name} rows of {options.row}"
        else:
            tokens, shape = 1, (numel,)
        yield from round_trip(
            name,
            partial(taco.encode, config=config, chunks=tokens),
            partial(taco.decode, config=config, shape=shape, dtype=dtype),
            lambda shape=shape: values(math.prod(shape), dtype, options.large_values),
        )
        if not options.row:
            yield from _taco_sums(name, config, numel, dtype, options.large_values)


def _taco_sums(name: str, config: CodecConfig, numel: int, dtype: torch.dtype, large: int) -> Iterator[Case]:
    shape, fp32, wire = (numel,), torch.float32, config.wire_bytes(numel)
    size, bits = numel * dtype.itemsize, 8 * wire / numel
    count = max(2, buffers_for(size + SENDERS * wire))
    many = [
        torch.cat([taco.encode(values(numel, dtype, large), config) for _ in range(SENDERS)])
        for _ in range(count)
    ]
    separate = sum(taco.decode(row[None], config, shape, fp32) for row in many[0])
    total = taco.decode_sum(many[0], config, shape, fp32)
    again = taco.decode(taco.decode_sum_encode(many[0], config, numel)[None], config, shape, fp32)
    summed, encoded = relative_error(total, separate), relative_error(again, total)
    decode_sum = lambda i: taco.decode_sum(many[i], config, shape, dtype)  # noqa: E731
    yield Case(name, "decode_sum", decode_sum, count, size + SENDERS * wire, bits, summed)
    decode_sum_encode = lambda i: taco.decode_sum_encode(many[i], config, numel)  # noqa: E731
    yield Case(name, "decode_sum_encode", decode_sum_encode, count, (SENDERS + 1) * wire, bits, encoded)


def lossless_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """Lossless encode, decode and the sum of pieces; every bit is checked."""
    layout, piece = (lossless.LosslessLayout(n, dtype) for n in (numel, numel // SENDERS))
    x = values(numel, dtype)
    back = lossless.decode(lossless.encode(x[None], layout), layout)
    assert torch.equal(back.view(-1).view(torch.uint8), x.view(torch.uint8))
    yield from round_trip(
        "lossless",
        lambda x: lossless.encode(x[None], layout),
        lambda wire: lossless.decode(wire, layout),
        lambda: values(numel, dtype),
    )
    count = buffers_for(x.nbytes)
    pieces = [lossless.encode(values(numel, dtype).view(SENDERS, -1), piece)[:, None] for _ in range(count)]
    moved, bits = pieces[0].nbytes + x.nbytes // SENDERS, 8 * pieces[0].nbytes / numel
    call = lambda i: lossless.decode_sum(pieces[i], piece, dtype)  # noqa: E731
    yield Case("lossless", f"decode_sum of {SENDERS}", call, count, moved, bits, 0.0)


def sdp4bit_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """SDP4Bit on a bucket of gradients: quantised whole, summed at its shard; and the weights' differences.

    The errors of sums are against the sum of the exact shards.
    """
    shard, pairs = numel // SENDERS, SENDERS // 2
    intra, inter, weights = GroupFormat(8, 128, True), GroupFormat(4, 128, True), GroupFormat(4, 2048)
    count = buffers_for(numel * dtype.itemsize)
    gradients = [values(SENDERS * shard, dtype).view(SENDERS, shard) for _ in range(count)]
    exact = gradients[0].float().sum(0, keepdim=True)
    outs = [torch.empty(1, shard, device="cuda", dtype=dtype) for _ in range(count)]
    wires = {format: [sdp4bit.quantize(g, format) for g in gradients] for format in (intra, inter)}
    bits = {format: 8 * format.wire_bytes(shard) / shard for format in (intra, inter, weights)}

    def error_of(format: GroupFormat, wires: torch.Tensor) -> float:
        return relative_error(sdp4bit.sum_dequantize(wires, format, torch.empty_like(exact)), exact)

    for format, sent in wires.items():
        name, error = f"int{format.bits} 128 rotated", error_of(format, sent[0][:, None])
        quantize = lambda i, f=format: sdp4bit.quantize(gradients[i], f)  # noqa: E731
        moved = gradients[0].nbytes + sent[0].nbytes
        yield Case(name, "quantize", quantize, count, moved, bits[format], error)
        dequantize = lambda i, f=format, w=sent: sdp4bit.sum_dequantize(w[i][:, None], f, outs[i])  # noqa: E731
        moved = sent[0].nbytes + outs[0].nbytes
        yield Case(name, f"sum {SENDERS}, dequantize", dequantize, count, moved, bits[format], error)

    def requantize(i: int) -> torch.Tensor:
        arrived = wires[intra][i].view(pairs, SENDERS // pairs, -1)
        return sdp4bit.sum_requantize(arrived, intra, shard, inter)

    error = error_of(inter, sdp4bit.sum_requantize(wires[intra][0][:, None], intra, shard, inter)[None])
    moved = wires[intra][0].nbytes + requantize(0).nbytes
    yield Case("int8 to int4", f"sum {pairs}, requantize", requantize, count, moved, bits[inter], error)

    old = [values(numel, torch.bfloat16) for _ in range(count)]
    new = [(o.float() + 1e-3 * torch.randn_like(o, dtype=torch.float32)).bfloat16() for o in old]
    changes = [sdp4bit.quantize_difference(n, o, weights) for n, o in zip(new, old, strict=True)]
    replicas = [o.view(1, -1).clone() for o in old]
    updated = sdp4bit.add_dequantized(changes[0], weights, replicas[0].clone()).view(-1)
    error = relative_error(updated.float() - old[0].float(), new[0].float() - old[0].float())
    moved = 4 * numel + changes[0].nbytes
    subtract = lambda i: sdp4bit.quantize_difference(new[i], old[i], weights)  # noqa: E731
    yield Case("int4 2048", "subtract, quantize", subtract, count, moved, bits[weights], error)
    add = lambda i: sdp4bit.add_dequantized(changes[i], weights, replicas[i])  # noqa: E731
    yield Case("int4 2048", "dequantize, add", add, count, moved, bits[weights], error)


def activations(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Gaussian values, each 64th token stronger, an outlier in every third tile of 64."""
    x = torch.randn(shape, device="cuda")
    x[::64] *= 8
    x.view(-1)[5::192] *= 20
    return x.to(dtype)


def pipeline_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """Codecs between pipeline stages on [tokens, 1, 4096]: TAH-Quant, normalised channels, plain integers."""
    shape = (numel // HIDDEN, 1, HIDDEN)
    make = partial(activations, shape, dtype)
    for allocation in tah_quant.ALLOCATIONS:
        config = tah_quant.TahConfig(allocation=allocation)
        decode = partial(tah_quant.decode, config=config, shape=shape, dtype=dtype)
        yield from round_trip(f"tah {allocation}", partial(tah_quant.encode, config=config), decode, make)
    config = CodecConfig("int4", 32, "signed", hadamard=False)
    layout = channel_norm.ChannelNormLayout(shape[0], HIDDEN, config)
    yield from round_trip(
        "int4 standardized",
        lambda x: channel_norm.encode(x.view(-1, HIDDEN), layout),
        lambda wire: channel_norm.decode(wire, layout, dtype),
        make,
    )
    for bits in (6, 8):
        config = CodecConfig(f"int{bits}", 32, "single", hadamard=False)
        decode = partial(taco.decode, config=config, shape=shape, dtype=dtype)
        yield from round_trip(f"int{bits}", partial(taco.encode, config=config), decode, make)


def bitmap_cases(numel: int, dtype: torch.dtype, options: Namespace) -> Iterator[Case]:
    """TAGC's packed values of fp32 shards, sparsity 0.8: choose a threshold, pack, unpack and sum, repack.

    ``choose`` has no bytes of its own: it looks at a sample. ``choose, repack`` is what a node sends on, that
    sum chosen from and packed again as the ranks' union.
    """
    layout, size = BitmapLayout(numel, 0.2, 16), 4 * numel
    count = max(SENDERS, buffers_for(size))
    xs = [torch.randn(1, numel, device="cuda") for _ in range(count)]
    remainders = [torch.empty_like(x) for x in xs]
    threshold = share_threshold(xs[0], layout.share)
    wires = torch.cat([bitmap_sparse.encode(x, threshold, layout) for x in xs[:SENDERS]])
    many = [wires.clone() for _ in range(buffers_for(wires.numel()))]
    union = BitmapLayout(numel, 1 - (1 - layout.share) ** SENDERS, 16)
    sums = [bitmap_sparse.decode_sum(wires, layout)[None] for _ in range(buffers_for(size))]

    def pack(i: int) -> torch.Tensor:
        return bitmap_sparse.encode(xs[i], threshold, layout, remainders[i])

    def repack(i: int) -> torch.Tensor:
        return bitmap_sparse.encode(sums[i], share_threshold(sums[i], union.share), union, remainders[i])

    for operation, call, buffers, moved in (
        ("choose", lambda i: share_threshold(xs[i], layout.share), count, 0),
        ("pack", pack, count, 2 * size + layout.wire_bytes),
        ("unpack, sum", lambda i: bitmap_sparse.decode_sum(many[i], layout), len(many), wires.numel() + size),
        ("choose, repack", repack, len(sums), 2 * size + union.wire_bytes),
    ):
        yield Case("packed", operation, call, buffers, moved, 8 * layout.wire_bytes / numel)
