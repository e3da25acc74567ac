"""``attach``: puts compression into the modules that ``fully_shard`` has wrapped."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.compression.codecs import Codec
from megatron.compression.codecs.contract import check_contract
from megatron.compression.communication.audit import BackendAudit
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.overflow import OverflowFlags
from megatron.compression.communication.policy import Policy
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology, find_topology
from megatron.compression.communication.transport import Transports, over_tcp
from megatron.compression.config import COMMUNICATORS, NODE_SIZE, from_environment
from megatron.compression.data_parallel.compressor import GradientSync
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.dimension import print_on_first_rank
from megatron.compression.errors import CompressionConfigError, refused_for, spelled
from megatron.compression.fsdp2.copies import IsCopy, copies_of
from megatron.compression.fsdp2.gradients import GradientReduce, GradientSums
from megatron.compression.fsdp2.parameter_group import ParameterGroup, Slots, parameter_groups
from megatron.compression.fsdp2.weights import WeightGather
from megatron.compression.names import PYTHON_NAMES, Names, path_of_traffic
from taco_kernels.common.fast_launch import slow_launches

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


_compressed: "weakref.WeakSet[Fsdp2Compression]" = weakref.WeakSet()
"""Of all models in this process."""


def attach(
    model: torch.nn.Module,
    gather: str | None = "lossless",
    reduce: str | None = "int8",
    *,
    start_iteration: int = 0,
    log: Callable[[str], None] = print_on_first_rank,
) -> "Fsdp2Compression":
    """Compress what the modules of ``model`` under ``fully_shard`` send.

    Collective over the ranks of the model's mesh; ranks that have no part in the model need not
    call.

    Args:
        model: the root module, on any device.
        gather: codec of the weights (lossless, int8, ...); "none" or None = uncompressed.
        reduce: codec of the gradients (int8, sdp4bit, ...), or tagc; "none" or None = uncompressed.
        start_iteration: the first iteration that compresses, counted from 0.
        log: prints a line; called on every rank.

    Returns:
        What has been put into the model.

    Raises:
        CompressionConfigError: a codec, or a setting of FSDP's, that is not covered.
    """
    if not isinstance(model, torch.nn.Module):
        raise CompressionConfigError(
            f"attach() takes one module, the root that fully_shard() was called on, not a "
            f"{type(model).__name__}; call it once for each model"
        )
    if start_iteration < 0:
        raise CompressionConfigError(f"start_iteration {start_iteration} must be an iteration >= 0")
    # The settings of data parallelism, with errors in the words of this call: gather and reduce.
    with spelled(NAMES):
        config = DataParallelConfig(compression=reduce or "none", weights=gather or "none")
        config.check_fsdp2()
    ledger = Ledger()
    transports = Transports(communicators=from_environment(COMMUNICATORS) or 0)
    node_size = from_environment(NODE_SIZE)
    policy = Policy(config.rules(start_iteration), ledger)
    codecs = [policy.rule(traffic).codec for traffic in ("dp.weight", "dp.gradient")]
    for traffic, codec in zip(("dp.weight", "dp.gradient"), codecs, strict=True):
        with spelled(NAMES), refused_for(path_of_traffic(traffic)):
            check_contract([codec])
    slow = slow_launches()
    if slow and any(codec is not None for codec in codecs):
        log(f"compression: FSDP2: {slow}")

    def topology_of(group: dist.ProcessGroup) -> Topology:
        topology = find_topology(group, node_size, transports, callers=group)
        log(f"compression: FSDP2: a group is {topology.describe()}")
        return topology

    run = Run(policy, ledger, transports)
    run.open()
    compression = Fsdp2Compression(model, run, topology_of, log)
    # The policy has to be there before the hooks that count iterations.
    policy.iteration = lambda: compression.iteration
    # What c10d is given in the first iteration is compared with the ledger.
    compression.audit = BackendAudit(ledger, lambda: {"data parallel": [*compression.topologies]})
    compression.audit.start_with_first_forward([model])
    return compression


class Fsdp2Compression:
    """Compression of one model under FSDP2.

    Ranks agree on what is sent by what they all see: steps of the model's optimizer, iterations,
    calls of ``weights_changed``. Nothing that one rank alone may see (another optimizer, a version
    counter of torch's) starts a collective.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        run: Run,
        topology_of: Callable[[dist.ProcessGroup], Topology],
        log: Callable[[str], None],
        is_copy: IsCopy | None = None,
    ) -> None:
        """Hook into a model. Collective over its ranks.

        Args:
            model: the root module.
            run: policy, ledger and transports, of this model alone or of a whole run.
            topology_of: finds the topology of a process group; called once a group, collectively
                over it.
            log: prints a line; called on every rank.
            is_copy: tells parameters that ranks outside the mesh hold as well; None: see
                ``copies_of``.

        Raises:
            CompressionConfigError: a setting of FSDP's that is not covered.
        """
        self.run = run
        self._log = log
        self.iteration = 0
        """Forward passes that began after a step of the model's optimizer; a run that resumes may
        set it."""
        self.audit: BackendAudit | None = None
        """Compares the first iteration's ledger with what c10d is given."""
        self.topologies: dict[dist.ProcessGroup, Topology] = {}
        """Of the shards' ranks and, under HSDP, of the replicas'."""
        self.gathers: list[WeightGather] = []
        self.reduces: list[GradientReduce] = []
        self._slots: list[Slots] = []
        # What has happened since the last pass; see _begin_pass.
        self._has_begun = False
        self._has_stepped = False
        self._weights_changed = True
        self._iteration_asked: int | None = None
        self._gradients_enabled = True
        weights = run.policy.rule("dp.weight").codec
        gradients = run.policy.rule("dp.gradient").codec
        self.groups = parameter_groups(model)
        # Everything is refused before anything is changed.
        for group in self.groups:
            check_supported(group, weights, gradients)
        # In the order of the modules, the same on all ranks of a group: finding a topology is
        # collective.
        for group in self.groups:
            for process_group in filter(None, (group.shard_group, group.replica_group)):
                if process_group not in self.topologies:
                    self.topologies[process_group] = topology_of(process_group)
        for group in self.groups:
            self._hook_into(group, is_copy or copies_of(group))
        _compressed.add(self)
        self._handles = [model.register_forward_pre_hook(self._begin_model, prepend=True)]
        # An optimizer that writes through pointers (Transformer Engine's, apex's) changes no
        # version, so steps are counted. The hook is torch's for all optimizers, and must not keep
        # the model alive.
        weak_self = weakref.proxy(self)
        step_hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: weak_self._on_step(optimizer)
        )
        self._remove_step_hook = weakref.finalize(self, step_hook.remove)
        if weights is not None or gradients is not None:
            self._describe(weights, gradients)

    def _hook_into(self, group: ParameterGroup, is_copy: IsCopy) -> None:
        """Put ours in the place of a group's gathers and reductions."""
        shards = self.topologies[group.shard_group]
        over_shards = GradientSums(group, shards, self.run, True, is_copy)
        over_replicas = None
        if group.replica_group is not None:
            replicas = self.topologies[group.replica_group]
            over_replicas = GradientSums(group, replicas, self.run, False, is_copy)
        # Before the slots are filled: it reads the hook that the user has set.
        gather = WeightGather(group, shards, self.run, is_copy, self._before_gather)
        reduce = GradientReduce(group, over_shards, over_replicas)
        sum_replicas = reduce.sum_replicas if over_replicas is not None else None
        self.gathers.append(gather)
        self.reduces.append(reduce)
        self._slots.append(Slots(group, gather, reduce, sum_replicas))

    def _describe(self, weights: Codec | None, gradients: Any) -> None:
        names = [codec.name if codec else "uncompressed" for codec in (weights, gradients)]
        self._log(
            f"compression: FSDP2: {len(self.groups)} modules: weights {names[0]}, gradients "
            f"{names[1]}"
        )
        for process_group, topology in self.topologies.items():
            on_nccl = dist.get_backend(process_group) == "nccl"
            if on_nccl and topology.nodes == 1 and not over_tcp(process_group):
                self._log(
                    "compression: FSDP2: these ranks share a host: leave it off unless you measure "
                    "a gain"
                )

    def close(self) -> None:
        """Give the model back to FSDP as it was; gradients that a compressor remembers are
        dropped."""
        for slots in self._slots:
            slots.restore()
        for handle in self._handles:
            handle.remove()
        self._remove_step_hook()
        if self.audit is not None:
            self.audit.abandon()
        self.run.close()
        _compressed.discard(self)

    def weights_changed(self) -> None:
        """Look again whether lossless payloads fit, at the next forward pass. To be called on all
        ranks.

        Steps of the model's optimizer are noticed without.
        """
        self._weights_changed = True

    def _on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step of any optimizer of the process: note one that holds the model's parameters.

        Others do not count: a rank may step one alone, as for a probe, or that of another model.
        """
        stepped = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        # Megatron's optimizers step fp32 copies, to which the parameters refer.
        holds_ours = any(
            id(parameter) in stepped or id(getattr(parameter, "main_param", None)) in stepped
            for group in self.groups
            for parameter in group.parameters
        )
        if not holds_ours:
            return
        self._has_stepped = True
        if self.audit is not None:
            self.audit.stop()  # until the next pass others send: a reference model, an evaluation

    def _begin_model(self, *_: object) -> None:
        """Before the root's forward pass."""
        if torch.is_grad_enabled() != self._gradients_enabled:
            # Between training and evaluation other weights may be swapped in, on all ranks.
            self._gradients_enabled = not self._gradients_enabled
            self._weights_changed = True
        self._begin_pass()

    def _begin_pass(self) -> None:
        """Before the root's forward pass, and before each gather: a part of the model may be
        called, too."""
        for compression in _compressed:
            if compression is not self and compression._has_begun and compression.audit is not None:
                compression.audit.abandon()  # what this model sends is not in its ledger
        if self._has_begun and not self._has_stepped:
            return
        # Once a step: public setters may have been called since.
        self._has_begun = True
        for slots in self._slots:
            slots.check()
        if not self._has_stepped:
            return
        self._has_stepped = False
        self.iteration += 1
        if self.audit is not None:
            shards = next(iter(self.topologies))  # other pipeline stages are not here yet
            for line in self.audit.finish(shards):
                self._log(f"compression: {line}")
        self._say_if_nothing_is_compressed()

    def _say_if_nothing_is_compressed(self) -> None:
        """After the first compressed iteration: say so where the compressor left out all
        gradients."""
        rule = self.run.policy.rule("dp.gradient")
        # the first iteration that was to be compressed has just ended
        if self.iteration != rule.start_iteration + 1:
            return
        sent = self.run.ledger.totals()["dp.gradient"]
        if sent["excluded"][0] and not sent["compressed"][0]:
            self._log(
                f"compression: FSDP2: {rule.codec.name} compresses no gradients: its layers have "
                "other names here, or are small; try tagc:layers=all"
            )

    def _before_gather(self, gather: WeightGather) -> None:
        """Before a forward pass gathers weights: know whether lossless payloads fit."""
        self._begin_pass()
        codec, _ = self.run.policy.decide("dp.weight")
        if codec is None or not codec.lossless:
            return
        # Megatron's own count, in a run of its: its optimizer may hold parameters that nobody
        # knows.
        iteration = self.run.policy.iteration()
        if self._weights_changed or iteration != self._iteration_asked:
            self._weights_changed = False
            self._iteration_asked = iteration
            self._ask_whether_weights_fit(codec)
        else:
            gather.check_alone(codec)

    def _ask_whether_weights_fit(self, codec: Codec) -> None:
        """Encode all shards and ask the ranks whether they fit. The host waits for the device.

        Raises:
            RuntimeError: weights that changed unnoticed did not fit; passes since had zeros for
                them.
        """
        # One question for each process group, whose ranks gather together.
        gathers = [gather for gather in self.gathers if gather.numel]
        for topology in dict.fromkeys(gather.topology for gather in gathers):
            asked = [gather for gather in gathers if gather.topology is topology]
            flags = OverflowFlags()
            for gather in asked:
                flags.note(gather, gather.overflow(codec))
                flags.note((gather, "since the last time"), gather.misfit)
            transport = topology.transport(self.run.ledger, "dp.weight")
            overflows = flags.ask(transport.any_ranks)
            for gather in asked:
                gather.fits = not overflows[gather]
                if overflows[gather, "since the last time"]:
                    raise RuntimeError(
                        f"weights of {gather.group} changed unnoticed and did not fit their "
                        "payload: passes had zeros for them; call weights_changed() after a change"
                    )

    def summary(self) -> str:
        """One line: what this rank has sent, would have sent uncompressed, and keeps on the
        device."""
        totals = self.run.ledger.totals()
        line = "sent"
        all_sent = 0
        all_uncompressed = 0
        for traffic in ("dp.weight", "dp.gradient"):
            sent, uncompressed = (sum(pair) for pair in zip(*totals[traffic].values(), strict=True))
            line += f" {traffic} {sent / 1e6:.3f} of {uncompressed / 1e6:.3f} MB,"
            all_sent += sent
            all_uncompressed += uncompressed
        ratio = all_uncompressed / all_sent if all_sent else 1
        # One gather and one reduction are under way at a time.
        payloads = max(gather.buffer_bytes for gather in self.gathers)
        payloads += max(sums.buffer_bytes() for reduce in self.reduces for sums in reduce.sums)
        memory = sum(values.nbytes for values in self.state_dict().values())
        line += f" ratio {ratio:.2f}; device memory: {payloads / 1e6:.3f} MB of buffers"
        line += f", {memory / 1e6:.3f} MB of kept gradients"
        misfits = sum(gather.fits is False for gather in self.gathers)
        if misfits:
            line += f"; {misfits} modules have weights that lossless cannot shorten: "
            line += "gathered uncompressed"
        return line

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a compressor of gradients remembers, for torch.distributed.checkpoint.

        By names of this rank, so for the same number of ranks; empty for codecs.
        """
        return {
            f"{prefix}.{name}": values
            for prefix, sync in self._syncs_with_memory().items()
            for name, values in sync.state().items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what ``state_dict`` gave, on the same number of ranks.

        Raises:
            CompressionConfigError: the state is of another number of ranks, other settings or
                another model.
        """
        # a name that only a job of more ranks has
        more_ranks = f"rank{dist.get_world_size()}."
        if any(name.startswith(more_ranks) for name in state):
            raise CompressionConfigError(_other_memory("is of more ranks"))
        expected = self.state_dict()
        for name, values in expected.items():
            if name not in state:
                problem = f"has no {name}"
            elif state[name].shape != values.shape:
                problem = f"has {name} of {tuple(state[name].shape)}, not {tuple(values.shape)}"
            else:
                continue
            raise CompressionConfigError(_other_memory(problem))
        for prefix, sync in self._syncs_with_memory().items():
            sync.load_state({name: state[f"{prefix}.{name}"] for name in sync.state()})

    def _syncs_with_memory(self) -> dict[str, GradientSync]:
        """Return the syncs by a prefix that names this rank; empty where the compressor remembers
        nothing."""
        if not getattr(self.run.policy.rule("dp.gradient").codec, "has_memory", False):
            return {}
        # Groups without gradients have no memory.
        every_sum = [sums for reduce in self.reduces for sums in reduce.sums if sums.numel]
        return {
            f"rank{dist.get_rank()}.{number}": sums.built(sums.numel)[0]
            for number, sums in enumerate(every_sum)
        }


def _other_memory(problem: str) -> str:
    return (
        f"load_state_dict(): the saved memory of gradients {problem}: it was saved on another "
        "number of ranks, with other settings or of another model; load without "
        '"compression", so that it starts from zero'
    )


def check_supported(group: ParameterGroup, weights: Codec | None, gradients: Any) -> None:
    """Refuse what ``fully_shard`` was given and these compressors cannot work with.

    Parameters offloaded to CPUs are an example, and fp16 weights with a lossless codec.

    Args:
        group: parameters that FSDP gathers and reduces together.
        weights: the codec of the weights; None: uncompressed.
        gradients: the gradient compressor; None: uncompressed.

    Raises:
        CompressionConfigError: with the module, the reason and the fix.
    """
    refusal = group.refusal(
        lossless=weights is not None and weights.lossless,
        gathers=weights is not None,
        memory=gradients is not None and gradients.has_memory,
    )
    if refusal is not None:
        raise CompressionConfigError(f"attach(): {group} {refusal}")
