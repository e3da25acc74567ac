"""Megatron without CUDA: its symbols that take a device for granted, and the arguments of a CPU run."""

import functools
import importlib
import sys
import warnings
from argparse import Namespace
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import DeviceMesh

from megatron.compression.patches.symbols import around, put
from megatron.host import cuda

# What every process of a CPU run would say: fused kernels are absent, and so is memory to pin.
_EXPECTED_WARNINGS = (
    r"(Transformer Engine and )?Apex (is|are) not installed",
    r"Only transformer-engine>=",
    r".*pin_memory.*",
)


def _with_own_generator(build, *args, **kwargs):
    """For build_pretraining_data_loader: the loader draws its workers' seed from a generator of its own. From
    the CPU generator, which dropout uses here too, only tensor-parallel rank 0 would draw."""
    loader = build(*args, **kwargs)
    if isinstance(loader, torch.utils.data.DataLoader):
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())
    return loader


def _without_cuda(initialize, *args, **kwargs):
    """For initialize_megatron, which asserts CUDA unless told otherwise; training.py holds it by name."""
    return initialize(*args, **{"allow_no_cuda": True} | kwargs)


def _as_numpy_from_here(move, tensor, as_numpy=False, record_stream=False):
    """For maybe_move_tensor_to_cpu, which makes numpy splits of CUDA tensors alone: gloo wants numbers."""
    tensor = move(tensor, as_numpy, record_stream)
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@functools.cache
def install_core() -> None:
    """Replace megatron-core's symbols."""
    _load("megatron.core.transformer")
    from megatron.core.tensor_parallel import random as tracker

    cuda.install_tracker(tracker)
    from megatron.core.transformer.moe import token_dispatcher

    around(
        token_dispatcher,
        "maybe_move_tensor_to_cpu",
        ("tensor", "as_numpy"),
        _as_numpy_from_here,
        lasting=True,
    )
    from megatron.core.distributed import torch_fully_sharded_data_parallel as fsdp2

    on_cpu = SimpleNamespace(from_group=lambda group, _: DeviceMesh.from_group(group, "cpu"))
    put(fsdp2, "DeviceMesh", on_cpu, "--use-torch-fsdp2 makes its mesh of CUDA devices")


def _load(name: str):
    """Import a Megatron module with torch.compile as the identity: `jit_fuser` applies it to small functions,
    which on CPU costs seconds of C++ compilation in each process and gains nothing."""
    if (
        "megatron.core.jit" in sys.modules
    ):  # too late for the import below: leave the functions uncompiled
        importlib.import_module("torch._dynamo").config.disable = True
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    compile_, why = torch.compile, "small functions of the modules that load now stay as they are"
    put(torch, "compile", lambda fn=None, **_: fn if fn is not None else (lambda f: f), why)
    try:
        return importlib.import_module(name)
    finally:
        put(torch, "compile", compile_, "they have loaded")


@functools.cache
def install() -> None:
    """Replace Megatron's own symbols; loads megatron.training on the way."""
    training = _load("megatron.training.training")
    around(training, "initialize_megatron", ("allow_no_cuda",), _without_cuda, lasting=True)
    # It warms up functions that are not compiled here, and draws random numbers, how many depends on the
    # tensor-parallel size: weights from --use-cpu-initialization would differ between sizes.
    put(training, "set_jit_fusion_options", lambda tp_size=None: None, "nothing is compiled")
    around(training, "build_pretraining_data_loader", (), _with_own_generator, lasting=True)
    install_core()


# argument -> (value on the CPU, flag that says the same, reason)
_OVERRIDES = {
    "distributed_backend": ("gloo", "--distributed-backend gloo", "NCCL needs GPUs"),
    "gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion", "a GPU kernel"),
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion", "needs a CUDA extension"),
    "bias_gelu_fusion": (False, "--no-bias-gelu-fusion", "a GPU kernel"),
    "bias_swiglu_fusion": (False, "--no-bias-swiglu-fusion", "a GPU kernel"),
    "bias_dropout_fusion": (False, "--no-bias-dropout-fusion", "a GPU kernel"),
    "apply_rope_fusion": (False, "--no-rope-fusion", "needs Transformer Engine"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm", "needs apex"),
    "tp_comm_overlap": (False, "no --tp-comm-overlap", "needs Transformer Engine"),
    "optimizer_cuda_graph": (False, "no --optimizer-cuda-graph", "CUDA graphs"),
    "record_memory_history": (False, "no --record-memory-history", "records CUDA memory"),
    "nccl_ub": (False, "no --use-nccl-ub", "NCCL needs GPUs"),
}


def cpu_argument_overrides(args: Namespace) -> list[str]:
    """Set in `args`, which are validated, what a CPU run needs. Returns: a line for each change."""
    said = []
    for name, (value, flag, reason) in _OVERRIDES.items():
        if getattr(args, name) != value:
            setattr(args, name, value)
            said.append(f"running without CUDA: {flag} ({reason})")
    if args.attention_backend.name in ("fused", "flash"):
        said.append(
            f"running without CUDA: --attention-backend auto ({args.attention_backend.name} is a GPU kernel)"
        )
        args.attention_backend = type(args.attention_backend).auto
    if args.cuda_graph_impl != "none":
        from megatron.core.transformer.enums import InferenceCudaGraphScope

        args.cuda_graph_impl, args.cuda_graph_modules, args.te_rng_tracker = "none", [], False
        args.inference_cuda_graph_scope = InferenceCudaGraphScope.none
        said.append("running without CUDA: --cuda-graph-impl none")
    if args.profile and not args.use_pytorch_profiler:
        args.profile = False
        said.append(
            "running without CUDA: no --profile (Nsight follows CUDA; --use-pytorch-profiler works)"
        )
    return said
