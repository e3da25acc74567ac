"""Tokenizers that megatron-core asks Hugging Face's hub for, though their files are on the command line."""

import atexit
import functools
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
            named = {"tokenizer_name": _as_folder(vocab_file, merges_file)}
            with mock.patch.dict(library.MEGATRON_CONFIG_MAP[_GPT2], named):
                return build(self, tokenizer_path, vocab_file, merges_file, **others)

        return wrapper

    parameters = ("self", "tokenizer_path", "vocab_file", "merges_file")
    replace(library.MegatronHFTokenizer, "__init__", parameters, wrap)


@functools.cache
def _as_folder(vocab_file: str, merges_file: str) -> str:
    """A folder of a GPT-2 tokenizer of these files, for as long as this process runs."""
    folder = Path(tempfile.mkdtemp(prefix="gpt2-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, file in (("vocab.json", vocab_file), ("merges.txt", merges_file)):
        shutil.copyfile(file, folder / name)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return str(folder)
