"""``--compression auto`` in a run of Megatron: decides before the hooks go in, then lets the run check."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.compression.auto import store
from megatron.compression.auto.candidates import BUDGET, SCHEDULES
from megatron.compression.auto.check import Check, Verdict
from megatron.compression.auto.decision import Decision
from megatron.compression.auto.measurement import Measurement, decided_config
from megatron.compression.auto.schedules import Schedules, shortage
from megatron.compression.compression import Compression
from megatron.compression.config import SAME_RESULTS
from megatron.compression.errors import CompressionConfigError


class Automatic:
    """Stands before ``Compression.attach_model``: the config is whole from then on.

    Args:
        args: Megatron's, validated.
        flops: of an iteration over all ranks.
        say: prints a line, on rank 0 alone.
        publish: takes {"auto": ..., "compression": ...} for the report.
    """

    def __init__(
        self,
        args: Namespace,
        compression: Compression,
        flops: Callable[[], float],
        say: Callable[[str], None],
        publish: Callable[[dict[str, Any]], None],
    ) -> None:
        self.args, self.compression, self.flops = args, compression, flops
        self._say, self._publish = say, publish
        self.config = compression.config
        """As the flags have it, with dimensions left open."""
        self.decision: Decision | None = None
        """None until the first model chunk is there."""
        self._check: Check | None = None
        self._probe_interval = 0
        self._built: list[torch.nn.Module] = []
        settings = self.config.asdict()
        settings = {key: value for key, value in settings.items() if key not in SAME_RESULTS}
        self._budget = BUDGET if self.config.loss_budget is None else self.config.loss_budget
        settings["loss_budget"] = self._budget
        self._made_for = store.circumstances(args, settings)

    def attach_model(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Decide, the first time, and hook into this stage's chunks. Collective over all ranks."""
        if self.decision is None:
            decision = self._decide(chunks)
            self.compression.adopt(decided_config(self.config, decision, self.args))
            chunks = self.compression.attach_model(chunks)
            self._announce(self._begin_check(decision, chunks))
            return chunks
        return self.compression.attach_model(chunks)

    def attach_next(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """The same where a model provider makes one chunk after the other: behind the last one.

        Not before: building a chunk may be collective (tied embeddings), in another order on each stage.
        """
        self._built += chunks
        if len(self._built) == (self.args.virtual_pipeline_model_parallel_size or 1):
            self.attach_model(self._built)
            self._built = []
        return chunks

    def on_training_log(self, iteration: int) -> None:
        """Behind each iteration, counted from 1."""
        if self._check is not None:
            self._check.on_training_log(iteration)

    def _decide(self, chunks: list[torch.nn.Module]) -> Decision:
        """As before, or by measuring; rank 0's word."""
        kept = [self._kept() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(kept, src=0)
        if kept[0] is not None:
            return kept[0]
        measurement = Measurement(self.args, self.compression, self.flops(), chunks)
        measured = [measurement.decide(self._budget)]
        for line in measurement.lines:
            self._tell(line)
        dist.broadcast_object_list(measured, src=0)
        return measured[0]

    def _kept(self) -> Decision | None:
        """What an earlier part of this run has decided."""
        decision = store.read(self.args.load, self._made_for, self._tell)
        if decision is None:
            return None
        try:
            decided_config(self.config, decision, self.args)
        except (TypeError, CompressionConfigError) as error:
            self._tell(f"{store.FILE} names what is not possible ({error}); the run measures anew")
            return None
        self._tell(f"as decided before: {self.args.load}/{store.FILE} (remove it to measure anew)")
        return decision

    def _begin_check(self, decision: Decision, chunks: list[torch.nn.Module]) -> Decision:
        """Arrange what the run is to try; the decision with what it can have."""
        config, run = self.compression.config, self.compression.run
        unchecked = [] if decision.checked else list(decision.settings())
        names: list[str] = []
        take: Callable[[str | None], object] = lambda name: None  # noqa: E731
        tensor = next((one for one in decision.choices if one.dimension == "tensor_parallel"), None)
        if tensor is not None and tensor.settings and (decision.schedule or not decision.checked):
            schedules = Schedules(self.args, config, run, chunks, exact=tensor.loss == 0)
            take = partial(self._take, schedules)
            tried = [decision.schedule] if decision.checked else list(SCHEDULES)
            for name in [one for one in tried if one in schedules.impossible]:
                self._tell(f"{name}: not tried: {schedules.impossible[name]}")
            if decision.schedule in schedules.names:
                take(decision.schedule)
            else:
                decision = replace(decision, schedule=None)
            names = [] if decision.checked else schedules.names
        first = config.start_iteration or 0
        iteration = run.policy.iteration
        self._check = Check(unchecked, names, first, iteration, take, self._may_take, self._checked)
        run.policy.left_out = self._check.left_out
        if unchecked:  # the probe's exact collectives would be timed
            self._probe_interval, run.probe.interval = run.probe.interval, 0
        return decision

    def _announce(self, decision: Decision) -> None:
        """Log the decision."""
        self._tell(
            f"decided in {decision.seconds:.1f} s within {decision.budget:g} % of loss, for an iteration of "
            f"{decision.iteration_ms:.4g} ms, {decision.computation_ms:.4g} of them computation"
        )
        for line in decision.table():
            self._say(f" {line}")
        if self._check is not None and not self._check.done:
            self._tell(f"compares iterations with and without, {self._check.iterations} in all")
        for line in self.compression.config.describe(self.args):
            self._say(f"compression: {line}")
        self._keep(decision)

    def _take(self, schedules: Schedules, name: str | None) -> None:
        self.compression.config = schedules.take(name)

    def _may_take(self) -> bool:
        reason = shortage()
        if reason is not None:
            self._tell(f"halves are not tried: {reason}")
        return reason is None

    def _checked(self, verdict: Verdict) -> None:
        """Take in what the run has measured, on all ranks."""
        useless, run = {}, self.compression.run
        run.probe.interval = self._probe_interval
        for name, gain in verdict.gains.items():
            measured = f"iterations with it take {100 * abs(gain):.1f} % {'less' if gain >= 0 else 'more'}"
            if name in SCHEDULES:
                without = ", since tensor parallelism is off" if "tensor_parallel" in verdict.off else ""
                taken = "taken" if name == verdict.schedule else f"not taken{without}"
                self._tell(f"{name}: {measured}: {taken}")
                continue
            off, by = name in verdict.off, ""
            if name == "tensor_parallel" and verdict.schedule:
                by = f" by {verdict.schedule}"
            self._tell(f"{name.replace('_', ' ')}{by}: {measured}: {'switched off' if off else 'kept'}")
            if off:
                useless[name] = f"switched off: in this run {measured}"
        if self.decision is not None:
            self._keep(self.decision.after_check(useless, verdict.schedule))

    def _keep(self, decision: Decision) -> None:
        """For the run, for a resume and for the report."""
        self.decision = decision
        if dist.get_rank() == 0:
            store.write(self.args.save, decision, self._made_for, self._tell)
        auto = {**decision.asdict(), "table": decision.table()}
        self._publish({"auto": auto, "compression": self.compression.config.asdict()})

    def _tell(self, line: str) -> None:
        self._say(f"compression auto: {line}")
