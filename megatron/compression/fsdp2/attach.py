"""``attach``: puts compression into the modules that ``fully_shard`` has wrapped."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.compression.codecs import Codec
from megatron.compression.communication.audit import BackendAudit
from megatron.compression.communication.overflow import OverflowFlags
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology
from megatron.compression.data_parallel.compressor import GradientSync
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.dimension import print_on_first_rank
from megatron.compression.errors import CompressionConfigError, spelled
from megatron.compression.fsdp2.copies import IsCopy, copies_of
from megatron.compression.fsdp2.gradients import GradientReduce, GradientSums
from megatron.compression.fsdp2.parameter_group import ParameterGroup, Slots, parameter_groups
from megatron.compression.fsdp2.weights import WeightGather
from megatron.compression.names import Names
from megatron.compression.one_model import (
    REDUCE_NAMES,
    check_saved_memory,
    left_out_everything,
    log_if_on_one_host,
    open_run,
    sent_so_far,
    topology_of,
)

NAMES = Names({**REDUCE_NAMES, "data_parallel.weights": "gather"})
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
    # The settings of data parallelism, with errors in the words of this call: gather and reduce.
    with spelled(NAMES):
        config = DataParallelConfig(compression=reduce or "none", weights=gather or "none")
        config.check_fsdp2()
    run = open_run(config, start_iteration, NAMES, "FSDP2", log)
    compression = Fsdp2Compression(
        model, run, lambda group: topology_of(run, group, "FSDP2", log), log
    )
    # The policy has to be there before the hooks that count iterations.
    run.policy.iteration = lambda: compression.iteration
    # What c10d is given in the first iteration is compared with the ledger.
    compression.audit = BackendAudit(
        run.ledger, lambda: {"data parallel": [*compression.topologies]}
    )
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
        for topology in self.topologies.values():
            log_if_on_one_host(topology, "FSDP2", self._log)

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
        warning = left_out_everything(self.run, self.iteration)
        if warning is not None:
            self._log(f"compression: FSDP2: {warning}")

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
        line = sent_so_far(self.run.ledger, ("dp.weight", "dp.gradient"))
        # One gather and one reduction are under way at a time.
        payloads = max(gather.buffer_bytes for gather in self.gathers)
        payloads += max(sums.buffer_bytes() for reduce in self.reduces for sums in reduce.sums)
        memory = sum(values.nbytes for values in self.state_dict().values())
        line += f"; device memory: {payloads / 1e6:.3f} MB of buffers"
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
        check_saved_memory(state, self.state_dict())
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
