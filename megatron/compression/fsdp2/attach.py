"""``attach``: hooks into the modules that ``fully_shard`` has wrapped."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.compression.codecs import Codec, parse_codec
from megatron.compression.codecs.sdp4bit import Sdp4bitCodec
from megatron.compression.communication.audit import BackendAudit
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.policy import Policy, Rule
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.communication.transport import Transports, over_tcp
from megatron.compression.config import COMMUNICATORS, NODE_SIZE, from_environment
from megatron.compression.data_parallel.codec_gradients import parse_gradient_compressor
from megatron.compression.data_parallel.compressor import GradientCompressor
from megatron.compression.dimension import print_on_first_rank, renaming
from megatron.compression.errors import CompressionConfigError
from megatron.compression.fsdp2.gradients import GradientReduce, GradientSums
from megatron.compression.fsdp2.weights import WeightGather

FLOATS = {torch.bfloat16, torch.float16, torch.float32}


def attach(
    model: torch.nn.Module,
    gather: str = "lossless",
    reduce: str = "int8",
    *,
    start_iteration: int = 0,
    say: Callable[[str], None] = print_on_first_rank,
) -> "Fsdp2Compression":
    """Compress what the modules of ``model`` send that ``fully_shard`` has wrapped. Collective over the job.

    Args:
        model: the root module, on any device; each parameter group is attached once.
        gather: codec of the weights: lossless, int8, ...; none = uncompressed.
        reduce: codec of the gradients, or a gradient compressor such as tagc; none = uncompressed.
        start_iteration: gradients and weights go uncompressed before it, counted from 0.
        say: prints a line; called on every rank.

    Raises: CompressionConfigError: a codec, or a setting of FSDP's, that is not covered.
    """
    with renaming({"--dp-compression WEIGHTS": "gather", "--dp-compression": "reduce"}):
        weights = None if gather == "none" else parse_codec(gather)
        gradients = None if reduce == "none" else parse_gradient_compressor(reduce)
    rules = {
        "dp.weight": Rule(weights, start_iteration=start_iteration, activations=False),
        "dp.gradient": Rule(gradients, start_iteration=start_iteration, activations=False),
    }
    ledger = Ledger()
    transports = Transports(communicators=from_environment(COMMUNICATORS) or 0)
    run, node_size = Run(Policy(rules, ledger), ledger, transports), from_environment(NODE_SIZE)
    compression = Fsdp2Compression(model, run, lambda group: find_topology(group, node_size, transports), say)
    run.policy.iteration = lambda: compression.iteration
    compression.check_traffic()
    return compression


def check_codecs(weights: Codec | None, gradients: GradientCompressor | None) -> None:
    """Refuse codecs that cannot encode what FSDP sends.

    Raises: CompressionConfigError.
    """
    if isinstance(weights, Sdp4bitCodec):
        raise CompressionConfigError(
            f"weights {weights.name}: SDP4Bit sends differences, to be added to the last weights, which FSDP "
            "frees after each use; choose lossless or int8"
        )
    if gradients is not None and gradients.lossless:
        raise CompressionConfigError(
            f"gradients {gradients.name}: they change in every backward pass, so the host would wait in each "
            "layer to see whether they fit; choose int8, or none"
        )
    for codec in (weights, getattr(gradients, "codec", None)):
        if codec is not None and codec.sees_shape:
            raise CompressionConfigError(
                f"{codec.name} needs tokens and channels, not a module's flat parameters; choose int8"
            )


def check_group(names: list[str], group: FSDPParamGroup, weights: Codec | None) -> None:
    """Refuse a parameter group whose collectives are not covered.

    Raises: CompressionConfigError.
    """
    whose = f"attach(): the module of {names[0]}"
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise CompressionConfigError(
            f"{whose} has CPUOffloadPolicy, whose gathers copy from the host; drop the policy or attach()"
        )
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        raise CompressionConfigError(f"{whose} is under replicate(), without shards; use fully_shard")
    if isinstance(group.mesh_info, HSDPMeshInfo) and group._all_reduce_hook is not None:
        raise CompressionConfigError(f"{whose} has an all-reduce hook, which HSDP needs here; drop the hook")
    own = group.fsdp_params
    dtypes = {group.mp_policy.param_dtype or one.sharded_param.dtype for one in own}
    extended = any(hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather") for one in own)
    if weights is not None and (extended or len(dtypes) > 1 or not dtypes <= FLOATS):
        raise CompressionConfigError(
            f"{whose} gathers {'fp8 or other' if extended else 'several'} types at once, which no codec "
            "takes; give gather='none', or one type"
        )
    if weights is not None and weights.lossless and torch.float16 in dtypes:
        raise CompressionConfigError(
            f"{whose} gathers fp16, whose exponents lossless cannot shorten; use bf16, or gather='int8'"
        )


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
        self.gathers: list[WeightGather] = []
        self.reduces: list[GradientReduce] = []
        self._changed, self._stepped = True, False
        self._versions: list[tuple[int, int, int]] = []
        self._audit: BackendAudit | None = None
        weights, gradients = (run.policy.rule(one).codec for one in ("dp.weight", "dp.gradient"))
        check_codecs(weights, gradients)
        groups = parameter_groups(model)
        for group, names in groups:
            check_group(names, group, weights)
        self.topologies: dict[dist.ProcessGroup, Topology] = {}
        """Of the shards' ranks and, under HSDP, of the replicas'."""
        for group, names in groups:
            own = [group.mesh_info.shard_process_group]
            if isinstance(group.mesh_info, HSDPMeshInfo):
                own.append(group.mesh_info.replicate_process_group)
            for ranks in own:
                if ranks not in self.topologies:
                    self.topologies[ranks] = topology_of(ranks)
            topology, *replicas = (self.topologies[ranks] for ranks in own)
            self.gathers.append(WeightGather(names[0], group, topology, run, self._refresh))
            self.reduces.append(GradientReduce(names, group, topology, next(iter(replicas), None), run))
            group.modules[0].set_custom_all_gather(self.gathers[-1])
            group.modules[0].set_custom_reduce_scatter(self.reduces[-1])
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        self_or_none = weakref.ref(self)

        def on_step(*_: object) -> None:
            if (compression := self_or_none()) is not None:
                compression.weights_changed()
                compression._stepped = True

        # An optimizer that writes through pointers (Transformer Engine's, apex's) changes no version.
        weakref.finalize(self, register_optimizer_step_post_hook(on_step).remove)
        names = ["none" if one is None else one.name for one in (weights, gradients)]
        say(f"compression: FSDP2: {len(groups)} modules, weights {names[0]}, gradients {names[1]}")
        self._say_links(weights is not None or gradients is not None)

    def _say_links(self, compresses: bool) -> None:
        for ranks, topology in self.topologies.items():
            self._say(f"compression: FSDP2: a group is {topology.describe()}")
            if compresses and dist.get_backend(ranks) == "nccl" and topology.nodes == 1 and not over_tcp(ranks):
                self._say(
                    "compression: FSDP2: its ranks share a host, whose links are not the limit: leave "
                    "compression off there, unless a measurement says otherwise"
                )

    def check_traffic(self) -> None:
        """Compare the first iteration's ledger with what c10d is given, and say what is missing."""
        self._audit = BackendAudit(self.run.ledger, lambda: {"data parallel": [*self.topologies]})

    def weights_changed(self) -> None:
        """Ask again, at the next forward, whether lossless payloads fit. Optimizers and torch's in-place
        functions are noticed without; on all ranks alike."""
        self._changed = True

    def _before_forward(self, module: torch.nn.Module, _: object) -> None:
        versions = [
            (id(one.sharded_param), one.sharded_param._version, one._sharded_local_tensor._version)
            for gather in self.gathers
            for one in gather.group.fsdp_params
        ]
        self._changed |= versions != self._versions
        self._versions = versions
        if self._stepped:
            self._stepped = False
            self.iteration += 1
        if self._audit is not None and module.training:
            if self.iteration == 0:
                self._audit.start()
            else:
                for line in self._audit.finish():
                    self._say(f"compression: {line}")
                self._audit = None

    def _refresh(self, gather: WeightGather) -> None:
        """Ask the ranks whether lossless payloads fit, if weights have changed since, or a gather is not known
        to. Collective; the host waits for the device, once an optimizer's step."""
        if not self._changed and gather.fits is not None:
            return
        self._changed = False
        codecs = {one: one.decide().codec for one in self.gathers}
        for topology in self.topologies.values():
            asked = [
                (one, codec)
                for one, codec in codecs.items()
                if one.topology is topology and codec is not None and codec.lossless
            ]
            if not asked:
                continue
            flags = [one.overflow(codec) for one, codec in asked] + [one.noted for one, _ in asked]
            found = topology.transport(self.run.ledger, "dp.weight").any_ranks(torch.stack(flags))
            for (one, _), overflows, overflowed in zip(asked, found, found[len(asked) :], strict=False):
                one.fits = not overflows
                if overflowed:
                    raise RuntimeError(
                        f"the weights of {one.name}'s module changed without torch's knowledge and did not fit "
                        "their lossless payload, so the last passes had zeros for them: repeat these, and call "
                        "weights_changed() after such a change"
                    )

    def summary(self) -> str:
        """One line: what this rank has sent so far and would have sent uncompressed, by class, and the bytes
        that compression keeps on the device."""
        classes, sent, plain = [], 0, 0
        for traffic in ("dp.weight", "dp.gradient"):
            kinds = self.run.ledger.totals()[traffic].values()
            own, instead = sum(one for one, _ in kinds), sum(one for _, one in kinds)
            classes.append(f"{traffic} {own / 1e6:.3f} of {instead / 1e6:.3f} MB")
            sent, plain = sent + own, plain + instead
        buffers = max(one.buffer_bytes for one in self.gathers)
        buffers += max((sums.buffer_bytes() for one in self.reduces for sums in one.sums), default=0)
        memory = sum(values.nbytes for values in self.state_dict().values())
        line = f"sent {', '.join(classes)}, ratio {plain / sent if sent else 1:.2f}; payloads in flight "
        line += f"{buffers / 1e6:.3f} MB, memory of gradients {memory / 1e6:.3f} MB"
        misfits = sum(one.fits is False for one in self.gathers)
        return line + (f"; {misfits} modules do not fit and go uncompressed" if misfits else "")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a compressor of gradients remembers, by names of this rank; empty for codecs. With
        ``load_state_dict`` it is what torch.distributed.checkpoint takes, at the same number of ranks."""
        return {
            f"rank{dist.get_rank()}.{key}.{name}": values
            for key, sums in self._remembering()
            for name, values in sums.state().items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what ``state_dict`` gave."""
        for key, sums in self._remembering():
            prefix = f"rank{dist.get_rank()}.{key}."
            sums.load_state({name: state[prefix + name] for name in sums.state()})

    def _remembering(self) -> list[tuple[str, GradientSums]]:
        found = [(f"{i}.{j}", sums) for i, one in enumerate(self.reduces) for j, sums in enumerate(one.sums)]
        return [(key, sums) for key, sums in found if sums.compressor.has_memory]


def parameter_groups(model: torch.nn.Module) -> list[tuple[FSDPParamGroup, list[str]]]:
    """What ``fully_shard`` gathers and reduces together, and the names of its parameters.

    Raises: CompressionConfigError: there is none.
    """
    places = {module: name for name, module in model.named_modules()}
    found: dict[int, tuple[FSDPParamGroup, list[str]]] = {}
    for module in places:
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None:
            infos = [one._module_info for one in group.fsdp_params]
            names = [f"{places[info.module]}.{info.param_name}".removeprefix(".") for info in infos]
            found[id(group)] = group, names
    if not found:
        raise CompressionConfigError("attach(): no module with parameters is under FSDP2; call fully_shard first")
    return [*found.values()]
