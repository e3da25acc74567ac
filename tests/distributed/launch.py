"""Starts training runs in processes of their own, as torchrun would.

The caller gets what they print and what their ranks hold at the end.

    run = pretrain(*tiny_flags("--tensor-model-parallel-size", "2"), ranks=2)
    run.losses, run.ranks[0].parameters, run.output

`start` sets the variables that torchrun sets and forks the ranks from server.py, which spares
torchrun's start-up (3 s) and each rank's (6 s); `torchrun` is the real one.
"""

import contextlib
import os
import pickle
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.distributed.forked import RankResult, run_and_keep
from tests.distributed.server import REPO, Forked, rank_environment, run_script

# A model of 2 layers on made-up data, on CPU: 20 to 60 ms for a micro-batch.
TINY = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 4
    --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0.1
    --vocab-size 127 --tokenizer-type NullTokenizer --num-workers 0
    --make-vocab-size-divisible-by 128 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --distributed-timeout-minutes 2"""

START_FAST = Path(__file__).parent / "start_fast"
UNKNOWN = "that the ledger does not know"
"""The words of the audit of a run's first iteration for bytes that nobody has counted."""
NONE_SKIPPED = "number of skipped iterations:   0 | number of nan iterations:   0"

_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|(.*)")


@dataclass
class Run:
    """What a finished run left behind."""

    returncode: int
    output: str
    """Standard output and error of all ranks, interleaved."""
    ranks: list[RankResult] = field(default_factory=list)
    """Results of ``pretrain`` by rank; empty where the run failed."""

    @property
    def losses(self) -> dict[int, float]:
        """Training loss by iteration, every digit."""
        return self.ranks[-1].losses

    @property
    def parameters(self) -> list[dict[str, str]]:
        """Hashes of the ranks' parameters."""
        return [rank.parameters for rank in self.ranks]

    @property
    def errors(self) -> list[str]:
        """The lines that tell a user what was wrong."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]

    def log(self, field_name: str) -> dict[int, float]:
        """Return {iteration: value} of a field of Megatron's log line.

        Args:
            field_name: such as "lm loss" or "grad norm".
        """
        values = {}
        for iteration, line in _ITERATION.findall(self.output):
            match = re.search(rf"{re.escape(field_name)}: ([-+.0-9Enaif]+)", line)
            if match:
                values[int(iteration)] = float(match.group(1))
        return values


@dataclass
class Started:
    """A run in progress: its processes, by rank, and what they have printed so far."""

    processes: list[subprocess.Popen | Forked]
    lines: list[str] = field(default_factory=list)

    def read(self, process: subprocess.Popen | Forked) -> None:
        """Collect a process's output in the background: a full pipe would stop it."""
        reader = threading.Thread(target=self._collect, args=(process.stdout,), daemon=True)
        reader.start()
        process.reader = reader

    def _collect(self, stream) -> None:
        for line in stream:
            self.lines.append(line)

    def wait_for(self, text: str, timeout: float) -> None:
        """Block until some rank has printed `text`.

        Raises:
            AssertionError: `timeout` seconds have passed, or every rank has ended before it.
        """
        deadline = time.monotonic() + timeout
        while not any(text in line for line in list(self.lines)):
            alive = any(process.poll() is None for process in self.processes)
            assert alive and time.monotonic() < deadline, (
                f"no {text!r} in:\n{''.join(self.lines[-40:])}"
            )
            time.sleep(0.05)

    def finish(self, timeout: float, grace: float = 1.0) -> Run:
        """Wait for the end of all ranks.

        Args:
            timeout: seconds for the whole run.
            grace: seconds that the other ranks get when one has failed, as under torchrun.

        Raises:
            AssertionError: the run has not ended in time; the message holds its last lines.
        """
        deadline = time.monotonic() + timeout
        failing = False
        try:
            while True:
                codes = [process.poll() for process in self.processes]
                if None not in codes:
                    break
                if any(codes) and not failing:
                    failing = True
                    deadline = min(deadline, time.monotonic() + grace)
                if time.monotonic() > deadline:
                    assert any(codes), (
                        f"still running after {timeout} s:\n{''.join(self.lines[-40:])}"
                    )
                    break
                time.sleep(0.05)
        finally:
            self.kill()
        codes = [process.returncode for process in self.processes]
        failures = [code for code in codes if code]
        # A rank that fails by itself has a positive status; its peers are killed: negative ones.
        failures.sort(key=lambda code: code < 0)
        return Run(failures[0] if failures else 0, "".join(self.lines))

    def kill(self) -> None:
        """End every process of this run, and what they started."""
        for process in self.processes:
            children = []
            if process.poll() is None:
                children = psutil.Process(process.pid).children(recursive=True)
                process.kill()
            for child in children:
                if child.is_running():
                    child.kill()
            process.wait()
            process.reader.join(timeout=10)


def free_port() -> int:
    """A TCP port that nothing listens on at this moment.

    It lies below those that the system gives to connections (gloo opens dozens of them while
    another run starts).
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def environment(transformers: bool = False, **extra: str) -> dict[str, str]:
    """The environment of a rank: one thread, this repository importable, no CUDA.

    Args:
        transformers: leave the installed transformers importable (Hugging Face tokenizers).
        extra: further variables by name.
    """
    path = [str(REPO)]
    if not transformers:
        path.insert(0, str(START_FAST))
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    settings = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(path),
    }
    return {**os.environ, "PYTHONUNBUFFERED": "1", **settings, **extra}


def _fork(ranks: int, env: dict[str, str], body: Callable, *arguments) -> Started:
    """Start `body(*arguments)` in `ranks` ranks on this host."""
    started = Started([])
    port = free_port()
    for rank in range(ranks):
        process = Forked(rank_environment(rank, ranks, port) | env, body, *arguments)
        started.processes.append(process)
        started.read(process)
    return started


def start(script: str, *arguments: str, processes: int = 1, **env: str) -> Started:
    """Start a script in ranks on this host.

    Args:
        script: path relative to the repository.
        arguments: the script's command line.
        processes: number of ranks.
        env: further environment variables.
    """
    return _fork(processes, env, run_script, script, list(arguments))


def launched(words: list, env: dict[str, str], folder: Path = REPO) -> Started:
    """Start a command with this environment and no other.

    Args:
        words: the command and its arguments.
        env: every environment variable of the process.
        folder: its working directory.
    """
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = Started([subprocess.Popen(words, env=env, cwd=folder, **pipes)])
    started.read(started.processes[0])
    return started


def torchrun(script: str, *arguments: str, processes: int = 1, **env: str) -> Started:
    """Start a script under torchrun itself.

    Args:
        script: path relative to the repository.
        arguments: the script's command line.
        processes: number of ranks.
        env: further environment variables.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*launcher, f"--nproc-per-node={processes}", script, *arguments]
    return launched(words, environment(**env))


def tiny_flags(*flags: str, **replaced: str) -> list[str]:
    """The command line of a tiny run; the last of two equal flags counts.

    Args:
        flags: added at the end, as a user writes them.
        replaced: values of TINY by flag name, e.g. train_iters="8".
    """
    changes = []
    for name, value in replaced.items():
        changes += [f"--{name.replace('_', '-')}", value]
    if not any(flag.endswith("data-path") for flag in flags):
        changes.append("--mock-data")
    return [*TINY.split(), *changes, *flags]


def pretrain(
    *flags: str,
    ranks: int = 2,
    timeout: float = 300,
    check: bool = True,
    script: str = "pretrain_gpt.py",
    through: str | None = None,
    env: dict[str, str] | None = None,
) -> Run:
    """Run ``script flags`` to its end and return it with what its ranks held there.

    Args:
        flags: the entrypoint's command line.
        ranks: number of ranks on this host.
        timeout: seconds, after which the ranks are killed and the test fails.
        check: require that the run succeeds.
        script: the entrypoint, relative to the repository.
        through: a script that is given the entrypoint as its first argument, in place of it.
        env: further environment variables.
    """
    if through is None:
        command = [script, *flags]
    else:
        command = [through, script, *flags]
    with tempfile.TemporaryDirectory(prefix="megatron-taco-") as folder:
        started = _fork(ranks, env or {}, run_and_keep, command[0], command[1:], Path(folder))
        run = started.finish(timeout)
        files = [Path(folder, str(rank)) for rank in range(ranks)]
        if all(file.exists() for file in files):
            run.ranks = [pickle.loads(file.read_bytes()) for file in files]
    good = run.returncode == 0 and len(run.ranks) == ranks
    assert good or not check, f"exit status {run.returncode}:\n{run.output[-6000:]}"
    return run


def go_back_to(iteration: int, saved: Path) -> None:
    """Delete the checkpoints after an iteration: a run that loads from the folder resumes there."""
    for folder in saved.glob("iter_*"):
        if int(folder.name.removeprefix("iter_")) > iteration:
            shutil.rmtree(folder)
    (saved / "latest_checkpointed_iteration.txt").write_text(str(iteration))
