"""Megatron without CUDA: its symbols that take a device for granted, and the arguments of a CPU
run."""

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
    """Stand in for build_pretraining_data_loader: the loader draws its workers' seed from its own
    generator.

    Dropout draws from the CPU generator here, so tensor-parallel ranks need the same draws from it,
    and rank 0 alone reads data.
    """
    loader = build(*args, **kwargs)
    if isinstance(loader, torch.utils.data.DataLoader):
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())
    return loader


def _without_cuda(initialize, *args, **kwargs):
    """Stand in for initialize_megatron, which asserts CUDA unless told otherwise; training.py holds
    its name."""
    kwargs.setdefault("allow_no_cuda", True)
    return initialize(*args, **kwargs)


def _as_numpy_from_here(move, tensor, as_numpy=False, record_stream=False):
    """Stand in for maybe_move_tensor_to_cpu, which makes numpy splits of CUDA tensors alone: gloo
    wants numbers."""
    tensor = move(tensor, as_numpy, record_stream)
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@functools.cache
def install_core() -> None:
    """Replace megatron-core's symbols."""
    # Its modules decorate functions with torch.compile at import.
    _load("megatron.core.transformer")
    from megatron.core.tensor_parallel import random as tracker

    cuda.install_tracker(tracker)
    # Below the load: an import of it before would compile.
    from megatron.core.transformer.moe import token_dispatcher

    around(
        token_dispatcher,
        "maybe_move_tensor_to_cpu",
        ("tensor", "as_numpy"),
        _as_numpy_from_here,
        lasting=True,
    )
    from megatron.core.distributed import torch_fully_sharded_data_parallel as fsdp2

    # from_group is all that it calls.
    on_cpu = SimpleNamespace(from_group=lambda group, _: DeviceMesh.from_group(group, "cpu"))
    put(fsdp2, "DeviceMesh", on_cpu, "--use-torch-fsdp2 makes its mesh of CUDA devices")


def _load(name: str):
    """Import a Megatron module with torch.compile as the identity: `jit_fuser` applies it to small
    functions, which on CPU costs seconds of C++ compilation in each process and gains nothing."""
    if "megatron.core.jit" in sys.modules:
        # Too late for the import below: have dynamo leave the functions uncompiled.
        importlib.import_module("torch._dynamo").config.disable = True
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    torch_compile = torch.compile
    put(
        torch,
        "compile",
        _uncompiled,
        "small functions of the modules that load now stay as they are",
    )
    try:
        return importlib.import_module(name)
    finally:
        put(torch, "compile", torch_compile, "they have loaded")


def _uncompiled(function=None, **options):
    """Stand in for torch.compile, called or as a decorator: the function as it is."""
    if function is None:
        return _uncompiled
    return function


@functools.cache
def install() -> None:
    """Replace Megatron's own symbols; loads megatron.training on the way."""
    # Everything of megatron.core comes with it.
    training = _load("megatron.training.training")
    around(training, "initialize_megatron", ("allow_no_cuda",), _without_cuda, lasting=True)
    # It warms up functions that are not compiled here, and draws random numbers, how many depends
    # on the tensor-parallel size: weights from --use-cpu-initialization would differ between sizes.
    put(training, "set_jit_fusion_options", lambda tp_size=None: None, "nothing is compiled")
    around(training, "build_pretraining_data_loader", (), _with_own_generator, lasting=True)
    install_core()


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
"""Argument -> (its value on the CPU, the flag that says the same, why)."""


def cpu_argument_overrides(args: Namespace) -> list[str]:
    """Set in validated `args` what a CPU run needs, and return a line for each change."""
    lines = []
    for name, (value, flag, reason) in _OVERRIDES.items():
        if getattr(args, name) != value:
            # As if the flag had been given.
            setattr(args, name, value)
            lines.append(f"running without CUDA: {flag} ({reason})")
    if args.attention_backend.name in ("fused", "flash"):
        lines.append(
            f"running without CUDA: --attention-backend auto ({args.attention_backend.name} is a "
            "GPU kernel)"
        )
        args.attention_backend = type(args.attention_backend).auto
    if args.cuda_graph_impl != "none":
        # Validation has derived settings from the flag, which are taken back.
        from megatron.core.transformer.enums import InferenceCudaGraphScope

        args.cuda_graph_impl = "none"
        args.cuda_graph_modules = []
        args.te_rng_tracker = False
        args.inference_cuda_graph_scope = InferenceCudaGraphScope.none
        lines.append("running without CUDA: --cuda-graph-impl none")
    if args.profile and not args.use_pytorch_profiler:
        args.profile = False
        lines.append(
            "running without CUDA: no --profile (Nsight follows CUDA; --use-pytorch-profiler works)"
        )
    return lines
