"""A prediction of what compression would bring on a cluster. Nothing is run, and no GPU is needed.

    python -m megatron.compression.auto.estimate --gpus 64 --inter 12.5:20 -- <flags of your launch script>

Messages and what they cost an iteration are those of ``--compression auto`` (messages.py), which measures.
Here a message takes its bytes over the link's bandwidth plus latency, a compressed one its payloads' bytes
and its codec's kernels, at rates measured on an H200. Computation is Megatron's count of operations at
``--gemm-tflops``. The host's time is a column of its own, and decides where it is larger. Contention between
jobs, memory, slow nodes and the input pipeline are not modelled.
"""

import argparse
import contextlib
import functools
import io
import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.compression.auto.measurement import dimension_config
from megatron.compression.auto.messages import MessageKind, workload
from megatron.compression.auto.plan import BUDGET, aligned, choose
from megatron.compression.codecs import Codec
from megatron.compression.codecs.recipes import RECIPES, Recipe
from megatron.compression.communication.ledger import bytes_sent
from megatron.compression.communication.policy import Rule
from megatron.compression.errors import InputError, OneLineParser, require_extra
from megatron.compression.flags import add_flags, resolve
from megatron.compression.names import PARALLELISMS
from megatron.compression.startup.checks import megatrons_own_check

MOST_GPUS = 16384
"""Of the picture."""
KERNELS = {
    **{"int": (0.91, 0.99, 0.35), "outliers": (1.28, 1.06, 0.38), "normalize": (3.18, 0.99, 0.35)},
    **{"sdp4bit": (1.39, 1.0, 0.5), "taco": (0.91, 1.0, 0.49), "lossless": (1.83, 1.27, 1.43)},
    "tah-quant": (1.64, 1.6, 1.6),
}
"""Encode, decode, sum of each sender's value: us for 2^20 values on an H200 (docs/results/kernels.md)."""
LAUNCH = 5e-6
"""Seconds of a kernel, however small."""
HOST_LAYER, HOST_MESSAGE = 5.3e-3, 0.3e-3
"""Seconds that a host needs to launch a layer of a micro-batch, forward and backward, and beyond that a
compressed message: two hosts that launch slowly (docs/results/iterations.md, "shapes of models")."""


@dataclass(frozen=True)
class Speed:
    """Of one GPU's share of a link."""

    bandwidth: float
    """Bytes a second that the GPU sends."""
    latency: float
    """Seconds."""

    def seconds(self, nbytes: float) -> float:
        """For so many bytes."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


SPEEDS = {
    "nvlink": Speed(340e9, 20e-6),
    "pcie": Speed(25e9, 20e-6),
    "ethernet": Speed(4.3e9, 200e-6),
}
"""Collectives of NCCL between four H200 of one host; pcie through host memory, ethernet over TCP
(docs/results/collectives.md)."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs."""

    per_node: int
    """GPUs of a node."""
    intra: Speed
    inter: Speed
    """Between nodes: a GPU's share of its node's adapters."""


@dataclass(frozen=True)
class Group:
    """Ranks of a process group, ``local`` of them on each node."""

    ranks: int
    local: int
    cluster: Cluster

    @classmethod
    def of(cls, message: MessageKind, args: Namespace, cluster: Cluster) -> "Group":
        """The group that a message is sent in; ranks are numbered as Megatron numbers them."""
        tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
        experts, sharing = args.expert_model_parallel_size, args.expert_tensor_parallel_size
        inside = args.data_parallel_size * context // args.num_distributed_optimizer_instances
        tokens = message.operation in ("gather_tokens", "sum_tokens")
        ranks, stride = {
            "tensor_parallel": (sharing if tokens else tensor, 1),
            "context_parallel": (context, tensor),
            "data_parallel": (inside, tensor),
            "outer": (args.num_distributed_optimizer_instances, tensor * inside),
            "expert_parallel": (experts * sharing, 1) if tokens else (experts, sharing),
            "pipeline_parallel": (2, args.world_size // args.pipeline_model_parallel_size),
        }["outer" if message.operation == "outer" else message.dimension]
        return cls(ranks, math.gcd(ranks, max(1, cluster.per_node // stride)), cluster)

    def seconds(self, operation: str, nbytes: float) -> float:
        """A collective over a whole buffer of ``nbytes``; over nodes the slower of both hops counts."""
        cluster, nodes = self.cluster, self.ranks // self.local
        if nodes == 1:
            return cluster.intra.seconds(bytes_sent(operation, int(nbytes), self.ranks))
        if operation == "send":
            return cluster.inter.seconds(nbytes)
        if operation == "all_to_all":
            inside = (self.local - 1) / self.ranks * nbytes
            outside = (self.ranks - self.local) / self.ranks * nbytes
        else:
            inside = bytes_sent(operation, int(nbytes), self.local)
            outside = bytes_sent(operation, int(nbytes), nodes) / self.local
        return max(cluster.intra.seconds(inside), cluster.inter.seconds(outside))

    def compressed(self, message: MessageKind, codec: Codec, sharded: bool) -> float:
        """Seconds of a message through a codec."""
        operation, values, dtype = (
            message.sent_as(sharded),
            torch.Size(message.shape).numel(),
            message.dtype,
        )
        first, second = codec.hops
        if message.operation == "gradients":
            return self._gradients(values, dtype, codec, sharded)

        def leg(way: str, hop: Codec, *coded: float) -> float:
            return self.seconds(way, payload(hop, values, dtype)) + kernels(hop, *coded)

        if operation not in ("all_reduce", "reduce_scatter"):
            encoded = values / self.ranks if operation == "all_gather" else values
            return leg(operation, second, encoded, values, 0)
        if operation == "all_reduce" and self.ranks == 2 and codec.one_exchange:
            return self._between_two(first, values, dtype)
        scattered = leg("all_to_all", first, values, 0, values)
        return scattered + (
            leg("all_gather", second, 0, values, 0) if operation == "all_reduce" else 0.0
        )

    def _between_two(self, codec: Codec, values: int, dtype: torch.dtype) -> float:
        """A sum of two ranks in one exchange."""
        both = payload(codec, 2 * values, dtype)
        return self.seconds("all_gather", both) + kernels(codec, values, 0, 2 * values)

    def _gradients(self, values: int, dtype: torch.dtype, codec: Codec, sharded: bool) -> float:
        """A sum inside the node and then one between nodes, each with its own codec of the pair."""
        (intra, inter), nodes = codec.hops, self.ranks // self.local
        if self.ranks == 2 and not sharded:
            return self._between_two(inter if nodes > 1 else intra, values, dtype)
        found = 0.0
        for hop, speed, ranks, part in (
            (intra, self.cluster.intra, self.local, values),
            (inter, self.cluster.inter, nodes, values // self.local),
        ):
            if ranks > 1:
                found += speed.seconds(bytes_sent("all_to_all", payload(hop, part, dtype), ranks))
                found += kernels(hop, part, 0, part)
        if not sharded:
            last = inter if nodes > 1 else intra
            found += self.seconds("all_gather", payload(last, values, dtype)) + kernels(
                last, 0, values, 0
            )
        return found


@functools.cache
def payload(codec: Codec, values: int, dtype: torch.dtype) -> int:
    """Bytes of the payloads of so many values, in rows long enough for padding not to matter."""
    shape = (1024, 1, 1024) if codec.sees_shape else (2**20,)
    return codec.message_bytes(shape, dtype) * values // 2**20


def kernels(codec: Codec, encoded: float, decoded: float, summed: float) -> float:
    """Seconds of a codec's kernels over so many values each."""
    name = codec.name.partition(":")[0]
    if getattr(codec, "normalize", "none") != "none":
        name = "normalize"
    elif getattr(codec, "outliers", False):
        name = "outliers"
    elif name.startswith("int"):
        name = "int"
    rates, values = KERNELS.get(name, KERNELS["lossless"]), (encoded, decoded, summed)
    return sum(
        LAUNCH + us * 1e-6 * many / 2**20 for us, many in zip(rates, values, strict=True) if many
    )


Row = tuple[str, tuple[float, float], float | None]
"""What to type; seconds of an iteration and of its host; cost in loss (percent; None: not known)."""


class Estimate:
    """Predicted iterations of one layout of ``args.world_size`` GPUs, each with ``gemm_rate`` FLOP/s."""

    def __init__(self, args: Namespace, cluster: Cluster, gemm_rate: float) -> None:
        from megatron.training.training import num_floating_point_operations

        self.args, self.cluster, self.config = args, cluster, resolve(args)
        flops = num_floating_point_operations(args, args.global_batch_size)
        self.work = workload(args, parameters(args), flops, gemm_rate)
        self.uncompressed = self.seconds({})[0]

    def seconds(self, rules: Mapping[str, Rule]) -> tuple[float, float]:
        """An iteration whose messages follow ``rules`` (by traffic class; others go uncompressed), and the
        host's time to launch it."""
        args, times, sharded = self.args, {}, self.args.use_distributed_optimizer
        micro = args.global_batch_size / args.micro_batch_size / args.data_parallel_size
        host = HOST_LAYER * args.num_layers / args.pipeline_model_parallel_size * micro
        for message in self.work.messages:
            group, rule = Group.of(message, self.args, self.cluster), rules.get(message.traffic)
            codec = (
                getattr(rule.codec, "codec", rule.codec) if rule else None
            )  # of a gradient compressor
            if codec is None:
                times[message] = group.seconds(message.sent_as(sharded), message.nbytes)
            else:
                times[message] = group.compressed(message, codec, sharded)
                host += HOST_MESSAGE * message.count
        return self.work.seconds(times), host

    def rows(self, budget: float, named: bool = False) -> list[Row]:
        """Of the table, the last one what ``auto`` would choose within a budget (percent of loss); ``named``:
        only recipes with a name have a row."""
        rows: list[Row] = [("uncompressed", self.seconds({}), 0.0)]
        gains: dict[str, dict[Recipe, float]] = {}
        rules: dict[tuple[str, Recipe], Mapping[str, Rule]] = {}
        for dimension in {message.dimension: None for message in self.work.messages}:
            for recipe in RECIPES[dimension]:
                try:
                    own = dimension_config(self.config, dimension, recipe, self.args).rules(0)
                except InputError:  # Megatron's flags do not allow it
                    continue
                seconds, rules[dimension, recipe] = self.seconds(own), own
                gains.setdefault(dimension, {})[recipe] = 1 - seconds[0] / self.uncompressed
                if recipe.named or not named:
                    rows.append((flag(dimension, recipe), seconds, recipe.loss))
        chosen = choose(gains, budget)
        together = {name: rule for one in chosen.items() for name, rule in rules[one].items()}
        text = " ".join(flag(*one) for one in chosen.items()) or "nothing"
        loss = sum(one.loss for one in chosen.values())
        rows.append((f"within {budget:g} %: {text}", self.seconds(together), loss))
        return rows


def flag(dimension: str, recipe: Recipe) -> str:
    """What to type for a recipe."""
    specs = filter(None, (recipe.compression, recipe.backward))
    return f"{PARALLELISMS[dimension].flag} {recipe.named or ' '.join(specs)}"


def parameters(args: Namespace) -> int:
    """Parameters of the fullest rank that data parallelism sends: experts may have no replica."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    whole = copy(args)
    whole.use_distributed_optimizer = False  # 18 bytes a parameter then
    held = compute_weight_and_optimizer_memory(whole) / 18
    stages, spread = args.pipeline_model_parallel_size, args.expert_model_parallel_size
    spread *= args.expert_tensor_parallel_size
    if args.num_experts and args.world_size == stages * spread:
        every = args.moe_layer_freq
        layers = sum(map(bool, every)) if isinstance(every, list) else -(-args.num_layers // every)
        width = (args.moe_latent_size or args.hidden_size) * args.moe_ffn_hidden_size
        held -= args.num_experts * width * (3 if args.swiglu else 2) * layers / stages / spread
    return int(held)


def parse_megatron(words: Sequence[str], gpus: int) -> Namespace:
    """Megatron's flags and ours, validated by Megatron for so many GPUs."""
    from megatron import host

    host.install()
    from megatron.training.arguments import add_megatron_arguments, validate_args

    parser = OneLineParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    args = add_flags(parser).parse_args(list(words))
    args.rank, args.world_size = 0, gpus
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_args(args, {})
    except (AssertionError, ValueError, RuntimeError) as error:
        said = megatrons_own_check(error, args)
        raise InputError(f"Megatron refuses these flags on {gpus} GPUs: {said}") from None
    args.padded_vocab_size = args.padded_vocab_size or args.vocab_size
    if not args.padded_vocab_size:
        raise InputError(
            "--vocab-size is missing: the tokenizer is not read here, so give the number"
        )
    return args


def speed_of(text: str, option: str) -> Speed:
    """A link by its name, or ``GB/s[:us]``. Raises: InputError: neither."""
    if text in SPEEDS:
        return SPEEDS[text]
    bandwidth, _, latency = text.partition(":")
    try:
        found = Speed(1e9 * float(bandwidth), 1e-6 * float(latency or 5))
    except ValueError:
        found = Speed(0.0, 0.0)
    if not (0 < found.bandwidth < math.inf and 0 <= found.latency < math.inf):
        names = ", ".join(SPEEDS)
        raise InputError(
            f"{option} {text}: give one of {names}, or GB/s and microseconds such as 50:10"
        )
    return found


def draw(options: Namespace, args: Namespace, cluster: Cluster) -> None:
    """Write the picture: times as fast as uncompressed against GPUs, as data parallelism doubles."""
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {}
    args = copy(args)
    while args.world_size <= MOST_GPUS:
        estimate = Estimate(args, cluster, 1e12 * options.gemm_tflops)
        for name, seconds, _ in estimate.rows(options.loss_budget, named=True)[1:]:
            name = name.partition(": ")[0]
            curves.setdefault(name, []).append(
                (args.world_size, estimate.uncompressed / seconds[0])
            )
        args.world_size, args.data_parallel_size = 2 * args.world_size, 2 * args.data_parallel_size
        args.global_batch_size *= 2  # each rank keeps its micro-batches
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=name)
    axes.axhline(1.0, color="0.6", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set(title="predicted", ylabel="times as fast as uncompressed", ylim=(0, None))
    axes.set_xlabel(
        f"GPUs, data parallelism grows; {options.intra} in a node, {options.inter} between nodes"
    )
    axes.legend(fontsize="small")
    figure.savefig(options.plot, dpi=120)


def make_parser() -> argparse.ArgumentParser:
    """The estimate's own options."""
    parser = OneLineParser(
        prog="python -m megatron.compression.auto.estimate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gpus", type=int, default=8)
    add("--gpus-per-node", type=int, default=8)
    link = f"one of {', '.join(SPEEDS)}, or GB/s that a GPU sends, with microseconds of latency after a colon"
    add("--intra", default="nvlink", metavar="LINK", help=f"inside a node: {link}")
    add(
        "--inter",
        default="50:10",
        metavar="LINK",
        help="between nodes: a GPU's share of the adapters",
    )
    add(
        "--gemm-tflops",
        type=float,
        default=720.0,
        help="of a layer's products on one GPU; 720: an H200",
    )
    add("--loss-budget", type=float, default=BUDGET, help="percent of validation loss, as for auto")
    add("--plot", type=Path, metavar="FILE", help=f"draw the speed-up for up to {MOST_GPUS} GPUs")
    return parser


def report(options: Namespace, words: Sequence[str]) -> None:
    """Print the table, and write the picture. Raises: InputError: impossible options or flags."""
    for name in ("gpus", "gpus_per_node", "gemm_tflops"):
        if not 0 < getattr(options, name) < math.inf:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)} must be above 0")
    if options.plot:
        require_extra("matplotlib", "plots", "--plot")
    intra, inter = speed_of(options.intra, "--intra"), speed_of(options.inter, "--inter")
    cluster = Cluster(options.gpus_per_node, intra, inter)
    args = parse_megatron(words, options.gpus)
    estimate = Estimate(args, cluster, 1e12 * options.gemm_tflops)
    rows = estimate.rows(options.loss_budget)
    if estimate.config.enabled:
        rows.append(("the flags as given", estimate.seconds(estimate.config.rules()), None))
    cells = [["predicted", "ms an iteration", "times as fast", "host, ms", "cost in loss"]]
    for name, (seconds, host), loss in rows:
        cost = "not known" if loss is None else f"+{loss:.3g} %"
        speed_up = f"{estimate.uncompressed / seconds:.2f}"
        cells.append([name, f"{1e3 * seconds:.4g}", speed_up, f"{1e3 * host:.4g}", cost])
    print("\n".join(aligned(cells)))
    computation = 1e3 * estimate.work.computation
    print(f"computation {computation:.4g} ms; a slow host's time decides where it is longer")
    if options.plot:
        draw(options, args, cluster)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 2 for bad input, which is one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    place = words.index("--") if "--" in words else len(words)
    try:
        report(make_parser().parse_args(words[:place]), words[place + 1 :])
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
