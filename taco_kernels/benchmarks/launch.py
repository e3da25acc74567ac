"""Host time of a call, by fast launches and by Triton's own: how long Python holds up the next call."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from taco_kernels import CodecConfig, Stream, packed, sdp4bit, tah_quant
from taco_kernels.benchmarks.timing import machine, report
from taco_kernels.layout import FORMATS, ROUNDINGS
from taco_kernels.sdp4bit import GroupFormat
from taco_kernels.symmetric_memory import collectives
from taco_kernels.symmetric_memory.lane import Lane, lane_bytes, make_lanes
from taco_kernels.triton import launch
from taco_kernels.triton.fast_launch import plain_launches, supported

COLUMNS = {"operation": "", "launches": "d", "fast us": ".2f", "triton us": ".2f", "ratio": ".2f"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--kib", type=int, default=64, help="bf16 size: small, so that the device keeps up")
    parser.add_argument("--format", choices=FORMATS, default="int8")
    parser.add_argument("--rounding", choices=ROUNDINGS, default="nearest")
    parser.add_argument("--calls", type=int, default=100, help="calls without waiting for the device")
    parser.add_argument("--repeats", type=int, default=30, help="the median is over so many")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")


def single_lane(device: torch.device) -> tuple[Lane, torch.Tensor]:
    """A lane of one rank, and its memory, which must be kept."""
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    memory = torch.zeros(lane_bytes(1, programs), dtype=torch.uint8, device=device)
    return make_lanes([memory.data_ptr()], 0, device, 1, programs, 20.0)[0], memory


def host_microseconds(call: Callable[[], object], calls: int, repeats: int) -> float:
    """Median time a call takes to return, of ``calls`` in a row while the device is idle or behind."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) * 1e6 / calls)
    torch.cuda.synchronize()
    return sorted(times)[repeats // 2]


def operations(
    numel: int, config: CodecConfig, lane: Lane, device: torch.device
) -> dict[str, tuple[int, Callable[[], object]]]:
    """Kernels that a call starts, and the call, by operation."""
    random = None if config.rounding == "nearest" else Stream(key=1, stream=2)
    x = torch.randn(4, numel // 4, device=device).bfloat16()
    out, wire = torch.empty_like(x), launch.encode(x, config, 1, random)
    wires = wire.expand(4, -1).contiguous()
    group = GroupFormat(4, 128, True)
    wires4, target = sdp4bit.quantize(x, group), torch.empty_like(x)
    tah = tah_quant.TahConfig()
    sent = tah_quant.encode(x, tah)
    values, layout = x.float(), packed.PackedLayout(numel // 4, 0.2, 16)
    thresholds = torch.ones(4, device=device)
    return {
        "torch: out.copy_(x)": (1, lambda: out.copy_(x)),
        "torch.empty_like(x)": (0, lambda: torch.empty_like(x)),
        "encode": (1, lambda: launch.encode(x, config, 1, random)),
        "encode into out": (1, lambda: launch.encode(x, config, 1, random, wire)),
        "decode": (1, lambda: launch.decode(wire, config, x.shape, x.dtype, random)),
        "decode_sum": (1, lambda: launch.decode_sum(wires, config, x.shape, x.dtype, random)),
        "decode_sum_encode": (1, lambda: launch.decode_sum_encode(wires, config, numel, random, random)),
        "all_reduce, world 1": (1, lambda: collectives.all_reduce(lane, x, config, random)),
        "all_gather, world 1": (1, lambda: collectives.all_gather(lane, x, config, random)),
        "reduce_scatter, world 1": (1, lambda: collectives.reduce_scatter(lane, x, config, random)),
        "sdp4bit.quantize": (1, lambda: sdp4bit.quantize(x, group)),
        "sdp4bit.sum_dequantize": (1, lambda: sdp4bit.sum_dequantize(wires4[None], group, target)),
        "tah_quant.encode": (4, lambda: tah_quant.encode(x, tah)),
        "tah_quant.decode": (2, lambda: tah_quant.decode(sent, tah, x.shape, x.dtype)),
        "packed.encode": (2, lambda: packed.encode(values, thresholds, layout)),
    }


def run(options: argparse.Namespace) -> None:
    """Measure on this device and print."""
    device = torch.device("cuda", torch.cuda.current_device())
    lane, memory = single_lane(device)
    config = CodecConfig(options.format, rounding=options.rounding)
    rows = []
    for name, (launches, call) in operations(512 * options.kib, config, lane, device).items():
        fast = host_microseconds(call, options.calls, options.repeats)
        with plain_launches():
            plain = host_microseconds(call, options.calls, options.repeats)
        rows.append(
            {
                "operation": name,
                "launches": launches,
                "fast us": fast,
                "triton us": plain,
                "ratio": plain / fast,
            }
        )
    lane.check()
    del memory
    print(machine(), f"{options.kib} KiB bf16, {config}; fast launches supported: {supported()}")
    report(rows, COLUMNS, options.json)
