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
    if not (isinstance(error, AssertionError) or "mismatch" in str(error)):
        return None
    source = f"--load {args.load}" if args.load else f"--pretrained-checkpoint {args.pretrained_checkpoint}"
    reason = "; ".join(differing_flags(args)) or first_line(error)
    return f"{source}: {reason.rstrip('.')}. Start with the flags that wrote it, or name another checkpoint"


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
    from megatron.core.dist_checkpointing import load_common_state_dict
    from megatron.training import checkpointing

    folder = args.load or args.pretrained_checkpoint
    try:
        iteration, release = checkpointing.read_metadata(
            checkpointing.get_checkpoint_tracker_filename(folder)
        )
        name = checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True)
        saved = load_common_state_dict(name)["args"]
    except Exception:  # a legacy or damaged checkpoint: the caller has Megatron's own message
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
