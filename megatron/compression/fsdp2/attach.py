"""``attach``: hooks into the modules that ``fully_shard`` has wrapped, and refuses what is not covered."""

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.compression.codecs import Codec
from megatron.compression.codecs.contract import check_contract
from megatron.compression.communication.audit import BackendAudit
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.objects import gather_objects
from megatron.compression.communication.policy import Policy
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.communication.transport import Transports, over_tcp
from megatron.compression.config import COMMUNICATORS, NODE_SIZE, from_environment
from megatron.compression.data_parallel.compressor import GradientSync
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.dimension import print_on_first_rank
from megatron.compression.errors import CompressionConfigError, spelled
from megatron.compression.fsdp2.gradients import GradientReduce, GradientSums
from megatron.compression.fsdp2.weights import WeightGather
from megatron.compression.names import PYTHON_NAMES, Names

NAMES = Names(
    {
        **PYTHON_NAMES.settings,
        "data_parallel.compression": "reduce",
        "data_parallel.outer": "reduce outer=",
        "data_parallel.weights": "gather",
        "start_iteration": "start_iteration",
    }
)
"""What the user of ``attach`` types for the settings of data parallelism."""


def attach(
    model: torch.nn.Module,
    gather: str | None = "lossless",
    reduce: str | None = "int8",
    *,
    start_iteration: int = 0,
    say: Callable[[str], None] = print_on_first_rank,
) -> "Fsdp2Compression":
    """Compress what the modules of ``model`` under ``fully_shard`` send. Collective over the job.

    Args:
        model: the root module, on any device.
        gather: codec of the weights (lossless, int8, ...); "none" or None = uncompressed.
        reduce: codec of the gradients (int8, sdp4bit, ...), or tagc; "none" or None = uncompressed.
        start_iteration: the first iteration that compresses, counted from 0.
        say: prints a line; called on every rank.

    Raises: CompressionConfigError: a codec, or a setting of FSDP's, that is not covered.
    """
    if not isinstance(model, torch.nn.Module):
        raise CompressionConfigError(
            f"attach() takes one module, the root that fully_shard() was called on, not a "
            f"{type(model).__name__}; call it once for each model"
        )
    if start_iteration < 0:
        raise CompressionConfigError(f"start_iteration {start_iteration} must be an iteration >= 0")
    with spelled(NAMES):
        config = DataParallelConfig(compression=reduce or "none", weights=gather or "none")
        config.check_fsdp2()
    ledger, transports = Ledger(), Transports(communicators=from_environment(COMMUNICATORS) or 0)
    policy, node_size = Policy(config.rules(start_iteration), ledger), from_environment(NODE_SIZE)
    ledger.count_replays()
    check_contract(policy.rule(one).codec for one in ("dp.weight", "dp.gradient"))

    def topology_of(group: dist.ProcessGroup) -> Topology:
        topology = find_topology(group, node_size, transports)
        say(f"compression: FSDP2: a group is {topology.describe()}")
        return topology

    compression = Fsdp2Compression(model, Run(policy, ledger, transports), topology_of, say)
    policy.iteration = lambda: compression.iteration
    compression.audit = BackendAudit(ledger, lambda: {"data parallel": [*compression.topologies]})
    compression.audit.start_with_first_forward([model])
    return compression


class Fsdp2Compression:
    """Compression of one model under FSDP2. Made collectively.

    Args:
        run: policy, ledger and transports, of this model alone or of a whole run.
        topology_of: finds the topology of a process group; called once a group.
    """

    _latest: ClassVar[Callable[[], "Fsdp2Compression | None"]] = lambda: None
    """Of the model that ran last in this process."""

    def __init__(
        self, model: torch.nn.Module, run: Run, topology_of: Callable[..., Topology], say: Any
    ) -> None:
        self.run, self._say = run, say
        self.iteration = 0
        """Forward passes that began after an optimizer's step; a run that resumes may set it."""
        self.audit: BackendAudit | None = None
        """Compares the first iteration's ledger with what c10d is given."""
        self.gathers: list[WeightGather] = []
        self.reduces: list[GradientReduce] = []
        self._changed, self._stepped = True, False
        weights, gradients = (run.policy.rule(one).codec for one in ("dp.weight", "dp.gradient"))
        groups = parameter_groups(model)
        memory = gradients is not None and gradients.has_memory
        ranks = [_ranks(names[0], group, weights, memory) for group, names in groups]
        each = list(dict.fromkeys(one for among in ranks for one in among))
        each += each[:1] * (max(gather_objects(len(each))) - len(each))  # others may have more
        self.topologies = {one: topology_of(one) for one in each}
        """Of the shards' ranks and, under HSDP, of the replicas'."""
        for (group, names), among in zip(groups, ranks, strict=True):
            sums = [
                GradientSums(names, group, self.topologies[one], run, one is among[0])
                for one in among
            ]
            self.gathers.append(WeightGather(group, sums[0].topology, run, self._before_gather))
            self.reduces.append(GradientReduce(group, sums))
            group.modules[0].set_custom_all_gather(self.gathers[-1])
            group.modules[0].set_custom_reduce_scatter(self.reduces[-1])
        model.register_forward_pre_hook(self._begin_pass, prepend=True)
        # An optimizer that writes through pointers (Transformer Engine's, apex's) changes no version.
        own = weakref.proxy(self)
        weakref.finalize(self, register_optimizer_step_post_hook(lambda *_: own._on_step()).remove)
        if weights is None and gradients is None:
            return
        what = [one.name if one else "uncompressed" for one in (weights, gradients)]
        say(f"compression: FSDP2: {len(groups)} modules: weights {what[0]}, gradients {what[1]}")
        for one, topology in self.topologies.items():
            if dist.get_backend(one) == "nccl" and topology.nodes == 1 and not over_tcp(one):
                say(
                    "compression: FSDP2: these ranks share a host: leave it off unless you measure a gain"
                )

    def weights_changed(self) -> None:
        """Look again whether lossless payloads fit. Collective. Optimizers' changes are noticed without."""
        self._changed = True

    def _on_step(self) -> None:
        self._changed = self._stepped = True
        if self.audit is not None:
            self.audit.stop()  # until the next pass others send: a reference model, an evaluation

    def _begin_pass(self, *_: object) -> None:
        """Before the model's forward pass, and before each gather: a part of the model may be called, too."""
        latest, Fsdp2Compression._latest = Fsdp2Compression._latest(), weakref.ref(self)
        if latest not in (None, self) and latest.audit is not None:
            latest.audit.abandon()  # what this model sends is not in its ledger
        if not self._stepped:
            return
        self.iteration, self._stepped = self.iteration + 1, False
        shards = next(iter(self.topologies))  # other pipeline stages are not here yet
        for line in self.audit.finish(shards) if self.audit is not None else ():
            self._say(f"compression: {line}")
        gradients = self.run.policy.rule("dp.gradient")
        if self.iteration == gradients.start_iteration + 1:
            sent = self.run.ledger.totals()["dp.gradient"]
            if sent["excluded"][0] and not sent["compressed"][0]:
                why = "its layers have other names here, or are small; try tagc:layers=all"
                self._say(
                    f"compression: FSDP2: {gradients.codec.name} compresses no gradients: {why}"
                )

    def _before_gather(self, gather: WeightGather) -> None:
        """Ask the ranks whether lossless payloads fit, where weights have changed or it is not known of
        ``gather``. The host waits for the device, once a step."""
        self._begin_pass()
        codec, _ = self.run.policy.decide("dp.weight")
        if codec is None or not codec.lossless or not (self._changed or gather.changed()):
            return
        self._changed = False
        for topology in dict.fromkeys(one.topology for one in self.gathers):
            asked = [one for one in self.gathers if one.topology is topology]
            flags = [one.overflow(codec) for one in asked] + [one.misfit for one in asked]
            found = topology.transport(self.run.ledger, "dp.weight").any_ranks(torch.stack(flags))
            for one, overflows, misfit in zip(asked, found, found[len(asked) :], strict=False):
                one.fits = not overflows
                if misfit:
                    raise RuntimeError(
                        f"weights of {one.group} changed unnoticed and did not fit their payload: passes had "
                        "zeros for them; call weights_changed() after a change"
                    )

    def summary(self) -> str:
        """One line: what this rank has sent, would have sent uncompressed, and keeps on the device."""
        totals, line, sent, plain = self.run.ledger.totals(), "sent", 0, 0
        for traffic in ("dp.weight", "dp.gradient"):
            own, instead = (sum(pair) for pair in zip(*totals[traffic].values(), strict=True))
            line += f" {traffic} {own / 1e6:.3f} of {instead / 1e6:.3f} MB,"
            sent, plain = sent + own, plain + instead
        payloads = max(one.buffer_bytes for one in self.gathers)
        payloads += max(sums.buffer_bytes() for one in self.reduces for sums in one.sums)
        memory = sum(values.nbytes for values in self.state_dict().values())
        line += f" ratio {plain / sent if sent else 1:.2f}; on the device payloads of {payloads / 1e6:.3f} MB"
        line += f" and gradients' memory of {memory / 1e6:.3f} MB"
        misfits = sum(one.fits is False for one in self.gathers)
        return line + (
            f"; {misfits} modules do not fit, and are gathered uncompressed" if misfits else ""
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a compressor of gradients remembers, by names of this rank, for torch.distributed.checkpoint
        and the same number of ranks; empty for codecs."""
        syncs = self._remembering().items()
        return {
            f"{key}.{name}": values for key, sync in syncs for name, values in sync.state().items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what ``state_dict`` gave."""
        for key, sync in self._remembering().items():
            sync.load_state({name: state[f"{key}.{name}"] for name in sync.state()})

    def _remembering(self) -> dict[str, GradientSync]:
        if not getattr(self.run.policy.rule("dp.gradient").codec, "has_memory", False):
            return {}
        every = [sums for one in self.reduces for sums in one.sums if sums.numel]
        prefix = f"rank{dist.get_rank()}"
        return {
            f"{prefix}.{number}": sums.built(sums.numel)[0] for number, sums in enumerate(every)
        }


def parameter_groups(model: torch.nn.Module) -> list[tuple[FSDPParamGroup, list[str]]]:
    """What ``fully_shard`` gathers and reduces together, and its parameters' names; at least one."""
    places = {module: name for name, module in model.named_modules()}
    states = [module._get_fsdp_state() for module in places if isinstance(module, FSDPModule)]
    groups = [
        group for state in dict.fromkeys(states) if (group := state._fsdp_param_group) is not None
    ]
    if not groups:
        raise CompressionConfigError(
            "attach() finds no parameters under FSDP2; call fully_shard() before it"
        )
    infos = [[one._module_info for one in group.fsdp_params] for group in groups]
    names = [
        [f"{places.get(one.module, '')}.{one.param_name}".strip(".") for one in own]
        for own in infos
    ]
    return list(zip(groups, names, strict=True))


def _ranks(
    name: str, group: FSDPParamGroup, weights: Codec | None, memory: bool
) -> list[dist.ProcessGroup]:
    """Those that share a parameter group. Raises: CompressionConfigError: FSDP's settings are not covered."""
    own, mesh = group.fsdp_params, group.mesh_info
    dtypes = {group.mp_policy.param_dtype or one.sharded_param.dtype for one in own}
    several = len(dtypes) > 1 or any(
        hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather") for one in own
    )
    no_room = (
        dtypes - {torch.bfloat16, torch.float32} if weights is not None and weights.lossless else ()
    )
    scaled = memory and torch.float16 in (group.mp_policy.reduce_dtype, *dtypes)
    hsdp = isinstance(mesh, HSDPMeshInfo)
    for found, reason in (
        (not isinstance(mesh, FSDPMeshInfo), "is replicated; use fully_shard()"),
        (
            isinstance(group.offload_policy, CPUOffloadPolicy),
            "is offloaded to CPU; drop CPUOffloadPolicy",
        ),
        (isinstance(group._all_gather_comm, WeightGather), "is attached already; attach() once"),
        (
            hsdp and group._all_reduce_hook is not None,
            "has the hook HSDP needs; drop set_all_reduce_hook()",
        ),
        (
            weights is not None and several,
            "gathers several types, or fp8; set param_dtype, or gather='none'",
        ),
        (
            no_room,
            "gathers neither bf16 nor fp32, which lossless shortens; use bf16, or gather='int8'",
        ),
        (
            scaled,
            "has fp16 gradients, whose scale may change; use bf16, or no compressor with a memory",
        ),
    ):
        if found:
            raise CompressionConfigError(f"attach(): the module of {name} {reason}")
    return [mesh.shard_process_group, *([mesh.replicate_process_group] if hsdp else [])]
