"""A session: one compressed run, from the first model chunk to the report.

A front end (frontends/, fsdp2/) makes a ``Session`` of the settings and of a ``Host``, its loop,
opens it, and calls it where the loop comes by:

    session = Session(config, host)
    session.open()
    chunks = session.attach_model(chunks)          # before they are wrapped
    chunks = session.attach_wrapped(wrapped)       # after
    session.iteration_ends(iteration, losses)      # once an iteration

Several sessions may be open in a process, over the same process groups: each has its own settings,
decisions, bytes and gradients. Functions of other packages are replaced while one is open
(patches/running.py).
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron.compression import graphs, loss_settings, repetition
from megatron.compression.caat_net.hooks import CaatNet
from megatron.compression.codecs.contract import check_contract
from megatron.compression.codecs.grouped import fp8_in_software
from megatron.compression.communication.audit import BackendAudit
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.meter import ErrorMeter
from megatron.compression.communication.policy import Policy
from megatron.compression.communication.site import Run
from megatron.compression.communication.transport import Transports
from megatron.compression.config import CompressionConfig, changed_settings, train_iterations
from megatron.compression.context_parallel.hooks import ContextParallel
from megatron.compression.dimension import Dimension, print_on_first_rank
from megatron.compression.errors import CompressionConfigError, refused_for
from megatron.compression.expert_parallel.hooks import ExpertParallel
from megatron.compression.extra_passes import RecordedStep
from megatron.compression.fsdp2.hooks import DataParallel
from megatron.compression.local_steps.rounds import LocalSteps
from megatron.compression.loss_meter import LossCost, LossMeter
from megatron.compression.names import PYTHON_NAMES, Names, path_of_traffic
from megatron.compression.patches import loop, running
from megatron.compression.pipeline_parallel.hooks import PipelineParallel
from megatron.compression.report import Reporter
from megatron.compression.tensor_parallel.hooks import TensorParallel
from taco_kernels.common.fast_launch import slow_launches

STATE = "megatron_taco"
"""Under this key a checkpoint holds the config, and what the error bound has decided."""


class Host:
    """The loop that a session runs in: what the session has to know of it, and where it logs.

    As it stands this is a loop of one's own, which counts its iterations by ``Session.step`` and
    has neither a log interval nor Megatron's arguments.
    """

    arguments: Namespace | None = None
    """Megatron's settings, by the names of its arguments; None: the loop has none."""
    names: Names = PYTHON_NAMES
    """What the loop's user calls a setting."""
    log_interval: int = 0
    """Iterations between two log lines; 0: the loop logs nothing, and so neither does the
    session."""
    broadcasts_batch: bool = False
    """Tensor-parallel rank 0 sends the batch to its group, which is counted then."""
    iteration: Callable[[], int] | None = None
    """Returns the zero-based training iteration; None: the session counts the calls of ``step``."""

    def log(self, line: str) -> None:
        """Print a line; called on every rank."""
        print_on_first_rank(line)

    def track(self, scalars: dict[str, float], iteration: int) -> None:
        """Write scalars of an iteration to the run's trackers; called on the last rank."""

    def seconds(self) -> float:
        """Return the seconds spent in training iterations so far; read at log intervals."""
        return 0.0

    def train_iters(self) -> int | None:
        """Return how long the run is, in iterations, where it is known by now."""
        return None

    def settings(self) -> dict[str, Any]:
        """Return what a report stores of the loop's own settings, JSON-ready."""
        return {}

    def training_begins(self) -> None:
        """Called when everything is built and loaded, before the first iteration."""

    def check_checkpoint(self, checkpoint_arguments: Namespace) -> None:
        """Refuse a checkpoint of a run with other settings, by the arguments saved with it."""

    def continues(self) -> bool:
        """Return whether a checkpoint that is read is one to continue, rather than to begin anew
        from."""
        return True


class Session:
    """Compression of one training run, in all its dimensions.

    Args:
        config: what is compressed, and how; checked when it is made.
        host: the loop that the run is in; None: a loop of one's own, as ``Host`` has it.
    """

    def __init__(self, config: CompressionConfig, host: Host | None = None) -> None:
        self.config = config
        self.host = Host() if host is None else host
        self.steps = 0
        """Calls of ``step`` so far."""
        # Policy, ledger and transports are made together: the policy decides by the ledger's phase,
        # and the run gives all three one state of lossless payloads.
        ledger = Ledger()
        meter = ErrorMeter(config.error_bound)
        iteration = self._count_steps if self.host.iteration is None else self.host.iteration
        rules = config.rules(self._train_iters())
        policy = Policy(rules, ledger, iteration, config.validate_uncompressed, meter)
        transports = Transports(config.transport, config.communicators)
        self.run = Run(policy, ledger, transports)
        """What communication sites share: policy, ledger, transports, the state of lossless
        payloads."""
        # The order matters: CAAT-Net changes layers that tensor parallelism has given their sites,
        # and data parallelism comes last, when all parameters are those that are reduced.
        tensor_parallel = TensorParallel(config.tensor_parallel, self.run, self.host.log)
        tensor_parallel.broadcasts_batch = self.host.broadcasts_batch
        self.gradients = DataParallel(config.data_parallel, self.run, self.host.log)
        """The data-parallel part: the topology of its groups."""
        self.dimensions: dict[str, Dimension] = {
            "tensor_parallel": tensor_parallel,
            "context_parallel": ContextParallel(config.context_parallel, self.run, self.host.log),
            "expert_parallel": ExpertParallel(config.expert_parallel, self.run, self.host.log),
            "caat_net": CaatNet(config.caat_net, self.run, self.host.log),
            "pipeline_parallel": PipelineParallel(
                config.pipeline_parallel, self.run, self.host.log
            ),
            "data_parallel": self.gradients,
        }
        """By the name of their settings in ``CompressionConfig``, in the order in which they are
        attached."""
        self.local_steps = LocalSteps(config.local_steps, ledger, self.host.log)
        """Rounds with other data centres; nothing happens there with one."""
        # Parts that a loop may not have. They are made when the session opens or the model is
        # attached.
        self.report_settings: dict[str, Any] = {}
        """What the report stores of all settings."""
        self.reporter: Reporter | None = None
        self.audit: BackendAudit | None = None
        """Both: None in a loop without a log interval."""
        self.automatic: Any = None
        """The ``Automatic`` that completes the settings when the model is there (``--compression
        auto``)."""
        self.repetition: repetition.Repetition | None = None
        """Repeats training passes with an overflow; None: none can be, or no codec overflows."""
        self.loss_meter: LossMeter | None = None
        """Measures what codecs cost in loss; None: nothing does."""
        self.whole_iterations: graphs.WholeIterations | None = None
        """Follows CUDA graphs of whole iterations; None: there are none."""
        self.awaits_provided_chunks = False
        """Whether the model comes from a provider, chunk after chunk."""
        self.split = "valid"
        """Which split is evaluated next: valid or test."""
        self._chunks: list[torch.nn.Module] = []
        """Of this stage, wrapped once they are."""
        self._step: RecordedStep | None = None
        """The training step that runs, if it is one that the loss meter measures."""
        self._has_stepped = False
        self._is_closed = False
        self._wrapped = False
        self._small_is_logged = False
        self._is_resumed = False

    @property
    def ledger(self) -> Ledger:
        """Bytes sent, by traffic class, reason and operation."""
        return self.run.ledger

    def open(self) -> "Session":
        """Begin: from here on the model of this session is followed, as it is attached.

        Raises:
            CompressionConfigError: another open session has CUDA graphs of whole iterations, too.
        """
        self.run.open()
        arguments = self.host.arguments
        if arguments is not None:
            # The loop finds the session by the run of the model that it works with.
            self.run.session = self
            # Megatron's loop keeps its arguments, not its session: the run lives as long as they
            # do.
            running.mark(arguments, self.run)
            self.whole_iterations = graphs.follow(self)
        if self.host.log_interval:
            self._open_report()
        return self

    def _open_report(self) -> None:
        """Make what follows the run to its report, and checks the ledger in the first iteration."""
        host = self.host
        config = self.config
        meter = self.run.policy.meter
        if config.report or config.error_bound is not None:
            meter.interval = host.log_interval
        self.report_settings = {"compression": config.asdict(), "megatron": host.settings()}
        # The log line names the setting that leaves small messages uncompressed, as the user types
        # it.
        min_mb = config.tensor_parallel.min_bytes / 2**20
        name = host.names.of("tensor_parallel.min_mb")
        separator = " " if name.startswith("--") else "="
        self.reporter = Reporter(
            self.ledger,
            meter,
            log_interval=host.log_interval,
            settings=self.report_settings,
            directory=config.report,
            train_iters=host.train_iters,
            track=host.track,
            small_hint=f"{name}{separator}{min_mb:g}",
            clock=host.seconds,
        )
        has_experts = getattr(host.arguments, "num_experts", None) is not None
        self.audit = BackendAudit(self.ledger, partial(groups_by_dimension, has_experts))

    def close(self) -> None:
        """End: nothing of this run is compressed from here on, also where its model lives on.

        All ranks close at the same place of their loops. After the last session of a process has
        been closed, the functions that were replaced in other packages are their own again.
        """
        self._is_closed = True
        self.gradients.close()
        # Without rules the policy decides for no codec. Sites stay in the model and go on counting.
        self.run.policy.rules = {}
        self.run.session = None
        if self.audit is not None:
            self.audit.abandon()
        self.run.close()

    def __enter__(self) -> "Session":
        return self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

    def adopt(self, config: CompressionConfig) -> None:
        """Use settings in place of the present ones; before anything is attached."""
        self.config = config
        self.report_settings["compression"] = config.asdict()
        policy = self.run.policy
        policy.replace_rules(config.rules(self._train_iters()))
        policy.meter.bound = config.error_bound
        for name, dimension in self.dimensions.items():
            dimension.adopt(getattr(config, name))

    def change(self, name: str, settings: Any) -> None:
        """Use other settings of one dimension from the next message on, in a run that has begun.

        Args:
            name: the dimension's, such as ``tensor_parallel``.
            settings: it sends activations, by hooks that are there already.
        """
        self.config = replace(self.config, **{name: settings})
        self.report_settings["compression"] = self.config.asdict()
        policy = self.run.policy
        rules = settings.rules(self.config.start_iteration, self._train_iters())
        # Other dimensions keep their rules: compressors of gradients may remember something.
        policy.replace_rules({**policy.rules, **rules})
        self.dimensions[name].adopt(settings)

    def attach_model(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Hook into the model chunks of this pipeline stage, before they are wrapped. Collective.

        Raises:
            CompressionConfigError: a layer communicates in a way that is not covered.
        """
        if self.automatic is not None:
            return self.automatic.attach_model(chunks)
        return self.attach_dimensions(chunks)

    def attach_dimensions(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Hook into chunks with the settings as they are; see ``attach_model``."""
        running.claim(chunks, self.run)
        self._chunks = chunks
        for dimension in self.dimensions.values():
            dimension.attach(chunks)
        return chunks

    def chunk_provided(self, chunk: torch.nn.Module) -> torch.nn.Module:
        """Hook into a chunk that a model provider has just made."""
        if self.automatic is not None:
            self.automatic.attach_next([chunk])
        else:
            self.attach_model([chunk])
        return chunk

    def attach_wrapped(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Hook into the chunks that DDP has wrapped. Collective.

        Raises:
            CompressionConfigError: a part of a spec by site that meets no site on any rank.
            InputError: ranks of this job were started as ranks of different data centres.
        """
        self.local_steps.check_job()
        codecs = [codec for rule in self.run.policy.rules.values() for codec in rule.codecs]
        # A codec of the user's own is tried once here, so that a mistake is one line at the start.
        for traffic, rule in self.run.policy.rules.items():
            with refused_for(path_of_traffic(traffic)):
                check_contract(rule.codecs)
        if codecs:
            for line in (fp8_in_software(codecs), slow_launches()):
                if line:
                    self.host.log(f"compression: {line}")
        running.claim(chunks, self.run)
        for dimension in self.dimensions.values():
            dimension.attach_wrapped(chunks)
        self._wrapped = True
        self._chunks = chunks
        if self.audit is not None:
            # Not before: what sets the run up (broadcasts of weights, topologies) is in no ledger.
            self.audit.start_with_first_forward(chunks)
        if self.host.arguments is not None:
            # By now --compression auto has decided, too.
            self.repetition = repetition.follow(self)
            self._follow_losses(self.host.arguments)
        return chunks

    def _follow_losses(self, arguments: Namespace) -> None:
        """Have the loss meter measure in Megatron's loop, where the settings ask for it."""
        interval = self.config.loss_interval
        if interval is not None and loss_settings.sees_messages(arguments, self.config):
            self.loss_meter = LossMeter(interval, self.run)
            loop.follow_passes()

    @contextmanager
    def training_step(self, step_arguments: dict[str, Any]) -> Iterator[None]:
        """Surround a training step of Megatron's loop.

        Args:
            step_arguments: those of its ``train_step``, by name.
        """
        args = self.host.arguments
        # The first step of a process is the audit's, and one in which kernels are compiled.
        is_first = not self._has_stepped
        self._has_stepped = True
        compares = self.automatic is not None and self.automatic.compares
        if args is None or self.loss_meter is None or is_first or compares:
            yield
            return
        passed = loss_settings.passed_micro_batches(args, step_arguments["config"])
        share = loss_settings.share_of_time(args, get_num_microbatches(), passed)
        if not self.loss_meter.due(self.run.policy.iteration(), share):
            yield
            return
        shape = {
            "seq_length": args.seq_length,
            "micro_batch_size": args.micro_batch_size,
            "decoder_seq_length": args.decoder_seq_length,
        }
        with RecordedStep(step_arguments, passed, shape) as self._step:
            try:
                yield
            finally:
                self._step = None

    def passes_ended(self) -> None:
        """Note that a step's passes have ended, and the optimizer's step has not begun."""
        step = self._step
        if step is not None and self.loss_meter is not None:
            self.loss_meter.measure(step.forward, step.micro_batches, self._chunks)

    def measure_loss(
        self, forward: Callable[[], torch.Tensor | None], micro_batches: int = 1
    ) -> None:
        """Measure what compression costs in loss, in a loop of one's own; a call for each
        iteration, after its backward passes and before the optimizer's step.

        It runs ``forward`` in every ``loss_interval``th iteration, and does nothing in the others.
        Random states are afterwards what they were. Collective over all ranks.

        Args:
            forward: passes the iteration's last micro-batch forward; returns its loss on the last
                pipeline stage, None elsewhere. With a tensor of two values, the sum over tokens and
                their number, each data-parallel replica is a pair; with one value all together are.
            micro_batches: of an iteration, from which the interval ``auto`` follows.

        Raises:
            CompressionConfigError: the settings have no ``loss_interval``.
        """
        interval = self.config.loss_interval
        if interval is None:
            raise CompressionConfigError(
                "measure_loss measures nothing: give CompressionConfig(loss_interval=...)"
            )
        meter = self._loss_meter_of_own_loop(interval)
        if not meter.due(self.run.policy.iteration(), 2 / (3 * micro_batches)):
            return

        def losses() -> list[torch.Tensor]:
            loss = forward()
            return [] if loss is None else [loss]

        meter.measure(losses, 1, self._chunks)

    def _loss_meter_of_own_loop(self, interval: int | str) -> LossMeter:
        """Return the loss meter of a loop of one's own, which is made when it is first needed."""
        if self.loss_meter is None:
            self.loss_meter = LossMeter(interval, self.run)
        return self.loss_meter

    def loss_cost(self) -> LossCost | None:
        """Return what compression costs, if ``measure_loss`` has measured since the last call and
        knows an error. Collective over all ranks; the host waits for the device."""
        return None if self.loss_meter is None else self.loss_meter.news()

    def describe(self) -> None:
        """Log what travels how."""
        if self.host.arguments is not None:
            for line in self.config.describe(self.host.arguments, self.host.names):
                self.host.log(f"compression: {line}")

    def refuse_missing_calls(self, *_: object) -> None:
        """Refuse to run a chunk in a loop of one's own that leaves out a call which some
        compression needs.

        Raises:
            CompressionConfigError: gradients or iterations that nobody tells of.
        """
        if self.steps or self._is_closed or not torch.is_grad_enabled():
            return
        # Before the first step, and in training alone: an evaluation reduces no gradients.
        replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        if self.config.data_parallel.enabled and replicas > 1 and not self._wrapped:
            raise CompressionConfigError(
                "gradients are not compressed: call compression.attach_wrapped(chunks) after "
                "DistributedDataParallel has wrapped the chunks"
            )
        if self.host.iteration is None and self._begins_later() and self._has_sent_gradients():
            raise CompressionConfigError(
                "compression never begins, since no iteration is counted: call compression.step() "
                "after each iteration, or give attach(iteration=...)"
            )

    def _begins_later(self) -> bool:
        """Return whether some traffic is compressed from a later iteration on."""
        rules = self.run.policy.rules.values()
        return any(rule.codecs and rule.start_iteration for rule in rules)

    def _has_sent_gradients(self) -> bool:
        """Return whether an iteration has ended, as far as the ledger can tell."""
        by_reason = self.ledger.totals()["dp.gradient"]
        return any(sent for sent, _ in by_reason.values())

    def summary(self) -> str:
        """Return what this rank has sent in training so far, and would have sent uncompressed: a
        line for each class of traffic, and one for all."""
        rows = {}
        # Classes without traffic are left out.
        for traffic, by_reason in self.ledger.totals().items():
            total = _sum(by_reason.values())
            if any(total):
                rows[traffic] = total
        rows["all"] = _sum(rows.values())
        lines = []
        for traffic, (sent, uncompressed) in rows.items():
            ratio = uncompressed / sent if sent else 1
            lines.append(
                f"{traffic:12s} {sent / 1e6:12.3f} MB sent, {uncompressed / 1e6:12.3f} MB "
                f"uncompressed, ratio {ratio:.2f}"
            )
        return "\n".join(lines)

    def step(self) -> None:
        """Count an iteration that has ended; for loops that do not tell the iteration otherwise."""
        self.steps += 1
        if self._small_is_logged:
            return
        small = sum(by_reason["small"][0] for by_reason in self.ledger.totals().values())
        if small:
            self._small_is_logged = True
            least = f"min_mb = {self.config.tensor_parallel.min_bytes / 2**20:g}"
            self.host.log(
                f"compression: {small / 1e6:.3f} MB so far are in messages under {least} and "
                "uncompressed"
            )

    def training_begins(self, optimizer: Any = None) -> None:
        """Note that everything is built and loaded; with several data centres, meet the others.

        Args:
            optimizer: megatron-core's, of the model that is trained; None: nothing is trained.
        """
        self.host.training_begins()
        if self.host.iteration is not None:
            self.local_steps.begin(optimizer, self.host.iteration())

    def step_ended(self) -> None:
        """Follow a training step that has ended, also one that was skipped."""
        if self.host.iteration is not None:
            self.local_steps.iteration_ended(self.host.iteration() + 1)

    def anchor_in_weights(self) -> AbstractContextManager[None]:
        """Return what has the weights hold what all data centres have in common, while its body
        runs."""
        return self.local_steps.anchor_in_weights()

    def iteration_ends(self, iteration: int, losses: dict[str, torch.Tensor]) -> None:
        """Follow an iteration that has ended: the audit of the first, the log line at the log
        interval, what the error bound decides there.

        Args:
            iteration: its number, counted from 1.
            losses: its losses by name, on the last pipeline stage; empty elsewhere and where it was
                skipped.
        """
        if self.audit is not None:
            for line in self.audit.finish():
                self.host.log(f"compression: {line}")
        if self.reporter is not None:
            self.reporter.on_training_log(iteration, losses)
        self._apply_error_bound(iteration)
        self._tell_cost_in_loss(iteration)
        if self.automatic is not None:
            self.automatic.on_training_log(iteration)

    def _tell_cost_in_loss(self, iteration: int) -> None:
        """Log at the log interval what the loss meter has measured."""
        if self.loss_meter is None or iteration % self.host.log_interval:
            return
        cost = self.loss_meter.news()
        if cost is None:
            return
        self.host.log(f"compression costs {cost}")
        if self.reporter is not None:
            self.reporter.on_loss_cost(iteration, cost)
        if self.automatic is not None:
            self.automatic.on_loss_cost(cost)

    def _apply_error_bound(self, iteration: int) -> None:
        meter = self.run.policy.meter
        if meter.bound is None or iteration % self.host.log_interval:
            return
        # Ranks of one stage hold the same sites and add up their errors; stages hold different ones
        # and tell each other.
        sharing = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        new = meter.decide(sharing, parallel_state.get_pipeline_model_parallel_group())
        for (site, traffic), error in sorted(new.items()):
            self.host.log(
                f"compression: {site} {traffic} has a relative error of {error:.4g}, past "
                f"{self.host.names.of('error_bound')} {meter.bound:g}; it goes uncompressed after "
                f"iteration {iteration}"
            )

    def evaluation_begins(self) -> None:
        """Count the traffic of an evaluation of ``split`` separately from here on."""
        # A run that only evaluates has no other beginning.
        self.host.training_begins()
        if self.reporter is not None:
            self.reporter.before_evaluate(self.split)

    def evaluation_ends(self, losses: dict[str, torch.Tensor] | None) -> None:
        """Store the losses of an evaluation; None: it failed."""
        if self.reporter is not None:
            self.reporter.after_evaluate(losses)

    def training_ends(self) -> None:
        """Write the report."""
        if self.reporter is not None:
            self.reporter.finish()

    def state(self) -> dict[str, Any]:
        """Return what a resume needs besides weights and optimizer: plain values, the same on every
        rank."""
        state: dict[str, Any] = {
            "steps": self.steps,
            "error_bound": self.run.policy.meter.state(),
        }
        if self.loss_meter is not None:
            state["loss_meter"] = self.loss_meter.state()
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` gave."""
        self.steps = state.get("steps", 0)
        meter = self.run.policy.meter
        tripped = state.get("error_bound")
        if meter.bound is not None and tripped:
            meter.restore(tripped)
            sites = ", ".join(f"{site} {traffic}" for site, traffic, _ in tripped)
            self.host.log(f"compression: uncompressed as when the checkpoint was saved: {sites}")
        interval = self.config.loss_interval
        if interval is not None and self.host.arguments is None:
            self._loss_meter_of_own_loop(interval)
        if self.loss_meter is not None and "loss_meter" in state:
            self.loss_meter.load_state(state["loss_meter"])

    def add_state(
        self, state_dict: dict[str, Any], is_loading: bool, optimizer: Any = None
    ) -> None:
        """Put the config, ``state`` and the dimensions' own into a checkpoint of Megatron's.

        Args:
            state_dict: what is saved, or for loading the template of what is to be read.
            is_loading: it is a template.
            optimizer: megatron-core's, whose state is in it; None: that of nobody.
        """
        if not is_loading:
            # What is loaded is looked up in the file itself, so nothing is put there for loading.
            state_dict[STATE] = {"config": self.config.asdict(), **self.state()}
        for dimension in self.dimensions.values():
            dimension.add_state(state_dict, is_loading)
        self.local_steps.add_state(state_dict, optimizer, is_loading)

    def check_checkpoint_arguments(self, checkpoint_arguments: Namespace) -> None:
        """Refuse a checkpoint that this run cannot continue, by the arguments saved with it."""
        self.host.check_checkpoint(checkpoint_arguments)

    def checkpoint_read(self, state_dict: dict[str, Any] | None) -> None:
        """Continue from a checkpoint that Megatron has read; None: there is none.

        Megatron reads twice: the arguments, with the plain values, and then everything.
        """
        if state_dict is None:
            return
        if STATE in state_dict and self.host.continues() and not self._is_resumed:
            # The second read is of the same checkpoint.
            self._is_resumed = True
            self.resume(state_dict)
        for dimension in self.dimensions.values():
            dimension.loaded(state_dict)
        self.local_steps.loaded(state_dict)

    def resume(self, state_dict: dict[str, Any]) -> None:
        """Continue as the run that saved this state dict, and log which settings have changed
        since."""
        saved = state_dict[STATE]
        changed = changed_settings(saved["config"], self.config.asdict())
        if changed:
            self.host.log(
                f"compression: other settings than the checkpoint's: {', '.join(changed)}"
            )
        self.load_state(saved)

    def _count_steps(self) -> int:
        return self.steps

    def _train_iters(self) -> int | None:
        if self.host.arguments is not None:
            return train_iterations(self.host.arguments)
        return self.host.train_iters()


def groups_by_dimension(has_experts: bool) -> dict[str, list[dist.ProcessGroup]]:
    """Return this rank's process groups by dimension.

    The audit compares the bytes that the ledger has for a dimension with those that were sent in
    its groups.
    """
    groups = {
        "expert parallel": [],
        "tensor parallel": [parallel_state.get_tensor_model_parallel_group()],
        "data parallel": [parallel_state.get_data_parallel_group(with_context_parallel=True)],
        "pipeline parallel": [parallel_state.get_pipeline_model_parallel_group()],
        "context parallel": [parallel_state.get_context_parallel_group()],
    }
    if has_experts:
        # Experts have groups of their own. The dispatchers send tokens over experts' expert and
        # tensor ranks together.
        groups["expert parallel"] += [parallel_state.get_expert_tensor_and_model_parallel_group()]
        groups["tensor parallel"] += [parallel_state.get_expert_tensor_parallel_group()]
        groups["data parallel"] += [parallel_state.get_expert_data_parallel_group()]
    return groups


def _sum(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the sums of bytes sent and of uncompressed bytes."""
    total_sent = 0
    total_uncompressed = 0
    for sent, uncompressed in pairs:
        total_sent += sent
        total_uncompressed += uncompressed
    return total_sent, total_uncompressed
