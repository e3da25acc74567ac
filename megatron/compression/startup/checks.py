"""Checks of what the command line names: data, tokenizer, checkpoints, and layers that are not there."""

import importlib.util
import os
import re
import struct
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron.compression.errors import InputError, explains, first_line, require_extra
from megatron.compression.startup.implementation import check_implementation, needs_transformer_engine

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents
_AGAIN = "write it again with scripts/preprocess_data.py"

SAMPLE_BLOCKS, SAMPLE_BLOCK = 16, 65_536
"""What is read of a large file: as many blocks, evenly spread, of as many entries."""


@explains("validate_args", "core_transformer_config_from_args", "initialize_model_parallel")
def megatrons_own_check(error: BaseException, args: Namespace | None) -> str | None:
    """The line of one of Megatron's own checks, with flags for the arguments of a bare assertion."""
    if not isinstance(error, AssertionError | ValueError | RuntimeError):
        return None
    line = re.sub(r"\bargs\.(\w+)", lambda name: f"--{name[1].replace('_', '-')}", first_line(error))
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


@explains("build_pretraining_data_loader")
def no_samples(error: BaseException, args: Namespace | None) -> str | None:
    """A share of the data that is smaller than a batch."""
    if isinstance(error, AssertionError) and str(error).startswith("no sample to consume"):
        return "a share of the data has no sample: give it more of --split, or 0 with --eval-iters 0"
    return None


def check_arguments(args: Namespace) -> None:
    """Check what validated arguments name, before anything is built (`patches.after_validating_arguments`).

    Raises: InputError: Transformer Engine, a tokenizer, a checkpoint, a package or a dataset that is not
        there; a folder that cannot be written.
    """
    check_implementation(args)
    check_tokenizer(args)
    check_checkpoints(args)
    check_datasets(args)


_FILE_TOKENIZERS = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")


def check_tokenizer(args: Namespace) -> None:
    """Check that the tokenizer is named and that its files are there.

    Raises: InputError: with the flag.
    """
    kind, model = args.tokenizer_type, args.tokenizer_model
    if kind in (None, "GPT2BPETokenizer") and not (args.vocab_file and args.merge_file):
        raise InputError(
            "no tokenizer: give --tokenizer-type and --tokenizer-model (GPT2BPETokenizer: --vocab-file and "
            "--merge-file), or --tokenizer-type NullTokenizer --vocab-size N for data made of numbers"
        )
    for flag, path in (("--vocab-file", args.vocab_file), ("--merge-file", args.merge_file)):
        if path and not os.path.isfile(path):
            raise InputError(f"{flag} {path}: no such file")
    if kind in (*_FILE_TOKENIZERS, "HuggingFaceTokenizer"):
        if not model:
            raise InputError(f"--tokenizer-type {kind} needs --tokenizer-model: its file or folder")
        # Hugging Face's hub names models by owner/name; anything else is a path.
        is_path = kind in _FILE_TOKENIZERS or model.startswith((".", "/", "~")) or model.count("/") > 1
        if is_path and not os.path.exists(model):
            raise InputError(f"--tokenizer-model {model}: no such file or folder")
    if kind in _FILE_TOKENIZERS[:3]:
        require_extra("sentencepiece", "tokenizers", f"--tokenizer-type {kind}")
    elif kind in ("HuggingFaceTokenizer", "GPT2BPETokenizer"):
        require_extra("transformers", "tokenizers", f"--tokenizer-type {kind}")


def check_checkpoints(args: Namespace) -> None:
    """Check the folder to load from, the one to save to, and what saving in the background needs.

    Raises: InputError: --load names a folder that is not there or is empty, without which Megatron would
    start from random weights; --save cannot be written; nvidia_resiliency_ext is missing.
    """
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


# What megatron-core's local layers would ignore, or end in a trace: argument -> its flag.
_NEEDS_TRANSFORMER_ENGINE = {
    **{"fp8": "--fp8-format", "fp4": "--fp4-format", "tp_comm_overlap": "--tp-comm-overlap"},
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
    "moe_latent_size": "--moe-latent-size",
}


def check_local_layers(args: Namespace) -> None:
    """Raises: InputError for a flag that only Transformer Engine serves, under --transformer-impl local."""
    if args.transformer_impl != "local":
        return
    for name, flag in _NEEDS_TRANSFORMER_ENGINE.items():
        if getattr(args, name, None):
            raise needs_transformer_engine(flag, f"remove {flag}")
    sharded = getattr(args, "use_megatron_fsdp", False) or getattr(args, "use_torch_fsdp2", False)
    if getattr(args, "init_model_with_meta_device", False) and not sharded:
        raise InputError(
            "--init-model-with-meta-device leaves weights uninitialized without --use-megatron-fsdp: drop it"
        )
    backend = getattr(getattr(args, "attention_backend", None), "name", None)
    several = getattr(args, "context_parallel_size", 1) > 1
    latent = getattr(args, "multi_latent_attention", False)
    for flag, given in (("--context-parallel-size", several), ("--multi-latent-attention", latent)):
        if given and backend == "local":
            raise InputError(
                f"{flag} is not covered by --attention-backend local (megatron-core's unfused attention): "
                "use --attention-backend auto"
            )
    if latent and getattr(args, "qk_l2_norm", False):
        raise InputError("--qk-l2-norm does not go with --multi-latent-attention: drop one of the two")
    if several and getattr(args, "mtp_num_layers", None):
        raise needs_transformer_engine("--mtp-num-layers with --context-parallel-size", "drop one of the two")
    recomputed = getattr(args, "recompute_modules", None) or ()
    if "layernorm" in recomputed and importlib.util.find_spec("transformer_engine") is None:
        raise needs_transformer_engine("--recompute-modules layernorm", "leave layernorm out of it")
    predicts = getattr(args, "mtp_num_layers", None) and getattr(args, "sequence_parallel", False)
    if predicts and importlib.util.find_spec("apex") is None:
        raise needs_transformer_engine(
            "--mtp-num-layers with --sequence-parallel",
            "install apex, whose norms do, or remove one of the two flags",
        )


def check_evaluation(args: Namespace) -> None:
    """Raises: InputError: what makes Megatron's evaluation divide by nothing, or end in a trace."""
    if not getattr(args, "eval_interval", None):
        raise InputError("--eval-interval is missing: give the iterations between evaluations, such as 1000")
    several = max(args.tensor_model_parallel_size, args.pipeline_model_parallel_size) > 1
    if getattr(args, "full_validation", False) and several:
        raise InputError(
            "--full-validation fails with tensor or pipeline parallelism in this megatron-core: drop it, and "
            "give --eval-iters the size of the validation set"
        )


def check_supported_data(args: Namespace) -> None:
    """Raises: InputError for a data flag of Megatron-LM that this entrypoint does not serve."""
    for name in ("sft", "fim_data", "hybrid_context_parallel", "dataloader_inter_document_masking"):
        if getattr(args, name, False):
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is not supported by this entrypoint: remove the flag")


def check_datasets(args: Namespace) -> None:
    """Check every dataset named on the command line.

    Raises: InputError: no data at all, a list file or dataset that is missing, a damaged index, or a .bin
    shorter than its index says.
    """
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
        raise InputError("no training data: give --data-path PREFIX, or --mock-data for made-up data")
    for prefix in prefixes:
        sequences = check_indexed_dataset(prefix)
        if one_split:
            check_split(prefix, args.split, sequences)


def check_vocabulary(args: Namespace, vocabulary: int) -> None:
    """Check a sample of each dataset's token ids: data of another tokenizer trains without a word.

    Args:
        vocabulary: ids of the tokenizer; ``--vocab-size`` may name more.
    Raises: InputError: an id that the tokenizer does not have.
    """
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
    """Datasets on this file system, each once; and whether ``--split`` shares them out."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    prefixes = [prefix for one in (blend, *(per_split or [])) if one is not None for prefix in one[0]]
    # Object storage is read when the dataset opens it.
    return [prefix for prefix in dict.fromkeys(prefixes) if "://" not in prefix], blend is not None


def _blocks(entries: int) -> Iterator[slice]:
    """All entries where they are few, else blocks of them, the first and the last among them."""
    if entries <= SAMPLE_BLOCKS * SAMPLE_BLOCK:
        yield slice(0, entries)
        return
    for start in np.linspace(0, entries - SAMPLE_BLOCK, SAMPLE_BLOCKS).astype(np.int64):
        yield slice(start, start + SAMPLE_BLOCK)


def check_split(prefix: str, split: str, sequences: int) -> None:
    """Check that each non-zero share of `--split` receives a document: Megatron never ends on an empty one.

    Args:
        split: shares of training, validation and test, such as "99,1,0".
    Raises: InputError: naming the share.
    """
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


def check_indexed_dataset(prefix: str) -> int:
    """Check that PREFIX.idx and PREFIX.bin exist and agree in size.

    The index holds, after its header: a length (int32) and an offset (int64) for each sequence, and one int64
    for each document. The last sequence ends the .bin file.

    Returns: The number of sequences.
    Raises: InputError: naming the file and what to do.
    """
    from megatron.core.datasets.indexed_dataset import DType

    index, data, what = Path(prefix + ".idx"), Path(prefix + ".bin"), f"--data-path {prefix}"
    for path in (index, data):
        if not path.is_file():
            raise InputError(f"{what}: {path} does not exist (give the path without .bin or .idx)")
    with index.open("rb") as stream:
        header = stream.read(_INDEX_HEADER.size)
        if len(header) < _INDEX_HEADER.size or not header.startswith(_INDEX_MAGIC):
            raise InputError(f"{what}: {index} is not an index of a Megatron dataset: {_AGAIN}")
        _, version, code, sequences, documents = _INDEX_HEADER.unpack(header)
        if version != 1 or code not in {member.value for member in DType}:
            raise InputError(f"{what}: {index} has an unknown version or token type: {_AGAIN}")
        needed = _INDEX_HEADER.size + sequences * (4 + 8) + documents * 8
        size = index.stat().st_size
        if size < needed:
            raise InputError(f"{what}: {index} is truncated, {size} of {needed} bytes: {_AGAIN}")
        if sequences == 0:
            raise InputError(f"{what}: the dataset is empty: give it documents")
    lengths = np.memmap(index, np.int32, "r", _INDEX_HEADER.size, (sequences,))
    offsets = np.memmap(index, np.int64, "r", _INDEX_HEADER.size + 4 * sequences, (sequences,))
    expected = int(offsets[-1]) + int(lengths[-1]) * DType.size(code)
    size = data.stat().st_size
    if size < expected:
        raise InputError(f"{what}: {data} is truncated, {size} of {expected} bytes: {_AGAIN}")
    return sequences


def largest_token_id(prefix: str) -> int:
    """The largest token id of PREFIX.bin, of a sample where it is large; a negative id counts as too large.

    The index has been checked (`check_indexed_dataset`).
    """
    from megatron.core.datasets.indexed_dataset import DType

    with open(prefix + ".idx", "rb") as stream:
        code = _INDEX_HEADER.unpack(stream.read(_INDEX_HEADER.size))[2]
    path = Path(prefix + ".bin")
    if path.stat().st_size == 0:
        return 0
    tokens = np.memmap(path, DType.dtype_from_code(code), "r")
    found = 0
    for block in _blocks(len(tokens)):
        part = tokens[block].astype(np.int64)
        found = max(found, int(part.max()), np.iinfo(np.int32).max if part.min() < 0 else 0)
    return found
