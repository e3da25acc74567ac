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
        **{"cwd": REPO, "env": environment(LOCAL_WORLD_SIZE="4"), "capture_output": True, "text": True},
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


WITHOUT_CUDA = """
seen["first"] = host.install()
replaced = lambda: [torch.zeros, torch.tensor, torch.randn, torch.Tensor.to, torch.cuda.current_device]
before, seen["second"] = replaced(), host.install()
seen["idempotent"] = all(a is b for a, b in zip(before, replaced()))
seen["cuda still absent"] = not torch.cuda.is_available()
made = [
    torch.zeros(2, device="cuda"), torch.tensor([1.0], device=torch.device("cuda", 0)),
    torch.empty(2, device=torch.cuda.current_device()), torch.ones(2, pin_memory=True).cuda(),
    torch.ones(2).to("cuda"), torch.ones(2).to(device="cuda", dtype=torch.bfloat16),
    torch.nn.Linear(2, 2).cuda().weight, torch.ones(2).new_zeros(3, device="cuda"),
]
seen["devices"] = sorted({str(tensor.device) for tensor in made})
seen["kept dtype"] = str(made[5].dtype)
one = torch.ones(1)
seen["type"] = [one.type(), one.bfloat16().type(), one.type("torch.IntTensor").type()]
seen["ranks on this host"] = torch.cuda.device_count()
with torch.device("meta"):
    seen["meta"] = str(torch.empty(2).device)

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
tracker = CudaRNGStatesTracker()
torch.manual_seed(1)
alone, streams = torch.rand(2).tolist(), {}
for name, seed in (("a", 10), ("b", 20)):
    torch.manual_seed(seed)
    streams[name] = torch.rand(4).tolist()
    tracker.add(name, seed)
torch.manual_seed(1)
drawn = {"a": [], "b": []}
with tracker.fork("a"):
    drawn["a"] += torch.rand(2).tolist()
    with tracker.fork("b"):
        drawn["b"] += torch.rand(4).tolist()
    drawn["a"] += torch.rand(1).tolist()
with tracker.fork("a"):
    drawn["a"] += torch.rand(1).tolist()
seen["drawn"], seen["outside"] = drawn == streams, alone == torch.rand(2).tolist()
"""


@pytest.mark.thorough
def test_without_cuda():
    """CUDA's tensors are the host's; each stream of the tracker goes on where it stopped, nested or not."""
    assert evaluate(WITHOUT_CUDA) == {
        **dict.fromkeys(("first", "second", "idempotent", "cuda still absent", "drawn", "outside"), True),
        **{"devices": ["cpu"], "kept dtype": "torch.bfloat16", "ranks on this host": 4, "meta": "meta"},
        "type": [f"torch.cuda.{one}Tensor" for one in ("Float", "BFloat16", "Int")],
    }


WITH_CUDA = """
torch.cuda.is_available = lambda: True
def replaced():
    holders = [torch, torch.Tensor, torch.cuda, torch.cuda.random, torch.nn.Module]
    return {(id(holder), name): id(value) for holder in holders for name, value in list(vars(holder).items())
            if callable(value) and not isinstance(value, type) and not name.startswith("_")}
import megatron.core.optimizer.distrib_optimizer as module
before = replaced()
from megatron.compression import startup
startup.prepare()
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
    assert evaluate(WITH_CUDA) == {"installed": False, "active": False, "changed": [], "helpers": None}
