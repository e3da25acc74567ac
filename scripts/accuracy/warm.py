#!/usr/bin/env python
"""Compile the codec kernels that settings need into the cache that the workers of ``run`` share.

``run`` starts some of these beside its workers: a kernel then costs a worker nothing in the middle of a run.
"""

import argparse
import traceback
from collections.abc import Sequence

import torch

from scripts.accuracy.errors import CODECS
from scripts.accuracy.exchange import Exchange, compile_elementwise, reduce_once, send
from scripts.accuracy.settings import SETTINGS, parse_codec
from scripts.accuracy.training import use_deterministic_kernels
from taco_kernels import Stream


def distinct(names: Sequence[str]) -> list[str]:
    """Of settings with the same codecs and form, the first."""
    seen: dict[tuple, str] = {}
    for name in names:
        setting = SETTINGS[name]
        seen.setdefault((setting.codecs(), setting.remove_mean, setting.sequence_parallel), name)
    return list(seen.values())


def exchange_once(name: str, partials: torch.Tensor) -> None:
    """Every exchange of a setting, once. partials: [W, T, h]."""
    exchange = Exchange(SETTINGS[name])
    for direction in ("forward", "backward"):
        exchange.reduce(partials, direction)
        exchange.reduce(partials, direction, whole=True)
        if exchange.setting.sequence_parallel:
            exchange.gather(partials[0], direction)


def measure_once(text: str, partials: torch.Tensor) -> None:
    """What errors.py does with a codec, once."""
    codec = parse_codec(text)
    reduce_once(partials, codec, 0, torch.float32)
    send(partials[0].float(), codec, Stream(0, 0), torch.float32)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", required=True)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="which part of how many")
    parser.add_argument("--shape", type=int, nargs=2, default=(32 * 1024, 768), help="tokens, hidden size")
    parser.add_argument("--compile", action="store_true", help="also what torch.compile makes")
    args = parser.parse_args(argv)
    use_deterministic_kernels()  # as the workers: it is part of the caches' keys
    compile_elementwise(args.compile)
    index, count = args.share
    partials = torch.ones(4, *args.shape, dtype=torch.bfloat16, device="cuda")
    jobs = [(exchange_once, name) for name in distinct(args.settings)]
    jobs += [(measure_once, codec) for codec in CODECS]
    for function, name in jobs[index::count]:
        try:
            function(name, partials)
        except Exception:
            traceback.print_exc()
            print(f"warm: {name} failed", flush=True)


if __name__ == "__main__":
    main()
