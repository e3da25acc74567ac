"""Checks of the datasets on the command line, before anything is written or trained."""

import os
import struct
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron.compression.errors import InputError

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents
_AGAIN = "write it again with scripts/preprocess_data.py"

SAMPLE_BLOCKS, SAMPLE_BLOCK = 16, 65_536
"""What is read of a large file: as many blocks, evenly spread, of as many entries."""


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
    for each document. The sequences lie one behind the other, and the last one ends the .bin file. Of
    large indexes a sample is read.

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
    expected = _check_sequences(index, sequences, documents, DType.size(code), what)
    size = data.stat().st_size
    if size < expected:
        raise InputError(f"{what}: {data} is truncated, {size} of {expected} bytes: {_AGAIN}")
    return sequences


def _check_sequences(index: Path, sequences: int, documents: int, item: int, what: str) -> int:
    """Check that lengths, offsets and documents of an index agree. Returns the bytes that .bin must have."""
    header = _INDEX_HEADER.size
    lengths = np.memmap(index, np.int32, "r", header, (sequences,))
    offsets = np.memmap(index, np.int64, "r", header + 4 * sequences, (sequences,))
    borders = np.memmap(index, np.int64, "r", header + 12 * sequences, (documents,))
    for block in _blocks(sequences):
        ends = offsets[block] + lengths[block].astype(np.int64) * item
        if offsets[0] != 0 or (lengths[block] < 0).any() or (ends[:-1] != offsets[block][1:]).any():
            raise InputError(f"{what}: the lengths and the offsets in {index} do not agree: {_AGAIN}")
    if documents == 0 or borders[0] != 0 or borders[-1] != sequences:
        raise InputError(f"{what}: the documents in {index} do not cover its {sequences} sequences: {_AGAIN}")
    return int(offsets[-1]) + int(lengths[-1]) * item


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
