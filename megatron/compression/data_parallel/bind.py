"""Hangs data-parallel compression on the DDP wrappers of a model (a ``post_wrap_hook``)."""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron.compression.communication.ledger import Ledger
from megatron.compression.data_parallel.bucket import GradientBucket, spans_of
from megatron.compression.data_parallel.bucket_group import CompressedBucketGroup
from megatron.compression.data_parallel.in_flight import InFlight
from megatron.compression.data_parallel.replicas import Replicas, replicated_ranges
from megatron.compression.data_parallel.topology import Topology, find_topology
from megatron.compression.data_parallel.weights import ATTRIBUTE, BucketWeights
from megatron.compression.runtime import CompressionRuntime


def bind_data_parallel(chunks: list, runtime: CompressionRuntime) -> list:
    """Give every bucket group its gradient sync and its weights. Collective over all ranks.

    Args:
        chunks: model chunks, wrapped by DDP.
        runtime: codecs, ledger, settings.

    Returns:
        The same chunks.
    """
    if not runtime.config.data_parallel.enabled:
        return chunks
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise TypeError(f"--dp-compression needs Megatron's DistributedDataParallel, not {type(chunk)}")
        topology_of(chunk.intra_dp_cp_group, runtime)  # all ranks, also those without a bucket
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        names = {parameter: prefix + name for name, parameter in chunk.module.named_parameters()}
        in_flight = InFlight()
        for group in chunk.bucket_groups:
            _bind_group(group, names, runtime, in_flight)
    return chunks


def _bind_group(group, names, runtime: CompressionRuntime, in_flight: InFlight) -> None:
    config = group.ddp_config
    sharded = config.use_distributed_optimizer
    ranks = group.intra_distributed_optimizer_instance_group if sharded else group.data_parallel_group
    if ranks.size() == 1:
        return
    topology = topology_of(ranks, runtime)
    group.__class__ = CompressedBucketGroup
    group.runtime, group.topology, group.in_flight = runtime, topology, in_flight
    group.gradient_syncs, group.weights = [], []
    group.gradient_replicas, group.weight_replicas = [], []
    tensor_ranks = parallel_state.get_tensor_model_parallel_group()
    for bucket in group.buckets:
        if runtime.gradient_sync is not None:
            average = 1 / ranks.size() if config.average_in_collective else 1.0
            view = GradientBucket(
                bucket.grad_data,
                spans_of(bucket, names),
                bucket.gradient_scaling_factor * average,
                sharded,
                topology,
                runtime.ledger,
            )
            sync = runtime.gradient_sync(view)
            group.gradient_syncs.append(sync)
            runtime.gradient_syncs.append((sync, view))
            first, values = 0, view.gradients
            if sharded:
                first, values = topology.rank * view.shard.numel(), view.shard
            ranges = replicated_ranges(view.spans, first, first + values.numel(), gradients=True)
            group.gradient_replicas.append(Replicas(values, ranges, tensor_ranks, runtime.ledger))
    # fp32 parameters have no master apart from themselves, so there is no difference to send.
    masters = sharded and all(b.param_data.dtype in (torch.bfloat16, torch.float16) for b in group.buckets)
    if runtime.weight_codec is not None and masters:
        for bucket in group.buckets:
            weights = BucketWeights(bucket.param_data, runtime.weight_codec, topology, runtime.ledger)
            setattr(bucket, ATTRIBUTE, weights)
            group.weights.append(weights)
            ranges = replicated_ranges(spans_of(bucket, names))
            flat = bucket.param_data.view(-1)
            group.weight_replicas.append(Replicas(flat, ranges, tensor_ranks, runtime.ledger))


def topology_of(ranks: torch.distributed.ProcessGroup, runtime: CompressionRuntime) -> Topology:
    """The topology of a data-parallel group, found once a group; the first time collectively."""
    if ranks not in runtime.topologies:
        settings = runtime.config.data_parallel
        topology = find_topology(ranks, settings.dp_intra_node_size, settings.dp_communicators)
        runtime.topologies[ranks] = topology
        if torch.distributed.get_rank() == 0:
            line = topology.describe() + topology.describe_communicators()
            print(f" compression: a data-parallel group is {line}", flush=True)
    return runtime.topologies[ranks]


def record_uncompressed(
    ledger: Ledger, channel: str, group, operation: str, buffer_bytes: int, world_size: int
) -> None:
    """Count an uncompressed collective of a bucket group, under the reason that a bound group gives."""
    kind = getattr(group, "uncompressed_kind", "off")
    topology = getattr(group, "topology", None)
    if topology is None:
        ledger.record_uncompressed(channel, kind, operation, buffer_bytes, world_size)
    else:
        topology.record_uncompressed(ledger, channel, kind, operation, buffer_bytes)
