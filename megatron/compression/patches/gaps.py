"""What megatron-core's wheel lacks or expects from apex and Transformer Engine, filled by torch.

Megatron expects the fused optimizers of Transformer Engine or apex, whose step count lives in the
parameter group. torch's Adam keeps a ``step`` tensor for each parameter, and megatron-core 0.19.2
trips over it on the way back from a checkpoint, by bugs of its own:

MegatronOptimizer.sharded_state_dict(is_loading=True), of all optimizers
    makes the state of an optimizer that has not stepped yet: without a step for Adam, which the
    first step after the load misses (``KeyError``; an assertion in ``DistributedOptimizer``); and
    for SGD it calls None.
ChainedOptimizer.state_dict(is_loading=True)
    does not exist, though ``--ckpt-format torch_dcp`` calls it.
load_checkpoint under ``--use-torch-fsdp2`` and ``--ckpt-format torch_dist``
    reads tensors into their places and calls no ``load_state_dict``: steps start anew.
DistributedOptimizer.load_state_dict
    hands every parameter the same step tensor: one iteration adds as many steps as there are
    parameters.
DistributedOptimizer._set_main_param_and_optimizer_states
    looks for ``step`` in checkpoints that keep it elsewhere, and copies into a leaf that requires a
    gradient.

Another bug is torch 2.13's and megatron-core's together:

get_param_id_to_sharded_param_map under ``--use-torch-fsdp2``
    pairs the optimizer's parameters with the model's tensors by ``id`` of the local tensor. Since
    torch 2.13 ``DTensor.to_local`` makes a new tensor of a parameter at each call, so that no pair
    is found and saving ends in ``KeyError: 0``.
"""

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron.compression.patches.symbols import around, extend, follow, put

if TYPE_CHECKING:  # torch is not loaded with this module
    import torch

_GPT2 = "GPT2BPETokenizer"


def use_shipped_helpers() -> None:
    """Make ``megatron.core.datasets.utils.compile_helpers`` a no-op where ``helpers_cpp`` imports.

    Why, a bug of megatron-core 0.19.2: start-up runs ``make`` in the package's folder, but the
    wheel ships ``helpers_cpp`` compiled and no Makefile, so training from the wheel dies there, on
    GPUs as well. Not
    reached: a source checkout without the compiled module, which keeps Megatron's own behaviour.
    """
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return
    utils = importlib.import_module("megatron.core.datasets.utils")
    # Megatron-Bridge has imported it by name, if it is loaded.
    bridge = sys.modules.get("megatron.bridge.training.initialize")
    for module in (utils, bridge):
        if module is not None:
            reason = "the wheel ships helpers_cpp and no Makefile"
            put(module, "compile_helpers", _nothing_to_compile, reason)


def _nothing_to_compile() -> None:
    """Stand in for ``compile_helpers``."""


def predict_with_own_layers() -> None:
    """Build layers of multi-token prediction of the last layer and the norm of the model's own
    layer spec.

    Why: Megatron's builder takes megatron-core's, whose norms refuse sequence parallelism. Not
    reached: a stage without other layers; model providers of a user's own.
    """
    gpt = importlib.import_module("megatron.training.models.gpt")
    parameters = ("config", "transformer_layer_spec")
    follow(gpt, "mtp_block_spec", parameters, _with_layers_of_the_model, lasting=True)


def _with_layers_of_the_model(result: Any, arguments: dict) -> None:
    if result is None:  # no layer of multi-token prediction is on this stage
        return
    block = arguments["transformer_layer_spec"]
    for layer in result.layer_specs:
        submodules = layer.submodules
        submodules.enorm = block.layer_norm
        submodules.hnorm = block.layer_norm
        submodules.layer_norm = block.layer_norm
        if block.layer_specs:
            submodules.mtp_model_layer = block.layer_specs[-1]


def fill_rope_slot(rotary: Callable) -> bool:
    """Put ``rotary`` where megatron-core keeps Transformer Engine's fused kernel, if that is
    missing.

    Returns whether ``rotary`` is there. Why: ``rope_utils.fused_apply_rotary_pos_emb`` is None
    without Transformer Engine, and then ``--apply-rope-fusion`` is refused. Not reached: packed
    sequences, which have a slot of their own.
    """
    from megatron.core.models.common.embeddings import rope_utils

    if rope_utils.fused_apply_rotary_pos_emb is None:
        put(
            rope_utils,
            "fused_apply_rotary_pos_emb",
            rotary,
            "the slot of Transformer Engine's kernel",
        )
    return rope_utils.fused_apply_rotary_pos_emb is rotary


def fill_weight_gradient_slot(add_product: Callable) -> None:
    """Put ``add_product(x, grad_output, main_grad)``, which adds in place, where megatron-core
    calls apex's fused weight gradients. Idempotent.

    Why: without apex's ``fused_weight_gradient_mlp_cuda`` gradient accumulation fusion is refused.
    Linear layers keep that module in a global; the deferred embedding's drain imports it at each
    call. Not reached: Megatron FSDP, which takes Transformer Engine's.
    """
    from megatron.core.tensor_parallel import layers

    name = "fused_weight_gradient_mlp_cuda"
    module = ModuleType(name, "torch's GEMMs in place of apex's kernels")
    # The names say what they accumulate into; torch's product does either.
    module.wgrad_gemm_accum_fp32 = add_product
    module.wgrad_gemm_accum_fp16 = add_product
    sys.modules[name] = module
    layers.fused_weight_gradient_mlp_cuda = module
    put(layers, "_grad_accum_fusion_available", True, "torch's GEMMs add to main_grad")


def keep_buffers_of_layer_graphs() -> None:
    """Let graphs of layers (``--cuda-graph-impl local``) own their inputs and outputs.

    Why, a bug of megatron-core 0.19.2: with Transformer Engine installed it frees inputs that no
    autograd function of Python has saved, before the backward is captured (``make_weakref``).
    torch's norms and products save theirs in C++, so gradients would be wrong. Not reached:
    Transformer Engine's layers, which save in Python.
    """
    from megatron.core.transformer import cuda_graphs

    put(cuda_graphs, "make_weakref", _strong_reference, "torch's kernels save in C++")


def _strong_reference(tensor: Any, inplace: bool = True) -> Any:
    """Stand in for ``make_weakref``: the tensor as it is."""
    return tensor


def build_gpt2_from_its_files() -> None:
    """Let ``--vocab-file`` and ``--merge-file`` alone make a ``GPT2BPETokenizer``.

    Why, a bug of megatron-core 0.19.2: ``MegatronHFTokenizer`` reads the name ``gpt2`` from the hub
    even where it is given both files, and a cluster's nodes reach no hub. Not reached: the
    tokenizer without files, and BERT's.
    """
    from megatron.core.tokenizers.text.libraries import megatron_hf_tokenizer as library

    parameters = ("self", "tokenizer_path", "vocab_file", "merges_file")
    around(library.MegatronHFTokenizer, "__init__", parameters, _made_of_files, lasting=True)


def _made_of_files(init, self, tokenizer_path, vocab_file=None, merges_file=None, **options):
    """Stand in for ``MegatronHFTokenizer.__init__``."""
    from megatron.core.tokenizers.text.libraries import megatron_hf_tokenizer as library

    if tokenizer_path != _GPT2 or not (vocab_file and merges_file):
        return init(self, tokenizer_path, vocab_file, merges_file, **options)
    # The hub's gpt2 as a folder: what AutoTokenizer finds there decides, whatever its version.
    with tempfile.TemporaryDirectory(prefix="gpt2-tokenizer-") as name:
        folder = Path(name)
        shutil.copyfile(vocab_file, folder / "vocab.json")
        shutil.copyfile(merges_file, folder / "merges.txt")
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        tokenizer_config = {"tokenizer_class": "GPT2Tokenizer"}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        with mock.patch.dict(library.MEGATRON_CONFIG_MAP[_GPT2], tokenizer_name=name):
            return init(self, tokenizer_path, vocab_file, merges_file, **options)


def on_master_copy(take: Callable[[Any], bool]) -> None:
    """Call ``take(optimizer)`` where the distributed optimizer copies its masters over the weights.

    Where it returns True, it has taken them and Megatron's own copy is left out. Why: a weight
    difference needs the weights before the update, and that copy is where the owner's are
    overwritten. Not reached: optimizers that write the weights themselves (precision-aware), FSDP,
    fp32 parameters.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "_copy_main_params_to_model_params"
    extend(DistributedOptimizer, name, ("self",), _copying_masters, take)


def _copying_masters(copy_main_params: Callable, calls: list[Callable[[Any], bool]]) -> Callable:
    def wrapper(self):
        if not self.is_stub_optimizer:
            for take in calls:
                if take(self):
                    return
        copy_main_params(self)

    return wrapper


def make_torch_optimizers_resumable() -> None:
    """Let Megatron's optimizers around torch's Adam, AdamW and SGD resume bit for bit; see above.

    Why: megatron-core's wheel runs without Transformer Engine and apex, but resumes with their
    optimizers alone. Not reached: optimizers of a user's own; with Transformer Engine or apex only
    the loading in place, ``torch_dcp`` and the local tensors of FSDP2 are mended.
    """
    pairing = importlib.import_module("megatron.core.dist_checkpointing.optimizer")
    around(pairing, "to_local_if_dtensor", ("tensor",), _same_local_tensor, lasting=True)
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizers = importlib.import_module("megatron.core.optimizer.optimizer")
    checkpointing = importlib.import_module("megatron.core.dist_checkpointing")
    expected = ("model_sharded_state_dict", "is_loading")
    # With any optimizer package: a state dict that says where to load to.
    for wrapper in (optimizers.Float16OptimizerWithFloat16Params, optimizers.FP32Optimizer):
        around(wrapper, "sharded_state_dict", expected, _loaded_in_place, lasting=True)
    follow(checkpointing, "load", ("sharded_state_dict",), _restore_in_place, lasting=True)
    around(optimizers.ChainedOptimizer, "state_dict", ("self",), _chained_state, lasting=True)
    # Their optimizers keep the step in the parameter group, where megatron-core expects it.
    if distributed.HAVE_APEX_OR_TE:
        return
    around(
        distributed.DistributedOptimizer,
        "sharded_state_dict",
        expected,
        _primed_for_loading,
        lasting=True,
    )
    around(
        distributed.DistributedOptimizer,
        "load_state_dict",
        ("state_dict",),
        _with_steps_of_their_own,
        lasting=True,
    )
    states = "_set_main_param_and_optimizer_states"
    around(
        distributed.DistributedOptimizer,
        states,
        ("model_param", "tensors"),
        _with_step_of_group,
        lasting=True,
    )


def _same_local_tensor(original: Callable, tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the tensor that a DTensor holds, the same object at each call.

    ``original`` asks ``to_local``, which does so before torch 2.13 and, of what is no parameter,
    after it. The model's side of the pairs reads ``_local_tensor`` itself.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return original(tensor)


def _has_torch_adam(wrapper) -> bool:
    import torch

    return isinstance(wrapper.optimizer, torch.optim.Adam | torch.optim.AdamW)


def prime(optimizer: "torch.optim.Optimizer | None", config: Any = None) -> None:
    """Give each parameter the state that torch's Adam or SGD has before its first step.

    A state that exists is kept, and so is one of another optimizer. The signature is that of an
    ``init_state_fn`` of Megatron's, which passes its ``config``; None stands for a rank without
    parameters.
    """
    import torch

    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        make = _adam_state
    elif isinstance(optimizer, torch.optim.SGD):
        make = _sgd_state
    else:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # reading makes an empty state; what has stepped keeps its own
            if not optimizer.state[parameter]:
                optimizer.state[parameter].update(make(group, parameter))


def _adam_state(group: dict, parameter: "torch.Tensor") -> dict:
    import torch

    # a fused or capturable Adam counts on the device
    device = parameter.device if group.get("fused") or group.get("capturable") else None
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter.data),
        "exp_avg_sq": torch.zeros_like(parameter.data),
    }


def _sgd_state(group: dict, parameter: "torch.Tensor") -> dict:
    import torch

    if not group["momentum"]:
        return {}
    return {"momentum_buffer": torch.zeros_like(parameter.data)}


def _prime_wrapper(wrapper: Any) -> None:
    """Prime the torch optimizer in a Megatron optimizer, before it is asked where to load a state
    to."""
    prime(wrapper.optimizer)
    if wrapper.init_state_fn is None:  # as for SGD; it is called without a look
        wrapper.init_state_fn = prime


def _primed_for_loading(
    original, self, model_sharded_state_dict, is_loading=False, *args, **kwargs
):
    if is_loading:
        _prime_wrapper(self)
    return original(self, model_sharded_state_dict, is_loading, *args, **kwargs)


_WRAPPER = "wrapper_that_is_loaded"
"""In the state dict of an optimizer that is loaded: the Megatron optimizer itself. It is not
saved."""


def _loaded_in_place(original, self, model_sharded_state_dict, is_loading=False, *args, **kwargs):
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    state = _primed_for_loading(
        original, self, model_sharded_state_dict, is_loading, *args, **kwargs
    )
    if is_loading:
        # It comes back with what was read, so that no list of waiting optimizers is needed.
        state[_WRAPPER] = LocalNonpersistentObject(self)
    return state


def _restore_in_place(result: Any, arguments: dict) -> None:
    """Restore what is no sharded tensor of the optimizers that asked for it, from what has been
    loaded."""
    loaded = result[0] if isinstance(result, tuple) else result  # with missing and unexpected keys
    saved = loaded.get("optimizer")
    if not isinstance(saved, dict):
        return
    chained = [saved, *saved.values()]  # one optimizer's state, or several by number
    for state in chained:
        if isinstance(state, dict) and _WRAPPER in state:
            _restore_steps(state.pop(_WRAPPER), state)


def _restore_steps(wrapper: Any, saved: dict) -> None:
    import torch

    optimizer_state = saved.get(
        "optimizer", saved
    )  # a mixed-precision optimizer's has more beside it
    step = optimizer_state["state"].get("common_step")
    # The moments and masters have been read into their tensors; this is what is no sharded tensor.
    if step is not None:  # torch's, a tensor for each parameter
        with torch.no_grad():
            for state in wrapper.optimizer.state.values():
                state["step"].copy_(step)
    groups = wrapper._filter_and_reorder_param_groups(
        wrapper.optimizer.param_groups, optimizer_state["param_groups"]
    )
    for group, saved_group in zip(wrapper.optimizer.param_groups, groups, strict=True):
        if "step" in saved_group:  # Transformer Engine's and apex's
            group["step"] = saved_group["step"]


def _chained_state(original, self, is_loading=False):
    if is_loading:
        for wrapper in self.chained_optimizers:
            _prime_wrapper(wrapper)
    return original(self)


def _with_steps_of_their_own(original, self, state_dict):
    import torch

    with torch.no_grad():
        result = original(self, state_dict)
        if _has_torch_adam(self):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()
    return result


def _with_step_of_group(original, self, model_param, tensors):
    import torch

    with torch.no_grad():
        if _has_torch_adam(self):
            group, order = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group]["params"][order]
            # load_state_dict has set the step already, from the parameter group.
            tensors = {**tensors, "step": self.optimizer.state[main_param]["step"]}
        return original(self, model_param, tensors)


def launch_optimizers_together() -> None:
    """Let norms, scaling and copies of a step be a few kernels for all tensors instead of some for
    each. Idempotent.

    Why: without Transformer Engine and apex, megatron-core's stand-ins for their kernels take
    tensors one by one, and the host waits for each norm. In a profile of GPT-350M, of 292
    parameters, that was over 1,000 kernels with 5 to 10 us between them, outside of the iteration's
    CUDA graph. Not reached: tensors on the CPU, where the stand-ins stay; the copies of a
    distributed optimizer.
    """
    utils = importlib.import_module("megatron.core.utils")
    clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
    optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
    reason = "torch's foreach kernels"
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        put(clip_grads, "l2_norm_impl", _norm_together, reason)
    for module in (clip_grads, optimizer):
        if module.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
            put(module, "multi_tensor_scale_impl", _scale_together, reason)
    parameters = ("this", "that", "overflow_buf")
    around(optimizer, "_multi_tensor_copy_this_to_that", parameters, _copy_together, lasting=True)


def _on_devices(tensors: "Sequence[torch.Tensor]") -> bool:
    """Return whether there are tensors, all of them on CUDA devices."""
    return bool(tensors) and all(tensor.is_cuda for tensor in tensors)


def norm_of_all(tensors: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """Return fp32 ``[1]``: the L2 norm of all values of tensors, on their device."""
    import torch

    norms = torch._foreach_norm(tensors)
    return torch.stack(norms).float().norm()[None]


def _norm_together(
    chunk_size: int, noop_flag: Any, tensor_lists: list, per_tensor: bool, *args: Any
) -> tuple:
    """Stand in for ``local_multi_tensor_l2_norm``: (norm, None)."""
    from megatron.core import utils

    tensors = [tensor for tensors in tensor_lists for tensor in tensors]
    if not _on_devices(tensors):
        return utils.local_multi_tensor_l2_norm(
            chunk_size, noop_flag, tensor_lists, per_tensor, *args
        )
    return norm_of_all(tensors), None


def _scale_together(chunk_size: int, noop_flag: Any, tensor_lists: list, scale: float) -> None:
    """Stand in for ``local_multi_tensor_scale``."""
    import torch
    from megatron.core import utils

    sources, destinations = tensor_lists
    if sources is destinations and _on_devices(sources):
        # Clipping: the gradients are scaled where they are.
        torch._foreach_mul_(sources, scale)
        return
    utils.local_multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale)


def _copy_together(copy: Callable, this: list, that: list, overflow_buf: Any = None) -> None:
    """Stand in for ``_multi_tensor_copy_this_to_that``: weights from their fp32 masters."""
    import torch

    if overflow_buf is None and _on_devices(this) and _on_devices(that):
        torch._foreach_copy_(that, this)
        return
    copy(this, that, overflow_buf)


def fuse_torch_adam() -> None:
    """Have every Megatron optimizer ``fuse`` the one it is given.

    Why: without Transformer Engine and apex, Megatron constructs ``torch.optim.AdamW`` with torch's
    defaults, whose step reads and writes every tensor of the optimizer about twenty times. Fused,
    it is seven.
    """
    base = importlib.import_module("megatron.core.optimizer.optimizer").MegatronOptimizer

    def build(init, self, optimizer, *args, **kwargs):
        fuse(optimizer)
        init(self, optimizer, *args, **kwargs)

    around(base, "__init__", ("optimizer",), build, lasting=True)


def fuse(optimizer: "torch.optim.Optimizer | None") -> bool:
    """Let torch's own Adam or AdamW step with its fused kernel, from before the first step, if all
    its parameters are on CUDA devices; whether it does."""
    import torch

    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False  # subclasses step in their own way
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not params or not all(param.is_cuda and param.is_floating_point() for param in params):
        return False
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(fused=True, foreach=None)
    optimizer.register_load_state_dict_pre_hook(_keep_fused)
    return True


def _keep_fused(optimizer: "torch.optim.Optimizer", state_dict: dict) -> dict:
    """A checkpoint of an unfused run does not undo it; torch places the steps by what the groups
    say."""
    groups = [{**group, "fused": True, "foreach": None} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}
