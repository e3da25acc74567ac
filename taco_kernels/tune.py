"""Fit the codecs' kernels to this GPU: time neighbours of each shipped tuning, keep what is faster.

    python -m taco_kernels.tune                                     # the default codecs: minutes
    python -m taco_kernels.tune --formats int6 int4 --groups 64 128 --outliers off on

A tuning is kept if its results are the shipped one's to the last bit, in every type and for several senders,
and if it is faster by 2 % on average over the sizes in two measurements, and at no size slower by 2 %. What
was found is written to ~/.cache/taco_kernels/tuning.json (TACO_KERNELS_TUNING names another place), where
launches find it.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from triton.errors import TritonError

from taco_kernels.benchmarks import codec, sdp4bit, tah_quant
from taco_kernels.benchmarks.timing import Operation, microseconds, report
from taco_kernels.common.device import AS_IF, Tuning, device_number
from taco_kernels.common.tuned import candidates, path, save, trying
from taco_kernels.taco import FORMATS, GROUP_SIZES, CodecConfig
from taco_kernels.tah_quant import TahConfig

FASTER = 0.98
"""A tuning is taken if it takes at most so much of the shipped one's time."""
ROUNDS = 2
"""Times that the neighbours of the best so far are tried."""
COLUMNS = {"setting": "", "us": ".1f", "tuned us": ".1f", "ratio": ".3f", "shipped": "", "tuned": ""}
Clock = Callable[[Sequence[Callable[[], object]]], float]


class Work(NamedTuple):
    """What a setting is timed at and checked with."""

    calls: list[Callable[[], torch.Tensor]]
    """The same on different buffers."""
    timed: bool
    """Else it is only checked."""


class Found(NamedTuple):
    """Of a setting, microseconds by size."""

    setting: str
    shipped: Tuning
    tuned: Tuning
    before: list[float]
    after: list[float]


def ratio(after: list[float], before: list[float]) -> float:
    """Geometric mean over the sizes; infinite if some size has become slower."""
    ratios = [a / b for a, b in zip(after, before, strict=True)]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if max(ratios) < 1.02 else math.inf


def times(setting: str, tuning: Tuning, works: list[Work], clock: Clock) -> list[float]:
    """Microseconds at each size."""
    with trying({setting: tuning}):
        return [clock(work.calls) for work in works if work.timed]


def results(setting: str, tuning: Tuning, works: list[Work]) -> list[torch.Tensor]:
    """Bytes of every work's first result."""
    found = []
    with trying({setting: tuning}):
        for work in works:
            work.calls[0]().zero_()  # what is not written is seen, and what is added to has a beginning
            found.append(work.calls[0]().clone().view(-1).view(torch.uint8))
    return found


def searched(
    setting: str, shipped: Tuning, works: list[Work], clock: Clock, say: Callable[[str], None] = print
) -> Found:
    """The fastest tuning of a setting that changes no bit, else the shipped one; says what is left out."""
    expected = results(setting, shipped, works)
    before = times(setting, shipped, works, clock)
    best, best_ratio, seen = shipped, 1.0, {shipped}
    ranked: list[tuple[float, Tuning]] = []
    for _ in range(ROUNDS):
        for tuning in candidates(best):
            if tuning in seen:
                continue
            seen.add(tuning)
            try:
                ranked.append((ratio(times(setting, tuning, works, clock), before), tuning))
            except (TritonError, RuntimeError) as error:
                say(f"  {tuple(tuning)} does not fit: {str(error).splitlines()[0]}")
        ranked.sort(key=lambda row: row[0])
        nearest = ranked[0] if ranked else (math.inf, shipped)
        if nearest[0] > best_ratio * FASTER:
            break
        best_ratio, best = nearest
    for found, tuning in ranked:
        if found > FASTER:
            break
        try:
            alike = all(map(torch.equal, results(setting, tuning, works), expected))
            again = [
                (times(setting, shipped, works, clock), times(setting, tuning, works, clock)) for _ in "12"
            ]
        except (TritonError, RuntimeError) as error:
            say(f"  {tuple(tuning)} does not fit in every type: {str(error).splitlines()[0]}")
            continue
        if not alike:
            say(f"  {tuple(tuning)} is left out: results have other bits")
        elif all(ratio(after, before) <= FASTER for before, after in again):
            return Found(setting, shipped, tuning, *again[-1])
    return Found(setting, shipped, shipped, before, before)


def collected(every: Iterator[tuple[Iterator[Operation], bool]]) -> dict[str, tuple[Tuning, list[Work]]]:
    """Settings that operations launch, how they are shipped, and what they are timed and checked with."""
    settings: dict[str, tuple[Tuning, list[Work]]] = {}
    for operations, timed in every:
        for _, call, buffers, _ in operations:
            with trying({}) as asked:
                call(0)
            calls = [lambda i=i, call=call: call(i) for i in range(buffers if timed else 1)]
            for setting, shipped in asked.items():
                settings.setdefault(setting, (shipped, []))[1].append(Work(calls, timed))
    return settings


def of_taco(options: argparse.Namespace, config: CodecConfig) -> Iterator[tuple[Iterator[Operation], bool]]:
    """The codec's four operations on bf16, and the other types and numbers of senders once."""
    for mib in options.mib:
        yield codec.operations(int(mib * 2**19), torch.bfloat16, config, options.senders, 0), True
    for dtype, senders in ((torch.float16, 2), (torch.float32, 8), (torch.float32, 16)):
        yield codec.operations(2**19 + 40, dtype, config, senders, 9), False


def of_sdp4bit(options: argparse.Namespace) -> Iterator[tuple[Iterator[Operation], bool]]:
    """SDP4Bit's operations on gradients of either type."""
    for mib, name in product(options.mib, ("bf16", "fp32")):
        yield sdp4bit.operations(int(mib * 2**19), name, options.senders), True
    for senders, name in product((2, 8), ("bf16", "fp32")):
        yield sdp4bit.operations(2**19, name, senders), False


def of_tah_quant(options: argparse.Namespace) -> Iterator[tuple[Iterator[Operation], bool]]:
    """TAH-Quant's encode and decode of activations."""
    names = argparse.Namespace(
        allocations=["tile"], transforms=["pivot-hadamard"], tile_size=TahConfig().tile_size
    )
    first = next(tah_quant.codecs(names))
    for mib in options.mib:
        yield tah_quant.operations((int(mib * 2**19) // 4096, 1, 4096), torch.bfloat16, first), True


def families(options: argparse.Namespace) -> Iterator[Iterator[tuple[Iterator[Operation], bool]]]:
    """What is tuned together: its buffers are held at a time."""
    for format, group, outliers in product(options.formats, options.groups, options.outliers):
        scales = "dual" if format.startswith("fp8") else "signed"
        yield of_taco(options, CodecConfig(format, group, scales, outliers=outliers == "on"))
    if "sdp4bit" in options.codecs:
        yield of_sdp4bit(options)
    if "tah-quant" in options.codecs:
        yield of_tah_quant(options)


def tune(options: argparse.Namespace, clock: Clock = microseconds) -> Iterator[Found]:
    """Search, and write the file after each setting."""
    device = device_number(torch.cuda.current_device())
    if not device.name:
        raise SystemExit(f"error: {AS_IF} is set: a tuning for another architecture is no use here; unset it")
    done: set[str] = set()
    for family in families(options):
        for setting, (shipped, works) in collected(family).items():
            if setting in done or not any(work.timed for work in works):
                continue
            found = searched(setting, shipped, works, clock)
            done.add(setting)
            row = {} if found.tuned == shipped else {setting: (shipped, found.tuned)}
            save(device, row, {setting})
            print(f"{setting}: {'as shipped' if not row else tuple(found.tuned)}", flush=True)
            yield found


def row_of(found: Found) -> dict:
    """A row of the table; times of the largest size, the ratio over all."""
    times = {"us": found.before[-1], "tuned us": found.after[-1], "ratio": ratio(found.after, found.before)}
    tunings = {
        "shipped": tuple(found.shipped),
        "tuned": "-" if found.tuned == found.shipped else tuple(found.tuned),
    }
    return {"setting": found.setting} | times | {name: str(tuning) for name, tuning in tunings.items()}


def parser() -> argparse.ArgumentParser:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m taco_kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=["fp8-e4m3", "int8", "int6"])
    parser.add_argument("--groups", type=int, nargs="+", choices=GROUP_SIZES, default=[128])
    parser.add_argument("--outliers", nargs="+", choices=("off", "on"), default=["off"])
    others = ("sdp4bit", "tah-quant")
    parser.add_argument("--codecs", nargs="*", choices=others, default=others, help="besides TACO's formats")
    parser.add_argument("--mib", type=float, nargs="+", default=[2, 16, 64], help="sizes of bf16 tensors")
    parser.add_argument("--senders", type=int, default=4, help="wires that the sums add up")
    return parser


def main() -> None:
    """Tune, and print before and after."""
    options = parser().parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: taco_kernels.tune needs a CUDA device, whose kernels it times")
    torch.manual_seed(0)
    report([row_of(found) for found in tune(options)], COLUMNS, None)
    print(f"written to {path()}; launches read it from their next start on")


if __name__ == "__main__":
    main()
