"""Keeps a decision beside the checkpoints, so that a resumed run does not measure again."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.compression.auto.decision import Decision

FILE = "compression-auto.json"
"""In the folder of --save."""

_SAME = (
    *("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "micro_batch_size", "global_batch_size"),
    *("sequence_parallel", "params_dtype", "accumulate_allreduce_grads_in_fp32", "transformer_impl"),
    *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "overlap_p2p_comm"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("ddp_bucket_size", "tp_comm_overlap", "padded_vocab_size", "num_experts"),
)
"""Arguments of Megatron that a decision holds for."""
_EXPERTS = (
    *("expert_tensor_parallel_size", "moe_token_dispatcher_type", "moe_router_topk", "moe_router_dtype"),
    *("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_layer_freq", "moe_latent_size"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm"),
)
"""And where there are experts."""
_CONTEXT = ("num_attention_heads", "num_query_groups", "kv_channels", "multi_latent_attention")
"""And where ranks share a sequence."""


def circumstances(args: Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """What a decision was made for, as JSON-ready values; for another run it is made anew.

    Args:
        settings: of compression, as the flags have them, less what does not change results.
    """
    experts = _EXPERTS if args.num_experts is not None else ()
    context = _CONTEXT if args.context_parallel_size > 1 else ()
    kept = {name: getattr(args, name, None) for name in (*_SAME, *experts, *context)}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    plain = json.loads(json.dumps({**kept, "device": device, "settings": settings}, default=str))
    return dict(plain)


def read(folder: str | None, wanted: dict[str, Any], say: Callable[[str], None]) -> Decision | None:
    """The decision of an earlier part of this run; None: there is none, or it was made for something else."""
    path = Path(folder or "", FILE)
    if folder is None or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        decision, made_for = Decision.from_dict(found["decision"]), dict(found["made_for"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(f"{path} cannot be read ({error}); the run measures anew")
        return None
    if changed := sorted(name for name in wanted if made_for.get(name) != wanted[name]):
        say(f"{path} is of another run ({', '.join(changed)}); this one measures anew")
        return None
    return decision


def write(
    folder: str | None, decision: Decision, made_for: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Keep a decision; a folder that cannot be written to is said, and a resume measures anew."""
    if folder is None:
        return
    path = Path(folder, FILE)
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps({"decision": decision.asdict(), "made_for": made_for}, indent=1) + "\n")
        new.replace(path)
    except OSError as error:
        say(f"{path} cannot be written ({error.strerror}); a resumed run measures anew")
