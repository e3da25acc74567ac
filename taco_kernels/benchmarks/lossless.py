"""Lossless encode, decode and sums, against a device copy of the same run; each call's bits are checked."""

import argparse
from collections.abc import Iterator
from itertools import product

import torch

from taco_kernels import lossless
from taco_kernels.benchmarks.timing import DTYPES, SPEED, Operation, buffers_for, timed_rows
from taco_kernels.lossless import CUT, FLAG_AT

COLUMNS = (
    {"MiB": "g", "dtype": "", "values": "", "operation": ""} | SPEED | {"bits": ".3f", "room used": ".2f"}
)
SENDERS = 4
KINDS = ("gaussian", "student-t", "raw")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256], help="of the tensor")
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--values", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--share", type=float, default=0.07, help="of escapes that there is room for")


def values_of(kind: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """``[1, numel]``: Gaussian, Student t of 3 degrees of freedom, or of all magnitudes, which do not fit."""
    x = torch.randn(numel, device="cuda")
    if kind == "student-t":
        x /= (torch.randn(3, numel, device="cuda").square().mean(0)).sqrt()
    elif kind == "raw":
        x *= torch.exp2(120 * torch.rand(numel, device="cuda") - 60)
    return x.to(dtype)[None]


def operations(numel: int, dtype: torch.dtype, options: argparse.Namespace) -> Iterator[Operation]:
    """Per operation: its columns, calls, buffers, bytes read and written by a call."""
    layout = lossless.layout_of(numel, dtype, options.share)
    piece = lossless.layout_of(numel // SENDERS, dtype, options.share)
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for kind in options.values:
        x = values_of(kind, numel, dtype)
        moved = x.nbytes + layout.head_bytes
        xs = [x, *[values_of(kind, numel, dtype) for _ in range(buffers_for(moved) - 1)]]
        payloads = [lossless.encode(x, layout) for x in xs]
        header = payloads[0][0, :4].view(torch.int32)
        columns = {
            "values": kind,
            "bits": 8 * layout.head_bytes / numel,
            "room used": int(header) / layout.words,
        }
        cut = int(payloads[0][0, FLAG_AT]) == CUT
        assert cut == (kind == "raw"), kind
        if cut:
            payloads = [
                torch.cat((payload, lossless.rest(x, layout)), 1)
                for payload, x in zip(payloads, xs, strict=True)
            ]
            columns["bits"] = 8 * layout.whole_bytes / numel
        for payload, x in zip(payloads, xs, strict=True):
            assert torch.equal(lossless.decode(payload, layout).view(integers), x.view(integers)), kind
        count = len(xs)
        yield columns | {"operation": "encode"}, lambda i, xs=xs: lossless.encode(xs[i], layout), count, moved
        read = x.nbytes + payloads[0].nbytes
        decode = lambda i, payloads=payloads: lossless.decode(payloads[i], layout)  # noqa: E731
        yield columns | {"operation": "decode"}, decode, count, read
        if cut:
            continue
        pieces = [lossless.encode(x.view(SENDERS, -1), piece)[:, None] for x in xs]
        read = pieces[0].nbytes + x.nbytes // SENDERS
        yield (
            columns | {"operation": f"decode_sum of {SENDERS} pieces"},
            lambda i, pieces=pieces: lossless.decode_sum(pieces[i], piece, dtype),
            count,
            read,
        )


def run(options: argparse.Namespace) -> Iterator[dict]:
    """Rows of every combination of the options."""
    for mib, name in product(options.mib, options.dtypes):
        dtype = DTYPES[name]
        numel = mib * 2**20 // dtype.itemsize
        yield from timed_rows(numel, dtype, {"MiB": mib, "dtype": name}, operations(numel, dtype, options))
