"""``attach``: hooks into the modules that ``fully_shard`` has wrapped, and refuses what is not covered."""

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.communication.audit import BackendAudit
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.policy import Policy, Rule
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.communication.transport import Transports, over_tcp
from megatron.compression.config import COMMUNICATORS, NODE_SIZE, from_environment
from megatron.compression.data_parallel.codec_gradients import parse_gradient_compressor
from megatron.compression.data_parallel.config import check_fsdp2
from megatron.compression.dimension import print_on_first_rank, renaming
from megatron.compression.errors import CompressionConfigError
from megatron.compression.fsdp2.gradients import GradientReduce, GradientSums
from megatron.compression.fsdp2.weights import WeightGather


def attach(
    model: torch.nn.Module,
    gather: str = "lossless",
    reduce: str = "int8",
    *,
    start_iteration: int = 0,
    say: Callable[[str], None] = print_on_first_rank,
) -> "Fsdp2Compression":
    """Compress what the modules of ``model`` under ``fully_shard`` send. Collective over the job.

    Args:
        model: the root module, on any device.
        gather: codec of the weights (lossless, int8, ...); none = uncompressed.
        reduce: codec of the gradients (int8, sdp4bit, ...), or tagc; none = uncompressed.
        start_iteration: the first iteration that compresses, counted from 0.
        say: prints a line; called on every rank.

    Raises: CompressionConfigError: a codec, or a setting of FSDP's, that is not covered.
    """
    with renaming({"--dp-compression WEIGHTS": "gather", "--dp-compression": "reduce"}):
        weights = None if gather == "none" else parse_codec(gather)
        gradients = None if reduce == "none" else parse_gradient_compressor(reduce)
        check_fsdp2(weights, gradients)
    codecs = {"dp.weight": weights, "dp.gradient": gradients}
    rules = {one: Rule(codecs[one], start_iteration=start_iteration, activations=False) for one in codecs}
    ledger, transports = Ledger(), Transports(communicators=from_environment(COMMUNICATORS) or 0)
    run, node_size = Run(Policy(rules, ledger), ledger, transports), from_environment(NODE_SIZE)

    def topology_of(group: dist.ProcessGroup) -> Topology:
        topology = find_topology(group, node_size, transports)
        say(f"compression: FSDP2: a group is {topology.describe()}")
        return topology

    compression = Fsdp2Compression(model, run, topology_of, say)
    run.policy.iteration = lambda: compression.iteration
    compression.audit = BackendAudit(ledger, lambda: {"data parallel": [*compression.topologies]})
    return compression


class Fsdp2Compression:
    """Compression of one model under FSDP2. Made collectively.

    Args:
        run: policy, ledger and transports, of this model alone or of a whole run.
        topology_of: finds the topology of a process group; called once a group.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        run: Run,
        topology_of: Callable[[dist.ProcessGroup], Topology],
        say: Callable[[str], None] = print_on_first_rank,
    ) -> None:
        self.run, self._say = run, say
        self.iteration = 0
        """Forward passes that began after an optimizer's step."""
        self.audit: BackendAudit | None = None
        """Compares the first iteration's ledger with what c10d is given."""
        self.gathers: list[WeightGather] = []
        self.reduces: list[GradientReduce] = []
        self.topologies: dict[dist.ProcessGroup, Topology] = {}
        """Of the shards' ranks and, under HSDP, of the replicas'."""
        self._changed, self._stepped = True, False
        self._versions: list[tuple[int, int, int]] = []
        weights, gradients = (run.policy.rule(one).codec for one in ("dp.weight", "dp.gradient"))
        groups = parameter_groups(model)
        for group, names in groups:
            _check_group(names[0], group, weights)
        for group, names in groups:
            ranks = [group.mesh_info.shard_process_group]
            if isinstance(group.mesh_info, HSDPMeshInfo):
                ranks.append(group.mesh_info.replicate_process_group)
            for one in ranks:
                if one not in self.topologies:
                    self.topologies[one] = topology_of(one)
            rows, *replicas = (
                GradientSums(names, group, self.topologies[one], run, one is ranks[0]) for one in ranks
            )
            self.gathers.append(WeightGather(names[0], group, rows.topology, run, self._refresh))
            self.reduces.append(GradientReduce(group, rows, replicas[0] if replicas else None, run))
            group.modules[0].set_custom_all_gather(self.gathers[-1])
            group.modules[0].set_custom_reduce_scatter(self.reduces[-1])
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        reference = weakref.ref(self)

        def on_step(*_: object) -> None:
            if (compression := reference()) is not None:
                compression._changed = compression._stepped = True

        # An optimizer that writes through pointers (Transformer Engine's, apex's) changes no version.
        weakref.finalize(self, register_optimizer_step_post_hook(on_step).remove)
        if weights is None and gradients is None:
            return
        what = [one.name if one else "uncompressed" for one in (weights, gradients)]
        say(f"compression: FSDP2: {len(groups)} modules: weights {what[0]}, gradients {what[1]}")
        for one, topology in self.topologies.items():
            if dist.get_backend(one) == "nccl" and topology.nodes == 1 and not over_tcp(one):
                say(
                    "compression: FSDP2: these ranks share a host, whose links seldom limit FSDP2: leave "
                    "compression off unless you measure a gain"
                )

    def weights_changed(self) -> None:
        """Look again, at the next forward, whether lossless payloads fit. Collective. Not needed after
        optimizers and torch's in-place functions, which are noticed."""
        self._changed = True

    def _before_forward(self, module: torch.nn.Module, _: object) -> None:
        parameters = [one for gather in self.gathers for one in gather.group.fsdp_params]
        versions = [
            (id(one.sharded_param), one.sharded_param._version, one._sharded_local_tensor._version)
            for one in parameters
        ]
        self._changed |= versions != self._versions
        self.iteration += self._stepped
        self._versions, self._stepped = versions, False
        if self.audit is None or not module.training:
            return
        if self.iteration == 0:
            self.audit.start()
            return
        for line in self.audit.finish():
            self._say(f"compression: {line}")
        self.audit = None

    def _refresh(self, gather: WeightGather) -> None:
        """Ask the ranks whether lossless payloads fit, where weights have changed or it is not known of
        ``gather``. The host waits for the device, once an optimizer's step."""
        if not self._changed and gather.fits is not None:
            return
        self._changed = False
        for topology in self.topologies.values():
            codecs = {one: one.decide().codec for one in self.gathers if one.topology is topology}
            asked = {one: codec for one, codec in codecs.items() if codec is not None and codec.lossless}
            if not asked:
                continue
            flags = [one.overflow(codec) for one, codec in asked.items()] + [one.misfit for one in asked]
            found = topology.transport(self.run.ledger, "dp.weight").any_ranks(torch.stack(flags))
            for one, overflows, misfit in zip(asked, found, found[len(asked) :], strict=False):
                one.fits = not overflows
                if misfit:
                    raise RuntimeError(
                        f"the weights of the module of {one.name} changed unnoticed and did not fit their "
                        "lossless payload, so the last passes took zeros for them: call weights_changed() "
                        "after such a change, and repeat them"
                    )

    def summary(self) -> str:
        """One line: what this rank has sent and would have sent uncompressed, and the bytes that compression
        needs on the device."""
        line, sent, plain, totals = "sent", 0, 0, self.run.ledger.totals()
        for traffic in ("dp.weight", "dp.gradient"):
            own, instead = map(sum, zip(*totals[traffic].values(), strict=True))
            line += f" {traffic} {own / 1e6:.3f} of {instead / 1e6:.3f} MB,"
            sent, plain = sent + own, plain + instead
        buffers = max(one.buffer_bytes for one in self.gathers)
        buffers += max(one.rows.buffer_bytes() for one in self.reduces)
        memory = sum(values.nbytes for values in self.state_dict().values())
        line += f" ratio {plain / sent if sent else 1:.2f}; payloads {buffers / 1e6:.3f} MB, memory of "
        line += f"gradients {memory / 1e6:.3f} MB on the device"
        misfits = sum(one.fits is False for one in self.gathers)
        return line + (f"; {misfits} modules do not fit, and are gathered uncompressed" if misfits else "")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a compressor of gradients remembers, by names of this rank; empty for codecs. With
        ``load_state_dict`` it is what torch.distributed.checkpoint takes, for the same number of ranks."""
        return {
            f"{key}.{name}": values
            for key, sums in self._remembering()
            for name, values in sums.built(sums.numel)[0].state().items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what ``state_dict`` gave."""
        for key, sums in self._remembering():
            sync = sums.built(sums.numel)[0]
            sync.load_state({name: state[f"{key}.{name}"] for name in sync.state()})

    def _remembering(self) -> list[tuple[str, GradientSums]]:
        compressor = self.run.policy.rule("dp.gradient").codec
        if compressor is None or not compressor.has_memory:
            return []
        every = [sums for one in self.reduces for sums in (one.rows, one.replicas) if sums and sums.numel]
        return [(f"rank{dist.get_rank()}.{number}", sums) for number, sums in enumerate(every)]


def parameter_groups(model: torch.nn.Module) -> list[tuple[FSDPParamGroup, list[str]]]:
    """What ``fully_shard`` gathers and reduces together, and the names of its parameters.

    Raises: CompressionConfigError: there is none.
    """
    places = {module: name for name, module in model.named_modules()}
    states = [module._get_fsdp_state() for module in places if isinstance(module, FSDPModule)]
    groups = [group for state in dict.fromkeys(states) if (group := state._fsdp_param_group) is not None]
    if not groups:
        raise CompressionConfigError("attach() finds no parameters under FSDP2; call fully_shard() before it")
    infos = [[one._module_info for one in group.fsdp_params] for group in groups]
    names = [[f"{places[one.module]}.{one.param_name}".removeprefix(".") for one in own] for own in infos]
    return list(zip(groups, names, strict=True))


def _check_group(name: str, group: FSDPParamGroup, weights: Codec | None) -> None:
    """Raises: CompressionConfigError: FSDP's settings of a parameter group are not covered."""
    own, hook = group.fsdp_params, group._all_reduce_hook is not None
    dtypes = {group.mp_policy.param_dtype or one.sharded_param.dtype for one in own}
    extended = any(hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather") for one in own)
    lossless = weights is not None and weights.lossless
    for found, reason in (
        (
            isinstance(group.offload_policy, CPUOffloadPolicy),
            "is offloaded to the CPU; drop CPUOffloadPolicy",
        ),
        (not isinstance(group.mesh_info, FSDPMeshInfo), "is under replicate(); use fully_shard()"),
        (
            isinstance(group.mesh_info, HSDPMeshInfo) and hook,
            "has an all-reduce hook, which HSDP needs here; drop set_all_reduce_hook()",
        ),
        (
            weights is not None and (extended or len(dtypes) > 1),
            "gathers several types, or fp8; give gather='none'",
        ),
        (
            lossless and torch.float16 in dtypes,
            "gathers fp16, whose exponents lossless cannot shorten; use bf16, or gather='int8'",
        ),
    ):
        if found:
            raise CompressionConfigError(f"attach(): the module of {name} {reason}")
