"""Tokenizers that megatron-core asks Hugging Face's hub for, though their files are on the command line."""

import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from megatron.compression.patches.symbols import replace

_GPT2 = "GPT2BPETokenizer"


def build_gpt2_from_its_files() -> None:
    """Let ``--vocab-file`` and ``--merge-file`` alone make a ``GPT2BPETokenizer``.

    Why: ``MegatronHFTokenizer`` reads the name ``gpt2`` from the hub even where it is given both files, and a
    cluster's nodes reach no hub. Not reached: the tokenizer without files, and BERT's.
    """
    from megatron.core.tokenizers.text.libraries import megatron_hf_tokenizer as library

    def wrap(build):
        def wrapper(self, tokenizer_path, vocab_file=None, merges_file=None, **others):
            if tokenizer_path != _GPT2 or not (vocab_file and merges_file):
                return build(self, tokenizer_path, vocab_file, merges_file, **others)
            # The hub's gpt2 as a folder: what AutoTokenizer finds there decides, whatever its version.
            with tempfile.TemporaryDirectory(prefix="gpt2-tokenizer-") as folder:
                _write(Path(folder), vocab_file, merges_file)
                with mock.patch.dict(library.MEGATRON_CONFIG_MAP[_GPT2], tokenizer_name=folder):
                    return build(self, tokenizer_path, vocab_file, merges_file, **others)

        return wrapper

    parameters = ("self", "tokenizer_path", "vocab_file", "merges_file")
    replace(library.MegatronHFTokenizer, "__init__", parameters, wrap)


def _write(folder: Path, vocab_file: str, merges_file: str) -> None:
    """A GPT-2 tokenizer of these files, as the hub has one."""
    for name, file in (("vocab.json", vocab_file), ("merges.txt", merges_file)):
        shutil.copyfile(file, folder / name)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
