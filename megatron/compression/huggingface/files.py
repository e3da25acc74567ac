"""The safetensors files of a Hugging Face folder: read one tensor at a time, write in pieces."""

import json
import os
from pathlib import Path

import torch

from megatron.compression.errors import require_extra
from megatron.compression.huggingface.models import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TensorReader:
    """Reads named tensors from a folder's safetensors files, each when it is asked for.

    Args:
        folder: holds model.safetensors, or several files and their index.
    Raises: ModelError: neither is there.
    """

    def __init__(self, folder: str | Path) -> None:
        require_extra("safetensors", "huggingface", f"reading {folder}")
        self.folder = Path(folder)
        self._open = {}
        if (self.folder / INDEX).is_file():
            self.files = json.loads((self.folder / INDEX).read_text())["weight_map"]
        elif (self.folder / SINGLE).is_file():
            from safetensors import safe_open

            with safe_open(self.folder / SINGLE, "pt") as file:
                self.files = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise ModelError(
                f"{folder} has neither {SINGLE} nor {INDEX}; save the model with safe_serialization=True"
            )

    def names(self) -> set[str]:
        """Every tensor there is."""
        return set(self.files)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the file's dtype.

        Raises: ModelError: there is none of that name.
        """
        if name not in self.files:
            raise ModelError(
                f"{self.folder} has no tensor {name}: is it another model than its config.json says?"
            )
        file = self.files[name]
        if file not in self._open:
            from safetensors import safe_open

            self._open[file] = safe_open(self.folder / file, "pt")
        return self._open[file].get_tensor(name)


class TensorWriter:
    """Writes tensors into files of a bounded size. Several writers (pipeline stages) share a folder.

    Args:
        writer: this writer's number; part of the names until `finish_index` gives the files their own.
        file_bytes: a file is closed once it holds as much.
    """

    def __init__(self, folder: str | Path, writer: int = 0, file_bytes: int = 5 * 10**9) -> None:
        require_extra("safetensors", "huggingface", f"writing {folder}")
        self.folder = Path(folder)
        self.writer = writer
        self.file_bytes = file_bytes
        self.written: list[tuple[str, dict[str, int]]] = []
        self._held: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor; it is written with the next full file."""
        self._held[name] = tensor.contiguous().clone()  # safetensors refuses views of shared memory
        if sum(held.nbytes for held in self._held.values()) >= self.file_bytes:
            self._flush()

    def close(self) -> list[tuple[str, dict[str, int]]]:
        """Write what is left. Returns each file with its tensors' names and sizes, for `finish_index`."""
        self._flush()
        return self.written

    def _flush(self) -> None:
        if not self._held:
            return
        from safetensors.torch import save_file

        file = f"part-{self.writer}-{len(self.written)}.safetensors"
        save_file(self._held, self.folder / file, metadata={"format": "pt"})
        self.written.append((file, {name: tensor.nbytes for name, tensor in self._held.items()}))
        self._held = {}


def finish_index(folder: str | Path, written: list[tuple[str, dict[str, int]]]) -> None:
    """Give the files of every writer the names that transformers expects, and write the index.

    Args:
        written: what the writers' `close` returned, in the model's order.
    """
    folder = Path(folder)
    if len(written) == 1:
        os.replace(folder / written[0][0], folder / SINGLE)
        return
    weight_map, total = {}, 0
    for number, (file, tensors) in enumerate(written, start=1):
        final = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        os.replace(folder / file, folder / final)
        weight_map |= dict.fromkeys(tensors, final)
        total += sum(tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
