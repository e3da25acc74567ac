"""What ``attach`` of FSDP2 and of DDP have in common: a run of one model in a loop of a user's own.

Nothing here needs megatron-core. ``wrapper`` is what lines of the log call the wrapper of the
model: FSDP2, or DDP.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.compression.codecs.contract import check_contract
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.policy import Policy
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.communication.transport import Transports, over_tcp
from megatron.compression.config import COMMUNICATORS, NODE_SIZE, from_environment
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.errors import CompressionConfigError, refused_for, spelled
from megatron.compression.names import PYTHON_NAMES, Names, path_of_traffic
from taco_kernels.common.fast_launch import slow_launches

Log = Callable[[str], None]

REDUCE_NAMES = {
    **PYTHON_NAMES.settings,
    "data_parallel.compression": "reduce",
    "data_parallel.outer": "reduce outer=",
    "start_iteration": "start_iteration",
}
"""What the user of an ``attach(model, reduce=...)`` types for the settings of data parallelism."""


def open_run(
    config: DataParallelConfig, start_iteration: int, names: Names, wrapper: str, log: Log
) -> Run:
    """Open a run of one model, with its own policy, ledger and transports.

    Args:
        config: how its gradients and weights are sent.
        start_iteration: the first iteration that compresses, counted from 0.
        names: what the user types for the settings.
        wrapper: FSDP2 or DDP.
        log: prints a line.

    Returns:
        The run. Its policy asks for the iteration of nobody yet: the caller sets that.

    Raises:
        CompressionConfigError: the iteration is negative, or a codec breaks the contract.
    """
    if start_iteration < 0:
        raise CompressionConfigError(f"start_iteration {start_iteration} must be an iteration >= 0")
    ledger = Ledger()
    transports = Transports(communicators=from_environment(COMMUNICATORS) or 0)
    policy = Policy(config.rules(start_iteration), ledger)
    # A codec of the user's own is tried once here, so that a mistake is one line at the start.
    has_codecs = False
    for traffic in ("dp.weight", "dp.gradient"):
        codecs = policy.rule(traffic).codecs
        has_codecs = has_codecs or bool(codecs)
        with spelled(names), refused_for(path_of_traffic(traffic)):
            check_contract(codecs)
    slow = slow_launches()
    if slow and has_codecs:
        log(f"compression: {wrapper}: {slow}")
    run = Run(policy, ledger, transports)
    run.open()
    return run


def topology_of(run: Run, group: dist.ProcessGroup, wrapper: str, log: Log) -> Topology:
    """Find the topology of a process group, and log it. Collective over the group.

    Args:
        run: has the transports.
        group: ranks that hold one model together.
        wrapper: FSDP2 or DDP.
        log: prints a line.
    """
    node_size = from_environment(NODE_SIZE)
    topology = find_topology(group, node_size, run.transports, callers=group)
    log(f"compression: {wrapper}: a group is {topology.describe()}")
    return topology


def log_if_on_one_host(topology: Topology, wrapper: str, log: Log) -> None:
    """Log that links inside a host seldom gain. Collective over the group.

    Args:
        topology: the group's.
        wrapper: FSDP2 or DDP.
        log: prints a line.
    """
    group = topology.group
    # Over gloo ranks are CPUs, in a trial or a test.
    on_nccl = dist.get_backend(group) == "nccl"
    if on_nccl and topology.nodes == 1 and not over_tcp(group):
        log(
            f"compression: {wrapper}: these ranks share a host: leave it off unless you measure "
            "a gain"
        )


def left_out_everything(run: Run, iteration: int) -> str | None:
    """Return a line where a compressor has left out all gradients of its first iteration.

    Args:
        run: the model's.
        iteration: the iteration that begins now, counted from 0.
    """
    rule = run.policy.rule("dp.gradient")
    # The first iteration that was to be compressed has just ended.
    if rule.codec is None or iteration != rule.start_iteration + 1:
        return None
    sent = run.ledger.totals()["dp.gradient"]
    if not sent["excluded"][0] or sent["compressed"][0]:
        return None
    return (
        f"{rule.codec.name} compresses no gradients: its layers have other names here, or are "
        "small; try tagc:layers=all"
    )


def sent_so_far(ledger: Ledger, traffics: Sequence[str]) -> str:
    """Return what this rank has sent and would have sent uncompressed, by traffic class, and the
    ratio."""
    totals = ledger.totals()
    words = []
    all_sent = 0
    all_uncompressed = 0
    for traffic in traffics:
        sent, uncompressed = (sum(pair) for pair in zip(*totals[traffic].values(), strict=True))
        words.append(f"{traffic} {sent / 1e6:.3f} of {uncompressed / 1e6:.3f} MB")
        all_sent += sent
        all_uncompressed += uncompressed
    ratio = all_uncompressed / all_sent if all_sent else 1
    return f"sent {', '.join(words)}, ratio {ratio:.2f}"


def check_saved_memory(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Refuse a saved memory of gradients that is not of this model, these settings and ranks.

    Args:
        state: what is loaded; its names begin with ``rank0.`` and so on.
        expected: what this rank would save.

    Raises:
        CompressionConfigError: a name or a shape differs.
    """
    problem = _difference(state, expected)
    if problem is None:
        return
    raise CompressionConfigError(
        f"load_state_dict(): the saved memory of gradients {problem}: it was saved on another "
        "number of ranks, with other settings or of another model; load without "
        '"compression", so that it starts from zero'
    )


def _difference(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str | None:
    # A name that only a job of more ranks has: names begin with the rank.
    more_ranks = f"rank{dist.get_world_size()}."
    if any(name.startswith(more_ranks) for name in state):
        return "is of more ranks"
    for name, values in expected.items():
        if name not in state:
            return f"has no {name}"
        if state[name].shape != values.shape:
            return f"has {name} of {tuple(state[name].shape)}, not {tuple(values.shape)}"
    return None
