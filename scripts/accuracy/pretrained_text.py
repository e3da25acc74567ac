"""The text for a pretrained model: what the installed Python packages say and are, as its tokens.

Half of it is documentation (a file's docstrings, one after the other), half of it sources. A file
gives one of the two, and a hash of its path decides which, and whether that is for training or for
validation. Packages repeat themselves, so a paragraph that has occurred is left out.

A folder that ``prepare_tokens`` has filled holds train.bin and valid.bin, two bytes a token, and
text.json, which says what they are of.
"""

import ast
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scripts._corpus import SKIPPED, hash_fraction, hash_of, read_documents, write_whole

END_OF_TEXT = 0
"""SmolLM2's token between documents."""
LEAST_DOCUMENTATION = 400
"""Characters; files with fewer of them in docstrings give no documentation."""
DOCUMENTATION_SHARE = 0.75
"""Part of the files whose docstrings are taken. They are a tenth of the sources' bytes, so that
half of the text takes far more than half of the files."""
TRAINING_SHARE = 0.75


def docstrings(source: str) -> str:
    """Return all docstrings of a Python file, with an empty line between them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in other people's strings
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    texts = [ast.get_docstring(node) for node in nodes]
    return "\n\n".join(text for text in texts if text)


def new_paragraphs(text: str, seen: set[str]) -> str:
    """Return the paragraphs of a text that have not occurred before, and note them.

    Args:
        text: whose paragraphs have empty lines between them.
        seen: all paragraphs so far; gets those of the text.
    """
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if paragraph not in seen:
            seen.add(paragraph)
            paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def documents(megabytes: float) -> Iterator[tuple[str, str]]:
    """Yield (split, text) of documents in the order of their paths' hashes.

    Args:
        megabytes: text of both splits together, 10^6 characters, half of it documentation.
    """
    root = Path(sysconfig.get_path("purelib"))
    seen: set[str] = set()
    left = {"documentation": megabytes * 0.5e6, "sources": megabytes * 0.5e6}
    for path, source in read_documents(root, SKIPPED).items():
        kind = "sources"
        text = source
        if hash_fraction(path, "kind") < DOCUMENTATION_SHARE:
            kind = "documentation"
            text = docstrings(source) if left[kind] > 0 else ""
            if len(text) < LEAST_DOCUMENTATION:
                continue
        if left[kind] <= 0:
            continue
        text = new_paragraphs(text, seen)
        left[kind] -= len(text)
        split = "train" if hash_fraction(path, "split") < TRAINING_SHARE else "valid"
        yield split, text


def prepare_tokens(folder: Path, model, megabytes: float) -> dict[str, str]:
    """Tokenize the text into a folder, unless it is there.

    Args:
        folder: where train.bin and valid.bin are.
        model: a ``GgufModel``, whose tokenizer is used.
        megabytes: text of both splits together, 10^6 characters.

    Returns:
        The paths without .bin, by split, as ``Corpus`` takes them.
    """
    paths = {split: str(folder / split) for split in ("train", "valid")}
    if (folder / "text.json").exists():
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[str]] = {"train": [], "valid": []}
    for split, text in documents(megabytes):
        texts[split].append(text)
    tokenizer = model.tokenizer()
    about: dict[str, dict] = {}
    for split, of_split in texts.items():
        ids: list[int] = []
        for encoding in tokenizer.encode_batch_fast(of_split):
            ids += encoding.ids
            ids.append(END_OF_TEXT)
        path = folder / f"{split}.bin"
        write_whole(path, np.array(ids, np.uint16).tobytes())
        about[split] = {"documents": len(of_split), "tokens": len(ids), "sha256": hash_of(path)}
        print(f"text: {split} has {len(ids)} tokens of {len(of_split)} documents", flush=True)
    # Written last: a folder without it is filled anew.
    write_whole(folder / "text.json", (json.dumps(about, indent=1) + "\n").encode())
    return paths
