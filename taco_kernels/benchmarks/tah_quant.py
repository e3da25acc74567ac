"""Codecs between pipeline stages, forward and backward, against a device copy of the same run."""

import argparse
import math
from collections.abc import Callable, Iterator
from itertools import product

import torch

from taco_kernels import channel_norm, taco, tah_quant
from taco_kernels.benchmarks.timing import DTYPES, SPEED, Operation, buffers_for, relative_error, timed_rows
from taco_kernels.tah_quant import ALLOCATIONS, TahConfig

COLUMNS = {"MiB": "g", "shape": "", "dtype": "", "codec": "", "operation": ""}
COLUMNS |= SPEED | {"bits": ".3f", "error": ".4f"}
Codec = tuple[str, Callable, Callable]
"""Name, encode(x), decode(wire, shape, dtype)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--allocations", nargs="+", choices=ALLOCATIONS, default=list(ALLOCATIONS))
    parser.add_argument("--tile-size", type=int, default=64)


def activations(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Gaussian values, each 64th token stronger, an outlier in every third tile of 64."""
    x = torch.randn(shape, device="cuda")
    x[::64] *= 8
    x.view(-1)[5::192] *= 20
    return x.to(dtype)


def codecs(options: argparse.Namespace) -> Iterator[Codec]:
    """The forward's codecs and the backward's."""
    for allocation in options.allocations:
        config = TahConfig(tile_size=options.tile_size, allocation=allocation)
        yield (
            f"tah {allocation}",
            lambda x, c=config: tah_quant.encode(x, c),
            lambda w, *to, c=config: tah_quant.decode(w, c, *to),
        )
    yield "int4 standardized", encode_standardized, decode_standardized
    for bits in (6, 8):
        config = taco.CodecConfig(f"int{bits}", 32, scales="single", hadamard=False)
        yield (
            f"int{bits}",
            lambda x, c=config: taco.encode(x, c),
            lambda w, *to, c=config: taco.decode(w, c, *to),
        )


def standardized(shape: tuple[int, ...]) -> channel_norm.ChannelNormLayout:
    """int4 of channels without their mean and spread."""
    config = taco.CodecConfig("int4", 32, "signed", hadamard=False)
    return channel_norm.ChannelNormLayout(math.prod(shape[:-1]), shape[-1], config)


def encode_standardized(x: torch.Tensor) -> torch.Tensor:
    """The message of x."""
    return channel_norm.encode(x.view(-1, x.shape[-1]), standardized(x.shape))


def decode_standardized(wire: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Its inverse."""
    return channel_norm.decode(wire, standardized(shape), dtype).view(shape)


def operations(shape: tuple[int, ...], dtype: torch.dtype, codec: Codec) -> Iterator[Operation]:
    """Per operation: its columns, calls, buffers, bytes read and written by a call."""
    name, encode, decode = codec
    x = activations(shape, dtype)
    wire = encode(x)
    moved = x.nbytes + wire.nbytes
    count = buffers_for(moved)
    xs = [x, *[activations(shape, dtype) for _ in range(count - 1)]]
    wires = [wire, *[encode(x) for x in xs[1:]]]
    error = relative_error(decode(wire, shape, dtype), x)
    columns = {"codec": name, "bits": 8 * wire.nbytes / x.numel(), "error": error}
    yield columns | {"operation": "encode"}, lambda i: encode(xs[i]), count, moved
    yield columns | {"operation": "decode"}, lambda i: decode(wires[i], shape, dtype), count, moved


def run(options: argparse.Namespace) -> Iterator[dict]:
    """Rows of every combination of the options."""
    for tokens, name in product(options.tokens, options.dtypes):
        dtype, shape = DTYPES[name], (tokens, 1, options.hidden)
        base = {"MiB": math.prod(shape) * dtype.itemsize / 2**20, "shape": str(shape), "dtype": name}
        every = (row for codec in codecs(options) for row in operations(shape, dtype, codec))
        yield from timed_rows(math.prod(shape), dtype, base, every)
