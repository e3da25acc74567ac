"""The state of a pretrain_gpt.py rank at its end: exact losses, parameters and the ledger."""

import hashlib
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.distributed.server import run_script


@dataclass
class RankResult:
    """The state of one rank when its run had ended."""

    losses: dict[int, float] = field(default_factory=dict)
    """Training loss by iteration; empty but on the last pipeline stage."""
    validation: list[float] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    """Hashes of the bits, by global name."""
    replicated: set[str] = field(default_factory=set)
    """Parameters that all tensor-parallel ranks hold in whole."""
    ledger: list[dict] = field(default_factory=list)
    stage_and_tensor_rank: tuple[int, int] = (0, 0)
    """(pipeline rank, tensor rank)."""
    coordinates: dict[str, int] = field(default_factory=dict)
    """This rank in each dimension of the mesh: pipeline, tensor, data, expert, expert tensor."""
    cut: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Dimensions of the mesh whose ranks hold different values of a parameter, by its name.

    Ranks that differ in no such dimension hold copies.
    """


def run_and_keep(script: str, arguments: list[str], results: Path) -> None:
    """Run a script and write its RankResult into a folder.

    Args:
        script: path relative to the repository.
        arguments: the script's command line.
        results: the folder; the file's name is the rank.
    """
    result, finish = _capture()
    run_script(script, arguments)
    finish()
    (results / os.environ["RANK"]).write_bytes(pickle.dumps(result))


def _capture() -> tuple[RankResult, Callable[[], None]]:
    """Watch the run that follows: its model, its ledger, and the losses as they are logged.

    Returns:
        The result that the run fills, and a function that fills in the rest after the run.
    """
    from megatron.core import parallel_state

    from megatron.compression.report import Reporter
    from megatron.compression.session import Session

    result = RankResult()
    chunks_of_run = []
    ledgers = []
    attach_model = Session.attach_model
    on_training_log = Reporter.on_training_log
    after_evaluate = Reporter.after_evaluate

    def attaching(self, chunks):
        chunks_of_run.extend(chunks)
        ledgers.append(self.ledger)
        result.coordinates = {
            "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
            "tensor": parallel_state.get_tensor_model_parallel_rank(),
            "data": parallel_state.get_data_parallel_rank(with_context_parallel=True),
            "expert": parallel_state.get_expert_model_parallel_rank(),
            "expert tensor": parallel_state.get_expert_tensor_parallel_rank(),
        }
        result.stage_and_tensor_rank = (
            result.coordinates["pipeline"],
            result.coordinates["tensor"],
        )
        return attach_model(self, chunks)

    def logging(self, iteration, losses):
        if "lm loss" in losses:
            result.losses[iteration] = float(losses["lm loss"])
        on_training_log(self, iteration, losses)

    def evaluated(self, losses):
        if losses:
            result.validation.append(float(losses["lm loss"]))
        after_evaluate(self, losses)

    Session.attach_model = attaching
    Reporter.on_training_log = logging
    Reporter.after_evaluate = evaluated

    def finish() -> None:
        result.ledger = ledgers[-1].rows()
        for number, chunk in enumerate(chunks_of_run):
            for name, parameter in chunk.named_parameters():
                name = f"{number}.{name}"
                is_shard = hasattr(parameter, "to_local")  # FSDP2's
                local = parameter.to_local() if is_shard else parameter
                bits = local.detach().float().numpy().tobytes()
                result.parameters[name] = hashlib.sha256(bits).hexdigest()
                result.cut[name] = _cut(parameter, is_shard)
                if not getattr(parameter, "tensor_model_parallel", False):
                    result.replicated.add(name)

    return result, finish


def _cut(parameter, is_shard: bool) -> tuple[str, ...]:
    """Return the dimensions of the mesh whose ranks hold different values of a parameter."""
    is_expert = not getattr(parameter, "allreduce", True)
    cut = ["pipeline"]
    if is_expert:
        cut.append("expert")
    if is_shard:
        cut.append("data")
    if getattr(parameter, "tensor_model_parallel", False):
        cut.append("expert tensor" if is_expert else "tensor")
    return tuple(cut)
