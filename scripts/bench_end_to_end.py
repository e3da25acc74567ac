"""Measure the time of an iteration with and without compression, on one host.

    python scripts/bench_end_to_end.py --tensor-parallel 4 --json end_to_end.json
    python scripts/bench_end_to_end.py --shape 1.3b --tensor-parallel 2 --pipeline-parallel 2 \\
        --data-parallel 2 --codecs none "none --compression taco-paper" "none --compression auto"
        none
    python scripts/bench_end_to_end.py --shape qwen3-30b-a3b --expert-parallel 2 --communicators 2
    python scripts/bench_end_to_end.py --shape 1.3b --data-parallel 4 --micro-batches 1 --regimes
        ethernet \\
        --codecs none "sdp4bit MEGATRON_COMPRESSION_NODE_SIZE=1" tagc

A row is printed, and written to --json, as soon as it is measured; a table follows. Flags that are
not this script's go to pretrain_gpt.py, such as --num-layers. A CAAT-Net is another model: compare
its times, not its losses.

Settings that differ only in their codecs share a run where that is possible, a block of iterations
each. Both sides of a comparison use as many communicators: the uncompressed collectives are split
as the payloads are (_split.py). "none --compression auto" first decides, in a run of its own, and
is then timed. Where "none --tp-compression-overlap halves" is one of the settings, the table
compares with it as well: what halves bring without a codec.
"""

import argparse
import json
import math
import os
import re
import shlex
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import _launch
from _launch import (
    DIMENSIONS,
    SETTINGS_HELP,
    BenchSetting,
    output_file,
    parse_setting,
    torchrun,
)

from megatron.compression.huggingface.models import MODELS, as_arguments, megatron_flags
from megatron.compression.names import COMMUNICATORS
from megatron.compression.report.render import table as markdown

MODEL = """--transformer-impl local --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4
    --attention-dropout 0 --hidden-dropout 0 --lr 1e-5 --mock-data --tokenizer-type NullTokenizer --split
    100,0,0 --eval-iters 0 --eval-interval 100000 --no-create-attention-mask-in-dataloader"""
"""Flags of every run. A shape, and then the user's flags, may replace some."""

WITHOUT_PEER_ACCESS = {"NCCL_P2P_DISABLE": "1"}
REGIMES: dict[str, dict[str, str]] = {
    "nvlink": {},
    "pcie": WITHOUT_PEER_ACCESS,
    "ethernet": WITHOUT_PEER_ACCESS | {"NCCL_SHM_DISABLE": "1"},
}
"""Kinds of links that NCCL's own switches make of one host, with their environment variables."""
REGIMES_HELP = (
    "links to measure over. nvlink: the host's GPU links as they are; pcie: through host memory, as between "
    "cards without peer access; ethernet: over TCP on this host; a rate such as 10gbit or 200mbit: TCP "
    "between two nodes that two_nodes.sh makes of this host, for which it needs root, ip and tc "
    "(default: nvlink pcie ethernet)"
)

WARM_UP = 3
"""Iterations of a block that are not timed; in CUDA graphs the capture follows them."""
WITH_GRAPHS = [
    "--no-check-for-nan-in-loss-and-grad",
    "--cuda-graph-warmup-steps",
    WARM_UP,
    "--cuda-graph-impl",
]
GRAPHS = {
    "none": [],
    "full_iteration": [*WITH_GRAPHS, "full_iteration"],
    "local": [*WITH_GRAPHS, "local"],
}
"""Kinds of CUDA graphs, with the flags that megatron-core needs for them."""
GRAPHS_HELP = (
    "none: eager; full_iteration: an iteration is one CUDA graph; local: a graph for each layer, captured "
    "once, so that each setting is a run of its own. Both sides of a comparison use the same kind (default: "
    "none)"
)

AUTO = ("--compression", "auto")
HALVES = ("--tp-compression-overlap", "halves")
"""Flags with which a half of a micro-batch computes while the other's sums travel."""
SECONDS_TO_END = 60
"""How long a run may take to end after its last row."""
ORDER = "BENCH_ORDER"
"""The environment variable that tells the ranks what to do: an ``Order`` in JSON."""
BLOCK = "bench block"
"""How a line of the ranks begins that ends a block; the peak memory in JSON follows."""


def gpt(layers: int, hidden: int, heads: int) -> str:
    """Return the flags of a GPT in bf16 with the vocabulary of GPT-2.

    Args:
        layers: number of layers.
        hidden: width of the model.
        heads: attention heads of a layer.
    """
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        "--vocab-size 50257 --bf16"
    )


def qwen(name: str, **changed: str) -> str:
    """Return the flags of a Qwen model in bf16.

    Megatron pads its vocabulary, so that a --vocab-size on the command line counts.
    """
    flags = megatron_flags(MODELS[name])
    for flag, value in changed.items():
        flags[f"--{flag.replace('_', '-')}"] = value
    del flags["--padded-vocab-size"]
    return " ".join(as_arguments(flags)) + " --bf16"


SHAPES = {
    "350m": gpt(24, 1024, 16) + " --micro-batch-size 8",
    "1.3b": gpt(24, 2048, 16),
    # Eight layers as wide as the 6.7b's.
    "1.75b": "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --bf16",
    "2.7b": gpt(32, 2560, 32),
    "6.7b": gpt(32, 4096, 32),
    "13b": gpt(40, 5120, 40),
    "qwen2.5-7b": qwen("2.5-7b") + " --seq-length 512 --micro-batch-size 8",
    # Four of 48 layers. The vocabulary is smaller too, since its product is not what is compared.
    "qwen3-30b-a3b": qwen(
        "3-30b-a3b", num_layers="4", vocab_size="32000", moe_aux_loss_coeff="0.01"
    )
    + " --moe-token-dispatcher-type alltoall --moe-router-dtype fp32",
    # {stages}: the pipeline-parallel size.
    "thin": "--num-layers {stages} --hidden-size 2048 --num-attention-heads 16 --vocab-size 8191"
    " --untie-embeddings-and-output-weights --bf16",
}
"""Models. Sequences are 2048 tokens long, in micro-batches of 4, unless a shape says otherwise."""
SHAPES_HELP = (
    "the model. 350m to 13b: whole GPT models, except 1.75b: 8 layers of width 4096; qwen2.5-7b: the whole "
    "model; qwen3-30b-a3b: 4 of its 48 layers; thin: one layer of width 2048 on each stage (default: 1.75b, "
    "with --expert-parallel qwen3-30b-a3b)"
)
LAYOUT = ("tensor", "context", "pipeline", "data")
"""Dimensions that can be combined. The first one with several ranks is the one that --codecs is
for."""
DEFAULT_SETTINGS = {
    "tensor": ["none", "taco", "int8", "int6", "none"],
    "expert": ["none", "int8", "int6", "none"],
    "context": ["none", "int8", "int6", "none"],
    "pipeline": ["none", "pipeline-6bit", "tah-quant", "int8", "none"],
    "data": ["none", "sdp4bit", "sdp4bit MEGATRON_COMPRESSION_NODE_SIZE=1"],
}
"""What is measured without --codecs, by dimension."""


# The command line
# ---------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that are this script's own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    compared = parser.add_argument_group("what is compared")
    compared.add_argument(
        "--codecs",
        dest="settings",
        nargs="+",
        type=parse_setting,
        metavar="SETTING",
        help="settings, measured one after the other, for the first of expert, tensor, context, pipeline and "
        "data that has several ranks. The others' codecs follow as flags "
        f'("taco --dp-compression sdp4bit"). A setting is {SETTINGS_HELP}; '
        "MEGATRON_COMPRESSION_NODE_SIZE=N there counts N ranks of this host as a node (1: as if all links "
        "were ethernet). The table compares with the first setting (default: by dimension)",
    )
    compared.add_argument("--regimes", nargs="+", default=list(REGIMES), help=REGIMES_HELP)
    compared.add_argument(
        "--cuda-graphs", nargs="+", choices=GRAPHS, default=["none"], help=GRAPHS_HELP
    )
    compared.add_argument(
        "--communicators",
        type=int,
        default=1,
        help="NCCL communicators that each message is split over, compressed or not (default: 1)",
    )

    model = parser.add_argument_group("model and layout")
    add = model.add_argument
    add("--shape", choices=SHAPES, help=SHAPES_HELP)
    add("--tensor-parallel", type=int, help="ranks (default: 4, beside others 1)")
    add("--context-parallel", type=int, default=1, help="ranks")
    add("--pipeline-parallel", type=int, default=1, help="ranks")
    add("--data-parallel", type=int, default=1, help="ranks")
    add("--expert-parallel", type=int, default=0, help="ranks among which experts are spread")
    add("--sequence-parallel", action="store_true", help="beside tensor parallelism")
    add("--micro-batch-size", type=int, help="sequences of a micro-batch (default: the shape's)")
    add(
        "--micro-batches",
        type=int,
        default=0,
        help="micro-batches of an iteration on a data-parallel rank (default: 4 for each stage)",
    )
    add("--fp32", action="store_true", help="train in fp32: messages are twice as large")
    add(
        "--fp32-gradients",
        action="store_true",
        help="reduce gradients in fp32, as Megatron does by default (default here: bf16)",
    )
    add(
        "--no-overlap",
        action="store_true",
        help="without --overlap-grad-reduce and --overlap-param-gather, which are on by default under data "
        "and context parallelism",
    )

    output = parser.add_argument_group("length and output")
    output.add_argument(
        "--iterations",
        type=int,
        default=13,
        help=f"iterations of a block, of which {WARM_UP} are not timed, in graphs {WARM_UP + 1} (default: 13)",
    )
    output.add_argument(
        "--limit",
        type=float,
        default=300,
        help="seconds for a row, with the start of its run; a run that takes longer is ended (default: 300)",
    )
    output.add_argument("--json", type=output_file, help="file for the rows")
    return parser


def parse(words: list[str] | None = None) -> Namespace:
    """Return the command line, completed.

    Besides the flags it has ``extra`` (words for pretrain_gpt.py), ``dimension`` (the one that
    --codecs is for), ``ranks`` (of all dimensions together), ``flags`` (of every run), and
    ``traffic`` (the classes of traffic in the table).
    """
    parser = build_parser()
    options, options.extra = parser.parse_known_args(words)
    if options.shape is None:
        options.shape = "qwen3-30b-a3b" if options.expert_parallel else "1.75b"
    if options.tensor_parallel is None:
        options.tensor_parallel = default_tensor_parallel(options)
    sizes = sizes_of(options)
    options.ranks = math.prod(sizes.values())
    # One GPU is a tensor-parallel group of one rank.
    used = [dimension for dimension, size in sizes.items() if size > 1] or ["tensor"]
    options.dimension = used[0]
    problem = (
        layout_conflict(options)
        or useless_flag(options)
        or length_conflict(options)
        or link_conflict(options, used)
    )
    if problem:
        parser.error(problem)
    if options.settings is None:
        options.settings = [parse_setting(text) for text in DEFAULT_SETTINGS[options.dimension]]
    options.traffic = traffic_of(options, used)
    options.flags = flags_of(options)
    return options


def default_tensor_parallel(options: Namespace) -> int:
    """Return 4 where nothing else is parallel, else 1."""
    ranks = options.context_parallel * options.pipeline_parallel * options.data_parallel
    if ranks > 1 or options.expert_parallel:
        return 1
    return 4


def sizes_of(options: Namespace) -> dict[str, int]:
    """Return the ranks of each dimension; experts are measured alone."""
    if options.expert_parallel:
        return {"expert": options.expert_parallel}
    return {dimension: getattr(options, f"{dimension}_parallel") for dimension in LAYOUT}


def layout_conflict(options: Namespace) -> str | None:
    """Return what is wrong with a layout, or None."""
    sizes = [getattr(options, f"{dimension}_parallel") for dimension in LAYOUT]
    if options.expert_parallel and max(sizes) > 1:
        return "--expert-parallel: experts are measured alone; drop the other --...-parallel"
    has_experts = options.shape == "qwen3-30b-a3b"
    if has_experts != bool(options.expert_parallel):
        return f"--shape {options.shape}: --expert-parallel and qwen3-30b-a3b only go together"
    return None


def useless_flag(options: Namespace) -> str | None:
    """Refuse a flag that would do nothing in this layout: its user expects something of it."""
    reduces_gradients = options.data_parallel * options.context_parallel > 1
    # By flag: whether it is set, and whether it does something.
    flags = {
        "--micro-batches": (options.micro_batches, not options.expert_parallel),
        "--sequence-parallel": (options.sequence_parallel, options.tensor_parallel > 1),
        "--no-overlap": (options.no_overlap, reduces_gradients),
        "--fp32-gradients": (options.fp32_gradients, reduces_gradients),
    }
    for flag, (is_set, has_effect) in flags.items():
        if is_set and not has_effect:
            return f"{flag} has no effect in this layout; leave it out"
    return None


def length_conflict(options: Namespace) -> str | None:
    """Return what is wrong with the number of iterations, or None."""
    shortest = max(untimed(graphs) for graphs in options.cuda_graphs)
    if options.iterations <= shortest:
        return f"--iterations {options.iterations}: give more than {shortest}, which are not timed"
    return None


def link_conflict(options: Namespace, used: list[str]) -> str | None:
    """Return what is wrong with the links, or None.

    Args:
        options: the command line.
        used: the dimensions with several ranks.
    """
    if used == ["pipeline"] and options.communicators > 1:
        return "--communicators: point-to-point messages have one; leave it out"
    for regime in options.regimes:
        if not is_regime(regime, options.ranks):
            return (
                f"--regimes {regime}: give {', '.join(REGIMES)} or, for an even number of ranks, a "
                "rate such as 10gbit"
            )
    return None


def is_regime(regime: str, ranks: int) -> bool:
    """Return whether a value of --regimes can be measured with so many ranks."""
    if regime in REGIMES:
        return True
    # Two nodes with half of the ranks each.
    return ranks % 2 == 0 and re.fullmatch("[1-9][0-9]*[mg]bit", regime) is not None


def traffic_of(options: Namespace, used: list[str]) -> tuple[str, ...]:
    """Return the ledger's classes of traffic that the table shows.

    Args:
        options: the command line.
        used: the dimensions with several ranks.
    """
    traffic = []
    for dimension in used:
        if dimension != "data":
            traffic += [f"{dimension[0]}p.forward", f"{dimension[0]}p.backward"]
    # Context-parallel ranks reduce gradients together with the data-parallel ones.
    if "data" in used or "context" in used:
        traffic += ["dp.gradient", "dp.weight"]
        typed = [*options.extra, *(setting.text for setting in options.settings)]
        if "--num-distributed-optimizer-instances" in " ".join(typed):
            traffic.append("dp.outer")
    return tuple(traffic)


def flags_of(options: Namespace) -> list:
    """Return what every run is started with: the model, and how it is spread over the ranks."""
    flags = MODEL.split()
    flags += SHAPES[options.shape].format(stages=options.pipeline_parallel).split()
    if options.fp32:
        flags.remove("--bf16")
    micro_batch_size = options.micro_batch_size
    if micro_batch_size is None:
        # The model's flags have one, a shape may have another behind it; the last one counts.
        last = len(flags) - 1 - flags[::-1].index("--micro-batch-size")
        micro_batch_size = int(flags[last + 1])
    flags += ["--micro-batch-size", micro_batch_size]
    # Experts are spread over data-parallel ranks.
    if options.expert_parallel:
        flags += ["--expert-model-parallel-size", options.expert_parallel]
        flags += ["--global-batch-size", 16, "--grad-reduce-in-bf16"]
        return flags
    flags += ["--tensor-model-parallel-size", options.tensor_parallel]
    flags += ["--pipeline-model-parallel-size", options.pipeline_parallel]
    if options.context_parallel > 1:
        flags += ["--context-parallel-size", options.context_parallel]
    # Four micro-batches a stage keep the pipeline's bubble below a fifth.
    micro_batches = options.micro_batches or 4 * options.pipeline_parallel
    flags += ["--global-batch-size", micro_batch_size * options.data_parallel * micro_batches]
    if options.sequence_parallel:
        flags.append("--sequence-parallel")
    if options.data_parallel * options.context_parallel > 1:
        flags.append("--use-distributed-optimizer")
        if not options.no_overlap:
            flags += ["--overlap-grad-reduce", "--overlap-param-gather"]
        if not options.fp32_gradients:
            flags.append("--grad-reduce-in-bf16")
    return flags


def untimed(graphs: str) -> int:
    """Return how many iterations of a block come before those that are timed."""
    if graphs == "none":
        return WARM_UP
    return WARM_UP + 1  # the capture


# Measuring
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchRow:
    """One setting, measured over one regime with one kind of graphs."""

    shape: str
    communicators: int
    ranks: int
    regime: str
    graphs: str
    codec: str
    """The setting as it was typed."""
    auto: bool
    """Whether --compression auto chose the codecs."""
    payloads: str
    """How payloads travelled, from the log; uncompressed runs have none."""
    flags: str
    """The command line of a run of this setting alone."""
    peak_memory: dict[str, float]
    """Bytes by kind, the largest of any rank."""
    milliseconds: float
    """Median of the timed iterations."""
    least: float
    most: float
    megabytes: dict[str, float]
    """What a rank sends in an iteration, by class of traffic."""
    iterations: int
    """How many were timed."""
    last_loss: float

    @property
    def cells(self) -> list[str]:
        """The first columns of the table."""
        memory = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in self.peak_memory.items())
        times = f"{self.milliseconds:.1f} ({self.least:.1f} - {self.most:.1f})"
        return [self.regime, self.graphs, self.codec, self.payloads, memory, times]


@dataclass(frozen=True)
class Order:
    """What the ranks of a run are told to do."""

    settings: list[list[str]]
    """Flags of each block."""
    before: int
    """Iterations before the first block: --compression auto checks its choice in them."""
    iterations: int
    """Iterations of a block."""
    communicators: int

    def to_json(self) -> str:
        """Return the order as the value of an environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> "Order":
        """Return the order that this rank was given."""
        return cls(**json.loads(os.environ[ORDER]))


def run(options: Namespace) -> None:
    """Measure every regime and print its table. The exit status is 1 where a row is missing."""
    rows: list[BenchRow] = []

    def keep(row: BenchRow) -> None:
        rows.append(row)
        print(*row.cells, sep=" | ", flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")

    for regime in options.regimes:
        for graphs in options.cuda_graphs:
            measure(options, regime, graphs, keep)
        rows_here = [row for row in rows if row.regime == regime]
        print(f"\n{table(rows_here, options.traffic, options.settings[0].text)}", flush=True)
    if len(rows) < len(options.regimes) * len(options.cuda_graphs) * len(options.settings):
        sys.exit(1)


def measure(options: Namespace, regime: str, graphs: str, keep: Callable[[BenchRow], None]) -> None:
    """Measure all settings over one regime with one kind of graphs. A setting that fails costs its
    row only.

    Args:
        options: the command line.
        regime: one of --regimes.
        graphs: one of --cuda-graphs.
        keep: called with each row as soon as it is measured.
    """
    batches = batches_of(options.dimension, options.settings, graphs)
    while batches:
        batch = batches.pop(0)
        finished = BatchRun(options, regime, graphs, batch, keep).run()
        # Settings after the one that failed run again, each by itself. If none finished, the
        # failure may be of the batch, such as an unknown codec anywhere in it: then all of them run
        # again.
        culprit_is_known = finished > 0 or len(batch) == 1
        retry_from = finished + 1 if culprit_is_known else 0
        batches = [[setting] for setting in batch[retry_from:]] + batches


def batches_of(
    dimension: str, settings: list[BenchSetting], graphs: str
) -> list[list[BenchSetting]]:
    """Return the settings, grouped by run: neighbours that differ only in their codecs share one.

    Args:
        dimension: the dimension whose codecs change.
        settings: in the order of the command line.
        graphs: the kind of CUDA graphs.
    """
    # Gradients and weights keep their codec for a whole run, and per-layer graphs what they have
    # captured.
    if dimension == "data" or graphs == "local":
        return [[setting] for setting in settings]
    return [list(batch) for _, batch in groupby(settings, lambda setting: setting.flags)]


def iterations_of_check(options: Namespace, graphs: str) -> int:
    """Return the most iterations that --compression auto takes to check its choice."""
    # Four iterations, then rounds. A round measures a block of everything compressed, one without
    # each dimension, and with tensor parallelism one of a safer codec and up to three in halves of a
    # micro-batch. In graphs a block has an iteration without one and a capture, too.
    rounds = 1
    block = 6
    if graphs == "none":
        rounds = 2
        block = 4
    sizes = [getattr(options, f"{dimension}_parallel") for dimension in DIMENSIONS]
    dimensions = sum(size > 1 for size in sizes)
    of_tensor_parallelism = 4 if options.tensor_parallel > 1 else 0
    return 4 + rounds * block * (1 + dimensions + of_tensor_parallelism)


def words_of(options: Namespace, setting: BenchSetting, flags: list) -> list:
    """Return the command line of a run of one setting alone.

    Args:
        options: the command line of this script.
        setting: the setting.
        flags: of every run.
    """
    return [*flags, *setting.words(options.dimension), *options.extra]


class BatchRun:
    """One run of pretrain_gpt.py that measures a batch of settings, a block of iterations each.

    Args:
        options: the command line.
        regime: the links.
        graphs: the kind of CUDA graphs.
        batch: settings that differ only in their codecs.
        keep: called with the row of each block that ends.
    """

    def __init__(
        self,
        options: Namespace,
        regime: str,
        graphs: str,
        batch: list[BenchSetting],
        keep: Callable[[BenchRow], None],
    ) -> None:
        self.options = options
        self.regime = regime
        self.graphs = graphs
        self.batch = batch
        self.keep = keep
        self.finished = 0
        """Blocks that have ended."""
        self.payloads: list[str] = []
        """How payloads travel, from the log."""
        self.flags = [*options.flags, *GRAPHS[graphs]]
        if graphs == "full_iteration" and "--overlap-param-gather" in self.flags:
            # Compressed weights are gathered outside of the graph.
            self.flags.remove("--overlap-param-gather")
        # The run is started with one of its settings, and changes to each block's. A lossless codec
        # comes first: whether training steps may be repeated is decided when the run starts.
        self.first = max(
            batch, key=lambda setting: ("lossless" in setting.text, setting.specs != ("none",))
        )
        self.is_auto = self.first.flags[: len(AUTO)] == AUTO
        self.before = iterations_of_check(options, graphs) if self.is_auto else 0

    def run(self) -> int:
        """Run the ranks and return how many settings were measured. An error is printed."""
        options = self.options
        with tempfile.TemporaryDirectory() as folder:
            self.report = Path(folder, "report")
            iterations = self.before + options.iterations * len(self.batch)
            words = words_of(options, self.first, self.flags)
            words += ["--train-iters", iterations, "--log-interval", 1]
            words += ["--compression-report", self.report]
            order = Order(
                settings=[setting.words(options.dimension) for setting in self.batch],
                before=self.before,
                iterations=options.iterations,
                communicators=options.communicators,
            )
            environment = {
                **REGIMES.get(self.regime, {}),
                **self.first.environment,
                ORDER: order.to_json(),
                COMMUNICATORS: str(options.communicators),
            }
            # A regime that NCCL's switches do not make is a rate of a link between two nodes.
            rate = "" if self.regime in REGIMES else self.regime
            try:
                torchrun(
                    options.ranks, __file__, words, self._read, options.limit, rate, **environment
                )
            except RuntimeError as error:
                where = f"{self.regime}, graphs {self.graphs}, {self._unfinished()}"
                print(f"error: {where}: {error}", file=sys.stderr, flush=True)
        return self.finished

    def _unfinished(self) -> str:
        """Return the settings that may have failed, for an error."""
        if self.finished == len(self.batch):
            return "at the end"
        if self.finished == 0:
            return "; ".join(setting.text for setting in self.batch)
        return self.batch[self.finished].text

    def _read(self, line: str) -> float | None:
        """Read a line of the run's output. Returns a new limit in seconds where a block has ended."""
        # Each transport says once how payloads travel.
        match = re.search("payloads travel (.*)", line)
        if match and match[1] not in self.payloads:
            self.payloads.append(match[1])
        # What --compression auto measured and chose is worth reading as it is.
        if self.is_auto and line.startswith(("compression auto:", " | ", " |--")):
            print(line, end="")
        match = re.search(f"{BLOCK} (.*)", line)
        if match is None:
            return None
        self.keep(self._row(json.loads(match[1])))
        self.finished += 1
        if self.finished == len(self.batch):
            return SECONDS_TO_END
        return self.options.limit

    def _row(self, peak_memory: dict[str, float]) -> BenchRow:
        """Return the row of the block that has just ended."""
        options = self.options
        setting = self.batch[self.finished]
        # The reporter writes a line for each iteration, before the ranks print that the block has
        # ended.
        lines = (self.report / "history.jsonl").read_text().splitlines()
        first = self.before + self.finished * options.iterations
        timed = lines[first + untimed(self.graphs) : first + options.iterations]
        return BenchRow(
            shape=options.shape,
            communicators=options.communicators,
            ranks=options.ranks,
            regime=self.regime,
            graphs=self.graphs,
            codec=setting.text,
            auto=self.is_auto,
            payloads="; ".join(self.payloads),
            flags=shlex.join(map(str, words_of(options, setting, self.flags))),
            peak_memory=peak_memory,
            **summary([json.loads(line) for line in timed], options.traffic),
        )


def summary(history: list[dict], traffic: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of ``BenchRow`` that come from the report's history of a block.

    Args:
        history: an object for each timed iteration.
        traffic: the classes whose bytes are wanted; those of the last iteration count.
    """
    times = [iteration["milliseconds_per_iteration"] for iteration in history]
    last = history[-1]
    megabytes = {}
    for name in traffic:
        tallies = last["bytes_per_iteration"].get(name, {}).values()
        # Compressed, exact and uncompressed messages of the class together.
        megabytes[name] = sum(tally["sent"] for tally in tallies) / 1e6
    return {
        "milliseconds": statistics.median(times),
        "least": min(times),
        "most": max(times),
        "megabytes": megabytes,
        "iterations": len(times),
        "last_loss": next(iter(last["losses"].values())),
    }


def is_uncompressed_in_halves(row: BenchRow) -> bool:
    """Return whether a row is that of interleaved halves without a codec."""
    setting = parse_setting(row.codec)
    return setting.specs == ("none",) and setting.flags == HALVES


def speed_up(row: BenchRow, base: BenchRow | None) -> str:
    """Return how many times as fast a row is as another; the range compares the extremes of both.

    Args:
        row: the faster one, as a rule.
        base: what it is compared with; None: there is nothing.
    """
    if base is None:
        return "-"
    median = base.milliseconds / row.milliseconds
    low = base.least / row.most
    high = base.most / row.least
    return f"{median:.2f} ({low:.2f} - {high:.2f})"


def table(rows: list[BenchRow], traffic: tuple[str, ...], baseline: str) -> str:
    """Return a markdown table.

    Args:
        rows: what was measured.
        traffic: classes of traffic, a column each.
        baseline: the setting that speed-ups are against, with the same regime and graphs. Where it
            has no row, there is no speed-up. Uncompressed halves are a second baseline, where they
            have a row.
    """
    if not rows:
        return "No rows."
    header = ["regime", "graphs", "codec", "payloads travel", "peak GB", "ms (least - most)"]
    header.append("speed-up (range)")
    with_halves = any(is_uncompressed_in_halves(row) for row in rows)
    if with_halves:
        header.append("against uncompressed halves")
    lines = [[*header, *(f"{name} MB" for name in traffic), "loss"]]
    for row in rows:
        same_mode = [
            base for base in rows if (base.regime, base.graphs) == (row.regime, row.graphs)
        ]
        usual = next((base for base in same_mode if base.codec == baseline), None)
        cells = [*row.cells, speed_up(row, usual)]
        if with_halves:
            halves = next((base for base in same_mode if is_uncompressed_in_halves(base)), None)
            cells.append(speed_up(row, halves))
        megabytes = [f"{row.megabytes[name]:.1f}" for name in traffic]
        lines.append([*cells, *megabytes, f"{row.last_loss:.4f}"])
    text = "\n".join(markdown(*lines))
    return f"{text}\nCommunicators of every message: {rows[0].communicators}."


# The ranks
# ----------------------------------------------------------------------------------------------


class BlockRules(dict):
    """The policy's rules: those of the block that the current iteration is in.

    Args:
        launched: the rules that the run was started with.
        blocks: the rules of each block.
        length: iterations of a block.
        iteration: returns the current iteration.
    """

    def __init__(
        self, launched: dict, blocks: list[dict], length: int, iteration: Callable[[], int]
    ) -> None:
        super().__init__(launched)
        # The policy asks for a rule at every message, so a block's rules hold as soon as it begins.
        self.blocks = blocks
        self.length = length
        self.iteration = iteration

    def get(self, traffic: str, default=None):
        """Return the rule that a class of traffic has now."""
        # Behind the last block the run still has to end.
        block = min(self.iteration() // self.length, len(self.blocks) - 1)
        return self.blocks[block].get(traffic, default)


def end_block() -> None:
    """Print the block's peak memory over all ranks, and begin the next block without a captured
    graph."""
    import torch
    import torch.distributed as dist
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    from megatron.compression import graphs
    from megatron.compression.auto.plan import largest
    from megatron.compression.report.reporter import peak_memory

    of_this_rank = peak_memory()
    of_all_ranks = dict(zip(of_this_rank, largest(*of_this_rank.values()), strict=True))
    if dist.get_rank() == dist.get_world_size() - 1:  # this rank has written the history
        print(BLOCK, json.dumps(of_all_ranks), flush=True)
    if torch.cuda.is_available():
        # The next block's codecs need a capture of their own, and its memory is measured from here.
        graphs.reset(FullCudaGraphWrapper(None))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def split_uncompressed(communicators: int) -> None:
    """Split uncompressed messages over as many communicators as payloads have."""
    import _split
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
    ]
    # Two of them may have the same ranks.
    distinct = {}
    for group in groups:
        if group.size() > 1:
            distinct[tuple(dist.get_process_group_ranks(group))] = group
    _split.split_over(distinct.values(), communicators)


def worker() -> None:
    """Run one rank."""
    order = Order.from_environment()

    def change(args: Namespace, session: Any, model_config: Any) -> None:
        """Let the run change its setting with each block, and print when a block ends.

        Args:
            args: Megatron's arguments.
            session: the compressed run.
            model_config: the model that Megatron is going to build.
        """
        policy = session.run.policy
        policy.meter.interval = 0  # the error meter encodes messages too, which would be timed
        iteration_ends = session.iteration_ends

        def iteration_and_block_end(iteration: int, losses: dict) -> None:
            iteration_ends(iteration, losses)
            measured = iteration - order.before
            if measured > 0 and measured % order.iterations == 0:
                end_block()

        session.iteration_ends = iteration_and_block_end
        if len(order.settings) > 1:
            blocks = [_launch.rules_of(args, words) for words in order.settings]
            policy.rules = BlockRules(policy.rules, blocks, order.iterations, policy.iteration)
        if order.communicators > 1:
            import _split

            def before_building(chunks: list) -> list:
                split_uncompressed(order.communicators)
                return chunks

            # The collectives are replaced now, before anything imports them by name. The groups are
            # known only when the model is built.
            _split.install()
            # First of the hooks: --compression auto times messages in a later one.
            model_config.pre_wrap_hooks.insert(0, before_building)

    _launch.train(change)


if __name__ == "__main__":
    if ORDER in os.environ:
        worker()
    else:
        run(parse())
