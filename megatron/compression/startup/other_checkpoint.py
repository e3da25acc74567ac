"""What a checkpoint that does not fit the model differs in."""

from argparse import Namespace

from megatron.compression.errors import first_line


def checkpoint_mismatch(error: BaseException, args: Namespace) -> str | None:
    """One line where a checkpoint does not fit the model, None where loading failed for another reason.

    Megatron compares arguments by assertion and tensors by CheckpointingException, which torch wraps in a
    CheckpointException of all ranks; the legacy format ends in torch's "size mismatch".
    """
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    source = f"--load {args.load}" if args.load else f"--pretrained-checkpoint {args.pretrained_checkpoint}"
    text = str(error)
    of_model = isinstance(error, AssertionError) or "mismatch" in text
    of_optimizer = text == "'optimizer'" or any(one in text for one in _OF_OPTIMIZER)
    if not (of_model or of_optimizer):
        return None  # nothing is read
    flags = differing_flags(args)
    if of_optimizer and not flags and (reason := _other_expert_ranks(args)):
        return f"{source}: {reason}"
    if not of_model:
        return None
    reason = "; ".join(flags) or first_line(error)
    return f"{source}: {reason.rstrip('.')}. Start with the flags that wrote it, or name another checkpoint"


_OF_OPTIMIZER = ("optimizer.distributed", "entries in state dict", "Could not find parameter group")
_SHAPE_FLAGS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "max_position_embeddings", "position_embedding_type", "normalization", "swiglu"),
    *("untie_embeddings_and_output_weights", "add_bias_linear", "add_qkv_bias", "padded_vocab_size"),
)


_SPOKEN = {  # arguments whose name is no flag
    "add_bias_linear": "the linear layers' bias (--disable-bias-linear)",
    "padded_vocab_size": "the padded vocabulary (--vocab-size)",
}


def differing_flags(args: Namespace) -> list[str]:
    """The flags that shape the model and differ from those that the checkpoint was written with.

    Returns: "--hidden-size is 64 in the checkpoint, 32 here" and so on; empty where it keeps no arguments.
    """
    saved = _saved_arguments(args)
    if saved is None:
        return []
    differ = []
    for field in _SHAPE_FLAGS:
        if field == "num_query_groups" and not args.group_query_attention:
            continue  # filled in from --num-attention-heads after parsing
        there, here = getattr(saved, field, None), getattr(args, field, None)
        if there != here:
            name = _SPOKEN.get(field, "--" + field.replace("_", "-"))
            differ.append(f"{name} is {there} in the checkpoint, {here} here")
    return differ


def _other_expert_ranks(args: Namespace) -> str | None:
    """Why the optimizer's state of experts cannot be read, None where it is spread as it was.

    megatron-core keeps a second optimizer for experts, but not where --expert-model-parallel-size is 1; and
    by default a checkpoint holds each rank's piece, which only the same layout reads.
    """
    saved, flag = _saved_arguments(args), "--expert-model-parallel-size"
    there, here = getattr(saved, "expert_model_parallel_size", None), args.expert_model_parallel_size
    if there in (None, here):
        return None
    again = "" if 1 in (there, here) else " --dist-ckpt-optim-fully-reshardable when it is saved, or"
    return (
        f"{flag} is {there} in the checkpoint, {here} here, and its optimizer state fits no other. "
        f"Give{again} --no-load-optim to go on from the weights, or the {flag} that wrote it"
    )


def _saved_arguments(args: Namespace) -> Namespace | None:
    """Of the run that wrote the checkpoint; None where it keeps none (a legacy or damaged one)."""
    from megatron.core.dist_checkpointing import load_common_state_dict
    from megatron.training import checkpointing

    folder = args.load or args.pretrained_checkpoint
    try:
        iteration, release = checkpointing.read_metadata(
            checkpointing.get_checkpoint_tracker_filename(folder)
        )
        name = checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True)
        return load_common_state_dict(name)["args"]
    except Exception:  # the caller has Megatron's own message
        return None
