#!/usr/bin/env python
"""Which codec suits a model: measured on the tensors of one's own run.

    python scripts/codec_sweep.py --processes 4 --iterations 3 -- <the flags of pretrain_gpt.py>
    python scripts/codec_sweep.py --processes 4 --codecs int6 int6:group=32 sdp4bit -- <flags> --load DIR

starts that run (--load measures a trained model), lets it compress as its flags say (taco if they say
nothing) and, in the last of --iterations iterations, encodes a sample of what every tensor-parallel
collective sends by every codec. Reported: bits a value, the relative L2 error of one encoding over all sites,
and of the worst site, by direction. For a codec of two hops, its first.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import _launch
import torch

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.communication.error_bound import ErrorBound

GROUPS = (32, 64, 128, 256)
CODECS = [
    f"{name}group={group}" for name in ("taco:", "int8:", "int6:", "int5:", "int4:") for group in GROUPS
]
_ORDER = "CODEC_SWEEP"


class CodecSweep(ErrorBound):
    """Stands in the place of the error bound, measures every codec once, and takes nothing out.

    Args:
        iteration: zero-based training iteration to measure in: each site's traffic, the first call of each.
        specs: of the codecs.
    """

    def __init__(self, iteration: int, specs: Sequence[str]) -> None:
        super().__init__(bound=float("inf"), group_size=max(GROUPS))
        self.iteration = iteration
        self.codecs = {spec: parse_codec(spec).hops[0] for spec in specs}
        self._found: dict[tuple[str, str], dict[str, torch.Tensor]] = {}

    def due(self, site: str, traffic: str, iteration: int) -> bool:
        """See ``ErrorBound``."""
        return iteration == self.iteration and (site, traffic) not in self._found

    def measure(self, site: str, traffic: str, tensor: torch.Tensor, codec: Codec) -> None:
        """See ``ErrorBound``: the same sample, whole groups of the largest size, by every codec."""
        exact = self._sample(tensor).float()
        signal = exact.double().square().sum()
        squares = {}
        for spec, each in self.codecs.items():
            decoded = each.decode(each.encode(exact[None]), exact.shape, exact.dtype)[0]
            squares[spec] = torch.stack([(decoded.double() - exact).square().sum(), signal])
        self._found[site, traffic] = squares

    def squares(self) -> list[dict]:
        """Rows of site, traffic, codec, and the squared error and signal of this rank's sample."""
        return [
            {"site": site, "traffic": traffic, "codec": spec, "error": error, "signal": signal}
            for (site, traffic), squares in self._found.items()
            for spec, (error, signal) in ((spec, found.tolist()) for spec, found in squares.items())
        ]


def worker() -> None:
    """One rank of the run: pretrain_gpt.py's loop with a sweep in the place of the error bound."""
    order = json.loads(os.environ[_ORDER])
    sweep = CodecSweep(order["iteration"], order["codecs"])

    def change(args, compression, model_config) -> None:
        compression.run.policy.error_bound = sweep

    try:
        _launch.train(change)
    finally:  # --exit-interval leaves by SystemExit
        Path(order["folder"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(sweep.squares()))


def merge(parts: Sequence[list[dict]]) -> list[dict]:
    """The ranks' rows, those of the same site, traffic and codec added up."""
    found: dict[tuple, dict] = {}
    for row in (row for part in parts for row in part):
        total = found.setdefault(
            (row["site"], row["traffic"], row["codec"]), {**row, "error": 0.0, "signal": 0.0}
        )
        total["error"] += row["error"]
        total["signal"] += row["signal"]
    return list(found.values())


def summary(rows: list[dict]) -> list[dict]:
    """For each traffic and codec: bits a value, the error over all sites, and the worst site's.

    Every site counts alike in ``error``: the root of the mean of their squared relative errors.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["signal"] > 0:
            groups.setdefault((row["traffic"], row["codec"]), []).append(row)
    table = []
    for (traffic, spec), sites in groups.items():
        relative = {row["site"]: (row["error"] / row["signal"]) ** 0.5 for row in sites}
        worst = max(relative, key=relative.get)
        mean = (sum(value**2 for value in relative.values()) / len(relative)) ** 0.5
        bits = parse_codec(spec).hops[0].bits_per_value()
        table.append({"traffic": traffic, "codec": spec, "bits": bits, "error": mean})
        table[-1] |= {"worst": relative[worst], "worst_site": worst}
    return table


def front(table: list[dict]) -> set[tuple[str, str]]:
    """(traffic, codec) of what no other codec beats in both bits and error."""
    return {
        (row["traffic"], row["codec"])
        for row in table
        if not any(
            other["traffic"] == row["traffic"]
            and other["bits"] <= row["bits"]
            and other["error"] < row["error"]
            for other in table
        )
    }


def report(table: list[dict]) -> str:
    """The table as text, by bits; codecs that none beats in both are marked."""
    marked = front(table)
    lines = [f"{'traffic':12} {'codec':28} {'bits':>7} {'error %':>9} {'worst site %':>13}  site"]
    for row in sorted(table, key=lambda r: (r["traffic"], r["bits"], r["error"])):
        mark = " <" if (row["traffic"], row["codec"]) in marked else ""
        lines.append(
            f"{row['traffic']:12} {row['codec']:28} {row['bits']:7.3f} {100 * row['error']:9.3f} "
            f"{100 * row['worst']:13.3f}  {row['worst_site']}{mark}"
        )
    return "\n".join([*lines, "< no other has less error in as few bits"])


def main(argv: Sequence[str] | None = None) -> int:
    """Start the run and print what its ranks found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1, help="ranks on this host")
    parser.add_argument("--iterations", type=int, default=3, help="measure in the last of so many iterations")
    parser.add_argument("--codecs", nargs="+", default=CODECS, help="specs")
    parser.add_argument("--json", type=Path, help="write all rows, by site, here")
    parser.add_argument("flags", nargs="+", metavar="-- FLAGS", help="of pretrain_gpt.py")
    args = parser.parse_args(argv)
    if args.iterations < 1:
        parser.error(f"--iterations {args.iterations}: give a positive number")
    try:
        if exact := [spec for spec in args.codecs if parse_codec(spec).hops[0].lossless]:
            parser.error(f"--codecs {exact[0]}: it has no error to measure; leave it out")
        if shaped := [spec for spec in args.codecs if parse_codec(spec).sees_shape]:
            parser.error(
                f"--codecs {shaped[0]}: it encodes whole messages, not samples of them; leave it out"
            )
    except ValueError as error:
        parser.error(f"--codecs: {error}")
    flags = [*args.flags, "--exit-interval", args.iterations]
    if not {"--taco", "--tp-compression"} & set(args.flags):
        flags += ["--taco", "--tp-compression-min-mb", "0"]
    with tempfile.TemporaryDirectory() as folder:
        order = {"iteration": args.iterations - 1, "codecs": args.codecs, "folder": folder}
        log, environment = Path(folder, "log.txt"), {_ORDER: json.dumps(order)}
        status, end = _launch.torchrun(args.processes, Path(__file__).resolve(), flags, log, **environment)
        rows = merge([json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))])
    if not rows:
        print(
            f"{end}\nerror: nothing was measured; the run must reach --iterations and send tensor-parallel "
            "traffic (--tensor-model-parallel-size of at least 2)",
            file=sys.stderr,
        )
        return status or 1
    if args.json:
        args.json.write_text(json.dumps(rows) + "\n")
    print(report(summary(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(worker() if _ORDER in os.environ else main())
