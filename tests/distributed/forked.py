"""Runs of pretrain_gpt.py on CPU, with what their ranks held at the end.

That is losses at full precision, parameters and the ledger.
"""

import hashlib
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.distributed.launch import Started, free_port
from tests.distributed.server import Forked, rank_environment, run_script


@dataclass
class RankResult:
    """What one rank held when its run had ended."""

    losses: dict[int, float] = field(default_factory=dict)
    """Training loss by iteration; empty but on the last pipeline stage."""
    validation: list[float] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    """Hashes of the bits by global name."""
    replicated: set[str] = field(default_factory=set)
    """Parameters that all tensor-parallel ranks hold in whole."""
    ledger: list[dict] = field(default_factory=list)
    place: tuple[int, int] = (0, 0)
    """(pipeline rank, tensor rank)."""


@dataclass
class ForkedRun:
    """A finished run."""

    returncode: int
    output: str
    ranks: list[RankResult]
    """By rank; empty where the run failed."""
    seconds: float

    @property
    def losses(self) -> dict[int, float]:
        """Training loss by iteration."""
        return self.ranks[-1].losses

    @property
    def errors(self) -> list[str]:
        """The lines that tell a user what was wrong."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


def pretrain(
    *flags: str,
    ranks: int,
    directory: Path,
    timeout: float = 300,
    check: bool = True,
    script: str = "pretrain_gpt.py",
    through: str | None = None,
) -> ForkedRun:
    """Run ``script flags`` on ``ranks`` forked processes.

    Args:
        directory: an existing folder for the output.
        timeout: seconds, after which the ranks are killed and the test fails.
        check: require that the run succeeds.
        script: the entrypoint, relative to the repository.
        through: a script that is given the entrypoint as its first argument, in place of it.
    """
    port, results = free_port(), Path(tempfile.mkdtemp(prefix="results-", dir=directory))
    started = Started([])
    words = [script, *flags] if through is None else [through, script, *flags]
    for rank in range(ranks):
        own = rank_environment(rank, ranks, port)
        started.processes.append(Forked(own, _rank_main, words, results / str(rank)))
        started.read(started.processes[-1])
    run = started.finish(timeout)
    files = [results / str(rank) for rank in range(ranks)]
    complete = [pickle.loads(file.read_bytes()) for file in files] if all(f.exists() for f in files) else []
    good = run.returncode == 0 and len(complete) == ranks
    assert good or not check, f"exit status {run.returncode}:\n{run.output[-6000:]}"
    return ForkedRun(run.returncode, run.output, complete, run.seconds)


def _rank_main(words: list[str], results: Path) -> None:
    result, finish = _capture()
    run_script(words[0], words[1:])
    finish()
    results.write_bytes(pickle.dumps(result))


def _capture() -> tuple[RankResult, Callable[[], None]]:
    """Keep hold of the run's model and ledger, and note the losses as they are logged.

    Returns:
        What is being filled, and a function that fills in the rest after the run.
    """
    from megatron.core import parallel_state

    from megatron.compression.compression import Compression
    from megatron.compression.report import Reporter

    result, held = RankResult(), {}
    attach_model = Compression.attach_model
    on_training_log, after_evaluate = Reporter.on_training_log, Reporter.after_evaluate

    def attaching(self, chunks):
        held.setdefault("chunks", []).extend(chunks)
        held["ledger"] = self.ledger
        result.place = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
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

    Compression.attach_model = attaching
    Reporter.on_training_log, Reporter.after_evaluate = logging, evaluated

    def finish() -> None:
        result.ledger = held["ledger"].rows()
        for number, chunk in enumerate(held["chunks"]):
            for name, parameter in chunk.named_parameters():
                name = f"{number}.{name}"
                bits = parameter.detach().float().numpy().tobytes()
                result.parameters[name] = hashlib.sha256(bits).hexdigest()
                if not getattr(parameter, "tensor_model_parallel", False):
                    result.replicated.add(name)

    return result, finish
