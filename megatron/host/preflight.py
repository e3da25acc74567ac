"""Checks that need no process group: versions, Transformer Engine, the datasets on the command line."""

import importlib.metadata
import importlib.util
import os
import struct
from argparse import Namespace
from pathlib import Path

from megatron.host.errors import InputError

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents


def check_megatron_core(pinned: str, installed: str | None) -> None:
    """Require the pinned megatron-core: seams replace its symbols by name.

    Args:
        pinned: the version this project is written against.
        installed: the version found, None where there is none.
    Raises:
        InputError: they differ.
    """
    if installed != pinned:
        found = f"version {installed} is installed" if installed else "none is installed"
        raise InputError(f"megatron-core {pinned} is required, {found}: pip install megatron-core=={pinned}")


def installed_megatron_core() -> str | None:
    """The installed version of megatron-core, None where it is absent."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_transformer_engine(transformer_impl: str) -> None:
    """Raises: InputError where --transformer-impl asks for Transformer Engine and it is absent."""
    if transformer_impl != "local" and importlib.util.find_spec("transformer_engine") is None:
        raise InputError(
            f"--transformer-impl {transformer_impl} needs Transformer Engine, which is not installed: "
            "install transformer_engine, or use --transformer-impl local"
        )


# What megatron-core's local layers would ignore, or end in a trace: argument -> (value without it, flag).
_NEEDS_TRANSFORMER_ENGINE = {
    "fp8": (None, "--fp8-format"),
    "fp4": (None, "--fp4-format"),
    "use_precision_aware_optimizer": (False, "--use-precision-aware-optimizer"),
    "tp_comm_overlap": (False, "--tp-comm-overlap"),
}


def check_local_layers(args: Namespace) -> None:
    """Raises: InputError for a flag that only Transformer Engine serves, under --transformer-impl local."""
    if args.transformer_impl != "local":
        return
    for name, (off, flag) in _NEEDS_TRANSFORMER_ENGINE.items():
        if getattr(args, name, off) != off:
            add = "--transformer-impl transformer_engine"
            raise InputError(f"{flag} needs Transformer Engine: add {add}, or remove {flag}")
    backend = getattr(getattr(args, "attention_backend", None), "name", None)
    if getattr(args, "context_parallel_size", 1) > 1 and backend == "local":
        raise InputError(
            "--context-parallel-size is not covered by --attention-backend local (megatron-core's unfused "
            "attention): use --attention-backend auto"
        )
    recomputed = getattr(args, "recompute_modules", None) or ()
    if "layernorm" in recomputed and importlib.util.find_spec("transformer_engine") is None:
        raise InputError(
            "--recompute-modules layernorm needs Transformer Engine, which is not installed: leave layernorm "
            "out of it, or install transformer_engine"
        )
    predicts = getattr(args, "mtp_num_layers", None) and getattr(args, "sequence_parallel", False)
    if predicts and importlib.util.find_spec("apex") is None:
        raise InputError(
            "--mtp-num-layers with --sequence-parallel needs apex's norms or Transformer Engine: remove one "
            "of the two flags, install apex, or add --transformer-impl transformer_engine"
        )


def check_supported_data(args: Namespace) -> None:
    """Raises: InputError for a data flag of Megatron-LM that this entrypoint does not serve."""
    unsupported = {
        "sft": "--sft (supervised fine-tuning data)",
        "fim_data": "--fim-data (fill-in-the-middle data)",
        "hybrid_context_parallel": "--hybrid-context-parallel",
        "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    }
    for name, what in unsupported.items():
        if getattr(args, name, False):
            raise InputError(f"{what} is not supported by this entrypoint: remove the flag")


def _read_file(flag: str, path: str) -> None:
    if not os.path.isfile(path):
        raise InputError(f"{flag} {path}: no such file")


def check_datasets(args: Namespace) -> None:
    """Check every dataset named on the command line, before anything is written or trained.

    Raises:
        InputError: no data at all, a list file or dataset that is missing, a damaged index, or a .bin shorter
            than its index says.
    """
    if args.mock_data:
        return
    for name in ("data_args_path", "per_split_data_args_path", "per_dataset_sequences_path"):
        if getattr(args, name, None):
            _read_file("--" + name.replace("_", "-"), getattr(args, name))
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [blend, *(per_split or [])]
    prefixes = [prefix for one in blends if one is not None for prefix in one[0]]
    if not prefixes:
        raise InputError("no training data: give --data-path PREFIX, or --mock-data for made-up data")
    for prefix in dict.fromkeys(prefixes):
        if "://" in prefix:  # object storage: read when the dataset opens it
            continue
        sequences = check_indexed_dataset(prefix)
        if blend is not None:
            check_split(prefix, args.split, sequences)


def check_split(prefix: str, split: str, sequences: int) -> None:
    """Check that each non-zero share of `--split` receives a document: Megatron never ends on an empty one.

    Args:
        prefix: the dataset, for the message.
        split: shares of training, validation and test, such as "99,1,0".
        sequences: documents in the dataset.

    Raises:
        InputError: naming the share.
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

    Returns:
        The number of sequences.

    Raises:
        InputError: naming the file and what to do.
    """
    from megatron.core.datasets.indexed_dataset import DType

    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    again = "write it again with scripts/preprocess_data.py"
    for path in (index, data):
        if not path.is_file():
            raise InputError(
                f"--data-path {prefix}: {path} does not exist (give the path without .bin or .idx)"
            )
    with index.open("rb") as stream:
        header = stream.read(_INDEX_HEADER.size)
        if len(header) < _INDEX_HEADER.size or not header.startswith(_INDEX_MAGIC):
            raise InputError(f"--data-path {prefix}: {index} is not an index of a Megatron dataset: {again}")
        _, version, code, sequences, documents = _INDEX_HEADER.unpack(header)
        if version != 1 or code not in {member.value for member in DType}:
            raise InputError(f"--data-path {prefix}: {index} has an unknown version or token type: {again}")
        needed = _INDEX_HEADER.size + sequences * (4 + 8) + documents * 8
        size = index.stat().st_size
        if size < needed:
            raise InputError(f"--data-path {prefix}: {index} is truncated, {size} of {needed} bytes: {again}")
        if sequences == 0:
            raise InputError(f"--data-path {prefix}: the dataset is empty: give it documents")
        stream.seek(_INDEX_HEADER.size + (sequences - 1) * 4)
        (length,) = struct.unpack("<i", stream.read(4))
        stream.seek(_INDEX_HEADER.size + sequences * 4 + (sequences - 1) * 8)
        (offset,) = struct.unpack("<q", stream.read(8))
    expected = offset + length * DType.size(code)
    size = data.stat().st_size
    if size < expected:
        raise InputError(f"--data-path {prefix}: {data} is truncated, {size} of {expected} bytes: {again}")
    return sequences
