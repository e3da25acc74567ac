"""Megatron's fusions that need a CUDA extension: switched off where it is not installed.

Megatron-LM's defaults assume apex and Transformer Engine. With ``--transformer-impl local`` neither is
needed, so a launch script should not have to say so in four flags.
"""

import importlib.util
from argparse import Namespace

# argument -> (value without the extension, the flag that says the same, the module that would be needed)
_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"
_NEEDS = {
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion", _SOFTMAX),
    "apply_rope_fusion": (False, "--no-rope-fusion", "transformer_engine"),
    "no_persist_layer_norm": (True, "--no-persist-layer-norm", "apex"),
}


def missing_extension_overrides(args: Namespace) -> list[str]:
    """Switch off in ``args`` what ``--transformer-impl local`` cannot run on this machine.

    Call it after validation and before the configs are built.

    Returns: One line for each value that changed, for the log.
    """
    if args.transformer_impl != "local":
        return []
    said = []
    for name, (value, flag, module) in _NEEDS.items():
        if getattr(args, name) != value and importlib.util.find_spec(module) is None:
            setattr(args, name, value)
            said.append(f"{module} is not installed: {flag}")
    return said
