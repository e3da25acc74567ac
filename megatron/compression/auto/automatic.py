"""``--compression auto`` in a run of Megatron: decides before the hooks go in, then lets the run check."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.compression.auto import candidates, store
from megatron.compression.auto.candidates import Candidate
from megatron.compression.auto.check import Check
from megatron.compression.auto.decision import LEAST_GAIN, Choice, Decision, choose
from megatron.compression.auto.messages import activations, workload
from megatron.compression.auto.predict import Message, iteration_seconds
from megatron.compression.auto.timing import LIMIT, Sender, Stopwatch, gemm_rate
from megatron.compression.codecs.registry import settings_of
from megatron.compression.compression import Compression
from megatron.compression.config import CompressionConfig
from megatron.compression.errors import CompressionConfigError
from megatron.compression.tensor_parallel.hooks import why_not_attachable

_SAME_RESULTS = ("report", "report_baseline", "transport", "communicators")


class Automatic:
    """Stands before ``Compression.attach_model``: the config is whole from then on.

    Args:
        args: Megatron's, validated.
        flops: of an iteration over all ranks.
        say: prints a line, once.
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
        self.args, self.compression, self._flops = args, compression, flops
        self._say, self._publish = say, publish
        self.config = compression.config
        """As the flags have it, with dimensions left open."""
        self.budget = candidates.BUDGET if self.config.loss_budget is None else self.config.loss_budget
        self.decision: Decision | None = None
        self._check: Check | None = None
        settings = self.config.asdict()
        settings = {key: value for key, value in settings.items() if key not in _SAME_RESULTS}
        self._made_for = store.circumstances(args, settings)

    def attach_model(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Decide, the first time, and hook into the chunks. Collective over all ranks."""
        if self.decision is None:
            self._start(chunks)
        return self.compression.attach_model(chunks)

    def on_training_log(self, iteration: int) -> None:
        """Behind each iteration, counted from 1."""
        if self._check is not None:
            self._check.on_training_log(iteration)

    def _start(self, chunks: list[torch.nn.Module]) -> None:
        kept: list[Decision | None] = [None]
        if dist.get_rank() == 0:
            kept[0] = self._kept()
        dist.broadcast_object_list(kept, src=0)
        if kept[0] is None:
            measured: list[Decision] = [Measurement(self, chunks).decide()]
            dist.broadcast_object_list(measured, src=0)
            kept = [measured[0]]
        self.decision = kept[0]
        config = self._config(self.decision)
        self.compression.adopt(config)
        dimensions = [] if self.decision.checked else list(self.decision.settings())
        policy = self.compression.run.policy
        self._check = Check(dimensions, config.start_iteration or 0, policy.iteration, self._checked)
        policy.left_out = self._check.left_out
        self._announce()
        if dimensions:
            self._tell(f"compares iterations with and without, {self._check.iterations} in all")
        for line in config.describe(self.args):
            self._say(f"compression: {line}")

    def _kept(self) -> Decision | None:
        """What an earlier part of this run decided, on rank 0."""
        decision = store.read(self.args.load, self._made_for, self._tell)
        if decision is None:
            return None
        try:
            self._config(decision)
        except (TypeError, CompressionConfigError) as error:
            self._tell(f"{store.FILE} names what is not possible ({error}); the run measures anew")
            return None
        self._tell(f"as decided before, {self.args.load}/{store.FILE}; remove it to measure anew")
        return decision

    def _config(self, decision: Decision) -> CompressionConfig:
        return replace(
            self.config,
            **{
                dimension: self.dimension_config(dimension, settings)
                for dimension, settings in decision.settings().items()
            },
        )

    def dimension_config(self, dimension: str, settings: dict[str, Any]) -> Any:
        """The dimension's config with a candidate's settings.

        Raises: CompressionConfigError: they do not go with this run.
        """
        config = settings_of(CompressionConfig)[dimension].type(**settings)
        if dimension == "data_parallel":
            config = config.resolved(self.args)
        config.check(self.args)
        return config

    def _announce(self) -> None:
        """Log the table; keep the decision for a resume and for the report."""
        decision = self.decision
        self._tell(
            f"decided in {decision.seconds:.1f} s within {decision.budget:g} % of loss, for an iteration of "
            f"{decision.iteration_ms:.4g} ms, {decision.computation_ms:.4g} of them computation"
        )
        for line in decision.table():
            self._say(f" {line}")
        if dist.get_rank() == 0:
            store.write(self.args.save, decision, self._made_for, self._tell)
        self._publish({"compression": self.compression.config.asdict()})
        self._publish_decision()

    def _checked(self, gains: dict[str, float]) -> None:
        """Take in what the run has measured, on all ranks."""
        useless = {}
        for dimension, gain in gains.items():
            off = dimension in self._check.off
            measured = f"iterations with it take {100 * abs(gain):.1f} % {'less' if gain >= 0 else 'more'}"
            self._tell(f"{dimension.replace('_', ' ')}: {measured}: {'switched off' if off else 'kept'}")
            if off:
                useless[dimension] = f"switched off: in this run {measured}"
        self.decision = self.decision.after_check(useless)
        if dist.get_rank() == 0:
            store.write(self.args.save, self.decision, self._made_for, self._tell)
        self._publish_decision()

    def _publish_decision(self) -> None:
        self._publish({"auto": {**self.decision.asdict(), "table": self.decision.table()}})

    def _tell(self, line: str) -> None:
        self._say(f"compression auto: {line}")


class Measurement:
    """Times and decides, once. Everything is the same on all ranks: it follows from largest values."""

    def __init__(self, auto: Automatic, chunks: list[torch.nn.Module]) -> None:
        self.auto, self.args, self.watch = auto, auto.args, Stopwatch()
        reason = why_not_attachable(chunks)
        if getattr(auto.args, "tp_comm_overlap", False):
            reason = "--tp-comm-overlap sends past NCCL"
        self._reason = self._common(reason)
        args, compression = auto.args, auto.compression
        # a model provider makes one chunk after the other
        more = (args.virtual_pipeline_model_parallel_size or 1) / len(chunks)
        parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad)
        (parameters,) = self.watch.largest(parameters * more)
        tokens, samples, channels = activations(args)
        columns = args.ffn_hidden_size // args.tensor_model_parallel_size
        rate = gemm_rate(self.watch, tokens * samples, columns, channels, args.params_dtype)
        self.work = workload(args, int(parameters), auto._flops(), rate)
        self.times: dict[Message, float] = {}
        self._sender = Sender(
            compression.run.transports,
            compression.gradients.topology,
            args.use_distributed_optimizer,
            self.watch.device,
        )

    def decide(self) -> Decision:
        """Time everything and choose."""
        config, budget = self.auto.config, self.auto.budget
        for message in self.work.messages:
            self.times[message] = self.watch.seconds(self._sender.sends(message))
        whole = iteration_seconds(self.work.computation, self.work.messages, self.times)
        gains: dict[str, dict[Candidate, float]] = {}
        why: dict[str, str] = {}
        used = list(dict.fromkeys(message.dimension for message in self.work.messages))
        for dimension in used:
            if dimension in config.auto:
                gains[dimension], why[dimension] = self._gains(dimension, whole)
        chosen = choose(gains, budget) if gains else {}
        choices = []
        for dimension in used:
            link = self._link(dimension)
            if dimension not in config.auto:
                specs = [spec for spec in getattr(config, dimension).specs if spec not in (None, "none")]
                name = ", back ".join(specs) or "none"
                choices.append(Choice(dimension, link, None, name, 0.0, 0.0, "as its own flag says"))
            elif dimension in chosen:
                one = chosen[dimension]
                settings, gain = dict(one.settings), gains[dimension][one]
                reason = f"gains most within the budget; loss: {one.source}"
                choices.append(Choice(dimension, link, settings, one.name, gain, one.loss, reason))
            else:
                reason = why[dimension] or self._beaten(gains[dimension])
                choices.append(Choice(dimension, link, None, "none", 0.0, 0.0, reason))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        computation, seconds = self.work.computation, self.watch.elapsed()
        return Decision(tuple(choices), budget, 1e3 * whole, 1e3 * computation, seconds)

    def _messages(self, dimension: str) -> list[Message]:
        return [message for message in self.work.messages if message.dimension == dimension]

    def _gains(self, dimension: str, whole: float) -> tuple[dict[Candidate, float], str]:
        """The part of an iteration that each candidate saves, and why there is none if there is none."""
        messages = self._messages(dimension)
        exposed = sum(message.exposed(self.times[message]) for message in messages)
        if exposed < LEAST_GAIN * whole:
            return {}, f"its messages hold up an iteration by {100 * exposed / whole:.1f} % only"
        found: dict[Candidate, float] = {}
        reason = ""
        prepared = False
        for candidate in candidates.within(self.auto.budget, dimension):
            try:
                settings = self.auto.dimension_config(dimension, dict(candidate.settings))
                if dimension == "tensor_parallel" and self._reason:
                    raise CompressionConfigError(self._reason)
            except CompressionConfigError as error:
                reason = reason or f"not possible: {error}"
                continue
            if self.watch.over():
                reason = reason or f"no time left of the {LIMIT:g} s for timings"
                break
            if not prepared and dimension == "tensor_parallel":
                group = parallel_state.get_tensor_model_parallel_group()
                self.auto.compression.run.transports.prepare([group])
                prepared = True
            rules = settings.rules(0)
            saved = 0.0
            for message in messages:
                rule = rules[message.traffic]
                if rule.codec is not None:
                    seconds = self.watch.seconds(self._sender.sends(message, rule))
                    saved += message.exposed(self.times[message]) - message.exposed(seconds)
            found[candidate] = saved / whole
        if found and max(found.values()) < LEAST_GAIN:
            best = max(found, key=lambda one: found[one])
            percent, least = 100 * found[best], f"under {100 * LEAST_GAIN:.0f} %"
            gain = f"gain {percent:.1f} %, {least}" if percent > 0 else f"cost {-percent:.1f} %"
            reason = f"{best.name}, the best here, would {gain} of an iteration"
        elif found:
            reason = ""
        return found, reason

    def _beaten(self, gains: dict[Candidate, float]) -> str:
        """Why a dimension with good candidates has none."""
        best = max(gains, key=lambda one: gains[one])
        return (
            f"{best.name} would gain {100 * gains[best]:.1f} % for +{best.loss:.3g} % of loss, and the budget "
            "is spent; raise --compression-loss-budget"
        )

    def _link(self, dimension: str) -> str:
        message = max(self._messages(dimension), key=lambda one: one.exposed(self.times[one]))
        return self._sender.describe(message, self.times[message])

    def _common(self, reason: str | None) -> str | None:
        """The first rank's reason, where any has one."""
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, reason)
        return next((one for one in found if one), None)
