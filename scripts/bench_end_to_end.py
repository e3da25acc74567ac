"""Iteration time of a model with and without compression, by link, on one host: any shape, any layout.

    python scripts/bench_end_to_end.py --tensor-parallel 4 --json end_to_end.json
    python scripts/bench_end_to_end.py --shape 1.3b --tensor-parallel 2 --pipeline-parallel 2 \\
        --data-parallel 2 --codecs none "none --compression taco-paper" "none --compression auto" none
    python scripts/bench_end_to_end.py --shape qwen3-30b-a3b --expert-parallel 2 --communicators 2
    python scripts/bench_end_to_end.py --shape 1.3b --data-parallel 4 --micro-batches 1 --regimes ethernet \\
        --codecs none "sdp4bit MEGATRON_COMPRESSION_NODE_SIZE=1" tagc

A codec of --codecs is that of the first of these with more than one rank: expert, tensor, context,
pipeline, data; flags after it name the others' ("taco --dp-compression sdp4bit"). Shapes are whole models,
but for 1.75b (8 layers of 4096), qwen3-30b-a3b (4 of 48) and thin (one layer of 2048 a stage). Flags that
are not the script's own go to pretrain_gpt.py, such as --num-layers. Under data and context parallelism
both of Megatron's overlaps are on and gradients are bf16. MEGATRON_COMPRESSION_NODE_SIZE=n after a setting
counts n ranks of this host as a node: one is what ethernet stands for. A CAAT-Net is another model: compare
times, not losses.

A regime is a kind of link, by NCCL's own switches:

    nvlink      as it is
    pcie        NCCL_P2P_DISABLE=1: through host memory
    ethernet    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1: TCP
    10gbit      any rate: TCP between two nodes that two_nodes.sh makes of this host; needs root, ip and tc

Settings that differ in their codecs alone share a run where the dimension allows it, a block of iterations
each. Both sides of every comparison use as many communicators: the uncompressed collectives are split as
payloads are, see _split.py. "none --compression auto" decides in a run of its own, and is timed after that.

--cuda-graphs full_iteration runs both sides of every comparison in CUDA graphs, "none full_iteration" eager
too; what comes before a replay is not timed. Per-layer graphs (local) are captured once, so that each setting
is a run of its own. A row is printed and written to --json when its block ends.
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
from itertools import groupby
from pathlib import Path

import _launch
from _launch import FLAGS, SETTINGS_HELP, BenchSetting, parse_setting, torchrun

from megatron.compression.huggingface.models import MODELS, as_arguments, megatron_flags
from megatron.compression.report.render import table as markdown

MODEL = """--transformer-impl local --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4
    --attention-dropout 0 --hidden-dropout 0 --lr 1e-5 --mock-data --tokenizer-type NullTokenizer --split
    100,0,0 --eval-iters 0 --eval-interval 100000 --no-create-attention-mask-in-dataloader"""
REGIMES: dict[str, dict[str, str]] = {
    "nvlink": {},
    "pcie": {"NCCL_P2P_DISABLE": "1"},
    "ethernet": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
WARM_UP = 3
"""Iterations of a block that are not timed; in CUDA graphs the capture follows them."""
_GRAPHS = [
    "--no-check-for-nan-in-loss-and-grad",
    "--cuda-graph-warmup-steps",
    WARM_UP,
    "--cuda-graph-impl",
]
GRAPHS = {"none": [], "full_iteration": [*_GRAPHS, "full_iteration"], "local": [*_GRAPHS, "local"]}
"""What megatron-core needs for a kind of CUDA graphs."""
AUTO = ("--compression", "auto")
AT_THE_END = 60
"""Seconds that a run has to end in after its last row."""
_ORDER, _BLOCK = "BENCH_ORDER", "bench block"
_GPT = "--num-layers {} --hidden-size {} --num-attention-heads {} --vocab-size 50257 --bf16"


def _qwen(name: str, **changed: str) -> str:
    """The flags of a model, its vocabulary padded by Megatron: a --vocab-size after the options counts."""
    flags = megatron_flags(MODELS[name]) | {
        f"--{flag.replace('_', '-')}": v for flag, v in changed.items()
    }
    del flags["--padded-vocab-size"]
    return " ".join(as_arguments(flags)) + " --bf16"


SHAPES = {
    "350m": _GPT.format(24, 1024, 16) + " --micro-batch-size 8",
    "1.3b": _GPT.format(24, 2048, 16),
    "1.75b": "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --bf16",
    "2.7b": _GPT.format(32, 2560, 32),
    "6.7b": _GPT.format(32, 4096, 32),
    "13b": _GPT.format(40, 5120, 40),
    "qwen2.5-7b": _qwen("2.5-7b") + " --seq-length 512 --micro-batch-size 8",
    # Four of 48 layers; the vocabulary is smaller too, since its product is not what is compared.
    "qwen3-30b-a3b": _qwen(
        "3-30b-a3b", num_layers="4", vocab_size="32000", moe_aux_loss_coeff="0.01"
    )
    + " --moe-token-dispatcher-type alltoall --moe-router-dtype fp32",
    "thin": "--num-layers {stages} --hidden-size 2048 --num-attention-heads 16 --vocab-size 8191"
    " --untie-embeddings-and-output-weights --bf16",
}
"""Sequences of 2048 in micro-batches of 4 unless a shape says otherwise."""
LAYOUT = ("tensor", "context", "pipeline", "data")
CODECS = {
    "tensor": ["none", "taco", "int8", "int6", "none"],
    "expert": ["none", "int8", "int6", "none"],
    "context": ["none", "int8", "int6", "none"],
    "pipeline": ["none", "pipeline-6bit", "tah-quant", "int8", "none"],
    "data": ["none", "sdp4bit", "sdp4bit MEGATRON_COMPRESSION_NODE_SIZE=1"],
}


def flags_of(options: Namespace) -> list:
    """What every run is started with: the model, and how it is spread."""
    shape = SHAPES[options.shape].format(stages=options.pipeline_parallel).split()
    flags = [*MODEL.split(), *(word for word in shape if not (options.fp32 and word == "--bf16"))]
    sizes = [flags[place + 1] for place, word in enumerate(flags) if word == "--micro-batch-size"]
    micro = options.micro_batch_size or int(sizes[-1])  # the last one wins
    flags += ["--micro-batch-size", micro]
    if options.expert_parallel:
        flags += ["--expert-model-parallel-size", options.expert_parallel]
        return [*flags, "--global-batch-size", 16, "--grad-reduce-in-bf16"]
    tensor, context, pipeline, data = (getattr(options, f"{name}_parallel") for name in LAYOUT)
    flags += ["--tensor-model-parallel-size", tensor, "--pipeline-model-parallel-size", pipeline]
    flags += ["--context-parallel-size", context] if context > 1 else []
    flags += ["--global-batch-size", micro * data * (options.micro_batches or 4 * pipeline)]
    flags += ["--sequence-parallel"] if options.sequence_parallel else []
    if data * context > 1:
        flags += ["--use-distributed-optimizer"]
        flags += [] if options.no_overlap else ["--overlap-grad-reduce", "--overlap-param-gather"]
        flags += [] if options.fp32_gradients else ["--grad-reduce-in-bf16"]
    return flags


def parse(words: list[str] | None = None) -> Namespace:
    """The command line; ``extra`` is not the script's, ``flags`` a run's, ``traffic`` the table's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    what = f"settings, one after the other: {SETTINGS_HELP}"
    add("--codecs", dest="settings", nargs="+", type=parse_setting, help=what)
    add("--regimes", nargs="+", default=list(REGIMES))
    add(
        "--communicators",
        type=int,
        default=1,
        help="over which each message is sent, compressed or not",
    )
    add(
        "--iterations",
        type=int,
        default=13,
        help=f"of a block; {WARM_UP} are not timed, 4 in graphs",
    )
    add("--cuda-graphs", nargs="+", choices=GRAPHS, default=["none"], help="none is eager")
    add("--json", type=argparse.FileType("a"), help="write the rows here")
    add("--limit", type=float, default=300, help="seconds for a row, its run's start included")
    add("--shape", choices=SHAPES, help="default: 1.75b, with --expert-parallel qwen3-30b-a3b")
    add("--tensor-parallel", dest="ranks", type=int)
    add("--context-parallel", type=int, default=1)
    add("--pipeline-parallel", type=int, default=1)
    add("--data-parallel", type=int, default=1)
    add("--expert-parallel", type=int, default=0, help="ranks between which experts are spread")
    add("--sequence-parallel", action="store_true")
    add(
        "--micro-batches", type=int, default=0, help="of an iteration and rank (default: 4 a stage)"
    )
    add("--micro-batch-size", type=int, help="sequences (default: the shape's)")
    add("--no-overlap", action="store_true", help="data parallelism without Megatron's overlaps")
    add("--fp32", action="store_true", help="an fp32 model: messages twice as large")
    add("--fp32-gradients", action="store_true", help="Megatron's default under data parallelism")
    options, options.extra = parser.parse_known_args(words)
    options.shape = options.shape or ("qwen3-30b-a3b" if options.expert_parallel else "1.75b")
    alone = options.context_parallel * options.pipeline_parallel * options.data_parallel == 1
    options.tensor_parallel = options.ranks or (4 if alone and not options.expert_parallel else 1)
    sizes = {name: getattr(options, f"{name}_parallel") for name in LAYOUT}
    if options.expert_parallel:
        if max(sizes.values()) > 1:
            parser.error(
                "--expert-parallel: experts are measured alone; drop the other --...-parallel"
            )
        sizes = {"expert": options.expert_parallel}
    if (options.shape == "qwen3-30b-a3b") != bool(options.expert_parallel):
        parser.error(
            f"--shape {options.shape}: --expert-parallel and qwen3-30b-a3b go together alone"
        )
    idle = ["micro_batches"] * bool(options.expert_parallel)
    idle += ["sequence_parallel"] * (options.tensor_parallel == 1)
    idle += ["no_overlap", "fp32_gradients"] * (
        options.data_parallel * options.context_parallel == 1
    )
    for name in idle:
        if getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} has no effect in this layout; leave it out")
    spread = [name for name, size in sizes.items() if size > 1] or ["tensor"]
    options.dimension, options.ranks = spread[0], math.prod(sizes.values())
    if options.iterations <= (least := max(map(untimed, options.cuda_graphs))):
        parser.error(
            f"--iterations {options.iterations}: give more than {least}, which are not timed"
        )
    if spread == ["pipeline"] and options.communicators > 1:
        parser.error("--communicators: point-to-point messages have one; leave it out")
    for one in options.regimes:
        if one not in REGIMES and (
            options.ranks % 2 or not re.fullmatch("[1-9][0-9]*[mg]bit", one)
        ):
            parser.error(
                f"--regimes {one}: give {', '.join(REGIMES)} or, for even ranks, a rate as 10gbit"
            )
    options.settings = options.settings or [parse_setting(text) for text in CODECS[spread[0]]]
    traffic = [
        f"{one[0]}p.{way}" for one in spread if one != "data" for way in ("forward", "backward")
    ]
    given = " ".join([*options.extra, *(setting.text for setting in options.settings)])
    outer = ["dp.outer"] * ("--num-distributed-optimizer-instances" in given)
    traffic += ["dp.gradient", "dp.weight", *outer] if {"data", "context"} & {*spread} else []
    options.traffic, options.flags = tuple(traffic), flags_of(options)
    return options


def untimed(graphs: str) -> int:
    """Iterations of a block before those that are timed."""
    return WARM_UP + (graphs != "none")


def run(options: Namespace) -> None:
    """Run every regime and print the table; exit status 1 where a row is missing."""
    rows: list[dict] = []

    def keep(row: dict) -> None:
        rows.append(row)
        print(*_cells(row), sep=" | ", flush=True)
        if options.json:
            Path(options.json.name).write_text(json.dumps(rows, indent=1) + "\n")

    for regime in options.regimes:
        for graphs in options.cuda_graphs:
            waiting = launches(options.dimension, options.settings, graphs)
            while waiting:
                together = waiting.pop(0)
                made = _run(options, regime, graphs, together, keep)
                sure = made > 0 or len(together) == 1  # which one failed; else each runs by itself
                waiting[:0] = [[one] for one in together[made + sure :]]
        mine = [row for row in rows if row["regime"] == regime]
        print(f"\n{table(mine, options.traffic, options.settings[0].text)}", flush=True)
    if len(rows) < len(options.regimes) * len(options.cuda_graphs) * len(options.settings):
        sys.exit(1)


def launches(dimension: str, settings: list[BenchSetting], graphs: str) -> list[list[BenchSetting]]:
    """Neighbours that differ in their codecs alone; gradients and weights keep theirs for a whole run, and
    per-layer graphs what they have captured."""
    if dimension == "data" or graphs == "local":
        return [[setting] for setting in settings]
    return [list(together) for _, together in groupby(settings, lambda setting: setting.flags)]


def _run(
    options: Namespace, regime: str, graphs: str, settings: list[BenchSetting], keep: Callable
) -> int:
    """Start a run, keep a row for each block that ends; how many did."""
    # One that is lossless first: whether its training steps may be repeated is decided when the run starts.
    first = max(settings, key=lambda one: ("lossless" in one.text, one.specs != ("none",)))
    flags = [*options.flags, *GRAPHS[graphs]]
    if graphs == "full_iteration" and "--overlap-param-gather" in flags:
        flags.remove("--overlap-param-gather")  # compressed weights are gathered outside the graph
    words, auto = _words(options, first, flags), first.flags[: len(AUTO)] == AUTO
    before = checked_in(options, graphs) if auto else 0
    words += ["--train-iters", before + options.iterations * len(settings), "--log-interval", 1]
    order = {"settings": [one.words(options.dimension) for one in settings], "before": before}
    order |= {key: getattr(options, key) for key in ("iterations", "communicators", "dimension")}
    made, payloads = 0, ""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")

        def show(line: str) -> float | None:
            nonlocal made, payloads
            if (found := re.search("payloads travel (.*)", line)) and found[1] not in payloads:
                payloads += f"; {found[1]}" if payloads else found[1]
            if auto and line.startswith(("compression auto:", " | ", " |--")):
                print(line, end="")
            if (found := re.search(f"{_BLOCK} (.*)", line)) is None:
                return None
            history = [
                json.loads(one) for one in (report / "history.jsonl").read_text().splitlines()
            ]
            begin = before + made * options.iterations
            lines = history[begin + untimed(graphs) : begin + options.iterations]
            setting = settings[made]
            row = {key: getattr(options, key) for key in ("shape", "communicators", "ranks")}
            row |= {"regime": regime, "graphs": graphs, "codec": setting.text}
            row |= {"auto": auto, "payloads": payloads}
            row |= {"flags": shlex.join(map(str, _words(options, setting, flags)))}
            keep(row | summary(lines, options.traffic) | {"peak_memory": json.loads(found[1])})
            made += 1
            return AT_THE_END if made == len(settings) else options.limit

        environment = {**REGIMES.get(regime, {}), _ORDER: json.dumps(order), **first.environment}
        rate = "" if regime in REGIMES else regime
        environment["MEGATRON_COMPRESSION_COMMUNICATORS"] = str(options.communicators)
        words += ["--compression-report", report]
        try:
            torchrun(options.ranks, __file__, words, show, options.limit, rate, **environment)
        except RuntimeError as error:
            where = (
                "; ".join(one.text for one in settings[made : made + 1 if made else None])
                or "at the end"
            )
            print(
                f"error: {regime}, graphs {graphs}, {where}: {error}", file=sys.stderr, flush=True
            )
    return made


def checked_in(options: Namespace, graphs: str) -> int:
    """Iterations in which --compression auto checks its choice at most, and those before them."""
    rounds, block = (2, 4) if graphs == "none" else (1, 4 + untimed(graphs))
    return 4 + rounds * block * (
        1 + sum(getattr(options, f"{name}_parallel") > 1 for name in FLAGS)
    )


def _words(options: Namespace, setting: BenchSetting, flags: list[str]) -> list:
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


def _cells(row: dict) -> list[str]:
    memory = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in row["peak_memory"].items())
    times = f"{row['milliseconds']:.1f} ({row['least']:.1f} - {row['most']:.1f})"
    return [row["regime"], row["graphs"], row["codec"], row["payloads"], memory, times]


def table(rows: list[dict], traffic: tuple[str, ...], first: str) -> str:
    """Markdown; speed-ups against the ``first`` setting in each regime and kind of graphs, of medians and of
    the extremes; none where that failed."""
    columns = ["regime", "graphs", "codec", "payloads travel", "peak GB", "ms (least - most)"]
    lines = [[*columns, "speed-up (range)", *(f"{name} MB" for name in traffic), "loss"]]
    for row in rows:
        cells = [*_cells(row), "-"]
        same = {"codec": first, "regime": row["regime"], "graphs": row["graphs"]}
        if base := next((one for one in rows if same.items() <= one.items()), None):
            speed_up = base["milliseconds"] / row["milliseconds"]
            least, most = base["least"] / row["most"], base["most"] / row["least"]
            cells[-1] = f"{speed_up:.2f} ({least:.2f} - {most:.2f})"
        cells += [f"{row[f'{name} MB']:.1f}" for name in traffic]
        lines.append([*cells, f"{row['last_loss']:.4f}"])
    text = "\n".join(markdown(*lines))
    return (
        f"{text}\nCommunicators of every message: {rows[0]['communicators']}."
        if rows
        else "No rows."
    )


class BlockRules(dict):
    """The policy's rules, those of the block that the iteration is in."""

    def __init__(self, launched: dict, blocks: list[dict], length: int, iteration) -> None:
        super().__init__(launched)
        self.blocks, self.length, self.iteration = blocks, length, iteration

    def get(self, traffic: str, default=None):
        """The rule of a traffic class now."""
        block = min(self.iteration() // self.length, len(self.blocks) - 1)
        return self.blocks[block].get(traffic, default)


def end_block() -> None:
    """Print the block's peak memory over all ranks, and begin the next one: without a captured graph."""
    import torch
    import torch.distributed as dist
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    from megatron.compression import graphs
    from megatron.compression.auto.plan import largest
    from megatron.compression.report.reporter import peak_memory

    own = peak_memory()
    peak = dict(zip(own, largest(*own.values()), strict=True))
    if dist.get_rank() == dist.get_world_size() - 1:  # which has written the history
        print(_BLOCK, json.dumps(peak), flush=True)
    if torch.cuda.is_available():
        graphs.reset(FullCudaGraphWrapper(None))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def worker() -> None:
    """One rank of a run."""
    order = json.loads(os.environ[_ORDER])

    def change(args, compression, model_config) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        compression.run.policy.meter.interval = 0  # what it encodes would be timed too
        after_iteration = compression.on_training_log

        def on_training_log(iteration: int, log_interval: int) -> None:
            after_iteration(iteration, log_interval)
            if (
                iteration > order["before"]
                and (iteration - order["before"]) % order["iterations"] == 0
            ):
                end_block()

        compression.on_training_log = on_training_log
        if len(order["settings"]) > 1:
            blocks = [_launch.rules_of(args, words) for words in order["settings"]]
            policy = compression.run.policy
            policy.rules = BlockRules(policy.rules, blocks, order["iterations"], policy.iteration)
        if order["communicators"] > 1:
            import _split

            def before_building(chunks: list) -> list:
                tensor = parallel_state.get_tensor_model_parallel_group()
                data = parallel_state.get_data_parallel_group(with_context_parallel=True)
                context = parallel_state.get_context_parallel_group()
                groups = tensor, data, context, parallel_state.get_expert_model_parallel_group()
                groups = {
                    tuple(dist.get_process_group_ranks(one)): one
                    for one in groups
                    if one.size() > 1
                }
                _split.split_over(groups.values(), order["communicators"])
                return chunks

            _split.install()
            model_config.pre_wrap_hooks.insert(0, before_building)  # before auto times anything

    _launch.train(change)


if __name__ == "__main__":
    if _ORDER in os.environ:
        worker()
    else:
        run(parse(sys.argv[1:]))
