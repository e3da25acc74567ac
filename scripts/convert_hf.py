"""Convert Qwen2.5, Qwen3 and Llama 3 weights between Hugging Face and Megatron, in one process on CPUs.

    python scripts/convert_hf.py import --hf-dir Qwen2.5-7B --save checkpoints/qwen
    python scripts/convert_hf.py export --load checkpoints/qwen --hf-dir trained --like Qwen2.5-7B

The checkpoint (torch_dist) holds weights alone and loads at any tensor- and pipeline-parallel size:
`torchrun pretrain_qwen.py --qwen-model Qwen2.5-7B --load checkpoints/qwen ...` starts at iteration 0 from it,
`examples/gpt/train_llama3_8b.sh --load checkpoints/llama` from Llama 3 8B. An export takes the newest
iteration of any torch_dist checkpoint of the model whose config.json is in the folder --like, and copies that
folder's files but the weights. Host memory holds the whole model.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = (
    ""  # a conversion only moves bytes: host memory holds larger models
)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron.compression.errors import InputError, one_line_errors
from megatron.compression.frontends import megatron_lm

megatron_lm.prepare()  # before megatron.training is imported

import torch  # noqa: E402
from megatron.core.dist_checkpointing import load_common_state_dict  # noqa: E402
from megatron.training.checkpointing import load_checkpoint, save_checkpoint  # noqa: E402

from megatron.compression.frontends.megatron_lm.model_alone import built_model  # noqa: E402
from megatron.compression.huggingface import models, weights  # noqa: E402

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def import_model(folder: Path, save: str, dtype: str | None) -> None:
    """Hugging Face folder to a release checkpoint: weights alone, which training loads at iteration 0."""
    config = models.read_config(folder)
    dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise InputError(
            f"weights of {dtype} are not covered; --dtype is one of {', '.join(DTYPES)}"
        )
    with built_model(str(folder), DTYPES[dtype]) as session:
        weights.read(session.chunks[0], models.model_from_config(config), folder)
        session.args.save = save
        save_checkpoint(0, session.chunks, None, None, 0, release=True)
    print(f"imported {folder} ({config['model_type']}, {dtype}) to {save}", flush=True)


def export_model(load: str, like: Path, folder: Path, dtype: str | None) -> None:
    """A Megatron checkpoint's newest iteration to a Hugging Face folder, its other files as in ``like``."""
    if (folder / "config.json").exists():
        raise InputError(
            f"--hf-dir {folder} holds a model already; choose another folder or empty it"
        )
    config = models.read_config(like)
    tracker = Path(load, "latest_checkpointed_iteration.txt")
    newest = tracker.read_text().strip() if tracker.is_file() else "0"
    iteration = Path(load, newest if newest == "release" else f"iter_{int(newest):07d}")
    if not (iteration / "metadata.json").is_file():
        raise InputError(
            f"--load {load}: no torch_dist checkpoint; save with --ckpt-format torch_dist"
        )
    held = load_common_state_dict(str(iteration))["args"].params_dtype
    config["torch_dtype"] = dtype or str(held).removeprefix("torch.")
    config.pop("dtype", None)  # transformers 5 has it as well
    folder.mkdir(parents=True, exist_ok=True)
    with built_model(str(like), held) as session:
        session.args.load = load
        load_checkpoint(session.chunks, None, None)
        model = models.model_from_config(config)
        weights.write(session.chunks[0], model, folder, DTYPES[config["torch_dtype"]])
    for file in like.iterdir():
        if file.suffix in (".json", ".txt", ".model", ".jinja") and file.name != weights.INDEX_FILE:
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"exported {load} ({model.family}, {config['torch_dtype']}) to {folder}", flush=True)


def main() -> None:
    """Run the command. Bad input ends it with one line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--hf-dir", required=True, type=Path, help="folder with config.json and safetensors"
    )
    common.add_argument("--dtype", choices=DTYPES, help="default: as the source has it")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser(
        "import", parents=[common], help="Hugging Face to Megatron"
    ).add_argument
    add("--save", required=True, help="folder of the Megatron checkpoint")
    add = commands.add_parser(
        "export", parents=[common], help="Megatron to Hugging Face"
    ).add_argument
    add("--load", required=True, help="folder of the Megatron checkpoint")
    add(
        "--like",
        required=True,
        type=Path,
        help="folder with the model's config.json and its tokenizer",
    )
    given = parser.parse_args()
    with one_line_errors():
        if given.command == "import":
            import_model(given.hf_dir, given.save, given.dtype)
        else:
            export_model(given.load, given.like, given.hf_dir, given.dtype)


if __name__ == "__main__":
    main()
