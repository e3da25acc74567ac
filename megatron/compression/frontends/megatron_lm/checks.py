"""Checks of what the command line names: data, tokenizer, folders, and layers that are not there."""

import importlib.util
import os
import re
import tempfile
from argparse import Namespace
from typing import Any

import numpy as np

from megatron.compression.errors import InputError, explains, first_line
from megatron.compression.frontends.megatron_lm.implementation import (
    check_implementation,
    needs_transformer_engine,
)

SAMPLE_BLOCKS, SAMPLE_BLOCK = 16, 65_536
"""What is read of a large file: as many blocks, evenly spread, of as many entries."""


@explains(
    *("validate_args", "core_transformer_config_from_args", "initialize_model_parallel"),
    "build_pretraining_data_loader",
)
def megatrons_own_check(error: BaseException, args: Namespace | None) -> str | None:
    """The line of one of Megatron's own checks, with flags for the arguments of a bare assertion."""
    if not isinstance(error, AssertionError | ValueError | RuntimeError):
        return None
    line = re.sub(
        r"\bargs\.(\w+)", lambda name: f"--{name[1].replace('_', '-')}", first_line(error)
    )
    missing = re.fullmatch(r"required: (--[\w-]+) is not None", line)
    return f"{missing[1]} is missing: give it" if missing else line


@explains("initialize_megatron")
def cannot_join(error: BaseException, args: Namespace | None) -> str | None:
    """Why the process groups could not be made."""
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        port = os.environ.get("MASTER_PORT", "29500")
        return f"port {port} of this machine is in use: set MASTER_PORT (torchrun --master-port) to another"
    if "RANK" not in os.environ:
        return "this process was not started by torchrun: torchrun --nproc-per-node N SCRIPT ..."
    return None


def check_arguments(args: Namespace) -> None:
    """Raises: InputError: validated arguments name Transformer Engine, a tokenizer, a checkpoint, a package
    or a dataset that is not there, or a folder that cannot be written."""
    check_implementation(args)
    check_tokenizer(args)
    check_folders(args)
    check_datasets(args)


_FILE_TOKENIZERS = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)


def check_tokenizer(args: Namespace) -> None:
    """Raises: InputError: no tokenizer is named, or its files are not there."""
    kind, model = args.tokenizer_type, args.tokenizer_model
    if kind in (None, "GPT2BPETokenizer") and not (args.vocab_file and args.merge_file):
        raise InputError(
            "no tokenizer: give --tokenizer-type and --tokenizer-model (GPT2BPETokenizer: --vocab-file and "
            "--merge-file), or --tokenizer-type NullTokenizer --vocab-size N for data made of numbers"
        )
    of_files = kind in _FILE_TOKENIZERS
    if not model and (of_files or kind == "HuggingFaceTokenizer"):
        raise InputError(f"--tokenizer-type {kind} needs --tokenizer-model: its file or folder")
    # Hugging Face's hub names models by owner/name; anything else is a path.
    is_path = model and (of_files or model.startswith((".", "/", "~")) or model.count("/") > 1)
    named = (("--vocab-file", args.vocab_file), ("--merge-file", args.merge_file))
    for flag, path in (*named, ("--tokenizer-model", model if is_path else None)):
        if path and not os.path.exists(path):
            raise InputError(f"{flag} {path}: no such file")


def check_folders(args: Namespace) -> None:
    """Raises: InputError: --load names a folder that is not there or is empty, without which Megatron would
    start from random weights; --save cannot be written; nvidia_resiliency_ext is missing."""
    load = args.load
    wanted = load and load != args.save and not args.pretrained_checkpoint and "://" not in load
    if wanted and not (os.path.isdir(load) and set(os.listdir(load)) - {"compression-auto.json"}):
        what = "the folder is empty" if os.path.isdir(load) else "no such folder"
        raise InputError(f"--load {load}: {what}; name a run's --save folder, or drop it")
    if args.save and "://" not in args.save:
        try:
            os.makedirs(args.save, exist_ok=True)
            tempfile.TemporaryFile(dir=args.save).close()
        except OSError as error:
            raise InputError(
                f"--save {args.save} cannot be written ({error.strerror}); name another folder"
            ) from None
    asynchronous = args.async_save and getattr(args, "async_strategy", "nvrx") == "nvrx"
    if asynchronous and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        raise InputError(
            "--async-save needs nvidia_resiliency_ext, which is not installed: pip install "
            "nvidia-resiliency-ext, add --async-strategy mcore, or drop --async-save"
        )


# What torch-native layers would ignore, or end in a trace: argument -> its flag.
_NEEDS_TRANSFORMER_ENGINE = {
    **{"fp8": "--fp8-format", "fp4": "--fp4-format", "tp_comm_overlap": "--tp-comm-overlap"},
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
    "moe_latent_size": "--moe-latent-size",
}


def check_local_layers(args: Namespace) -> None:
    """Raises: InputError for what torch-native layers do not serve, under --transformer-impl local."""
    if args.transformer_impl != "local":
        return
    for name, flag in _NEEDS_TRANSFORMER_ENGINE.items():
        if getattr(args, name, None):
            raise needs_transformer_engine(flag, f"remove {flag}")
    backend = getattr(getattr(args, "attention_backend", None), "name", None)
    several = getattr(args, "context_parallel_size", 1) > 1
    latent = getattr(args, "multi_latent_attention", False)
    for flag, given in (("--context-parallel-size", several), ("--multi-latent-attention", latent)):
        if given and backend == "local":
            raise InputError(
                f"{flag} is not covered by --attention-backend local (megatron-core's unfused attention): "
                "use --attention-backend auto"
            )


def check_evaluation(args: Namespace) -> None:
    """Raises: InputError: what makes Megatron's loop divide by nothing, or end in a trace."""
    if not getattr(args, "eval_interval", None):
        raise InputError(
            "--eval-interval is missing: give the iterations between evaluations, such as 1000"
        )
    if args.log_interval < 1:
        raise InputError(f"--log-interval {args.log_interval} must be a number of iterations >= 1")
    several = max(args.tensor_model_parallel_size, args.pipeline_model_parallel_size) > 1
    if getattr(args, "full_validation", False) and several:
        raise InputError(
            "--full-validation fails with tensor or pipeline parallelism in this megatron-core: drop it, and "
            "give --eval-iters the size of the validation set"
        )


def check_datasets(args: Namespace) -> None:
    """Raises: InputError: no data at all, a list file or dataset that is missing, a damaged index, or a .bin
    shorter than its index says; a share of --split without a document, on which Megatron never ends."""
    if args.mock_data:
        return
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
    """Raises: InputError: a sample of a dataset has a token id that neither the tokenizer, of ``vocabulary``
    ids, nor --vocab-size has: data of another tokenizer trains without a word."""
    if args.mock_data:
        return
    vocabulary = max(vocabulary, args.vocab_size or 0)
    for prefix in _prefixes(args)[0]:
        largest = largest_token_id(prefix)
        if largest >= vocabulary:
            raise InputError(
                f"--data-path {prefix}: it holds token id {largest}, but the tokenizer has {vocabulary} ids: "
                "give the tokenizer that made it, or make it again with scripts/preprocess_data.py"
            )


def _prefixes(args: Namespace) -> tuple[list[str], bool]:
    """Datasets on this file system, each once; and whether ``--split`` divides them."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    prefixes = [
        prefix for one in (blend, *(per_split or [])) if one is not None for prefix in one[0]
    ]
    # Object storage is read when the dataset opens it.
    return [prefix for prefix in dict.fromkeys(prefixes) if "://" not in prefix], blend is not None


def check_split(prefix: str, split: str, sequences: int) -> None:
    """Raises: InputError: a share of ``split`` ("99,1,0": training, validation, test) gets no document."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for name, share in zip(("training", "validation", "test"), matrix, strict=True):
        if share is not None and round(share[0] * sequences) == round(share[1] * sequences):
            raise InputError(
                f"--split {split}: the {name} share of {prefix} ({sequences} documents) is empty; give it a "
                "larger share or 0"
            )


def read_index(prefix: str) -> Any:
    """megatron-core's reader of PREFIX.idx, which PREFIX.bin has been compared with.

    Raises: InputError: one is missing, or damaged; no documents. Each names the file and what to do.
    """
    from megatron.core.datasets.indexed_dataset import _IndexReader

    what, again = f"--data-path {prefix}", "write it again with scripts/preprocess_data.py"
    for path in (f"{prefix}.idx", f"{prefix}.bin"):
        if not os.path.isfile(path):
            raise InputError(f"{what}: {path} does not exist (give the path without .bin or .idx)")
    try:
        index = _IndexReader(f"{prefix}.idx", multimodal=False)
    except Exception as error:
        raise InputError(
            f"{what}: {prefix}.idx is damaged ({first_line(error)}): {again}"
        ) from None
    if index.sequence_count == 0:
        raise InputError(f"{what}: the dataset is empty: give it documents")
    expected = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
    size = os.path.getsize(f"{prefix}.bin")
    if size < expected:
        raise InputError(f"{what}: {prefix}.bin is truncated, {size} of {expected} bytes: {again}")
    return index


def largest_token_id(prefix: str) -> int:
    """The largest token id of PREFIX.bin, of a sample where it is large; a negative one is too large."""
    tokens = np.memmap(f"{prefix}.bin", read_index(prefix).dtype, "r")
    tokens = tokens.view(f"u{tokens.itemsize}")
    last = max(0, len(tokens) - SAMPLE_BLOCK)
    starts = np.linspace(0, last, SAMPLE_BLOCKS).astype(np.int64)
    return max(int(tokens[start : start + SAMPLE_BLOCK].max()) for start in starts)
