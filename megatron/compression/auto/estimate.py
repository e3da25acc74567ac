"""Predict what compression would bring on a cluster. Nothing is run, and no GPU is needed.

    python -m megatron.compression.auto.estimate --gpus 64 --inter 12.5:20 -- FLAGS_OF_A_SCRIPT

Messages and what they cost an iteration are those of ``--compression auto`` (messages.py), which
measures. Here a message takes its bytes over the link's bandwidth plus latency, a compressed one
its payloads' bytes and its codec's kernels, at rates measured on an H200. Computation is Megatron's
count of operations at ``--gemm-tflops``. An iteration takes the GPU's time or the host's, which
launches it, whichever is longer; with ``--cuda-graph-impl full_iteration`` the host launches once.
In interleaved halves the longer one of computation and link counts, and the host launches twice.
Contention between jobs, memory, slow nodes and the input pipeline are not modelled.

Megatron's flags follow a ``--``; ``--qwen-model NAME`` among them gives the sizes of a model, and
``--use-tp-pp-dp-mapping`` places data parallelism, instead of stages, over nodes.
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
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.compression import graphs
from megatron.compression.auto import data_centres
from megatron.compression.auto.measurement import dimension_config
from megatron.compression.auto.messages import MessageKind, workload
from megatron.compression.auto.plan import BUDGET, LEAST_GAIN, choose, flag
from megatron.compression.codecs import Codec
from megatron.compression.codecs.recipes import RECIPES, Recipe
from megatron.compression.communication.ledger import bytes_sent
from megatron.compression.communication.policy import Rule
from megatron.compression.errors import (
    InputError,
    OneLineParser,
    require_extra,
)
from megatron.compression.flags import add_flags, resolve
from megatron.compression.huggingface.models import add_qwen_arguments, expand
from megatron.compression.megatron_checks import megatrons_own_check
from megatron.compression.report.markdown import table
from megatron.compression.tensor_parallel.config import HALVES, halves_refusal
from taco_kernels.common import ceil_div

MOST_GPUS = 16384
"""The picture ends here."""


@dataclass(frozen=True)
class KernelTimes:
    """Microseconds that a codec's kernels take for 2^20 values on an H200
    (docs/results/kernels.md)."""

    encode: float
    decode: float
    sum: float
    """For each sender's values that are decoded and added up."""


KERNELS = {
    "int": KernelTimes(0.91, 0.99, 0.35),
    "outliers": KernelTimes(1.28, 1.06, 0.38),
    "normalize": KernelTimes(3.18, 0.99, 0.35),
    "sdp4bit": KernelTimes(1.39, 1.0, 0.5),
    "taco": KernelTimes(0.91, 1.0, 0.49),
    "lossless": KernelTimes(1.83, 1.27, 1.43),
    "tah-quant": KernelTimes(1.64, 1.6, 1.6),
}
"""By codec, or by the setting of an integer codec that decides. A codec that is not here counts as
the slowest of them."""
SLOWEST = "lossless"
LAUNCH = 5e-6
"""Seconds of a kernel, however small."""
HOST_LAYER = 5.3e-3
"""Seconds that a slow host needs to launch a layer of a micro-batch, forward and backward
(docs/results/iterations.md, "shapes of models")."""
HOST_MESSAGE = 0.3e-3
"""Seconds that it needs beyond that for a compressed message."""


@dataclass(frozen=True)
class Speed:
    """One GPU's share of a link."""

    bandwidth: float
    """Bytes a second that the GPU sends."""
    latency: float
    """Seconds."""

    def seconds(self, nbytes: float) -> float:
        """Return how long so many bytes take; nothing is sent of none."""
        if not nbytes:
            return 0.0
        return self.latency + nbytes / self.bandwidth


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
    """Inside a node."""
    inter: Speed
    """Between nodes: a GPU's share of its node's adapters."""


@dataclass(frozen=True)
class Group:
    """A process group in a cluster."""

    ranks: int
    local: int
    """Its ranks on each node."""
    cluster: Cluster

    @property
    def nodes(self) -> int:
        """The number of nodes that the group lies on."""
        return self.ranks // self.local

    @classmethod
    def of(cls, message: MessageKind, args: Namespace, cluster: Cluster) -> "Group":
        """Return the group that a message is sent in; ranks are numbered as Megatron numbers them.

        Args:
            message: one kind of message of an iteration.
            args: Megatron's arguments.
            cluster: the nodes that the ranks lie on, one node after the other.
        """
        if message.operation == "exchange":
            return cls(2, _local_stages(args, cluster.per_node), cluster)
        # The ranks of rank 0's group on rank 0's node; every node holds as many.
        members = [0]
        for ranks, stride in _axes(message, args):
            members = [member + stride * step for step in range(ranks) for member in members]
        local = sum(member < cluster.per_node for member in members)
        return cls(len(members), math.gcd(len(members), local), cluster)

    def seconds(self, operation: str, nbytes: float) -> float:
        """Return the time of a collective over a whole buffer; over nodes the slower of both hops
        counts.

        Args:
            operation: as the ledger calls it.
            nbytes: of the whole buffer over all ranks.
        """
        intra = self.cluster.intra
        inter = self.cluster.inter
        if self.nodes == 1:
            return intra.seconds(bytes_sent(operation, int(nbytes), self.ranks))
        if operation == "send":
            return inter.seconds(nbytes)
        # Each peer gets as much; those of the same node are reached over the inner link.
        if operation == "all_to_all":
            inside = (self.local - 1) / self.ranks * nbytes
            outside = (self.ranks - self.local) / self.ranks * nbytes
        else:
            # A collective over nodes sums or gathers inside each node and then, every local rank
            # its part, between nodes. The backend overlaps the two.
            inside = bytes_sent(operation, int(nbytes), self.local)
            outside = bytes_sent(operation, int(nbytes), self.nodes) / self.local
        return max(intra.seconds(inside), inter.seconds(outside))

    def compressed(self, message: MessageKind, codec: Codec, sharded: bool) -> float:
        """Return the seconds of a message through a codec, kernels included.

        Args:
            message: one kind of message of an iteration.
            codec: encodes it.
            sharded: with the distributed optimizer.
        """
        operation = message.sent_as(sharded)
        values = torch.Size(message.shape).numel()
        dtype = message.dtype
        # As the collectives send: an all-to-all of partial sums, and for an all-reduce a gather of
        # the sums.
        first, second = codec.hops
        if message.operation == "gradients":
            return self._gradients(values, dtype, codec, sharded)
        if operation == "all_reduce" and self.ranks == 2 and codec.one_exchange:
            return self._sum_of_two(first, values, dtype)
        if operation in ("all_reduce", "reduce_scatter"):
            seconds = self.seconds("all_to_all", payload(first, values, dtype))
            seconds += kernels(first, encoded=values, summed=values)
            if operation == "all_reduce":
                seconds += self.seconds("all_gather", payload(second, values, dtype))
                seconds += kernels(second, decoded=values)
            return seconds
        encoded: float = values
        if operation == "all_gather":
            encoded = values / self.ranks  # each rank has its own part
        seconds = self.seconds(operation, payload(second, values, dtype))
        return seconds + kernels(second, encoded=encoded, decoded=values)

    def _sum_of_two(self, codec: Codec, values: int, dtype: torch.dtype) -> float:
        """Return the seconds of a sum of two ranks in one exchange: each sends the other all it
        has."""
        both = payload(codec, 2 * values, dtype)
        return self.seconds("all_gather", both) + kernels(codec, encoded=values, summed=2 * values)

    def _gradients(self, values: int, dtype: torch.dtype, codec: Codec, sharded: bool) -> float:
        """Return the seconds of a sum inside the node and then one between nodes, each with its own
        codec."""
        intra_codec, inter_codec = codec.hops
        last_codec = inter_codec if self.nodes > 1 else intra_codec
        if self.ranks == 2 and not sharded:
            return self._sum_of_two(last_codec, values, dtype)
        seconds = 0.0
        # Inside the node all values, then between nodes each rank's share of the node's sum.
        for hop_codec, speed, ranks, hop_values in (
            (intra_codec, self.cluster.intra, self.local, values),
            (inter_codec, self.cluster.inter, self.nodes, values // self.local),
        ):
            if ranks > 1:
                nbytes = bytes_sent("all_to_all", payload(hop_codec, hop_values, dtype), ranks)
                seconds += speed.seconds(nbytes)
                seconds += kernels(hop_codec, encoded=hop_values, summed=hop_values)
        if not sharded:
            seconds += self.seconds("all_gather", payload(last_codec, values, dtype))
            seconds += kernels(last_codec, decoded=values)
        return seconds


def _axes(message: MessageKind, args: Namespace) -> list[tuple[int, int]]:
    """Return sizes and strides of the dimensions that a message's group spans; a stride is the
    distance between neighbouring ranks.

    Megatron's order of ranks: tensor, context, data, pipeline; with --use-tp-pp-dp-mapping the last
    two change places. Experts' groups are their own.
    """
    tensor = args.tensor_model_parallel_size
    context = args.context_parallel_size
    experts = args.expert_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size
    # Instances are consecutive pieces of the data-parallel ranks.
    instances = args.num_distributed_optimizer_instances
    data = args.data_parallel_size // instances
    data_stride = tensor * context
    if args.use_tp_pp_dp_mapping:
        data_stride *= args.pipeline_model_parallel_size
    is_of_tokens = message.operation in ("gather_tokens", "sum_tokens")
    if message.operation == "outer":
        return [(instances, data * data_stride)]
    if message.dimension == "tensor_parallel":
        return [(expert_tensor if is_of_tokens else tensor, 1)]
    if message.dimension == "context_parallel":
        return [(context, tensor)]
    if message.dimension == "data_parallel":
        return [(context, tensor), (data, data_stride)]
    # Tokens are gathered over experts and their shards; an all-to-all is between the experts of one
    # shard.
    if is_of_tokens:
        return [(experts * expert_tensor, 1)]
    return [(experts, expert_tensor)]


def _local_stages(args: Namespace, per_node: int) -> int:
    """Return 2 where every two neighbouring stages share a node, else 1: the slowest exchange
    counts."""
    ranks_of_all_stages = args.world_size
    if args.use_tp_pp_dp_mapping:
        ranks_of_all_stages //= args.data_parallel_size
    return 2 if ranks_of_all_stages <= per_node else 1


@functools.cache
def payload(codec: Codec, values: int, dtype: torch.dtype) -> int:
    """Return the bytes of the payloads of so many values, in rows so long that padding does not
    matter.

    Args:
        codec: encodes them.
        values: how many.
        dtype: theirs, which lossless payloads depend on.
    """
    # 2^20 values in any case, so that the bytes scale with ``values``.
    shape: tuple[int, ...] = (2**20,)
    if codec.sees_shape:
        shape = (1024, 1, 1024)  # tokens, samples, channels
    return codec.message_bytes(shape, dtype) * values // 2**20


def kernels(
    codec: Codec, *, encoded: float = 0.0, decoded: float = 0.0, summed: float = 0.0
) -> float:
    """Return the seconds of a codec's kernels.

    Args:
        codec: whose kernels run.
        encoded: values that are encoded.
        decoded: values that are decoded alone.
        summed: values that are decoded and added up, those of all senders.
    """
    times = _kernel_times(codec)
    seconds = 0.0
    for microseconds, values in (
        (times.encode, encoded),
        (times.decode, decoded),
        (times.sum, summed),
    ):
        if values:
            seconds += LAUNCH + microseconds * 1e-6 * values / 2**20
    return seconds


def _kernel_times(codec: Codec) -> KernelTimes:
    """Return the measured times of a codec's kernels."""
    name = codec.name.partition(":")[0]
    if getattr(codec, "normalize", "none") != "none":
        name = "normalize"
    elif getattr(codec, "outliers", False):
        name = "outliers"
    elif name.startswith("int"):
        name = "int"
    return KERNELS.get(name, KERNELS[SLOWEST])


RulesOf = Mapping[tuple[str, Recipe], dict[str, Rule]]
"""Dimension and recipe -> the policy's rules."""


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    """What to type."""
    gpu_seconds: float
    """The GPU's time of an iteration."""
    host_seconds: float
    """The time that a slow host needs to launch it."""
    loss: float | None
    """Percent of validation loss above uncompressed; None: not known."""

    @property
    def seconds(self) -> float:
        """Seconds of an iteration: the longer one of the GPU's time and the host's."""
        return max(self.gpu_seconds, self.host_seconds)


class Estimate:
    """Predicts iterations of one layout of GPUs.

    Args:
        args: Megatron's arguments, validated for ``args.world_size`` GPUs.
        cluster: the nodes.
        gemm_rate: FLOP/s of a layer's matrix products on one GPU.
    """

    def __init__(self, args: Namespace, cluster: Cluster, gemm_rate: float) -> None:
        from megatron.training.training import num_floating_point_operations

        self.args = args
        self.cluster = cluster
        self.config = resolve(args)
        flops = num_floating_point_operations(args, args.global_batch_size)
        self.work = workload(args, parameters(args), flops, gemm_rate)
        self.uncompressed_seconds = self.row("uncompressed", {}, 0.0).seconds

    def row(
        self, name: str, rules: Mapping[str, Rule], loss: float | None, halves: bool = False
    ) -> Row:
        """Return the prediction of an iteration.

        Args:
            name: what to type for it.
            rules: by traffic class; messages of other classes go uncompressed.
            loss: percent of validation loss above uncompressed; None: not known.
            halves: whether halves of a micro-batch are interleaved.
        """
        args = self.args
        # The host launches every layer of the stage once for each micro-batch, in halves twice.
        launches = 2 if halves else 1
        micro_batches = args.global_batch_size / args.micro_batch_size / args.data_parallel_size
        layers = args.num_layers / args.pipeline_model_parallel_size
        host_seconds = HOST_LAYER * layers * micro_batches * launches
        times = {}
        for message in self.work.messages:
            rule = rules.get(message.traffic)
            # A gradient compressor holds its codec.
            codec = None if rule is None else getattr(rule.codec, "codec", rule.codec)
            parts = launches if message.dimension == "tensor_parallel" else 1
            times[message] = self._seconds(message, codec, parts)
            if codec is not None:
                host_seconds += HOST_MESSAGE * message.count * parts
        if graphs.whole_iterations(args):
            host_seconds = 0.0  # one launch replays everything
        gpu_seconds = self.work.seconds(times)
        if halves:
            gpu_seconds = self.work.seconds_in_halves(times)
        return Row(name, gpu_seconds, host_seconds, loss)

    def _seconds(self, message: MessageKind, codec: Codec | None, parts: int) -> float:
        """Return the seconds of a message by itself.

        Args:
            message: one kind of message of an iteration.
            codec: encodes it; None: it goes uncompressed.
            parts: equal parts that it is sent in, one after the other.
        """
        group = Group.of(message, self.args, self.cluster)
        sharded = self.args.use_distributed_optimizer
        if parts > 1:
            tokens, *rest = message.shape
            message = replace(message, shape=(ceil_div(tokens, parts), *rest))
        if codec is None:
            return parts * group.seconds(message.sent_as(sharded), message.nbytes)
        return parts * group.compressed(message, codec, sharded)

    def rows(self, budget: float, named: bool = False) -> list[Row]:
        """Return the rows of the table: uncompressed, each recipe alone, halves of a micro-batch
        where they are covered, and what ``auto`` would choose.

        Args:
            budget: percent of validation loss that may be spent.
            named: only recipes with a name have a row.
        """
        rows = [self.row("uncompressed", {}, 0.0)]
        gains: dict[str, dict[Recipe, float]] = {}
        rules_of: dict[tuple[str, Recipe], dict[str, Rule]] = {}
        for dimension in {message.dimension: None for message in self.work.messages}:
            for recipe in RECIPES[dimension]:
                try:
                    config = dimension_config(self.config, dimension, recipe, self.args)
                except InputError:  # Megatron's flags do not allow it
                    continue
                rules = config.rules(0)
                row = self.row(flag(dimension, recipe), rules, recipe.loss)
                rules_of[dimension, recipe] = rules
                gain = 1 - row.seconds / self.uncompressed_seconds
                gains.setdefault(dimension, {})[recipe] = gain
                if recipe.named or not named:
                    rows.append(row)
        if self.covers_halves:
            rows.append(self.row(HALVES, {}, 0.0, halves=True))
            for (dimension, recipe), rules in rules_of.items():
                if dimension == "tensor_parallel" and recipe.named:
                    name = f"{flag(dimension, recipe)} {HALVES}"
                    rows.append(self.row(name, rules, recipe.loss, halves=True))
        rows.append(self._choice(choose(gains, budget), rules_of, budget))
        return rows

    @property
    def covers_halves(self) -> bool:
        """True where the run could interleave halves of its micro-batches, and the usual schedule
        was not typed."""
        if self.config.tensor_parallel.overlap == "weights":
            return False
        sends = any(message.dimension == "tensor_parallel" for message in self.work.messages)
        return sends and halves_refusal(self.args) is None

    def _choice(self, chosen: Mapping[str, Recipe], rules_of: RulesOf, budget: float) -> Row:
        """Return the row of what ``--compression auto`` would come to by these predictions.

        Args:
            chosen: recipes by dimension, from what each gains alone.
            rules_of: the rules of each recipe of a dimension.
            budget: percent of validation loss.
        """
        candidates = self._candidates(chosen, rules_of)
        # As the run's check: a step to a larger loss has to gain.
        candidates.sort(key=lambda candidate: candidate.loss or 0.0)
        best = candidates[0]
        for candidate in candidates:
            if 1 - candidate.seconds / best.seconds >= LEAST_GAIN:
                best = candidate
        return replace(best, name=f"within {budget:g} %: {best.name}")

    def _candidates(self, chosen: Mapping[str, Recipe], rules_of: RulesOf) -> list[Row]:
        """Return rows of what a run would compare, uncompressed first.

        Args:
            chosen: recipes by dimension, from what each gains alone.
            rules_of: the rules of each recipe of a dimension.
        """
        nothing: dict[str, Recipe] = {}
        candidates = [self._together(nothing, rules_of), self._together(chosen, rules_of)]
        # Together they may gain less than each alone: the host launches for all of them.
        for dimension in chosen:
            candidates.append(self._together(_without(chosen, dimension), rules_of))
        if not self.covers_halves:
            return candidates
        # Both baselines: halves alone gain too, and a codec has to gain beside them.
        in_halves = [_without(chosen, "tensor_parallel"), chosen]
        # Halves may hide the bytes of a codec that costs less loss.
        decided = chosen.get("tensor_parallel")
        for dimension, recipe in rules_of:
            if dimension == "tensor_parallel" and decided and recipe.loss < decided.loss:
                in_halves.append({**chosen, dimension: recipe})
        return candidates + [
            self._together(recipes, rules_of, halves=True) for recipes in in_halves
        ]

    def _together(
        self, recipes: Mapping[str, Recipe], rules_of: RulesOf, halves: bool = False
    ) -> Row:
        """Return the row of recipes of several dimensions at once.

        Args:
            recipes: by dimension; the others go uncompressed.
            rules_of: the rules of each recipe of a dimension.
            halves: whether halves of a micro-batch are interleaved.
        """
        rules: dict[str, Rule] = {}
        words = []
        for dimension, recipe in recipes.items():
            rules |= rules_of[dimension, recipe]
            words.append(flag(dimension, recipe))
        if halves:
            words.append(HALVES)
        loss = sum(recipe.loss for recipe in recipes.values())
        return self.row(" ".join(words) or "nothing", rules, loss, halves)


def _without(recipes: Mapping[str, Recipe], dimension: str) -> dict[str, Recipe]:
    """Return the recipes of the other dimensions."""
    return {name: recipe for name, recipe in recipes.items() if name != dimension}


def parameters(args: Namespace) -> int:
    """Return the parameters of the fullest rank that data parallelism sends.

    Experts that have no replica are left out.
    """
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    # Megatron gives bytes: 18 a parameter without the distributed optimizer.
    replicated_args = copy(args)
    replicated_args.use_distributed_optimizer = False
    count = compute_weight_and_optimizer_memory(replicated_args) / 18
    stages = args.pipeline_model_parallel_size
    ranks_of_experts = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    # A stage's ranks hold one set of experts together: no expert has a replica to be summed with.
    if args.num_experts and args.world_size == stages * ranks_of_experts:
        frequency = args.moe_layer_freq
        if isinstance(frequency, list):
            layers = sum(map(bool, frequency))
        else:
            layers = ceil_div(args.num_layers, frequency)
        matrix_size = (args.moe_latent_size or args.hidden_size) * args.moe_ffn_hidden_size
        matrices = 3 if args.swiglu else 2
        of_experts = args.num_experts * matrices * matrix_size * layers
        count -= of_experts / stages / ranks_of_experts
    return int(count)


def parse_megatron(words: Sequence[str], gpus: int) -> Namespace:
    """Return Megatron's flags and ours, validated by Megatron for so many GPUs.

    Raises:
        InputError: Megatron refuses them, or the vocabulary's size is not known.
    """
    from megatron import host

    host.install()
    from megatron.training.arguments import add_megatron_arguments, validate_args

    parser = OneLineParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    add_flags(add_qwen_arguments(parser))
    # --qwen-model stands for flags of the model's sizes.
    words = list(words)
    if any(word.split("=")[0] == "--qwen-model" for word in words):
        words, _ = expand(words)
    args = parser.parse_args(words)
    args.rank = 0
    args.world_size = gpus
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_args(args, {})
    except (AssertionError, ValueError, RuntimeError) as error:
        reason = megatrons_own_check(error, args)
        raise InputError(f"Megatron refuses these flags on {gpus} GPUs: {reason}") from None
    # Megatron pads when it builds the tokenizer, which is not built here.
    args.padded_vocab_size = args.padded_vocab_size or args.vocab_size
    if not args.padded_vocab_size:
        raise InputError(
            "--vocab-size is missing: the tokenizer is not read here, so give the number"
        )
    return args


def speed_of(text: str, option: str) -> Speed:
    """Return a link by its name, or by ``GB/s[:us]``.

    Args:
        text: as typed.
        option: which option takes it, for errors.

    Raises:
        InputError: it is neither.
    """
    if text in SPEEDS:
        return SPEEDS[text]
    bandwidth, _, latency = text.partition(":")
    try:
        speed = Speed(1e9 * float(bandwidth), 1e-6 * float(latency or 5))
    except ValueError:
        speed = Speed(0.0, 0.0)
    if not (0 < speed.bandwidth < math.inf and 0 <= speed.latency < math.inf):
        names = ", ".join(SPEEDS)
        raise InputError(
            f"{option} {text}: give one of {names}, or GB/s and microseconds such as 50:10"
        )
    return speed


def draw(options: Namespace, args: Namespace, cluster: Cluster) -> None:
    """Draw the speed-up over uncompressed against the number of GPUs, as data parallelism doubles.

    Args:
        options: the estimate's own; the picture goes to ``options.plot``.
        args: Megatron's arguments for the smallest number of GPUs.
        cluster: the nodes.
    """
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {}
    args = copy(args)
    while args.world_size <= MOST_GPUS:
        estimate = Estimate(args, cluster, 1e12 * options.gemm_tflops)
        for row in estimate.rows(options.loss_budget, named=True)[1:]:
            label = row.name.partition(": ")[0]
            speed_up = estimate.uncompressed_seconds / row.seconds
            curves.setdefault(label, []).append((args.world_size, speed_up))
        # More replicas of the same model, each with the same work.
        args.world_size *= 2
        args.data_parallel_size *= 2
        args.global_batch_size *= 2  # each rank keeps its micro-batches
    # Without pyplot, which would look for a display.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=label)
    axes.axhline(1.0, color="0.6", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set(title="predicted", ylabel="times as fast as uncompressed", ylim=(0, None))
    axes.set_xlabel(
        f"GPUs, data parallelism grows; {options.intra} in a node, {options.inter} between nodes"
    )
    axes.legend(fontsize="small")
    figure.savefig(options.plot, dpi=120)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the estimate's own options."""
    parser = OneLineParser(
        prog="python -m megatron.compression.auto.estimate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    link = (
        f"{', '.join(SPEEDS)}, or GB/s that one GPU sends and its latency in microseconds, such as "
        "50:10"
    )
    parser.add_argument(
        "--gpus", type=int, default=8, metavar="N", help="GPUs of the job (default: 8)"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node (default: 8)"
    )
    parser.add_argument(
        "--intra",
        default="nvlink",
        metavar="LINK",
        help=f"the link inside a node: {link} (default: nvlink)",
    )
    parser.add_argument(
        "--inter",
        default="50:10",
        metavar="LINK",
        help="the link between nodes, in the same words. GB/s are a GPU's share of its node's "
        "adapters: 400 Gbit/s = 50 GB/s, shared by 8 GPUs 6.25 (default: 50:10)",
    )
    parser.add_argument(
        "--gemm-tflops",
        type=float,
        default=720.0,
        metavar="TFLOP/S",
        help="rate of a layer's matrix products on one GPU, in TFLOP/s (default: 720, an H200)",
    )
    parser.add_argument(
        "--loss-budget",
        type=float,
        default=BUDGET,
        metavar="PERCENT",
        help=f"validation loss that may be spent, in percent (default: {BUDGET})",
    )
    parser.add_argument(
        "--outer",
        type=data_centres.outer_link,
        metavar="GBIT/S[:MS]",
        help="also predict local steps between 2 to 64 data centres of --gpus each: Gbit/s that a "
        "data centre sends, and milliseconds one way, such as 1:30",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"draw the speed-up for up to {MOST_GPUS} GPUs"
    )
    return parser


def report(options: Namespace, words: Sequence[str]) -> None:
    """Print the table, and draw the picture where asked.

    Args:
        options: the estimate's own.
        words: Megatron's flags and ours.

    Raises:
        InputError: impossible options or flags.
    """
    for name in ("gpus", "gpus_per_node", "gemm_tflops"):
        if not 0 < getattr(options, name) < math.inf:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)} must be above 0")
    if options.plot:
        require_extra("matplotlib", "plots", "--plot")
    intra = speed_of(options.intra, "--intra")
    inter = speed_of(options.inter, "--inter")
    cluster = Cluster(options.gpus_per_node, intra, inter)
    args = parse_megatron(words, options.gpus)
    estimate = Estimate(args, cluster, 1e12 * options.gemm_tflops)
    rows = estimate.rows(options.loss_budget)
    config = estimate.config
    if config.enabled or config.tensor_parallel.halves:
        halves = config.tensor_parallel.halves
        rows.append(estimate.row("the flags as given", config.rules(), None, halves))
    print("\n".join(table(*_cells(rows, estimate), aligned=True)))
    computation = 1e3 * estimate.work.computation
    print(
        f"{computation:,.1f} ms of the GPU's time are computation. An iteration takes the longer "
        "one of the GPU's time and the host's, which is that of a slow host."
    )
    launched_slowly = [row for row in rows if row.host_seconds > row.gpu_seconds]
    if launched_slowly:
        print(
            f"The host decides in {len(launched_slowly)} of {len(rows)} rows: it launches kernels "
            "more slowly than the GPU runs them. With --cuda-graph-impl full_iteration "
            "--no-check-for-nan-in-loss-and-grad it launches an iteration at once: add these and "
            "estimate again."
        )
    if options.outer is not None:
        settings = config.local_steps
        # Every rank of the model's sends its own part.
        values = parameters(args) * args.tensor_model_parallel_size
        values *= args.pipeline_model_parallel_size
        # The last row is of the flags as given, where these compress something.
        seconds = estimate.uncompressed_seconds
        if config.enabled:
            seconds = rows[-1].seconds
        print(data_centres.explanation(settings, options.outer))
        cells = data_centres.rows(settings, values, seconds, options.outer)
        print("\n".join(table(*cells, aligned=True)))
    if options.plot:
        draw(options, args, cluster)


def _cells(rows: Sequence[Row], estimate: Estimate) -> list[list[str]]:
    """Return the table's cells, the header first."""
    cells = [["predicted", "GPU, ms", "host, ms", "iteration, ms", "times as fast", "cost in loss"]]
    for row in rows:
        loss = "not known"
        if row.loss is not None:
            loss = f"+{row.loss:.3g} %"
        speed_up = estimate.uncompressed_seconds / row.seconds
        milliseconds = [
            f"{1e3 * seconds:,.1f}" for seconds in (row.gpu_seconds, row.host_seconds, row.seconds)
        ]
        cells.append([row.name, *milliseconds, f"{speed_up:.2f}", loss])
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    """Run the estimate and return the exit status: 2 for bad input, which is one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    separator = words.index("--") if "--" in words else len(words)
    try:
        report(make_parser().parse_args(words[:separator]), words[separator + 1 :])
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
