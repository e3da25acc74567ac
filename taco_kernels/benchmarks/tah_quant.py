"""Pipeline codecs, forward and backward, against a device copy of the same run."""

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from taco_kernels import CodecConfig, normalized, ops, tah_quant
from taco_kernels.benchmarks.codec import DTYPES, relative_error
from taco_kernels.benchmarks.copies import copy_rate
from taco_kernels.benchmarks.timing import buffers_for, machine, microseconds, report
from taco_kernels.tah_quant import ALLOCATIONS, TRANSFORMS, TahConfig

COLUMNS = {
    "MiB": "g",
    "shape": "",
    "dtype": "",
    "codec": "",
    "operation": "",
    "us": ".1f",
    "GB/s": ".0f",
    "of copy": ".2f",
    "bits": ".3f",
    "error": ".4f",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--allocations", nargs="+", choices=ALLOCATIONS, default=list(ALLOCATIONS))
    parser.add_argument("--transforms", nargs="+", choices=TRANSFORMS, default=["pivot-hadamard"])
    parser.add_argument("--tile-size", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")


def activations(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Gaussian values, each 64th token stronger, an outlier in every third tile of 64."""
    x = torch.randn(shape, device="cuda")
    x[::64] *= 8
    x.view(-1)[5::192] *= 20
    return x.to(dtype)


def run(options: argparse.Namespace) -> None:
    """Measure every combination of the options and print the table."""
    torch.manual_seed(0)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    rows = []
    for tokens in options.tokens:
        for dtype_name in options.dtypes:
            dtype, shape = DTYPES[dtype_name], (tokens, 1, options.hidden)
            numel = tokens * options.hidden
            us, rate = copy_rate(numel, dtype)
            common = dict(MiB=numel * dtype.itemsize / 2**20, shape=str(shape), dtype=dtype_name)
            row = dict(common, codec="-", operation="copy", us=us, bits=8.0 * dtype.itemsize, error=0.0)
            rows.append({**row, "GB/s": rate, "of copy": 1.0})
            for name, encode, decode in codecs(options):
                measured = measure(shape, dtype, encode, decode)
                for operation, (us, moved, bits, error) in measured.items():
                    row = dict(common, codec=name, operation=operation, us=us, bits=bits, error=error)
                    rows.append({**row, "GB/s": moved / us / 1e3, "of copy": moved / us / 1e3 / rate})
    report(rows, COLUMNS, options.json)


def codecs(options: argparse.Namespace) -> list[tuple[str, Callable, Callable]]:
    """(name, encode(x), decode(wire, shape, dtype)): the forward's codecs and the backward's."""
    found = []
    for allocation in options.allocations:
        for transform in options.transforms:
            config = TahConfig(tile_size=options.tile_size, allocation=allocation, transform=transform)
            name = f"tah {allocation}" + (", no transform" if transform == "none" else "")
            found.append(
                (
                    name,
                    partial(tah_quant.encode, config=config),
                    lambda wire, shape, dtype, config=config: tah_quant.decode(wire, config, shape, dtype),
                )
            )
    found.append(("int4 standardized", encode_standardized, decode_standardized))
    for bits in (6, 8):
        config = CodecConfig(f"int{bits}", 32, scales="single", hadamard=False)
        found.append(
            (
                f"fixed int{bits}",
                partial(ops.encode, config=config),
                lambda wire, shape, dtype, config=config: ops.decode(wire, config, shape, dtype),
            )
        )
    return found


def standardized(shape: tuple[int, ...]) -> normalized.ChannelNormLayout:
    """What ``--pp-compression auto`` sends."""
    config = CodecConfig("int4", 32, "signed", hadamard=False)
    return normalized.ChannelNormLayout(math.prod(shape[:-1]), shape[-1], config)


def encode_standardized(x: torch.Tensor) -> torch.Tensor:
    """The message of x."""
    return normalized.encode(x.view(-1, x.shape[-1]), standardized(x.shape))


def decode_standardized(wire: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Its inverse."""
    return normalized.decode(wire, standardized(shape), dtype).view(shape)


def measure(
    shape: tuple[int, ...], dtype: torch.dtype, encode: Callable, decode: Callable
) -> dict[str, tuple[float, int, float, float]]:
    """{operation: (microseconds, bytes read and written, bits a value, relative L2 error)}."""
    xs = [activations(shape, dtype)]
    wires = [encode(xs[0])]
    size, wire = xs[0].nbytes, wires[0].nbytes
    count = buffers_for(size + wire)
    xs += [activations(shape, dtype) for _ in range(count - 1)]
    wires += [encode(x) for x in xs[1:]]
    bits = 8 * wire / xs[0].numel()
    error = relative_error(decode(wires[0], shape, dtype), xs[0])
    return {
        "encode": (microseconds([partial(encode, x) for x in xs]), size + wire, bits, error),
        "decode": (microseconds([partial(decode, w, shape, dtype) for w in wires]), size + wire, bits, error),
    }
