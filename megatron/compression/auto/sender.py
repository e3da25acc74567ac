"""Sends a run's messages one by one, as training sends them, so that they can be timed.

Collectives are called as attributes of ``torch.distributed``, so that a test that replaces those
makes a link slow for timings and training alike.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings

from megatron.compression.auto.messages import MessageKind
from megatron.compression.communication.ledger import Ledger, bytes_sent
from megatron.compression.communication.policy import Policy, Rule
from megatron.compression.communication.site import CommSite, Run
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.transport import Transports
from megatron.compression.data_parallel.codec_gradients import CodecGradients
from megatron.compression.data_parallel.compressor import GradientBucket
from megatron.compression.data_parallel.weights import BucketWeights
from megatron.compression.expert_parallel.exchange import TokenExchange, TokenSite

Send = Callable[[], object]
"""Sends one message once and waits for it. Collective over the message's group."""

_TOKEN_OPERATIONS = ("all_to_all", "gather_tokens", "sum_tokens")


class Sender:
    """Makes what sends one message of a run.

    Args:
        transports: carry the payloads.
        topology: finds the topology of a data-parallel group.
        sharded: with the distributed optimizer, a rank needs its shard of a sum only.
        device: where the tensors are.
    """

    def __init__(
        self,
        transports: Transports,
        topology: Callable[..., Topology],
        sharded: bool,
        device: torch.device,
    ) -> None:
        self._transports = transports
        self._topology = topology
        self._sharded = sharded
        self._device = device

    def prepare(self, messages: Sequence[MessageKind], lossy: bool) -> list[str]:
        """Decide how payloads travel, as the hooks of layers would. Collective.

        Args:
            messages: of one dimension.
            lossy: codecs that change bits may be chosen; lossless ones have no fused kernels.

        Returns:
            Lines for the log.
        """
        # A transport is chosen for a group, whichever of its messages asks.
        last_message_of = {_group(message): message for message in messages}
        lines = []
        for group, message in last_message_of.items():
            # Tokens have no fused kernels either. Tensor parallelism's hooks do not ask for the
            # codec.
            is_of_tokens = message.operation in _TOKEN_OPERATIONS
            fused = not is_of_tokens and (lossy or message.dimension == "tensor_parallel")
            lines += self._transports.prepare([group], fused)
        return lines

    def sends(self, message: MessageKind, rule: Rule | None = None) -> Send:
        """Return what sends a message once and waits for it.

        All ranks make it together: a data-parallel codec makes the process groups of its topology.

        Args:
            message: one kind of message of an iteration.
            rule: whose codec encodes it; None: uncompressed.
        """
        if message.operation == "exchange":
            return self._exchange(message, rule)
        if message.operation == "weights":
            return self._weights(message, rule)
        if message.operation in ("gradients", "outer"):
            return self._gradients(message, rule)
        if message.operation in _TOKEN_OPERATIONS:
            return self._tokens(message, rule)
        return self._collective(message, rule)

    def describe(self, message: MessageKind, seconds: float) -> str:
        """Return ``16.0 MiB all_reduce 0.35 ms, 48 GB/s``: the link as measured, uncompressed."""
        operation = message.sent_as(self._sharded)
        rate = bytes_sent(operation, message.nbytes, _group(message).size()) / seconds
        size = message.nbytes / 2**20
        return f"{size:.3g} MiB {operation} {1e3 * seconds:.3g} ms, {rate / 1e9:.3g} GB/s"

    def _collective(self, message: MessageKind, rule: Rule | None) -> Send:
        """Return a function that sends a layer's message once; rule None: uncompressed."""
        group = _group(message)
        operation = message.operation
        shape = message.shape
        if operation == "all_gather":
            # ``message.shape`` is what the gather makes.
            shape = (shape[0] // group.size(), *shape[1:])
        x = normal_values(shape, message.dtype, self._device)
        if rule is not None:
            site = CommSite("timing", group, self._run(message, rule))
            traffic = message.traffic
            nbytes = message.nbytes
            return lambda: site.message(traffic, operation, nbytes).start(x).wait()
        if operation == "all_reduce":
            x.zero_()  # it is summed in place, again and again
            return lambda: dist.all_reduce(x, group=group)
        if operation == "reduce_scatter":
            shard = x.new_empty((shape[0] // group.size(), *shape[1:]))
            return lambda: dist.reduce_scatter_tensor(shard, x, group=group)
        full = x.new_empty(message.shape)
        return lambda: dist.all_gather_into_tensor(full, x, group=group)

    def _tokens(self, message: MessageKind, rule: Rule | None) -> Send:
        """Return a dispatcher's exchange with as many tokens for each rank."""
        group = _group(message)
        ranks = group.size()
        rows = message.shape[0]
        if message.operation == "gather_tokens":
            rows //= ranks
        x = normal_values((rows, *message.shape[1:]), message.dtype, self._device)
        site = TokenSite("timing", group, self._run(message, rule), None)
        # Gradients are sent as tokens are.
        site.forward = message.traffic
        site.backward = message.traffic
        exchange = TokenExchange()
        # Evenly: what a router would send is not known before training.
        rows_of_a_rank = rows
        if message.operation != "gather_tokens":
            rows_of_a_rank //= ranks
        sizes = None
        if message.unequal:
            sizes = [rows_of_a_rank] * ranks

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
        """Return a run in which this message alone is compressed."""
        ledger = Ledger()
        rules = {}
        if rule is not None:
            rules[message.traffic] = rule
        return Run(Policy(rules, ledger), ledger, transports=self._transports)

    def _gradients(self, message: MessageKind, rule: Rule | None) -> Send:
        """Return the reduction of a gradient bucket, or of its shard between optimizer
        instances."""
        group = _group(message)
        is_outer = message.operation == "outer"
        sharded = self._sharded and not is_outer
        x = normal_values(message.shape, message.dtype, self._device)
        if rule is not None:
            if is_outer:
                share = 1 / _group_of_instance().size()
                topology = self._topology(group, share, "the outer")
                compressor = CodecGradients(rule.codec)
            else:
                topology = self._topology(group)
                compressor = rule.codec
            bucket = GradientBucket(
                x, (), 1 / group.size(), sharded, topology, Ledger(), message.traffic
            )
            sync = compressor.build(bucket)
            return lambda: sync.start().wait()
        x.zero_()  # it is summed in place, again and again
        if not sharded:
            return lambda: dist.all_reduce(x, group=group)
        shard = torch.empty_like(x.view(group.size(), -1)[0])
        return lambda: dist.reduce_scatter_tensor(shard, x, group=group)

    def _weights(self, message: MessageKind, rule: Rule | None) -> Send:
        """Return the gather of a bucket's updated weights."""
        group = _group(message)
        x = normal_values(message.shape, message.dtype, self._device)
        shard = x.view(group.size(), -1)[group.rank()]
        if rule is None:
            shard = shard.clone()
            return lambda: dist.all_gather_into_tensor(x, shard, group=group)
        first_rank = dist.get_process_group_ranks(group)[0]
        dist.broadcast(x, src=first_rank, group=group)  # replicas begin alike
        # As after a step of the optimizer: masters in fp32, a little off the weights.
        updated = shard.float() * 1.001
        ledger = Ledger()
        policy = Policy({message.traffic: rule}, ledger)
        weights = BucketWeights(x, policy, self._topology(group), ledger)

        def send() -> None:
            weights.decide()
            weights.update([(0, updated)])
            weights.start().wait()

        return send

    def _exchange(self, message: MessageKind, rule: Rule | None) -> Send:
        """Return an exchange in which every stage sends to the next one and receives from the one
        before."""
        group = _group(message)
        x = normal_values(message.shape, message.dtype, self._device)
        if rule is None:
            return lambda: _send_around(x, group)
        codec = rule.codec

        def send() -> torch.Tensor:
            payload = _send_around(codec.encode(x[None]), group)
            return codec.decode(payload, x.shape, x.dtype)

        return send


def normal_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return Gaussian values of a shape; the run's own random numbers stay as they are.

    Args:
        shape: any.
        dtype: of the result.
        device: of the result.
    """
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def _send_around(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send a tensor to the next rank of a group and return that of the one before, both at once."""
    ranks = dist.get_process_group_ranks(group)
    rank = group.rank()
    # In a ring, so that the first and the last stage have as much to do.
    following = ranks[(rank + 1) % len(ranks)]
    previous = ranks[rank - 1]
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, following, group)
    receive = dist.P2POp(dist.irecv, received, previous, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return received


def _group(message: MessageKind) -> dist.ProcessGroup:
    """Return the process group of this rank that a message is sent in."""
    dimension = message.dimension
    operation = message.operation
    if operation == "outer":
        return parallel_state.get_inter_distributed_optimizer_instance_group()
    if dimension == "data_parallel":
        return _group_of_instance()
    if dimension == "tensor_parallel" and operation in _TOKEN_OPERATIONS:
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


def _group_of_instance() -> dist.ProcessGroup:
    """Return the data-parallel ranks of this rank's optimizer instance."""
    return parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=True
    )
