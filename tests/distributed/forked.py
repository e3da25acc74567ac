"""Many short runs of pretrain_gpt.py on CPU: ranks are forked from one process that has loaded Megatron.

A rank runs the script itself with the environment that torchrun sets; what it saves is five seconds of
imports. Beside the output a run gives what its ranks held at the end: losses at full precision, parameters,
the ledger.
"""

import hashlib
import multiprocessing as mp
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.distributed.launch import REPO, START_FAST, free_port

_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": os.pathsep.join([str(START_FAST), str(REPO)]),
}


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


def pretrain(*flags: str, ranks: int, directory: Path, timeout: float = 300, check: bool = True) -> ForkedRun:
    """Run ``pretrain_gpt.py flags`` on ``ranks`` forked processes.

    Args:
        directory: an existing folder for the output.
        timeout: seconds, after which the ranks are killed and the test fails.
        check: require that the run succeeds.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)  # the server inherits it at its start
    log, results, port = directory / f"log-{time.monotonic_ns()}", context.SimpleQueue(), free_port()
    began = time.monotonic()
    processes = [
        context.Process(target=_rank_main, args=(rank, ranks, port, flags, log, results))
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        gathered: dict[int, RankResult] = {}
        while any(process.is_alive() for process in processes) or not results.empty():
            if not results.empty():
                rank, result = results.get()
                gathered[rank] = result
                continue
            failed = any(process.exitcode for process in processes)
            if failed or time.monotonic() - began > timeout:
                time.sleep(5)  # the others' last words
                break
            time.sleep(0.02)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    output = log.read_text() if log.exists() else ""
    codes = [process.exitcode for process in processes]
    failed = next((code for code in codes if code and code > 0), next((code for code in codes if code), 0))
    complete = [gathered[rank] for rank in range(ranks)] if len(gathered) == ranks else []
    run = ForkedRun(failed, output, complete, time.monotonic() - began)
    assert not check or (failed == 0 and complete), f"exit status {codes}:\n{output[-6000:]}"
    return run


def _rank_main(rank: int, ranks: int, port: int, flags: tuple[str, ...], log: Path, results) -> None:
    with open(log, "a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        from megatron.host import devices

        devices.install()  # the number of devices is this run's
        result, finish = _capture()
        os.chdir(REPO)
        sys.argv = ["pretrain_gpt.py", *flags]
        runpy.run_path(str(REPO / "pretrain_gpt.py"), run_name="__main__")
        finish()
        results.put((rank, result))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a peer may be inside a collective
    sys.stdout.flush()


def _capture() -> tuple[RankResult, Callable[[], None]]:
    """Keep hold of the run's model and ledger, and note the losses as they are logged.

    Returns:
        What is being filled, and a function that fills in the rest after the run.
    """
    from megatron.core import parallel_state

    from megatron.compression import weave
    from megatron.compression.reporter import Reporter

    result, held = RankResult(), {}
    bind = weave.bind_compression
    on_training_log, after_evaluate = Reporter.on_training_log, Reporter.after_evaluate

    def binding(model, runtime):
        held["chunks"], held["runtime"] = model, runtime
        result.place = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        return bind(model, runtime)

    def logging(self, iteration, losses):
        if "lm loss" in losses:
            result.losses[iteration] = float(losses["lm loss"])
        on_training_log(self, iteration, losses)

    def evaluated(self, losses):
        if losses:
            result.validation.append(float(losses["lm loss"]))
        after_evaluate(self, losses)

    weave.bind_compression = binding
    Reporter.on_training_log, Reporter.after_evaluate = logging, evaluated

    def finish() -> None:
        result.ledger = held["runtime"].ledger.rows()
        for number, chunk in enumerate(held["chunks"]):
            for name, parameter in chunk.named_parameters():
                name = f"{number}.{name}"
                bits = parameter.detach().float().numpy().tobytes()
                result.parameters[name] = hashlib.sha256(bits).hexdigest()
                if not getattr(parameter, "tensor_model_parallel", False):
                    result.replicated.add(name)

    return result, finish
