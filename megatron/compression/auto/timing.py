"""Times a run's own messages on its own process groups, uncompressed and through codecs.

Everything is sent as training sends it: tensor and context parallelism by a ``CommSite``, tokens by what
stands in for their dispatcher's functions, gradients and weights by what a bucket has, stages by the calls of
megatron-core. Test seam: collectives are called as attributes of
``torch.distributed``, so a test that replaces those makes a link slow for timings and training alike.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings

from megatron.compression.auto.predict import Message
from megatron.compression.communication.ledger import Ledger, bytes_sent
from megatron.compression.communication.policy import Policy, Rule
from megatron.compression.communication.run import Run
from megatron.compression.communication.site import CommSite
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.transports import Transports
from megatron.compression.data_parallel.compressor import GradientBucket
from megatron.compression.data_parallel.weights import BucketWeights
from megatron.compression.expert_parallel.exchange import TokenExchange
from megatron.compression.expert_parallel.site import TokenSite

LIMIT = 10.0
"""Seconds after which no candidate is timed but the first of each dimension."""
TRIALS = 5
TRIAL_SECONDS = 0.01
"""A trial repeats a message until it takes about so long; their median counts."""

_TOKENS = {"all_to_all": "all_to_all", "gather_tokens": "all_gather", "sum_tokens": "reduce_scatter"}
_SENT_AS = {"gradients": "reduce_scatter", "weights": "all_gather", "exchange": "send", **_TOKENS}


class Stopwatch:
    """Times what all ranks do at once. Every method is collective and gives the same on all ranks."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())

    def largest(self, *values: float) -> list[float]:
        """The largest of each over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def elapsed(self) -> float:
        """Seconds since it was made."""
        return self.largest(time.perf_counter() - self._began)[0]

    def seconds(self, work: Callable[[], object]) -> float:
        """What one call takes, on the slowest rank: the median of a few trials, after two calls to warm up
        (kernels are compiled, communicators are made)."""
        work()
        self._synchronize()
        (once,) = self.largest(self._time(work, 1))
        if once > 0.5:
            return once
        repeats = max(1, min(50, round(TRIAL_SECONDS / max(once, 1e-9))))
        trials = TRIALS if once < 0.05 else 2
        return self.largest(statistics.median(self._time(work, repeats) for _ in range(trials)))[0]

    def _time(self, work: Callable[[], object], repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        self._synchronize()
        return (time.perf_counter() - began) / repeats

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def gemm_rate(watch: Stopwatch, rows: int, columns: int, inner: int, dtype: torch.dtype) -> float:
    """FLOP/s of ``[rows, inner] @ [inner, columns]`` on the slowest rank."""
    left, right = _normal((rows, inner), dtype, watch.device), _normal((inner, columns), dtype, watch.device)
    return 2 * rows * columns * inner / watch.seconds(lambda: left @ right)


class Sender:
    """Makes what sends one message of a run.

    Args:
        transports: the run's; see ``prepare``.
        topology: of the data-parallel group.
        sharded: the distributed optimizer is used.
    """

    def __init__(
        self,
        transports: Transports,
        topology: Callable[[dist.ProcessGroup], Topology],
        sharded: bool,
        device: torch.device,
    ) -> None:
        self._transports, self._topology = transports, topology
        self._sharded, self._device = sharded, device

    def prepare(self, messages: Sequence[Message], lossy: bool) -> list[str]:
        """Decide how payloads travel, as the hooks of layers would; lines for the log. Collective.

        Args:
            lossy: whether codecs that change bits may be chosen; lossless has no fused kernels.
        """
        lines = []
        for group, one in {_group(one): one for one in messages}.items():
            # nor have tokens; tensor parallelism's hooks do not ask for the codec
            fused = one.operation not in _TOKENS and (lossy or one.dimension == "tensor_parallel")
            lines += self._transports.prepare([group], fused)
        return lines

    def sends(self, message: Message, rule: Rule | None = None) -> Callable[[], object]:
        """A call that sends ``message`` once and waits for it, through the rule's codec if there is one.

        Made by all ranks together: a data-parallel codec makes the process groups of its topology.
        """
        if message.operation == "exchange":
            return self._exchange(message, rule)
        if message.operation == "gradients":
            return self._gradients(message, rule)
        if message.operation == "weights":
            return self._weights(message, rule)
        if message.operation in _TOKENS:
            return self._tokens(message, rule)
        return self._collective(message, rule)

    def describe(self, message: Message, seconds: float) -> str:
        """``16.0 MiB all_reduce 0.35 ms, 48 GB/s``: the link as measured, uncompressed."""
        operation = _SENT_AS.get(message.operation, message.operation)
        if message.operation == "gradients" and not self._sharded:
            operation = "all_reduce"
        rate = bytes_sent(operation, message.nbytes, _group(message).size()) / seconds
        size = message.nbytes / 2**20
        return f"{size:.3g} MiB {operation} {1e3 * seconds:.3g} ms, {rate / 1e9:.3g} GB/s"

    def _collective(self, message: Message, rule: Rule | None) -> Callable[[], object]:
        group, operation = _group(message), message.operation
        shape = message.shape
        if operation == "all_gather":
            shape = (shape[0] // group.size(), *shape[1:])
        x = _normal(shape, message.dtype, self._device)
        if rule is not None:
            send = getattr(CommSite("timing", group, self._run(message, rule)), operation)
            return lambda: send(x, message.traffic).wait()
        if operation == "all_reduce":
            x.zero_()  # it is summed in place, again and again
            return lambda: dist.all_reduce(x, group=group)
        if operation == "reduce_scatter":
            part = x.new_empty((shape[0] // group.size(), *shape[1:]))
            return lambda: dist.reduce_scatter_tensor(part, x, group=group)
        full = x.new_empty(message.shape)
        return lambda: dist.all_gather_into_tensor(full, x, group=group)

    def _tokens(self, message: Message, rule: Rule | None) -> Callable[[], object]:
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

    def _run(self, message: Message, rule: Rule | None) -> Run:
        """In which this message alone is compressed."""
        ledger = Ledger()
        rules = {} if rule is None else {message.traffic: rule}
        return Run(Policy(rules, ledger), ledger, transports=self._transports)

    def _gradients(self, message: Message, rule: Rule | None) -> Callable[[], object]:
        group = _group(message)
        x = _normal(message.shape, message.dtype, self._device)
        if rule is not None:
            topology = self._topology(group)
            bucket = GradientBucket(x, (), 1 / group.size(), self._sharded, topology, Ledger())
            sync = rule.codec.build(bucket, lambda: None)
            return lambda: sync.start().wait()
        x.zero_()
        if not self._sharded:
            return lambda: dist.all_reduce(x, group=group)
        shard = torch.empty_like(x.view(group.size(), -1)[0])
        return lambda: dist.reduce_scatter_tensor(shard, x, group=group)

    def _weights(self, message: Message, rule: Rule | None) -> Callable[[], object]:
        group = _group(message)
        x = _normal(message.shape, message.dtype, self._device)
        own = x.view(group.size(), -1)[group.rank()]
        if rule is None:
            shard = own.clone()
            return lambda: dist.all_gather_into_tensor(x, shard, group=group)
        dist.broadcast(x, src=dist.get_process_group_ranks(group)[0], group=group)  # replicas begin alike
        ledger, updated = Ledger(), own.float() * 1.001
        weights = BucketWeights(x, Policy({message.traffic: rule}, ledger), self._topology(group), ledger)

        def send() -> None:
            weights.decide()
            weights.update([(0, updated)])
            weights.start().wait()

        return send

    def _exchange(self, message: Message, rule: Rule | None) -> Callable[[], object]:
        """Every stage sends to the next and receives from the one before: both directions at once."""
        group = _group(message)
        x = _normal(message.shape, message.dtype, self._device)
        if rule is None:
            return lambda: _ring(x, group)
        codec = rule.codec

        def send() -> None:
            received = _ring(codec.encode(x[None]), group)
            codec.decode(received, x.shape, x.dtype)

        return send


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal values, which leave the run's own random numbers as they are."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def _ring(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = dist.get_process_group_ranks(group)
    received, rank = torch.empty_like(tensor), group.rank()
    following, previous = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, following, group),
            dist.P2POp(dist.irecv, received, previous, group),
        ]
    ):
        work.wait()
    return received


def _group(message: Message) -> dist.ProcessGroup:
    dimension, operation = message.dimension, message.operation
    if dimension == "data_parallel":
        return parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
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
