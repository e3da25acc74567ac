"""Times a run's own messages, uncompressed and through codecs, and decides: in about ``LIMIT`` seconds.

Everything is sent as training sends it. All ranks come to the same plan: it follows from values that are the
largest over all ranks. Collectives are called as attributes of ``torch.distributed``, so that a test that
replaces those makes a link slow for timings and training alike.
"""

import math
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings

from megatron.compression import graphs
from megatron.compression.auto.messages import MessageKind, activations, workload
from megatron.compression.auto.plan import (
    LEAST_GAIN,
    TRIED,
    DimensionPlan,
    RunPlan,
    choose,
    device_of_rank,
    largest,
    within,
)
from megatron.compression.codecs.recipes import RECIPES, Recipe
from megatron.compression.communication.ledger import Ledger, bytes_sent
from megatron.compression.communication.objects import gather_objects
from megatron.compression.communication.policy import Policy, Rule
from megatron.compression.communication.site import CommSite, Run
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.transport import Transports
from megatron.compression.compression import Compression
from megatron.compression.config import CompressionConfig
from megatron.compression.data_parallel.codec_gradients import CodecGradients
from megatron.compression.data_parallel.compressor import GradientBucket
from megatron.compression.data_parallel.weights import BucketWeights
from megatron.compression.errors import CompressionConfigError
from megatron.compression.expert_parallel.exchange import TokenExchange, TokenSite

LIMIT = 10.0
"""Seconds after which no recipe is timed but the first of each dimension."""
TRIALS = 5
TRIAL_SECONDS = 0.01
"""A trial repeats a message until it takes about so long; their median counts."""
CAPTURED = 4
"""Calls in a CUDA graph that is timed."""

_TOKENS = ("all_to_all", "gather_tokens", "sum_tokens")


class Stopwatch:
    """Times what all ranks do at once. Every method is collective and gives the same on all ranks."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.device = device_of_rank()
        self.not_captured: set[str] = set()
        """Why calls that were to be timed in a CUDA graph were timed eager."""

    def elapsed(self) -> float:
        """Seconds since it was made."""
        return largest(time.perf_counter() - self._began)[0]

    def seconds(self, work: Callable[[], object], in_graph: bool = False) -> float:
        """What one call takes, on the slowest rank: the median of a few trials, after two calls to warm up;
        ``in_graph``: of replays of a CUDA graph, if it can be captured."""
        work()
        self._synchronize()
        calls = 1
        if in_graph and (replay := self._captured(work)) is not None:
            work, calls = replay, CAPTURED
        (once,) = largest(self._time(work, 1))
        if once > 0.5:
            return once / calls
        repeats = max(1, min(50, round(TRIAL_SECONDS / max(once, 1e-9))))
        trials = TRIALS if once < 0.05 else 2
        return (
            largest(statistics.median(self._time(work, repeats) for _ in range(trials)))[0] / calls
        )

    def _captured(self, work: Callable[[], object]) -> Callable[[], None] | None:
        """Replays ``CAPTURED`` calls; None: some rank cannot capture them."""
        stream, graph, why = torch.cuda.current_stream(), torch.cuda.CUDAGraph(), None
        try:
            # As Megatron captures. One that fails would leave its stream the current one.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                for _ in range(CAPTURED):
                    work()
        except Exception as error:  # of CUDA, of NCCL or of what refuses by itself
            why = f"{error}".partition("\n")[0] or type(error).__name__
        if (why := _of_any_rank(why)) is None:
            return graph.replay
        self.not_captured.add(why)
        return None

    def _time(self, work: Callable[[], object], repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        self._synchronize()
        return (time.perf_counter() - began) / repeats

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Sender:
    """Makes what sends one message of a run; ``sharded``: with the distributed optimizer."""

    def __init__(
        self,
        transports: Transports,
        topology: Callable[..., Topology],
        sharded: bool,
        device: torch.device,
    ) -> None:
        self._transports, self._topology = transports, topology
        self._sharded, self._device = sharded, device

    def prepare(self, messages: Sequence[MessageKind], lossy: bool) -> list[str]:
        """Decide how payloads travel, as the hooks of layers would; lines for the log. Collective.

        ``lossy``: codecs that change bits may be chosen; lossless has no fused kernels.
        """
        lines = []
        for group, one in {_group(one): one for one in messages}.items():
            # nor have tokens; tensor parallelism's hooks do not ask for the codec
            fused = one.operation not in _TOKENS and (lossy or one.dimension == "tensor_parallel")
            lines += self._transports.prepare([group], fused)
        return lines

    def sends(self, message: MessageKind, rule: Rule | None = None) -> Callable[[], object]:
        """A call that sends ``message`` once and waits for it, through the rule's codec if there is one.

        Made by all ranks together: a data-parallel codec makes the process groups of its topology.
        """
        ways = {"exchange": self._exchange, "weights": self._weights}
        ways |= dict.fromkeys(("gradients", "outer"), self._gradients)
        ways |= dict.fromkeys(_TOKENS, self._tokens)
        return ways.get(message.operation, self._collective)(message, rule)

    def describe(self, message: MessageKind, seconds: float) -> str:
        """``16.0 MiB all_reduce 0.35 ms, 48 GB/s``: the link as measured, uncompressed."""
        operation = message.sent_as(self._sharded)
        rate = bytes_sent(operation, message.nbytes, _group(message).size()) / seconds
        size = message.nbytes / 2**20
        return f"{size:.3g} MiB {operation} {1e3 * seconds:.3g} ms, {rate / 1e9:.3g} GB/s"

    def _collective(self, message: MessageKind, rule: Rule | None) -> Callable[[], object]:
        group, operation = _group(message), message.operation
        shape = message.shape
        if operation == "all_gather":
            shape = (shape[0] // group.size(), *shape[1:])
        x = _normal(shape, message.dtype, self._device)
        if rule is not None:
            site, nbytes = CommSite("timing", group, self._run(message, rule)), message.nbytes
            return lambda: site.message(message.traffic, operation, nbytes).start(x).wait()
        if operation == "all_reduce":
            x.zero_()  # it is summed in place, again and again
            return lambda: dist.all_reduce(x, group=group)
        if operation == "reduce_scatter":
            part = x.new_empty((shape[0] // group.size(), *shape[1:]))
            return lambda: dist.reduce_scatter_tensor(part, x, group=group)
        full = x.new_empty(message.shape)
        return lambda: dist.all_gather_into_tensor(full, x, group=group)

    def _tokens(self, message: MessageKind, rule: Rule | None) -> Callable[[], object]:
        """A dispatcher's exchange with as many tokens for each rank."""
        group, rows = _group(message), message.shape[0]
        if message.operation == "gather_tokens":
            rows //= group.size()
        x = _normal((rows, *message.shape[1:]), message.dtype, self._device)
        site = TokenSite("timing", group, self._run(message, rule), None)
        site.forward = site.backward = message.traffic  # gradients are sent as tokens are
        exchange = TokenExchange()
        given = rows if message.operation == "gather_tokens" else rows // group.size()
        sizes = [given] * group.size() if message.unequal else None

        def send() -> torch.Tensor:
            with exchange.under_way({group: site}):
                if message.operation == "all_to_all":
                    return exchange.all_to_all(mappings.all_to_all, group, x, sizes, sizes)
                if message.operation == "gather_tokens":
                    gather = mappings.gather_from_sequence_parallel_region
                    return exchange.gather(gather, x, group=group, output_split_sizes=sizes)
                total = mappings.reduce_scatter_to_sequence_parallel_region
                return exchange.reduce_scatter(total, x, group, sizes)

        return send

    def _run(self, message: MessageKind, rule: Rule | None) -> Run:
        """In which this message alone is compressed."""
        ledger = Ledger()
        rules = {} if rule is None else {message.traffic: rule}
        return Run(Policy(rules, ledger), ledger, transports=self._transports)

    def _gradients(self, message: MessageKind, rule: Rule | None) -> Callable[[], object]:
        group, outer = _group(message), message.operation == "outer"
        sharded = self._sharded and not outer
        x = _normal(message.shape, message.dtype, self._device)
        if rule is not None:
            whose = (1 / _instance().size(), "the outer") if outer else ()
            topology = self._topology(group, *whose)
            bucket = GradientBucket(
                x, (), 1 / group.size(), sharded, topology, Ledger(), message.traffic
            )
            sync = (CodecGradients(rule.codec) if outer else rule.codec).build(bucket)
            return lambda: sync.start().wait()
        x.zero_()
        if not sharded:
            return lambda: dist.all_reduce(x, group=group)
        shard = torch.empty_like(x.view(group.size(), -1)[0])
        return lambda: dist.reduce_scatter_tensor(shard, x, group=group)

    def _weights(self, message: MessageKind, rule: Rule | None) -> Callable[[], object]:
        group = _group(message)
        x = _normal(message.shape, message.dtype, self._device)
        own = x.view(group.size(), -1)[group.rank()]
        if rule is None:
            shard = own.clone()
            return lambda: dist.all_gather_into_tensor(x, shard, group=group)
        dist.broadcast(
            x, src=dist.get_process_group_ranks(group)[0], group=group
        )  # replicas begin alike
        ledger, updated = Ledger(), own.float() * 1.001
        weights = BucketWeights(
            x, Policy({message.traffic: rule}, ledger), self._topology(group), ledger
        )

        def send() -> None:
            weights.decide()
            weights.update([(0, updated)])
            weights.start().wait()

        return send

    def _exchange(self, message: MessageKind, rule: Rule | None) -> Callable[[], object]:
        """Every stage sends to the next and receives from the one before: both directions at once."""
        group = _group(message)
        x = _normal(message.shape, message.dtype, self._device)
        if rule is None:
            return lambda: _ring(x, group)
        codec = rule.codec
        return lambda: codec.decode(_ring(codec.encode(x[None]), group), x.shape, x.dtype)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal values, which leave the run's own random numbers as they are."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def _ring(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = dist.get_process_group_ranks(group)
    received, rank = torch.empty_like(tensor), group.rank()
    following, previous = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    sends = dist.P2POp(dist.isend, tensor, following, group)
    for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, received, previous, group)]):
        work.wait()
    return received


def _group(message: MessageKind) -> dist.ProcessGroup:
    dimension, operation = message.dimension, message.operation
    if operation == "outer":
        return parallel_state.get_inter_distributed_optimizer_instance_group()
    if dimension == "data_parallel":
        return _instance()
    if dimension == "tensor_parallel" and operation in _TOKENS:
        return parallel_state.get_expert_tensor_parallel_group()
    if dimension == "tensor_parallel":
        return parallel_state.get_tensor_model_parallel_group()
    if dimension == "context_parallel":
        return parallel_state.get_context_parallel_group()
    if operation == "all_to_all":
        return parallel_state.get_expert_model_parallel_group()
    if dimension == "expert_parallel":
        return parallel_state.get_expert_tensor_and_model_parallel_group()
    return parallel_state.get_pipeline_model_parallel_group()


def _instance() -> dist.ProcessGroup:
    """The data-parallel ranks of an optimizer instance."""
    return parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=True
    )


class Measurement:
    """One measurement of a run, whose iteration has ``flops`` over all ranks. Collective over all ranks."""

    def __init__(
        self, args: Namespace, compression: Compression, flops: float, chunks: list[torch.nn.Module]
    ) -> None:
        self.args, self.config, self.watch = args, compression.config, Stopwatch()
        self._transports = compression.run.transports
        self.lines: list[str] = []
        """For the log: how payloads of layers travel."""
        hooks = {name: one.refusal(chunks) for name, one in compression.dimensions.items()}
        self._not_attachable = {name: _of_any_rank(reason) for name, reason in hooks.items()}
        experts = (
            parallel_state.get_expert_data_parallel_world_size() > 1
        )  # else they have no replica
        every = (p for chunk in chunks for p in chunk.parameters() if p.requires_grad)
        sent = sum(p.numel() for p in every if experts or getattr(p, "allreduce", True))
        (parameters,) = largest(sent)
        tokens, samples, channels = activations(args)
        columns = args.ffn_hidden_size // args.tensor_model_parallel_size
        left = _normal((tokens * samples, channels), args.params_dtype, self.watch.device)
        right = _normal((channels, columns), args.params_dtype, self.watch.device)
        rate = 2 * left.numel() * columns / self.watch.seconds(lambda: left @ right)
        self.work = workload(args, int(parameters), flops, rate)
        sharded, topology = args.use_distributed_optimizer, compression.gradients.topology
        self._sender = Sender(self._transports, topology, sharded, self.watch.device)
        self._times: dict[MessageKind, float] = {}

    def decide(self, budget: float) -> RunPlan:
        """Time everything and choose within a budget (percent of loss, over all dimensions)."""
        for message in self.work.messages:
            self._times[message] = self._seconds(message)
        whole = self.work.seconds(self._times)
        used = [name for name in RECIPES if self._messages(name) or self._unseen(name)]
        possible: dict[str, dict[Recipe, dict[str, Rule]]] = {}
        why: dict[str, str] = {}
        for dimension in used:
            if dimension in self.config.auto:
                possible[dimension], why[dimension] = self._worth_timing(dimension, whole, budget)
        gains = self._gains(possible, whole)
        chosen = choose(gains, budget)
        plans = []
        for dimension in used:
            name, gain, loss = "none", 0.0, 0.0
            if dimension not in self.config.auto:
                specs = [spec for spec in getattr(self.config, dimension).specs if spec]
                name, reason = ", back ".join(specs), "its own flag says so"
            elif dimension in chosen:
                one = chosen[dimension]
                name, loss, gain = one.name, one.loss, gains[dimension][one]
                reason = f"gains most within the budget; loss: {one.source}"
            else:
                reason = why[dimension] or _not_chosen(gains[dimension])
            if untimed := len(possible.get(dimension, ())) - len(gains.get(dimension, ())):
                reason += f"; {untimed} more not timed: no time was left of the {LIMIT:g} s"
            link = self._link(dimension)
            plans.append(
                DimensionPlan(dimension, link, dimension in chosen, name, gain, loss, reason)
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.lines += [
            f"timed eager, not in a CUDA graph: {why}" for why in sorted(self.watch.not_captured)
        ]
        milliseconds = 1e3 * whole, 1e3 * self.work.computation
        return RunPlan(tuple(plans), budget, *milliseconds, self.watch.elapsed())

    def _seconds(self, message: MessageKind, rule: Rule | None = None) -> float:
        """What a message takes by itself, sent as in training: in a CUDA graph where one holds it."""
        in_layer = graphs.by_layer(self.args) and message.dimension in graphs.held_by_layers(
            self.args
        )
        in_graph = in_layer or graphs.whole_iterations(self.args)
        return self.watch.seconds(self._sender.sends(message, rule), in_graph)

    def _messages(self, dimension: str) -> list[MessageKind]:
        return [message for message in self.work.messages if message.dimension == dimension]

    def _unseen(self, dimension: str) -> bool:
        """Whether a dimension is in use, but sends in a way that cannot be timed."""
        ways = ("expert_parallel", "context_parallel")
        return dimension in ways and getattr(self.config, dimension).ranks(self.args) > 1

    def _worth_timing(
        self, dimension: str, whole: float, budget: float
    ) -> tuple[dict[Recipe, dict[str, Rule]], str]:
        """The recipes to be timed, each with its rules; or why there are none."""
        messages = self._messages(dimension)
        allowed, reason = self._possible(dimension, budget if messages else math.inf)
        if not messages or not allowed:
            return {}, "no layer sends any" if allowed else reason
        exposed = sum(message.exposed(self._times[message]) for message in messages)
        if exposed < LEAST_GAIN * whole:
            return {}, f"its messages lengthen an iteration by {100 * exposed / whole:.1f} % only"
        if dimension not in ("pipeline_parallel", "data_parallel"):
            self.lines += self._sender.prepare(messages, any(not one.exact for one in allowed))
        return allowed, ""

    def _gains(
        self, possible: dict[str, dict[Recipe, dict[str, Rule]]], whole: float
    ) -> dict[str, dict[Recipe, float]]:
        """The part of an iteration that each recipe saves, by dimension. The first of every dimension is
        timed; then the second ones and so on, as long as the longest so far would fit into the limit."""
        gains: dict[str, dict[Recipe, float]] = {dimension: {} for dimension in possible}
        rounds = zip_longest(
            *([(name, *one) for one in known.items()] for name, known in possible.items())
        )
        now, longest = self.watch.elapsed(), 0.0
        for dimension, recipe, rules in filter(None, chain.from_iterable(rounds)):
            if gains[dimension] and now + longest > LIMIT:
                continue
            saved = 0.0
            for message in self._messages(dimension):
                rule = rules[message.traffic]
                if rule.codec is not None:
                    seconds = self._seconds(message, rule)
                    saved += message.exposed(self._times[message]) - message.exposed(seconds)
            gains[dimension][recipe] = saved / whole
            began, now = now, self.watch.elapsed()
            longest = max(longest, now - began)
        return gains

    def _possible(self, dimension: str, budget: float) -> tuple[dict[Recipe, dict[str, Rule]], str]:
        """The recipes that go with this run, each with its rules; or why there are none."""
        if reason := self._not_attachable.get(dimension):
            return {}, f"not possible: {reason}"
        found, reason = {}, "no recipe is within the budget"
        for recipe in within(budget, dimension):
            try:
                found[recipe] = dimension_config(self.config, dimension, recipe, self.args).rules(0)
            except CompressionConfigError as error:
                reason = f"not possible: {error}"
        return found, reason

    def _link(self, dimension: str) -> str:
        if not self._messages(dimension):
            return "not timed"
        message = max(self._messages(dimension), key=lambda one: one.exposed(self._times[one]))
        return self._sender.describe(message, self._times[message])


def dimension_config(
    config: CompressionConfig, dimension: str, recipe: Recipe, args: Namespace
) -> Any:
    """A dimension's part of ``config``, with a recipe's codecs.

    Raises: CompressionConfigError: they do not go with this run.
    """
    if recipe.exact and args.cuda_graph_impl != "none":
        raise CompressionConfigError(
            f"--cuda-graph-impl {args.cuda_graph_impl} switches lossless off"
        )
    part: Any = getattr(config, dimension)
    settings: dict[str, Any] = {"compression": recipe.compression}
    if recipe.backward is not None:
        settings["backward"] = recipe.backward
    if dimension == "tensor_parallel" and part.min_mb is None:
        settings["min_mb"] = 0.0  # all messages of a layer have one size, which is timed
    found = replace(part, **settings)
    if dimension == "data_parallel":
        if getattr(args, "use_torch_fsdp2", False):
            raise CompressionConfigError(
                "--use-torch-fsdp2 is not timed; time --dp-compression yourself"
            )
        found = replace(found, weights=None).resolved(args)  # those of the recipe
    found.check(args)
    return found


def decided_config(config: CompressionConfig, plan: RunPlan, args: Namespace) -> CompressionConfig:
    """``config`` with what was left open.

    Raises: CompressionConfigError: a recipe that does not go with this run.
    """
    recipes = plan.recipes().items()
    return replace(
        config, **{one: dimension_config(config, one, recipe, args) for one, recipe in recipes}
    )


def _not_chosen(gains: dict[Recipe, float]) -> str:
    """Why a dimension whose recipes were timed has none."""
    best = max(gains, key=lambda one: gains[one])
    percent = 100 * gains[best]
    if gains[best] < TRIED:
        gain = (
            f"gain {percent:.1f} %, under {100 * TRIED:g} %"
            if percent > 0
            else f"cost {-percent:.1f} %"
        )
        return f"{best.name}, the best here, would {gain} of an iteration"
    return (
        f"{best.name} would gain {100 * gains[best]:.1f} % for +{best.loss:.3g} % of loss, but the budget is "
        "spent; raise --compression-loss-budget"
    )


def _of_any_rank(reason: str | None) -> str | None:
    """The first rank's reason, where any has one."""
    reasons = gather_objects(reason)
    return next((reason for reason in reasons if reason), None)
