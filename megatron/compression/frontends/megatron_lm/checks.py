"""Checks of what the command line names: data, tokenizer, folders, and layers that are not
there."""

import importlib.util
import os
import tempfile
from argparse import Namespace
from typing import Any

import numpy as np

from megatron.compression.errors import InputError, explains, first_line
from megatron.compression.frontends.megatron_lm.implementation import (
    check_implementation,
    needs_transformer_engine,
)

SAMPLE_BLOCKS = 16
SAMPLE_BLOCK = 65_536
"""What is read of a large file: so many blocks, evenly spread, of so many entries."""


@explains("initialize_megatron")
def cannot_join(error: BaseException, args: Namespace | None) -> str | None:
    """Explain why the process groups could not be made."""
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        port = os.environ.get("MASTER_PORT", "29500")
        return (
            f"port {port} of this machine is in use: set MASTER_PORT (torchrun --master-port) to "
            "another"
        )
    if "RANK" not in os.environ:
        return "this process was not started by torchrun: torchrun --nproc-per-node N SCRIPT ..."
    return None


def check_arguments(args: Namespace) -> None:
    """Check what validated arguments name, before anything is built.

    Raises: InputError: layers, a tokenizer, a checkpoint, a package or a dataset that is not there,
        a folder that cannot be written, or numbers that Megatron stumbles over later.
    """
    check_implementation(args)
    check_numbers(args)
    check_gradients(args)
    check_tokenizer(args)
    check_folders(args)
    check_datasets(args)


def check_numbers(args: Namespace) -> None:
    """Refuse numbers that Megatron does not check, and that end in a trace once the model is built.

    Raises: InputError: with the flag, its value and what it has to be.
    """
    for name in ("num_layers", "hidden_size", "seq_length", "kv_channels", "ffn_hidden_size"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value} must be a number >= 1")
    for name in ("attention_dropout", "hidden_dropout"):
        value = getattr(args, name, None)
        if value is not None and not 0 <= value < 1:
            raise InputError(
                f"--{name.replace('_', '-')} {value:g} must be a share from 0 to below 1"
            )
    if not getattr(args, "skip_train", False):
        _check_training(args)
    _check_divisions(args)


def _check_training(args: Namespace) -> None:
    """Refuse training without a learning rate or an end."""
    if args.lr is None:
        raise InputError("--lr is missing: give the learning rate, such as --lr 1e-4")
    if not (args.train_iters or args.train_samples):
        raise InputError("--train-iters is missing: give the number of iterations to train")


def _check_divisions(args: Namespace) -> None:
    """Refuse heads, sequences and experts that cannot be divided as the flags say."""
    if getattr(args, "group_query_attention", False):
        heads, groups = args.num_attention_heads, args.num_query_groups
        if groups < 1 or heads % groups:
            raise InputError(
                f"--num-query-groups {groups} does not divide --num-attention-heads {heads}: give "
                "a divisor"
            )
    ranks = args.tensor_model_parallel_size
    if args.sequence_parallel and args.seq_length % ranks:
        raise InputError(
            f"--seq-length {args.seq_length} is not a multiple of --tensor-model-parallel-size "
            f"{ranks}, over which --sequence-parallel splits it: change one of them"
        )
    experts, chosen = args.num_experts, getattr(args, "moe_router_topk", 1)
    if experts is not None and chosen > experts:
        raise InputError(
            f"--moe-router-topk {chosen} is more than --num-experts {experts}: lower it"
        )


def check_gradients(args: Namespace) -> None:
    """Refuse what would train with gradients of a wrong size, compressed or not.

    megatron-core's FSDP2 averages gradients over ranks, and its ``scale_gradients``, by which the
    loss of tokens is divided by their number, does nothing there. The norm in the log, and what
    --clip-grad compares, would be as many times too large as a rank has tokens in an iteration.

    Raises: InputError: --calculate-per-token-loss under --use-torch-fsdp2.
    """
    if args.use_torch_fsdp2 and args.calculate_per_token_loss:
        raise InputError(
            "--calculate-per-token-loss does not work with --use-torch-fsdp2: this megatron-core "
            "does not divide gradients by the number of tokens there; drop "
            "--calculate-per-token-loss"
        )


_FILE_TOKENIZERS = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)
"""Types of tokenizers whose model is a file."""


def check_tokenizer(args: Namespace) -> None:
    """Refuse a tokenizer that is not named, or whose files are not there.

    Raises: InputError: with the flag that is missing, or the file.
    """
    tokenizer = args.tokenizer_type
    has_files_of_gpt2 = args.vocab_file and args.merge_file
    if tokenizer in (None, "GPT2BPETokenizer") and not has_files_of_gpt2:
        raise InputError(
            "no tokenizer: give --tokenizer-type and --tokenizer-model (GPT2BPETokenizer: "
            "--vocab-file and --merge-file), or --tokenizer-type NullTokenizer --vocab-size N for "
            "data made of numbers"
        )
    if tokenizer == "NullTokenizer" and not args.vocab_size:
        raise InputError(
            "--tokenizer-type NullTokenizer needs --vocab-size: the number of different tokens"
        )
    _check_tokenizer_files(args)


def _check_tokenizer_files(args: Namespace) -> None:
    """Refuse a tokenizer whose files are not there."""
    tokenizer = args.tokenizer_type
    model = args.tokenizer_model
    is_file = tokenizer in _FILE_TOKENIZERS  # else a folder, or a name on Hugging Face's hub
    if not model and (is_file or tokenizer == "HuggingFaceTokenizer"):
        raise InputError(
            f"--tokenizer-type {tokenizer} needs --tokenizer-model: its file or folder"
        )
    paths = {"--vocab-file": args.vocab_file, "--merge-file": args.merge_file}
    if model and (is_file or _is_path(model)):
        paths["--tokenizer-model"] = model
    for flag, path in paths.items():
        if path and not os.path.exists(path):
            raise InputError(f"{flag} {path}: no such file")


def _is_path(model: str) -> bool:
    """Return whether a tokenizer is named by its path: Hugging Face's hub names models by
    owner/name."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def check_folders(args: Namespace) -> None:
    """Refuse folders and packages of checkpoints and logs that are not there.

    Raises: InputError: --load names no folder or an empty one, without which Megatron would start
        from random weights; --save or --tensorboard-dir cannot be written; nvidia_resiliency_ext is
        missing.
    """
    _check_loaded_folder(args)
    for name in ("save", "tensorboard_dir"):
        folder = getattr(args, name, None)
        if folder and "://" not in folder:
            _check_writable(f"--{name.replace('_', '-')}", folder)
    asynchronous = args.async_save and getattr(args, "async_strategy", "nvrx") == "nvrx"
    if asynchronous and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        raise InputError(
            "--async-save needs nvidia_resiliency_ext, which is not installed: pip install "
            "nvidia-resiliency-ext, add --async-strategy mcore, or drop --async-save"
        )


def _check_loaded_folder(args: Namespace) -> None:
    """Refuse a --load that holds nothing. Where --save names the same folder, the run may be the
    first."""
    # A job script that restarts itself gives --save and --load the same folder, which is empty in
    # its first run.
    load = args.load
    if not load or load == args.save or args.pretrained_checkpoint or "://" in load:
        return
    if not os.path.isdir(load):
        raise InputError(f"--load {load}: no such folder; name a run's --save folder, or drop it")
    # --compression auto may have stored its plan there before the first checkpoint.
    if not set(os.listdir(load)) - {"compression-auto.json"}:
        raise InputError(
            f"--load {load}: the folder is empty; name a run's --save folder, or drop it"
        )


def _check_writable(flag: str, folder: str) -> None:
    """Refuse a folder that cannot be made or written."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # permissions alone say little on a network disk
    except OSError as error:
        raise InputError(
            f"{flag} {folder} cannot be written ({error.strerror}); name another folder"
        ) from None


_NEEDS_TRANSFORMER_ENGINE = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "tp_comm_overlap": "--tp-comm-overlap",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
    "moe_latent_size": "--moe-latent-size",
}
"""Arguments that torch-native layers would ignore, or that end in a trace there -> their flags."""


def check_local_layers(args: Namespace) -> None:
    """Refuse what torch-native layers do not serve, where --transformer-impl local has them built.

    Raises: InputError: with the flag and what to do.
    """
    if args.transformer_impl != "local":
        return
    for name, flag in _NEEDS_TRANSFORMER_ENGINE.items():
        if getattr(args, name, None):
            raise needs_transformer_engine(flag, f"remove {flag}")
    # megatron-core's unfused attention knows neither parts of a sequence nor latent attention.
    backend = getattr(getattr(args, "attention_backend", None), "name", None)
    unfused = {
        "--context-parallel-size": getattr(args, "context_parallel_size", 1) > 1,
        "--multi-latent-attention": getattr(args, "multi_latent_attention", False),
    }
    for flag, is_set in unfused.items():
        if is_set and backend == "local":
            raise InputError(
                f"{flag} is not covered by --attention-backend local (megatron-core's unfused "
                "attention): use --attention-backend auto"
            )


def check_evaluation(args: Namespace) -> None:
    """Refuse intervals by which Megatron's loop would divide by nothing, and evaluations that end
    in a trace.

    Raises: InputError: with the flag and what to give.
    """
    if not getattr(args, "eval_interval", None):
        raise InputError(
            "--eval-interval is missing: give the iterations between evaluations, such as 1000"
        )
    if args.log_interval < 1:
        raise InputError(f"--log-interval {args.log_interval} must be a number of iterations >= 1")
    several_ranks = max(args.tensor_model_parallel_size, args.pipeline_model_parallel_size) > 1
    if getattr(args, "full_validation", False) and several_ranks:
        raise InputError(
            "--full-validation fails with tensor or pipeline parallelism in this megatron-core: "
            "drop it, and give --eval-iters the size of the validation set"
        )


def check_datasets(args: Namespace) -> None:
    """Refuse data that is not there, or not whole.

    Raises: InputError: no data at all, a list file or dataset that is missing, a damaged index, a
        .bin that is shorter than its index says, or a share of --split without a document, on which
        Megatron never ends.
    """
    if args.mock_data:
        return
    # Lists first: the prefixes are read from them.
    for name in ("data_args_path", "per_split_data_args_path", "per_dataset_sequences_path"):
        path = getattr(args, name, None)
        if path and not os.path.isfile(path):
            raise InputError(f"--{name.replace('_', '-')} {path}: no such file")
    if getattr(args, "data_args_path", None) and not args.split:
        raise InputError("--data-args-path needs --split, such as --split 99,1,0")
    prefixes, one_split = _prefixes(args)
    if not prefixes:
        raise InputError(
            "no training data: give --data-path PREFIX, or --mock-data for made-up data"
        )
    for prefix in prefixes:
        sequences = read_index(prefix).sequence_count
        if one_split:
            check_split(prefix, args.split, sequences)


def check_vocabulary(args: Namespace, vocabulary: int) -> None:
    """Refuse data of another tokenizer, which would train without a word. A sample of each dataset
    is read.

    Args:
        args: Megatron's arguments.
        vocabulary: how many ids the tokenizer has; --vocab-size may give more.

    Raises: InputError: a dataset has a token id that is not among them.
    """
    if args.mock_data:
        return
    vocabulary = max(vocabulary, args.vocab_size or 0)
    # A token id beyond the embedding ends in a device assertion on a GPU, far from its reason.
    for prefix in _prefixes(args)[0]:
        largest = largest_token_id(prefix)
        if largest >= vocabulary:
            raise InputError(
                f"--data-path {prefix}: it holds token id {largest}, but the tokenizer has "
                f"{vocabulary} ids: give the tokenizer that made it, or make it again with "
                "scripts/preprocess_data.py"
            )


def _prefixes(args: Namespace) -> tuple[list[str], bool]:
    """The prefixes of the datasets on this file system, without repetition, and whether ``--split``
    divides them. Those in object storage are read when the dataset opens them."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    prefixes: dict[str, None] = {}
    for blend_of_split in (blend, *(per_split or [])):
        if blend_of_split is not None:
            prefixes.update(dict.fromkeys(blend_of_split[0]))
    return [prefix for prefix in prefixes if "://" not in prefix], blend is not None


def check_split(prefix: str, split: str, sequences: int) -> None:
    """Refuse a share of --split that gets no document.

    Args:
        prefix: the dataset, for the message.
        split: the shares of training, validation and test, such as "99,1,0".
        sequences: how many documents the dataset has.

    Raises: InputError: a share above 0 is empty.
    """
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    # A share is a range of the dataset, (0.99, 1.0) for instance; None is a share of 0.
    ranges = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for name, share in zip(("training", "validation", "test"), ranges, strict=True):
        if share is None:
            continue
        first, last = (round(end * sequences) for end in share)
        if first == last:
            raise InputError(
                f"--split {split}: the {name} share of {prefix} ({sequences} documents) is empty; "
                "give it a larger share or 0"
            )


def read_index(prefix: str) -> Any:
    """Open PREFIX.idx with megatron-core's reader, and compare PREFIX.bin with it.

    Raises: InputError: a file is missing or damaged, or there are no documents; with what to do.
    """
    from megatron.core.datasets.indexed_dataset import _IndexReader

    flag = f"--data-path {prefix}"
    again = "write it again with scripts/preprocess_data.py"
    for path in (f"{prefix}.idx", f"{prefix}.bin"):
        if not os.path.isfile(path):
            raise InputError(f"{flag}: {path} does not exist (give the path without .bin or .idx)")
    try:
        index = _IndexReader(f"{prefix}.idx", multimodal=False)
    except Exception as error:
        raise InputError(
            f"{flag}: {prefix}.idx is damaged ({first_line(error)}): {again}"
        ) from None
    if index.sequence_count == 0:
        raise InputError(f"{flag}: the dataset is empty: give it documents")
    # Where the last document ends.
    expected = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
    size = os.path.getsize(f"{prefix}.bin")
    if size < expected:
        raise InputError(f"{flag}: {prefix}.bin is truncated, {size} of {expected} bytes: {again}")
    return index


def largest_token_id(prefix: str) -> int:
    """Return the largest token id of PREFIX.bin, or of a sample of it where it is large."""
    tokens = np.memmap(f"{prefix}.bin", read_index(prefix).dtype, "r")
    tokens = tokens.view(f"u{tokens.itemsize}")  # a negative id becomes one that is too large
    # Blocks at even distances, the last one at the end.
    last = max(0, len(tokens) - SAMPLE_BLOCK)
    starts = np.linspace(0, last, SAMPLE_BLOCKS).astype(np.int64)
    return max(int(tokens[start : start + SAMPLE_BLOCK].max()) for start in starts)
