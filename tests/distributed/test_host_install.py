"""What `host.install()` replaces, and what it leaves alone. In processes of their own: it changes torch."""

import json
import subprocess
import sys

import pytest

from tests.distributed.launch import REPO, environment


def evaluate(code: str) -> dict:
    """Run `code` in a fresh interpreter and return the dict `seen` that it fills."""
    program = f"import json, torch\nfrom megatron import host\nseen = {{}}\n{code}\nprint(json.dumps(seen))"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        **{
            "cwd": REPO,
            "env": environment(LOCAL_WORLD_SIZE="4"),
            "capture_output": True,
            "text": True,
        },
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


GROUPS = """
import tempfile, torch.distributed as dist
from pathlib import Path
host.install(training=False)
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
threads = lambda: [one.read_text().strip() for one in Path("/proc/self/task").glob("*/comm")]
before = len(threads())
groups = [dist.new_group([0]) for _ in range(10)]
seen["threads a group"] = (len(threads()) - before) / 10
total = torch.ones(3)
dist.all_reduce(total, group=groups[3])
seen["total"] = total.tolist()
seen["timeout"] = groups[3]._get_backend(torch.device("cpu")).options._timeout.total_seconds()
dist.destroy_process_group()
"""


def test_groups_share_a_device() -> None:
    """Each has the two threads that run its work, and none that polls; the timeout is the group's own."""
    assert evaluate(GROUPS) == {"threads a group": 2.0, "total": [1.0] * 3, "timeout": 1800.0}


WITH_CUDA = """
torch.cuda.is_available = lambda: True
def replaced():
    holders = [torch, torch.Tensor, torch.cuda, torch.cuda.random, torch.nn.Module]
    return {(id(holder), name): id(value) for holder in holders for name, value in list(vars(holder).items())
            if callable(value) and not isinstance(value, type) and not name.startswith("_")}
import megatron.core.optimizer.distrib_optimizer as module
before = replaced()
from megatron.compression.frontends import megatron_lm
megatron_lm.prepare()
seen["installed"] = host.install()
after = replaced()
seen["changed"] = sorted(key[1] for key, value in before.items() if after.get(key) != value)
seen["active"] = host.is_active()
import megatron.core.datasets.utils as utils
seen["helpers"] = utils.compile_helpers()
"""


@pytest.mark.thorough
def test_with_cuda_torch_is_left_alone():
    """Helpers: megatron-core's own function would look for a Makefile and end the process."""
    assert evaluate(WITH_CUDA) == {
        "installed": False,
        "active": False,
        "changed": [],
        "helpers": None,
    }
