"""``--compression auto`` in a run of Megatron: decides before attachment, then lets the run
check."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch
import torch.distributed as dist

from megatron.compression import graphs
from megatron.compression.auto import plan as plans
from megatron.compression.auto.check import CAPTURING, TENSOR, Check, Trial, Verdict
from megatron.compression.auto.host import HostWatch
from megatron.compression.auto.measurement import Measurement, decided_config
from megatron.compression.auto.plan import BUDGET, FILE, LEAST_GAIN, RunPlan, flag, largest
from megatron.compression.auto.recommendation import layer_passes, recommendation
from megatron.compression.auto.safety import Safety, without_replaced_flags
from megatron.compression.auto.schedules import Schedules, shortage, tensor_recipe
from megatron.compression.config import SAME_RESULTS, CompressionConfig
from megatron.compression.errors import CompressionConfigError
from megatron.compression.expert_parallel.flex import sends_by_flex, switch_to_alltoall
from megatron.compression.loss_meter import LossCost
from megatron.compression.session import Session
from megatron.compression.tensor_parallel.config import HALVES


class Automatic:
    """Completes a session's settings before the first model chunk is attached, and lets the run
    check them.

    Args:
        session: its host has Megatron's arguments; its report stores the plan.
        flops: returns the floating-point operations of an iteration, over all ranks.
    """

    def __init__(self, session: Session, flops: Callable[[], float]) -> None:
        self.session = session
        self.flops = flops
        self.args = session.host.arguments
        self._log = session.host.log
        self.config = session.config
        """As the flags have it, with dimensions left open."""
        self.plan: RunPlan | None = None
        """None until the first model chunk is there."""
        self._check: Check | None = None
        self._safety: Safety | None = None
        """Takes safer settings by what the loss meter measures; None: there is no meter."""
        self._meter_interval = 0
        """The error meter's, while it is off to compare iterations."""
        self._provided: list[torch.nn.Module] = []
        """Chunks of a model provider, until the last one is there."""
        self._host: HostWatch | None = None
        """Watches the host while it may turn out to be the bottleneck."""
        self._budget = BUDGET
        if self.config.loss_budget is not None:
            self._budget = self.config.loss_budget
        settings = {"loss_budget": self._budget}
        for name, value in self.config.asdict().items():
            if name not in SAME_RESULTS and name != "loss_budget":
                settings[name] = value
        self._made_for = plans.circumstances(self.args, settings)

    def attach_model(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Decide, the first time, and attach to this stage's chunks. Collective over all ranks."""
        # Decided already: whatever is built later has the same plan.
        if self.plan is not None:
            return self.session.attach_dimensions(chunks)
        plan = self._decide(chunks)
        # The policy's rules are replaced before any site asks.
        decided = self._decided(plan)
        self.session.adopt(decided)
        if decided.expert_parallel.enabled and sends_by_flex(self.args):
            # The layers' dispatchers follow when experts are attached.
            switch_to_alltoall(self.args)
        chunks = self.session.attach_dimensions(chunks)
        self._begin(plan, chunks)
        # Last: halves are not attached to layers that have hooks.
        if self.args.cuda_graph_impl == "none" and torch.cuda.is_available():
            self._host = HostWatch(chunks)
        return chunks

    def attach_next(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Take chunks of a model provider, and attach to all of the stage's when the last one is
        there.

        Building a chunk may be collective (tied embeddings), in another order on each stage; so
        nothing collective may come in between.
        """
        self._provided += chunks
        if len(self._provided) == (self.args.virtual_pipeline_model_parallel_size or 1):
            self.attach_model(self._provided)
            self._provided = []
        return chunks

    @property
    def compares(self) -> bool:
        """True while iterations with and without compression are timed, to compare them."""
        return self._check is not None and not self._check.done

    def on_loss_cost(self, cost: LossCost) -> None:
        """Keep the run within its budget, by what the loss meter has measured; on all ranks."""
        if self._safety is not None and self.plan is not None and not self.compares:
            self._safety.look(self.plan, cost)

    def _take_safer(self, plan: RunPlan, line: str) -> None:
        """Log and store what the run has become, on all ranks."""
        self._tell(line)
        self._store(plan)

    def on_training_log(self, iteration: int) -> None:
        """Follow an iteration, counted from 1, that has ended."""
        # The watch first: the check switches schedules, and the watch is over by then.
        watch = self._host
        if watch is not None and watch.iteration_ended():
            self._host = None
            line = recommendation(watch, self.args, self.session.config)
            if line is not None:
                self._tell(line)
            self._refuse_slow_halves(watch)
        check = self._check
        if check is not None:
            if check.tries_halves and check.is_due(iteration):
                self._leave_out_halves(shortage())
            check.on_training_log(iteration)

    # Deciding
    # --------------------------------------------------------------------------------------

    def _decide(self, chunks: list[torch.nn.Module]) -> RunPlan:
        """Return the plan of an earlier part of this run, or a measured one; rank 0's for all."""
        # Rank 0 alone may see the folder, and all ranks need one plan.
        stored: list[RunPlan | None] = [None]
        if dist.get_rank() == 0:
            stored = [self._stored_plan()]
        dist.broadcast_object_list(stored, src=0)
        if stored[0] is not None:
            return stored[0]
        measurement = Measurement.of_run(self.args, self.session, self.flops(), chunks)
        # Collective: all ranks send the messages that are timed.
        measured = [measurement.decide(self._budget)]
        for line in measurement.lines:
            self._tell(line)
        dist.broadcast_object_list(measured, src=0)
        return measured[0]

    def _stored_plan(self) -> RunPlan | None:
        """Return what an earlier part of this run has decided; None: nothing, or it is not possible
        now."""
        plan = plans.read(self.args.load, self._made_for, self._tell)
        if plan is None:
            return None
        try:
            self._decided(plan)
        except CompressionConfigError as error:
            self._tell(f"{FILE} names what is not possible ({error}); the run measures anew")
            return None
        self._tell(f"as decided before: {self.args.load}/{FILE} (remove it to measure anew)")
        return plan

    def _decided(self, plan: RunPlan) -> CompressionConfig:
        """Return the settings with what was left open, and with what is safer than a flag."""
        config = without_replaced_flags(self.config, plan)
        return decided_config(config, plan, self.args)

    # Comparing iterations
    # --------------------------------------------------------------------------------------

    def _begin(self, plan: RunPlan, chunks: Sequence[torch.nn.Module] = ()) -> None:
        """Log and store the plan, and have the run check it. Collective over all ranks.

        Args:
            plan: the decision, which the session has adopted.
            chunks: this stage's, attached.
        """
        compressed = list(plan.recipes())
        schedules = Schedules(self.session, self.config, self.args, self._tell)
        trials = [Trial()]
        if not plan.checked and graphs.by_layer(self.args):
            if compressed:
                self._tell(
                    f"--cuda-graph-impl {self.args.cuda_graph_impl} captures once: iterations "
                    "without are not compared"
                )
        elif not plan.checked:
            trials = schedules.prepare(plan, chunks)
        graph_warm_up = 0
        capturing = 0
        if graphs.whole_iterations(self.args):
            # The graph of the first block is captured before it, those of the others in them.
            graph_warm_up = self.args.cuda_graph_warmup_steps
            capturing = CAPTURING
        self._check = Check(
            trials,
            compressed,
            self.session.config.start_iteration or 0,
            schedules.take,
            self._checked,
            self._loss_of,
            graph_warm_up,
            capturing,
        )
        policy = self.session.run.policy
        if self.config.loss_interval is not None:
            self._safety = Safety(self.session, self.args, self._budget, self._take_safer)
        if not self._check.done:
            # What the error meter encodes would be timed.
            self._meter_interval = policy.meter.interval
            policy.meter.interval = 0
            # From the first iteration on, so that a graph of the warm-up serves the first block.
            policy.schedule = (False, "")
        self._describe(plan)
        self._store(plan)

    def _describe(self, plan: RunPlan) -> None:
        """Log a decision."""
        assert self._check is not None
        self._tell(
            f"decided in {plan.seconds:.1f} s, for at most +{plan.budget:g} % of loss "
            f"(--compression-loss-budget). Estimated uncompressed iteration: "
            f"{plan.iteration_ms:.4g} ms ({plan.computation_ms:.3g} compute)"
        )
        for line in plan.table():
            self._log(f" {line}")
        if not self._check.done:
            line = f"the first {self._check.iterations} iterations after a warm-up compare "
            line += f"{self._check.count} ways to train"
            if self._check.tries_halves:
                line += f", some with {HALVES}"
            self._tell(line)
        self.session.describe()

    def _loss_of(self, trial: Trial) -> float:
        """Return the percent of validation loss that tensor parallelism costs in a way to train."""
        if TENSOR in trial.off or self.plan is None:
            return 0.0
        if trial.recipe:
            return tensor_recipe(trial.recipe).loss
        tensor = self.plan.of(TENSOR)
        return 0.0 if tensor is None else tensor.loss

    def _checked(self, verdict: Verdict) -> None:
        """Log and store what the run has measured, on all ranks."""
        assert self.plan is not None and self._check is not None
        # Measuring goes on where it was interrupted.
        self.session.run.policy.meter.interval = self._meter_interval
        plan = self.plan.after_check(self._useless(verdict))
        if verdict.trial.recipe and TENSOR not in verdict.trial.off:
            recipe = tensor_recipe(verdict.trial.recipe)
            plan = plan.with_recipe(TENSOR, recipe, f"as fast in this run; loss: {recipe.source}")
        if any(trial.halves or trial.recipe for trial in verdict.timings):
            self._tell(self._compared(verdict))
            plan = replace(plan, halves=verdict.trial.halves)
        seconds = _seconds_of(verdict)
        if seconds > 0:
            cost = (plan.seconds + verdict.extra_seconds) / seconds
            plan = replace(plan, cost_iterations=cost)
            self._tell(
                f"cost as much time as {cost:.0f} iterations: {plan.seconds:.1f} s of timings, and "
                f"{self._check.iterations} iterations that took {verdict.extra_seconds:.1f} s "
                "longer than they take now"
            )
        self._settle(self._decided(plan))
        self._store(plan)
        self._tell(self._to_type(plan))

    def _useless(self, verdict: Verdict) -> dict[str, str]:
        """Log what each dimension's compression gains; return why those that are switched off do
        not gain."""
        useless: dict[str, str] = {}
        for name, gain in verdict.gains.items():
            direction = "less" if gain >= 0 else "more"
            measured = f"iterations with it take {100 * abs(gain):.1f} % {direction}"
            decision = "kept"
            if name in verdict.trial.off:
                useless[name] = f"switched off: in this run {measured}"
                decision = "switched off"
                if gain >= 0:
                    # Faster, and yet not taken: it costs loss, and may be chance.
                    decision += f", under {100 * LEAST_GAIN:g} % or what timings scatter by"
            self._tell(f"{name.replace('_', ' ')}: {measured}: {decision}")
        return useless

    def _compared(self, verdict: Verdict) -> str:
        """Return a line on what an iteration takes by each way that tensor parallelism could go, and
        which one is taken."""
        parts = []
        for trial, timing in verdict.timings.items():
            if trial.off <= {TENSOR}:
                parts.append(f"{1e3 * timing.seconds:.4g} ms {self._name(trial)}")
        chosen = self._name(verdict.trial)
        return f"tensor parallelism: an iteration takes {', '.join(parts)}; from now on {chosen}"

    def _to_type(self, plan: RunPlan) -> str:
        """Return a line with the flags that give the decided run without timings."""
        recipes = plan.recipes()
        words = [flag(dimension, recipe) for dimension, recipe in recipes.items()]
        if TENSOR in recipes and self.config.tensor_parallel.min_mb is None:
            # Messages of a layer have one size, which was timed; by default small ones are left out.
            words.append("--compression-min-mb 0")
        if plan.halves:
            words.append(HALVES)
        if not words:
            return "the same without timings: drop --compression auto"
        return f"the same without timings: {' '.join(words)} in place of --compression auto"

    def _name(self, trial: Trial) -> str:
        """Return how tensor parallelism goes in a trial, in words."""
        assert self.plan is not None
        tensor = self.plan.of(TENSOR)
        name = "uncompressed"
        if TENSOR not in trial.off and tensor is not None and tensor.chosen:
            name = trial.recipe or tensor.name
        if trial.halves:
            name += " in halves"
        return name

    def _settle(self, config: CompressionConfig) -> None:
        """Let the session know the settings that the run goes on with: checkpoints and reports have
        them."""
        self.session.config = config
        self.session.report_settings["compression"] = config.asdict()
        self.session.dimensions[TENSOR].adopt(config.tensor_parallel)

    def _store(self, plan: RunPlan) -> None:
        """Store a plan for the run, for a resume and for the report."""
        self.plan = plan
        if dist.get_rank() == 0:
            # Beside the checkpoints: a resume does not measure anew.
            plans.write(self.args.save, plan, self._made_for, self._tell)
        self.session.report_settings["auto"] = {**asdict(plan), "table": plan.table()}

    # The host
    # --------------------------------------------------------------------------------------

    def _refuse_slow_halves(self, watch: HostWatch) -> None:
        """Leave halves out of the comparison where the host cannot launch them fast enough.

        Collective over all ranks while halves are to be compared.
        """
        if self._check is None or not self._check.tries_halves:
            return
        # Every kernel is launched twice. So an iteration in halves takes as long as that at least.
        part = 0.0
        if watch.times is not None and watch.iteration_seconds:
            launching = 2 * watch.times.host * layer_passes(watch, self.args)
            part = launching / watch.iteration_seconds
        (part,) = largest(part)
        if part > 1:
            self._leave_out_halves(
                f"the host would launch twice as many kernels, in {part:.1f} times what an "
                "iteration takes"
            )

    def _leave_out_halves(self, reason: str | None) -> None:
        """Compare whole micro-batches only, for a reason that all ranks have; None: there is none."""
        if reason is None or self._check is None:
            return
        self._check.leave_out_halves()
        if self._check.done:
            # They were all that was to be compared.
            self.session.run.policy.meter.interval = self._meter_interval
        self._tell(f"interleaved halves are not tried: {reason}")

    def _tell(self, line: str) -> None:
        self._log(f"compression auto: {line}")


def _seconds_of(verdict: Verdict) -> float:
    """Return the seconds of an iteration of what a check has decided; 0: not known."""
    chosen = verdict.trial
    # Other dimensions are switched off one by one, and not in halves.
    for trial in (chosen, replace(chosen, off=chosen.off & {TENSOR}), Trial()):
        timing = verdict.timings.get(trial)
        if timing is not None and timing.seconds > 0:
            return timing.seconds
    return 0.0
