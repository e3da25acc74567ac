"""The runs of bench_end_to_end.py: settings take turns inside one run of the training loop.

A regime is a kind of link, by NCCL's own switches:

    nvlink      as it is
    pcie        NCCL_P2P_DISABLE=1: through host memory
    ethernet    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1: TCP

Settings that differ in their codecs alone share a run where the dimension allows it, a block of iterations
each, so that they see the same machine, model and weights. Both sides of every comparison use as many
communicators (--communicators): the uncompressed collectives are cut as payloads are, see _split.py.
"none --compression auto" is a run of its own that decides, and is timed behind its check.
Flags that are not the script's own go to pretrain_gpt.py.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from argparse import Namespace
from itertools import groupby
from pathlib import Path

import _launch
from _launch import FLAGS, Setting, parse_setting, torchrun

from megatron.compression.report.render import largest
from megatron.compression.report.render import table as markdown

MODEL = """--transformer-impl local
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --attention-dropout 0
    --hidden-dropout 0 --lr 1e-5 --mock-data --tokenizer-type NullTokenizer --split 100,0,0 --eval-iters 0
    --eval-interval 100000 --log-interval 1 --no-create-attention-mask-in-dataloader"""
REGIMES: dict[str, dict[str, str]] = {
    "nvlink": {},
    "pcie": {"NCCL_P2P_DISABLE": "1"},
    "ethernet": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
WARM_UP = 3
"""Iterations of a block that are not timed."""
AUTO = ("--compression", "auto")
_ORDER = "BENCH_ORDER"


def run(options: Namespace, flags: list[str], traffic: tuple[str, ...]) -> None:
    """Run every regime and print the table; exit status 1 where a run failed, which leaves no rows.

    Args:
        options: as parsed, with ``extra``.
        flags: of every run: model and parallel sizes.
        traffic: the ledger's classes whose megabytes become columns.
    """
    try:
        settings = [parse_setting(text) for text in options.codecs]
    except ValueError as error:
        sys.exit(f"error: --codecs {error}")
    if options.iterations <= WARM_UP:
        sys.exit(f"error: --iterations {options.iterations}: give more than {WARM_UP}, which are not timed")
    rows: list[dict] = []
    for regime in options.regimes:
        for _, together in groupby(enumerate(settings), lambda pair: _launch_key(options, *pair)):
            rows += _run(options, regime, [setting for _, setting in together], flags, traffic)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        here = [row for row in rows if row["regime"] == regime]
        print("\n".join(["", table(here, traffic), *verdicts(here)]), flush=True)
    if len(rows) < len(options.regimes) * len(settings):
        sys.exit(1)


def _launch_key(options: Namespace, index: int, setting: Setting) -> object:
    """Equal for neighbours that share a run: gradients and weights keep their codec for a whole run."""
    return index if options.dimension == "data" else setting.flags


def _run(
    options: Namespace, regime: str, settings: list[Setting], flags: list[str], traffic: tuple[str, ...]
) -> list[dict]:
    # One that is lossless first: whether its training steps may be repeated is decided when the run starts.
    first = max(settings, key=lambda one: (any("lossless" in spec for spec in one.specs), one.compresses))
    words, auto = _words(options, first, flags), is_auto(first)
    before = checked_in(options) if auto else 0
    words += ["--train-iters", before + options.iterations * len(settings)]
    order = {"settings": [one.words(options.dimension) for one in settings]}
    order |= {key: getattr(options, key) for key in ("iterations", "communicators", "dimension")}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        environment = {**REGIMES[regime], _ORDER: json.dumps(order), **first.environment}
        environment["MEGATRON_COMPRESSION_COMMUNICATORS"] = str(options.communicators)
        words += ["--compression-report", report]
        status, end = torchrun(
            options.ranks, Path(sys.argv[0]).resolve(), words, Path(folder, "log.txt"), **environment
        )
        if status:
            print(f"error: the {regime} run of {first.text} failed:\n{end}", file=sys.stderr)
            return []
        history = [json.loads(line) for line in (report / "history.jsonl").read_text().splitlines()][before:]
        memory = largest(json.loads((report / "report.json").read_text())["memory_by_rank"])
        print(f"{regime} {', '.join(one.text for one in settings)}: peak {_gigabytes(memory)}", flush=True)
        if auto:
            print("\n".join([regime, *decision_lines(Path(folder, "log.txt").read_text())]), flush=True)
    rows = []
    for block, setting in enumerate(settings):
        lines = history[block * options.iterations + WARM_UP : (block + 1) * options.iterations]
        row = {"regime": regime, "communicators": options.communicators, "codec": setting.text, "auto": auto}
        row |= {"ranks": options.ranks, "flags": shlex.join(map(str, _words(options, setting, flags)))}
        rows.append(row | summary(lines, traffic) | {"launch_memory": memory})
    return rows


def _gigabytes(memory: dict[str, int]) -> str:
    """Of a launch, whose settings share it."""
    return ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.2f} GB" for name, size in memory.items())


def _used(options: Namespace) -> list[str]:
    """Dimensions with more than one rank."""
    return [name for name in FLAGS if getattr(options, f"{name}_parallel") > 1]


def checked_in(options: Namespace) -> int:
    """Iterations in which --compression auto checks its choice at most, and those before them."""
    return 4 + 2 * 4 * (1 + len(_used(options)))


def is_auto(setting: Setting) -> bool:
    """Whether the setting leaves the choice to the run."""
    return setting.flags[: len(AUTO)] == AUTO


def decision_lines(log: str) -> list[str]:
    """What --compression auto has said in a log: its start-up time, its table, its check."""
    return [line for line in log.splitlines() if line.startswith(("compression auto:", " | ", " |--"))]


def verdicts(rows: list[dict]) -> list[str]:
    """How fast runs with --compression auto are, beside uncompressed ones and the best other setting."""
    lines = []
    for regime in dict.fromkeys(row["regime"] for row in rows):
        here = [row for row in rows if row["regime"] == regime]
        fixed = [row["milliseconds"] for row in here if not row["auto"]]
        plain = [row["milliseconds"] for row in here if row["codec"] == "none"]
        for row in here:
            if row["auto"] and plain:
                beside_none, beside_best = (min(times) / row["milliseconds"] for times in (plain, fixed))
                beside = f"{beside_none:.3f} of the speed uncompressed and {beside_best:.3f}"
                lines.append(f"{regime}: auto has {beside} of the best fixed setting's")
    return lines


def _words(options: Namespace, setting: Setting, flags: list[str]) -> list:
    """What a run of this setting alone is started with."""
    return [*flags, *setting.words(options.dimension), *options.extra]


def summary(lines: list[dict], traffic: tuple[str, ...]) -> dict:
    """Of the history's rows of a block: times and the bytes of its last iteration."""
    times = [line["milliseconds_per_iteration"] for line in lines]
    row = {"milliseconds": statistics.median(times), "least": min(times), "most": max(times)}
    for name in traffic:
        kinds = lines[-1]["bytes_per_iteration"].get(name, {})
        row[f"{name} MB"] = sum(pair["sent"] for pair in kinds.values()) / 1e6
    return row | {"iterations": len(times), "last_loss": next(iter(lines[-1]["losses"].values()))}


def table(rows: list[dict], traffic: tuple[str, ...]) -> str:
    """Markdown; speed-ups against the first setting of each regime, of medians and of the extremes."""
    columns = [
        "regime",
        "codec",
        "ms (least - most)",
        "speed-up (range)",
        *(f"{n} MB" for n in traffic),
        "loss",
    ]
    lines = [columns]
    for row in rows:
        base = next(other for other in rows if other["regime"] == row["regime"])
        speed_up = base["milliseconds"] / row["milliseconds"]
        least, most = base["least"] / row["most"], base["most"] / row["least"]
        cells = [
            row["regime"],
            row["codec"],
            f"{row['milliseconds']:.1f} ({row['least']:.1f} - {row['most']:.1f})",
        ]
        cells.append(f"{speed_up:.2f} ({least:.2f} - {most:.2f})")
        cells += [f"{row[f'{name} MB']:.1f}" for name in traffic]
        lines.append([*cells, f"{row['last_loss']:.4f}"])
    text = "\n".join(markdown(*lines))
    return f"{text}\nCommunicators of every message: {rows[0]['communicators']}." if rows else "No rows."


class Turns(dict):
    """The policy's rules, those of the block that the iteration is in; a list of them is the launch's."""

    def __init__(self, launched: dict, blocks: list[dict], length: int, iteration) -> None:
        super().__init__(launched)
        self.blocks, self.length, self.iteration = blocks, length, iteration

    def get(self, traffic: str, default=None):
        """The rule of a traffic class now."""
        block = min(self.iteration() // self.length, len(self.blocks) - 1)
        return self.blocks[block].get(traffic, default)


def worker() -> None:
    """One rank of a run."""
    order = json.loads(os.environ[_ORDER])

    def change(args, compression, model_config) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        from megatron.compression import flags

        compression.run.policy.meter.interval = 0  # what it encodes would be timed too
        if len(order["settings"]) > 1:
            blocks = []
            for words in order["settings"]:
                own, _megatrons = flags.add_flags(argparse.ArgumentParser()).parse_known_args(words)
                blocks.append(flags.resolve(Namespace(**vars(args) | vars(own))).rules(args.train_iters))
            policy = compression.run.policy
            policy.rules = Turns(policy.rules, blocks, order["iterations"], policy.iteration)
        if order["communicators"] > 1:
            import _split

            def before_building(chunks: list) -> list:
                groups = [
                    parallel_state.get_tensor_model_parallel_group(),
                    parallel_state.get_data_parallel_group(with_context_parallel=True),
                    parallel_state.get_expert_model_parallel_group(),
                ]
                groups = {tuple(dist.get_process_group_ranks(one)): one for one in groups if one.size() > 1}
                _split.split_over(groups.values(), order["communicators"])
                return chunks

            _split.install()

            model_config.pre_wrap_hooks.insert(0, before_building)  # before auto times anything

    _launch.train(change)


def is_worker() -> bool:
    """Whether this process is a rank of a run."""
    return _ORDER in os.environ
