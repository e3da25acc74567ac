"""Tiles, warps and registers of SDP4Bit's kernels: every combination, measured; where TUNING comes from."""

import argparse
import itertools
from pathlib import Path

import torch
import triton

from taco_kernels.benchmarks import sdp4bit
from taco_kernels.benchmarks.codec import DTYPES
from taco_kernels.benchmarks.copies import copy_rate
from taco_kernels.benchmarks.timing import machine, microseconds, report
from taco_kernels.sdp4bit.triton import launch

COLUMNS = {
    "operation": "",
    "dtype": "",
    "tile": "d",
    "warps": "d",
    "registers": "",
    "stages": "d",
    "programs": "d",
    "us": ".1f",
    "of copy": ".3f",
}
KERNEL_OF = {  # by the beginning of the benchmark's name of an operation
    "quantize": "quantize",
    "subtract": "quantize_difference",
    "sum": "sum_dequantize",
    "dequantize": "add_dequantized",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    kernels = sorted(launch.TUNING)
    parser.add_argument("--kernels", nargs="+", choices=kernels, default=["sum_dequantize", "sum_requantize"])
    parser.add_argument("--mib", type=float, default=256, help="bf16 size of the bucket in MiB")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"], help="of gradients")
    parser.add_argument("--tiles", type=int, nargs="+", default=[1024, 2048, 4096], help="values a program")
    parser.add_argument("--warps", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--registers", type=int, nargs="+", default=[0, 96], help="most a thread; 0: any")
    parser.add_argument("--stages", type=int, nargs="+", default=[1], help="of pipelined kernels")
    parser.add_argument(
        "--programs", type=int, nargs="+", default=[0], help="a multiprocessor; 0: one a tile"
    )
    parser.add_argument("--most-values", type=int, default=64, help="values a thread that are still tried")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")


def kernel_of(operation: str) -> str:
    """Key of TUNING of one of sdp4bit.operations."""
    if "requantize" in operation:
        return "sum_requantize"
    return KERNEL_OF[operation.split(",")[0].split(" ")[0]]


def candidates(options: argparse.Namespace) -> list[launch.Tuning]:
    """Combinations that give a thread 16 values or more, and not too many."""
    combinations = itertools.product(
        options.tiles, options.warps, options.stages, options.programs, options.registers
    )
    return [
        launch.Tuning(tile, warps, stages, programs, registers or None)
        for tile, warps, stages, programs, registers in combinations
        if 16 <= tile // (32 * warps) <= options.most_values
    ]


def measure(kernel: str, calls: list, candidate: launch.Tuning) -> float:
    """Microseconds with this tuning; infinite where it does not fit the device."""
    kept = launch.TUNING[kernel]
    launch.TUNING[kernel] = candidate
    try:
        return microseconds(calls)
    except triton.runtime.errors.OutOfResources:
        return float("inf")
    finally:
        launch.TUNING[kernel] = kept


def run(options: argparse.Namespace) -> None:
    """Measure and print, fastest first within an operation; the present tuning is among them."""
    torch.manual_seed(0)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    numel = int(options.mib * 2**19) // options.ranks * options.ranks
    _, rate = copy_rate(numel, torch.bfloat16)
    print(f"copy {rate:.0f} GB/s")
    rows = []
    for dtype in options.dtypes:
        for operation, (calls, moved, _) in sdp4bit.operations(numel, DTYPES[dtype], options.ranks).items():
            kernel = kernel_of(operation)
            if kernel not in options.kernels:
                continue
            tried = []
            for tuning in dict.fromkeys([launch.TUNING[kernel], *candidates(options)]):
                us = measure(kernel, calls, tuning)
                row = {**tuning._asdict(), "registers": str(tuning.registers or "any")}
                row |= {"operation": operation, "dtype": dtype, "us": us, "of copy": moved / us / 1e3 / rate}
                tried.append(row)
            rows += sorted(tried, key=lambda row: row["us"])
    report(rows, COLUMNS, options.json)
