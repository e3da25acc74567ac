"""``--compression auto`` in a run of Megatron: decides before attachment, then lets the run check."""

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
    """Completes a session's settings before the first model chunk is attached, and lets the run check them.

    Args:
        session: its host has Megatron's arguments; its report stores the plan.
        flops: returns the floating-point operations of an iteration, over all ranks.
    """

    def __init__(self, session: Session, flops: Callable[[], float]) -> None:
        self.session = session
        self.flops = flops
        self.args = session.host.arguments
        self._say = session.host.log
        self.config = session.config
        """As the flags have it, with dimensions left open."""
        self.plan: RunPlan | None = None
        """None until the first model chunk is there."""
        self._check: Check | None = None
        self._meter_interval = 0
        self._built: list[torch.nn.Module] = []
        self._idle: list[bool] = []
        """Of layers that the host came to: whether the GPU had nothing left to do."""
        self._looking: list[RemovableHandle] = []
        self._logged = 0
        settings = {
            key: one for key, one in self.config.asdict().items() if key not in SAME_RESULTS
        }
        self._budget = BUDGET if self.config.loss_budget is None else self.config.loss_budget
        settings["loss_budget"] = self._budget
        self._made_for = plans.circumstances(self.args, settings)

    def attach_model(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Decide, the first time, and attach to this stage's chunks. Collective over all ranks."""
        if self.args.cuda_graph_impl == "none" and torch.cuda.is_available():
            layers = (
                one
                for chunk in chunks
                for one in chunk.modules()
                if isinstance(one, TransformerLayer)
            )
            self._looking += [one.register_forward_pre_hook(self._look) for one in layers]
        if self.plan is not None:
            return self.session.attach_dimensions(chunks)
        plan = self._decide(chunks)
        self.session.adopt(decided_config(self.config, plan, self.args))
        chunks = self.session.attach_dimensions(chunks)
        self._begin(plan)
        return chunks

    def attach_next(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """The same where a model provider makes one chunk after the other: after the last one, since building
        a chunk may be collective (tied embeddings), in another order on each stage."""
        self._built += chunks
        if len(self._built) == (self.args.virtual_pipeline_model_parallel_size or 1):
            self.attach_model(self._built)
            self._built = []
        return chunks

    def on_training_log(self, iteration: int) -> None:
        """After each iteration, counted from 1."""
        if self._check is not None:
            self._check.on_training_log(iteration)
        self._logged += 1
        if self._logged == 1:
            self._idle.clear()  # kernels were compiled
        elif self._logged == 1 + LOOKED_AT:
            self._recommend_graphs()

    def _look(self, *_: object) -> None:
        self._idle.append(torch.cuda.current_stream().query())

    def _recommend_graphs(self) -> None:
        """In a line, where the GPU waits for the host."""
        for handle in self._looking:
            handle.remove()
        if self._idle and sum(self._idle) > len(self._idle) / 2:
            layers = "" if self.args.transformer_impl == "local" else "--transformer-impl local "
            self._tell(
                f"the host is the bottleneck: at {sum(self._idle)} of {len(self._idle)} layers the GPU had "
                f"nothing left to do; {layers}--cuda-graph-impl full_iteration "
                "--no-check-for-nan-in-loss-and-grad launches a whole iteration at once"
            )

    def _decide(self, chunks: list[torch.nn.Module]) -> RunPlan:
        """The plan of an earlier part of this run, or a measured one; rank 0's for all."""
        kept = [self._kept() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(kept, src=0)
        if kept[0] is not None:
            return kept[0]
        measurement = Measurement.of_run(self.args, self.session, self.flops(), chunks)
        measured = [measurement.decide(self._budget)]
        for line in measurement.lines:
            self._tell(line)
        dist.broadcast_object_list(measured, src=0)
        return measured[0]

    def _kept(self) -> RunPlan | None:
        """What an earlier part of this run has decided."""
        if (plan := plans.read(self.args.load, self._made_for, self._tell)) is None:
            return None
        try:
            decided_config(self.config, plan, self.args)
        except CompressionConfigError as error:
            self._tell(f"{FILE} names what is not possible ({error}); the run measures anew")
            return None
        self._tell(f"as decided before: {self.args.load}/{FILE} (remove it to measure anew)")
        return plan

    def _begin(self, plan: RunPlan) -> None:
        """Log and keep the plan, and check it."""
        run, first = self.session.run, self.session.config.start_iteration or 0
        unchecked, impl = [] if plan.checked else list(plan.recipes()), self.args.cuda_graph_impl
        if unchecked and graphs.by_layer(self.args):
            self._tell(
                f"--cuda-graph-impl {impl} captures once: iterations without are not compared"
            )
            unchecked = []
        capturing = (
            self.args.cuda_graph_warmup_steps + 1 if graphs.whole_iterations(self.args) else 0
        )
        self._check = Check(unchecked, first, run.policy.iteration, self._checked, capturing)
        run.policy.left_out = self._check.left_out
        if unchecked:  # else what the error meter encodes would be timed
            self._meter_interval, run.policy.meter.interval = run.policy.meter.interval, 0
        self._tell(
            f"decided in {plan.seconds:.1f} s. Loss budget {plan.budget:g} %. Estimated iteration: "
            f"{plan.iteration_ms:.4g} ms ({plan.computation_ms:.3g} compute)"
        )
        for line in plan.table():
            self._say(f" {line}")
        if unchecked:
            self._tell(
                f"the first {self._check.iterations} iterations run with and without compression, to compare"
            )
        for line in self.session.config.describe(self.args):
            self._say(f"compression: {line}")
        self._keep(plan)

    def _checked(self, gains: dict[str, float]) -> None:
        """Log and keep what the run has measured, on all ranks."""
        assert self.plan is not None and self._check is not None
        self.session.run.policy.meter.interval = self._meter_interval
        useless = {}
        for name, gain in gains.items():
            measured = (
                f"iterations with it take {100 * abs(gain):.1f} % {'less' if gain >= 0 else 'more'}"
            )
            off = name in self._check.off
            self._tell(f"{name.replace('_', ' ')}: {measured}: {'switched off' if off else 'kept'}")
            if off:
                useless[name] = f"switched off: in this run {measured}"
        self._keep(self.plan.after_check(useless))

    def _keep(self, plan: RunPlan) -> None:
        """For the run, for a resume and for the report."""
        self.plan = plan
        if dist.get_rank() == 0:
            plans.write(self.args.save, plan, self._made_for, self._tell)
        auto = {**asdict(plan), "table": plan.table()}
        self.session.report_settings["auto"] = auto

    def _tell(self, line: str) -> None:
        self._say(f"compression auto: {line}")
