"""``--compression auto`` in a run of Megatron: decides before attachment, then lets the run
check."""

from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.hooks import RemovableHandle

from megatron.compression import graphs
from megatron.compression.auto import plan as plans
from megatron.compression.auto.measurement import Measurement, decided_config
from megatron.compression.auto.plan import BUDGET, FILE, Check, RunPlan
from megatron.compression.config import SAME_RESULTS
from megatron.compression.errors import CompressionConfigError
from megatron.compression.session import Session

LOOKED_AT = 3
"""Iterations after the first in which the host is watched."""


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
        self._meter_interval = 0
        """The error meter's, while it is off to compare iterations."""
        self._provided: list[torch.nn.Module] = []
        """Chunks of a model provider, until the last one is there."""
        self._idle: list[bool] = []
        """For each layer that the host came to, whether the GPU had nothing left to do."""
        self._watching: list[RemovableHandle] = []
        self._logged_iterations = 0
        self._budget = BUDGET if self.config.loss_budget is None else self.config.loss_budget
        settings = {"loss_budget": self._budget}
        for name, value in self.config.asdict().items():
            if name not in SAME_RESULTS and name != "loss_budget":
                settings[name] = value
        self._made_for = plans.circumstances(self.args, settings)

    def attach_model(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Decide, the first time, and attach to this stage's chunks. Collective over all ranks."""
        if self.args.cuda_graph_impl == "none" and torch.cuda.is_available():
            self._watch_host(chunks)
        # Decided already: whatever is built later has the same plan.
        if self.plan is not None:
            return self.session.attach_dimensions(chunks)
        plan = self._decide(chunks)
        # The policy's rules are replaced before any site asks.
        self.session.adopt(decided_config(self.config, plan, self.args))
        chunks = self.session.attach_dimensions(chunks)
        self._begin(plan)
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

    def on_training_log(self, iteration: int) -> None:
        """Follow an iteration, counted from 1, that has ended."""
        if self._check is not None:
            self._check.on_training_log(iteration)
        self._logged_iterations += 1
        if self._logged_iterations == 1:
            self._idle.clear()  # kernels were compiled
        elif self._logged_iterations == 1 + LOOKED_AT:
            self._recommend_graphs()

    def _watch_host(self, chunks: list[torch.nn.Module]) -> None:
        """Note at each layer whether the GPU has caught up with the host."""
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer):
                    self._watching.append(module.register_forward_pre_hook(self._look))

    def _look(self, *_: object) -> None:
        # query: whether all that was launched has been done. It does not wait.
        self._idle.append(torch.cuda.current_stream().query())

    def _recommend_graphs(self) -> None:
        """Stop watching the host, and recommend CUDA graphs if the GPU waited for it.

        It did if at more than half of the layers the GPU had nothing left to do.
        """
        for handle in self._watching:
            handle.remove()
        idle_layers = sum(self._idle)
        if idle_layers <= len(self._idle) / 2:
            return
        # The check reads gradients on the host, which a graph of a whole iteration cannot hold.
        flags = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
        if self.args.transformer_impl != "local":
            flags = f"--transformer-impl local {flags}"
        self._tell(
            f"the host is the bottleneck: at {idle_layers} of {len(self._idle)} layers the GPU "
            f"had nothing left to do; {flags} launches a whole iteration at once"
        )

    def _decide(self, chunks: list[torch.nn.Module]) -> RunPlan:
        """Return the plan of an earlier part of this run, or a measured one; rank 0's for all."""
        stored = [self._stored_plan() if dist.get_rank() == 0 else None]
        # Rank 0 alone may see the folder, and all ranks need one plan.
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
            decided_config(self.config, plan, self.args)
        except CompressionConfigError as error:
            self._tell(f"{FILE} names what is not possible ({error}); the run measures anew")
            return None
        self._tell(f"as decided before: {self.args.load}/{FILE} (remove it to measure anew)")
        return plan

    def _begin(self, plan: RunPlan) -> None:
        """Log and store the plan, and have the run check it."""
        unchecked = [] if plan.checked else list(plan.recipes())
        if unchecked and graphs.by_layer(self.args):
            self._tell(
                f"--cuda-graph-impl {self.args.cuda_graph_impl} captures once: iterations without "
                "are not compared"
            )
            unchecked = []
        # Each block of iterations is captured anew, after its warm-up.
        capturing = 0
        if graphs.whole_iterations(self.args):
            capturing = self.args.cuda_graph_warmup_steps + 1
        policy = self.session.run.policy
        first = self.session.config.start_iteration or 0
        self._check = Check(unchecked, first, policy.iteration, self._checked, capturing)
        # From here on the check says which dimension an iteration leaves out, and after the last
        # block which ones have been switched off.
        policy.left_out = self._check.left_out
        if unchecked:
            # What the error meter encodes would be timed.
            self._meter_interval = policy.meter.interval
            policy.meter.interval = 0
        self._tell(
            f"decided in {plan.seconds:.1f} s. Loss budget {plan.budget:g} %. Estimated iteration: "
            f"{plan.iteration_ms:.4g} ms ({plan.computation_ms:.3g} compute)"
        )
        for line in plan.table():
            self._log(f" {line}")
        if unchecked:
            self._tell(
                f"the first {self._check.iterations} iterations run with and without compression, "
                "to compare"
            )
        self.session.describe()
        self._store(plan)

    def _checked(self, gains: dict[str, float]) -> None:
        """Log and store what the run has measured, on all ranks.

        Args:
            gains: by dimension, the part of an iteration that its compression saves.
        """
        assert self.plan is not None and self._check is not None
        # Measuring goes on where it was interrupted.
        self.session.run.policy.meter.interval = self._meter_interval
        useless = {}
        for name, gain in gains.items():
            direction = "less" if gain >= 0 else "more"
            measured = f"iterations with it take {100 * abs(gain):.1f} % {direction}"
            if name in self._check.off:
                useless[name] = f"switched off: in this run {measured}"
                verdict = "switched off"
            else:
                verdict = "kept"
            self._tell(f"{name.replace('_', ' ')}: {measured}: {verdict}")
        self._store(self.plan.after_check(useless))

    def _store(self, plan: RunPlan) -> None:
        """Store a plan for the run, for a resume and for the report."""
        self.plan = plan
        if dist.get_rank() == 0:
            # Beside the checkpoints: a resume does not measure anew.
            plans.write(self.args.save, plan, self._made_for, self._tell)
        self.session.report_settings["auto"] = {**asdict(plan), "table": plan.table()}

    def _tell(self, line: str) -> None:
        self._log(f"compression auto: {line}")
