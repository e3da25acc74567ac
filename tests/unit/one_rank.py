"""Megatron in the test's own process: one rank, on the GPU where there is one."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from tests.distributed.tiny_gpt import transformer_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """Megatron's process groups with this process as their only rank; new tensors on DEVICE."""
    torch.set_default_device(DEVICE)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    torch.set_default_device(None)


def config(**changes):
    """Return the tiny model's config for one rank, with changes."""
    return transformer_config(1, **changes)
