"""Runs a function in several processes of one process group, for tests of single operations.

Over gloo they have loaded Megatron with its CPU stand-ins; where there is CUDA there are none.
"""

import datetime
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed import server


def spawn(
    function: Callable, world_size: int, *args: Any, backend: str = "gloo", timeout: float = 240
) -> list:
    """Call ``function(rank, world_size, *args)`` in processes of one group.

    Args:
        function: importable at module level; what it returns must pickle.
        world_size: number of processes.
        args: further arguments of the function.
        backend: gloo (CPU tensors), or nccl (one CUDA device a rank, which is set).
        timeout: seconds for the whole call.

    Returns:
        The results by rank.

    Raises:
        AssertionError: a rank failed (with its traceback) or did not end in time.
    """
    if backend == "gloo":
        context = server.context()
    else:
        context = mp.get_context("spawn")  # CUDA does not survive a fork
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        processes = [
            context.Process(
                target=_main, args=(function, rank, world_size, backend, store, results, args)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            outcomes = {}
            deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout)
            while len(outcomes) < world_size:
                remaining = (deadline - datetime.datetime.now()).total_seconds()
                rank, result, error = results.get(timeout=max(remaining, 0.1))
                assert error is None, f"rank {rank} failed:\n{error}"
                outcomes[rank] = pickle.loads(result)
            for process in processes:
                process.join(timeout=30)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
    return [outcomes[rank] for rank in range(world_size)]


def spawned(function: Callable, world_size: int, *args: Any, **options: Any):
    """Return a module-scoped fixture of the results of ``spawn``, which has the same arguments."""

    @pytest.fixture(scope="module")
    def results() -> list:
        return spawn(function, world_size, *args, **options)

    return results


def _main(function, rank, world_size, backend, store, results, args) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    try:
        if backend == "nccl":
            from tests.shared_gpus import share_gpus

            torch.cuda.set_device(share_gpus(rank, world_size, torch.cuda.device_count()))
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        result = function(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
        # Bytes, not tensors: those would lie in shared memory that this process may not outlive.
        results.put((rank, pickle.dumps(result), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
