"""Convert Qwen2.5, Qwen3 and Llama 3 weights between Hugging Face and Megatron, on CPUs.

    python scripts/convert_hf.py import --hf-dir Qwen2.5-7B --save checkpoints/qwen
    python scripts/convert_hf.py export --load checkpoints/qwen --hf-dir trained --tokenizer Qwen2.5-7B

The checkpoint (torch_dist) holds weights alone and loads at any tensor- and pipeline-parallel size:
`torchrun pretrain_qwen.py --qwen-model Qwen2.5-7B --load checkpoints/qwen ...` starts at iteration 0 from it,
`examples/gpt/train_llama3_8b.sh --load checkpoints/llama` from Llama 3 8B.
An export takes the newest iteration of any checkpoint of such a model that pretrain_qwen.py or
pretrain_gpt.py wrote.

One process holds the whole model. To share it between processes, start several with torchrun and give
Megatron's flags after `--`:

    torchrun --nproc_per_node 4 scripts/convert_hf.py import ... -- --tensor-model-parallel-size 4
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a conversion only moves bytes: host memory holds larger models
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.compression import preflight
from megatron.compression.errors import one_line_errors

preflight.prepare()  # before megatron.training is imported

import json  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.dist_checkpointing import load_common_state_dict  # noqa: E402
from megatron.training import print_rank_0  # noqa: E402

from megatron.compression.huggingface.config import (  # noqa: E402
    config_from_model,
    model_from_config,
    read_config,
)
from megatron.compression.huggingface.conversion import export_weights, import_weights  # noqa: E402
from megatron.compression.huggingface.files import TensorReader, TensorWriter, finish_index  # noqa: E402
from megatron.compression.huggingface.mapping import hugging_face_names  # noqa: E402
from megatron.compression.huggingface.models import ModelError, model_from_args  # noqa: E402
from megatron.compression.huggingface.session import Session, conversion_session, newest_iteration  # noqa: E402

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def import_model(hf_dir: str, save: str, dtype: str | None, flags: list[str]) -> None:
    """Hugging Face folder to Megatron checkpoint.

    Args:
        hf_dir: config.json and safetensors.
        save: folder of the checkpoint.
        dtype: of the checkpoint; None for the folder's.
        flags: Megatron's, parallel sizes for example.
    """
    config = read_config(hf_dir)
    model, reader = model_from_config(config), TensorReader(hf_dir)
    dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    with conversion_session(model, getattr(torch, dtype), flags) as session:
        import_weights(session.chunks, model, reader, session.groups)
        session.save(save)
        print_rank_0(f"imported {hf_dir} ({model.family}, {dtype}) to {save}")


def export_model(load: str, hf_dir: str, dtype: str | None, tokenizer: str | None, flags: list[str]) -> None:
    """Megatron checkpoint to Hugging Face folder.

    Args:
        load: folder of the checkpoint; its newest iteration is taken.
        hf_dir: made if missing; must hold no model.
        dtype: of the tensors; None for the checkpoint's.
        tokenizer: folder whose tokenizer files are copied; None copies none.
        flags: Megatron's, parallel sizes for example.
    """
    folder = Path(hf_dir)
    if (folder / "config.json").exists():
        raise ModelError(f"--hf-dir {hf_dir} holds a model already; choose another folder or empty it")
    trained_with = load_common_state_dict(str(newest_iteration(load)))["args"]
    model = model_from_args(trained_with)
    held = trained_with.params_dtype
    written_as = getattr(torch, dtype) if dtype else held
    config = config_from_model(model, str(written_as).removeprefix("torch."))
    folder.mkdir(parents=True, exist_ok=True)
    with conversion_session(model, held, flags) as session:
        session.load(load)
        write_files(session, model, folder, written_as)
        if dist.get_rank() == 0:
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for name in TOKENIZER_FILES if tokenizer else ():
                if (source := Path(tokenizer) / name).is_file():
                    shutil.copy(source, folder / name)
        print_rank_0(f"exported {load} ({model.family}, {config['torch_dtype']}) to {hf_dir}")


def write_files(session: Session, model, folder: Path, dtype: torch.dtype) -> None:
    """Every stage writes its tensors; rank 0 names the files and writes the index."""
    groups = session.groups
    writes = groups.tp.rank() == 0 and groups.dp_cp.rank() == 0
    writer = TensorWriter(folder, groups.pp.rank()) if writes else None
    if groups.dp_cp.rank() == 0:
        export_weights(session.chunks, model, writer, groups, dtype)
    written = [None] * dist.get_world_size()
    dist.all_gather_object(written, (groups.pp.rank(), writer.close() if writes else []))
    if dist.get_rank() == 0:
        files = [file for _, stage in sorted(written, key=lambda stage: stage[0]) for file in stage]
        found = {name for _, tensors in files for name in tensors}
        if missing := sorted(set(hugging_face_names(model)) - found):
            raise ModelError(f"the checkpoint's model lacks {missing[:5]}")
        finish_index(folder, files)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; what follows `--` is Megatron's."""
    own, _, flags = (arguments, "", []) if "--" not in arguments else _cut(arguments)
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    importer = commands.add_parser("import", allow_abbrev=False, help="Hugging Face to Megatron")
    importer.add_argument("--hf-dir", required=True, help="folder with config.json and safetensors files")
    importer.add_argument("--save", required=True, help="folder of the Megatron checkpoint")
    exporter = commands.add_parser("export", allow_abbrev=False, help="Megatron to Hugging Face")
    exporter.add_argument("--load", required=True, help="folder of the Megatron checkpoint")
    exporter.add_argument(
        "--hf-dir", required=True, help="folder to write config.json and safetensors files to"
    )
    exporter.add_argument("--tokenizer", help="folder to copy the tokenizer's files from")
    for command in (importer, exporter):
        command.add_argument(
            "--dtype", choices=("bfloat16", "float16", "float32"), help="default: as the source has it"
        )
    namespace = parser.parse_args(own)
    namespace.flags = flags
    return namespace


def _cut(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    at = arguments.index("--")
    return arguments[:at], "--", arguments[at + 1 :]


def main() -> None:
    """Run the command. Bad input ends it with one line."""
    with one_line_errors():
        given = parse(sys.argv[1:])
        if given.command == "import":
            import_model(given.hf_dir, given.save, given.dtype, given.flags)
        else:
            export_model(given.load, given.hf_dir, given.dtype, given.tokenizer, given.flags)


if __name__ == "__main__":
    main()
