"""The process that ranks of the tests are forked from: it has loaded Megatron (six seconds).

A forked rank runs a script with the environment that torchrun sets, as a process of its own would.
"""

import faulthandler
import multiprocessing as mp
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path

REPO = Path(__file__).parents[2]
MOCK_DOCUMENTS = "MOCK_DOCUMENTS"
"""Environment variable of a rank: how many documents --mock-data makes up."""
_SETTINGS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPO)}


def context() -> mp.context.ForkServerContext:
    """Return the context whose processes are forked from the server; start the server if needed."""
    forkserver = mp.get_context("forkserver")
    forkserver.set_forkserver_preload(["tests.distributed.preloaded"])
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)  # the server keeps the environment of its start
    try:
        ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return forkserver


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script of the repository in this process, as `python script arguments` does."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron.host import cuda

    cuda.install_devices()  # the number of devices is this run's
    mp.set_start_method("fork", force=True)  # as a script finds it, for its data loaders
    # Megatron's own 100,000 take each rank a sixth of a short run to put into order.
    MockGPTLowLevelDataset.size = int(os.environ.get(MOCK_DOCUMENTS, 2000))
    if "--async-save" not in arguments:
        # Otherwise a save starts a process that loads torch, only to hold a queue between two ends
        # that are both in this process.
        import queue

        filesystem_async._results_queue = queue.Queue()
    os.chdir(REPO)
    sys.argv = [script, *arguments]
    path = REPO / script
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank.

    Args:
        rank: this rank.
        ranks: number of ranks, all on this host.
        port: TCP port of the rendezvous.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _main(output: Connection, env: dict[str, str], body: Callable, arguments: tuple) -> None:
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()  # a crash shows its Python stack in the run's output
    os.environ.update(env)
    try:
        body(*arguments)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a peer may be inside a collective


class Forked:
    """A process that runs `body(*arguments)`, with the part of subprocess.Popen that tests use."""

    def __init__(self, env: dict[str, str], body: Callable, *arguments) -> None:
        fork = context()
        reader, writer = fork.Pipe(duplex=False)
        self._process = fork.Process(target=_main, args=(writer, env, body, arguments))
        self._process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()), errors="replace")
        reader.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status as far as it is known."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process's end and return its exit status.

        Raises:
            TimeoutError: it still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return self.returncode

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
