"""Slots that megatron-core's wheel leaves empty: compiled dataset helpers, RoPE, fused weight gradients."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from megatron.compression.patches.symbols import put


def use_shipped_helpers() -> None:
    """Make ``megatron.core.datasets.utils.compile_helpers`` a no-op where ``helpers_cpp`` imports.

    Why: start-up runs ``make`` in the package's folder, but the wheel ships ``helpers_cpp`` compiled and no
    Makefile, so training from the wheel dies there, on GPUs as well. Not reached: a source checkout without
    the compiled module, which keeps Megatron's own behaviour.
    """
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return
    utils = importlib.import_module("megatron.core.datasets.utils")
    put(utils, "compile_helpers", lambda: None, "the wheel ships helpers_cpp and no Makefile")


def fill_rope_slot(rotary: Callable) -> bool:
    """Put ``rotary`` where megatron-core keeps Transformer Engine's fused kernel, if that is missing.

    Why: ``rope_utils.fused_apply_rotary_pos_emb`` is None without Transformer Engine, and then
    ``--apply-rope-fusion`` is refused. It is read at each call. Packed sequences have a slot of their own.

    Returns: Whether ``rotary`` is in the slot.
    """
    from megatron.core.models.common.embeddings import rope_utils

    if rope_utils.fused_apply_rotary_pos_emb is None:
        put(rope_utils, "fused_apply_rotary_pos_emb", rotary, "the slot of Transformer Engine's kernel")
    return rope_utils.fused_apply_rotary_pos_emb is rotary


def fill_weight_gradient_slot(add_product: Callable) -> None:
    """Put ``add_product`` where megatron-core calls apex's fused weight gradients. Idempotent.

    Why: without apex's ``fused_weight_gradient_mlp_cuda`` gradient accumulation fusion is refused. Linear
    layers keep that module in a global; the deferred embedding's drain imports it at each call. Not reached:
    Megatron FSDP, which takes Transformer Engine's.

    Args:
        add_product: called with ``(x, grad_output, main_grad)``, adds in place.
    """
    from megatron.core.tensor_parallel import layers

    name = "fused_weight_gradient_mlp_cuda"
    module = ModuleType(name, "torch's GEMMs in place of apex's kernels")
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = add_product
    sys.modules[name] = layers.fused_weight_gradient_mlp_cuda = module
    put(layers, "_grad_accum_fusion_available", True, "torch's GEMMs add to main_grad")
