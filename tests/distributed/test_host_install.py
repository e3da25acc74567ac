"""`host.install()` changes torch where there is no CUDA, and only there.

Each test runs in a process of its own.
"""

import functools
import json
import subprocess
import sys

import pytest

from tests.distributed.launch import REPO, environment


def evaluate(code: str) -> dict:
    """Run `code` in a fresh interpreter and return the dict `seen` that it fills."""
    before = "import json, torch\nfrom megatron import host\nseen = {}\n"
    after = "\nprint(json.dumps(seen))"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", before + code + after],
        cwd=REPO,
        env=environment(LOCAL_WORLD_SIZE="4"),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


GROUPS = """
import tempfile, torch.distributed as dist
from pathlib import Path
host.install(training=False)
store = f"file://{tempfile.mkdtemp()}/store"
dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
def number_of_threads():
    return len(list(Path("/proc/self/task").iterdir()))
before = number_of_threads()
groups = [dist.new_group([0]) for _ in range(10)]
seen["threads a group"] = (number_of_threads() - before) / 10
total = torch.ones(3)
dist.all_reduce(total, group=groups[3])
seen["total"] = total.tolist()
seen["timeout"] = groups[3]._get_backend(torch.device("cpu")).options._timeout.total_seconds()
dist.destroy_process_group()
"""


@functools.cache
def groups() -> dict:
    """Results of ``GROUPS``: ten gloo groups of one rank."""
    return evaluate(GROUPS)


def test_a_group_has_two_threads() -> None:
    """They run its work; the thread that polls is shared with all groups."""
    assert groups()["threads a group"] == 2.0


def test_a_group_reduces() -> None:
    assert groups()["total"] == [1.0, 1.0, 1.0]


def test_a_group_has_its_own_timeout() -> None:
    assert groups()["timeout"] == 1800.0


WITH_CUDA = """
torch.cuda.is_available = lambda: True
def public_functions():
    functions = {}
    for owner in (torch, torch.Tensor, torch.cuda, torch.cuda.random, torch.nn.Module):
        for name, value in list(vars(owner).items()):
            if callable(value) and not isinstance(value, type) and not name.startswith("_"):
                functions[id(owner), name] = id(value)
    return functions
import megatron.core.optimizer.distrib_optimizer as module
before = public_functions()
from megatron.compression.frontends import megatron_lm
megatron_lm.prepare()
seen["installed"] = host.install()
after = public_functions()
seen["changed"] = sorted(key[1] for key, value in before.items() if after.get(key) != value)
seen["active"] = host.is_active()
import megatron.core.datasets.utils as utils
seen["helpers"] = utils.compile_helpers()
"""


@functools.cache
def with_cuda() -> dict:
    """Results of ``WITH_CUDA``: an installation in a process that believes to have CUDA."""
    return evaluate(WITH_CUDA)


@pytest.mark.thorough
def test_nothing_is_installed_with_cuda() -> None:
    assert with_cuda()["installed"] is False
    assert with_cuda()["active"] is False


@pytest.mark.thorough
def test_torch_is_left_alone_with_cuda() -> None:
    assert with_cuda()["changed"] == []


@pytest.mark.thorough
def test_megatron_compiles_no_helpers_with_cuda() -> None:
    """megatron-core's own function would look for a Makefile and end the process."""
    assert with_cuda()["helpers"] is None
