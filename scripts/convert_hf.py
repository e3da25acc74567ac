"""Convert Qwen2.5, Qwen3 and Llama 3 weights between Hugging Face and Megatron, in one process on
CPUs.

    python scripts/convert_hf.py import --hf-dir Qwen2.5-7B --save checkpoints/qwen
    python scripts/convert_hf.py export --load checkpoints/qwen --hf-dir trained --like Qwen2.5-7B

An import writes a checkpoint (torch_dist) that holds weights alone and loads at any tensor- and
pipeline-parallel size. Training starts from it at iteration 0:

    torchrun pretrain_qwen.py --qwen-model Qwen2.5-7B --load checkpoints/qwen ...
    examples/gpt/train_llama3_8b.sh --load checkpoints/llama

An export takes the newest iteration of a torch_dist checkpoint, whatever its sizes. --like is the
folder of the Hugging Face model that it was trained from: its config.json describes the model, and
its other files (the tokenizer's) are copied. Host memory holds the whole model.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

# A conversion only moves bytes, and host memory holds larger models than a GPU's.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from megatron.compression.errors import InputError, first_line, one_line_errors
from megatron.compression.frontends import megatron_lm

megatron_lm.prepare()  # before megatron.training is imported

import torch  # noqa: E402
from megatron.core.dist_checkpointing import load_common_state_dict  # noqa: E402
from megatron.training.checkpointing import load_checkpoint, save_checkpoint  # noqa: E402

from megatron.compression.frontends.megatron_lm.model_alone import built_model  # noqa: E402
from megatron.compression.huggingface import models, weights  # noqa: E402

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COPIED = (".json", ".txt", ".model", ".jinja")
"""Files of --like that an export copies: config, tokenizer, chat template."""


def import_model(folder: Path, save: str, dtype: str | None) -> None:
    """Write a release checkpoint of a Hugging Face folder.

    Args:
        folder: holds config.json and safetensors files.
        save: folder of the Megatron checkpoint.
        dtype: type of the weights in it; None: the folder's.

    Raises:
        InputError: the folder cannot be read, or holds a model that is not covered.
    """
    config = models.read_config(folder)
    if dtype is None:
        # transformers 5 writes the first name, earlier versions the second.
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise InputError(
            f"{folder}: weights of {dtype} are not covered; give --dtype {', '.join(DTYPES)}"
        )
    with built_model(str(folder), DTYPES[dtype]) as session:
        weights.read(session.chunks[0], models.model_from_config(config), folder)
        # A release has no iteration: training that loads it starts at 0, with a new optimizer.
        session.args.save = save
        save_checkpoint(0, session.chunks, None, None, 0, release=True)
    print(f"imported {folder} ({config['model_type']}, {dtype}) to {save}", flush=True)


def newest_iteration(load: str) -> Path:
    """Return the folder of a checkpoint's newest iteration.

    Raises:
        InputError: there is none in the format torch_dist.
    """
    tracker = Path(load, "latest_checkpointed_iteration.txt")
    newest = tracker.read_text().strip() if tracker.is_file() else "0"
    if newest == "release":
        folder = Path(load, "release")
    elif newest.isdecimal():
        folder = Path(load, f"iter_{int(newest):07d}")
    else:
        raise InputError(
            f"--load {load}: {tracker.name} holds {newest[:40]!r}, which is no iteration; write the number "
            "of the newest iter_... folder into it"
        )
    if not (folder / "metadata.json").is_file():
        raise InputError(
            f"--load {load}: no torch_dist checkpoint in {folder.name}; save with --ckpt-format torch_dist"
        )
    return folder


def dtype_of(iteration: Path) -> torch.dtype:
    """Return the type of the weights in a checkpoint.

    Raises:
        InputError: the checkpoint is damaged, or Megatron's training has not written it.
    """
    try:
        return load_common_state_dict(str(iteration))["args"].params_dtype
    except Exception as error:  # unpickling raises anything
        raise InputError(
            f"--load {iteration}: its arguments cannot be read ({type(error).__name__}: "
            f"{first_line(error)}); name a checkpoint that Megatron's training has saved, whole"
        ) from error


def export_model(load: str, like: Path, folder: Path, dtype: str | None) -> None:
    """Write the newest iteration of a Megatron checkpoint as a Hugging Face folder.

    Args:
        load: folder of the Megatron checkpoint.
        like: a Hugging Face folder of the same model, whose other files are copied.
        folder: the Hugging Face folder to write.
        dtype: type of the weights in it; None: the checkpoint's.

    Raises:
        InputError: one of the folders cannot be used.
    """
    if (folder / "config.json").exists():
        raise InputError(
            f"--hf-dir {folder} holds a model already; choose another folder or empty it"
        )
    config = models.read_config(like)
    saved_dtype = dtype_of(newest_iteration(load))
    if dtype is None:
        dtype = str(saved_dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    with built_model(str(like), saved_dtype) as session:
        # Megatron reshards what any number of ranks has saved into the one model of this process.
        session.args.load = load
        load_checkpoint(session.chunks, None, None)
        model = models.model_from_config(config)
        weights.write(session.chunks[0], model, folder, DTYPES[dtype])
    for file in like.iterdir():
        if file.suffix in COPIED and file.name != weights.INDEX_FILE:
            shutil.copy(file, folder)
    # The config says what is in the files now. One name of the two is enough.
    config["torch_dtype"] = dtype
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"exported {load} ({model.family}, {dtype}) to {folder}", flush=True)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--hf-dir",
        required=True,
        type=Path,
        help="Hugging Face folder with config.json and safetensors files",
    )
    common.add_argument(
        "--dtype", choices=DTYPES, help="type of the written weights (default: the source's)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser(
        "import", parents=[common], help="Hugging Face to Megatron", allow_abbrev=False
    )
    to_megatron.add_argument("--save", required=True, help="folder of the Megatron checkpoint")
    to_hugging_face = commands.add_parser(
        "export", parents=[common], help="Megatron to Hugging Face", allow_abbrev=False
    )
    to_hugging_face.add_argument("--load", required=True, help="folder of the Megatron checkpoint")
    to_hugging_face.add_argument(
        "--like",
        required=True,
        type=Path,
        help="Hugging Face folder of the model that was trained: its config.json and tokenizer",
    )
    return parser.parse_args(words)


def main() -> None:
    """Run the command. Bad input ends it with one line."""
    options = parse()
    with one_line_errors():
        if options.command == "import":
            import_model(options.hf_dir, options.save, options.dtype)
        else:
            export_model(options.load, options.like, options.hf_dir, options.dtype)


if __name__ == "__main__":
    main()
