"""Checks that need no process group: versions, packages, the tokenizer, checkpoints, flags not served."""

import importlib.util
import os
import re
from argparse import Namespace
from pathlib import Path

from megatron.compression.errors import InputError, one_line_errors, require_extra
from megatron.compression.versions import MEGATRON_CORE_SERIES


def prepare() -> None:
    """What an entrypoint calls first, before megatron.training is imported.

    Checks the version of megatron-core, hides a Transformer Engine that cannot run, puts the CPU stand-ins in
    place where there is no CUDA, and makes the repairs that every run needs. Ends the process with one line
    where the version does not fit.
    """
    with one_line_errors():
        check_megatron_core(find_megatron_core())
        from megatron import host
        from megatron.compression import patches
        from megatron.compression.startup import implementation

        implementation.transformer_engine()
        host.install()
        patches.use_shipped_helpers()
        patches.make_torch_adam_resumable()
        patches.fuse_torch_adam()


def find_megatron_core() -> tuple[str, Path] | None:
    """The version and the folder of the megatron-core that an import finds, wheel or checkout; None: none.

    It is read from the file: importing megatron.core is too early here.
    """
    for folder in importlib.util.find_spec("megatron").submodule_search_locations:
        info = Path(folder) / "core" / "package_info.py"
        if info.is_file():
            text = info.read_text()
            parts = [re.search(rf"^{name} = (\d+)", text, re.M) for name in ("MAJOR", "MINOR", "PATCH")]
            return ".".join(part[1] if part else "?" for part in parts), info.parent
    return None


def check_megatron_core(found: tuple[str, Path] | None) -> None:
    """Require a megatron-core of the series: symbols of it are replaced by name.

    Raises: InputError: another series, or none.
    """
    if found is None or not found[0].startswith(f"{MEGATRON_CORE_SERIES}."):
        there = f"{found[0]} is in {found[1]}" if found else "none is installed"
        raise InputError(
            f"megatron-core {MEGATRON_CORE_SERIES} is required, {there}: pip install "
            f"'megatron-core=={MEGATRON_CORE_SERIES}.*', or put that release of Megatron-LM first on the path"
        )


def check_arguments(args: Namespace) -> None:
    """Check what validated arguments name, before anything is built (`patches.after_validating_arguments`).

    Raises:
        InputError: Transformer Engine, a tokenizer, a checkpoint, a package or a dataset that is not there;
            a layout that experts cannot have.
    """
    from megatron.compression.startup.data_checks import check_datasets
    from megatron.compression.startup.implementation import check_implementation

    check_implementation(args)
    check_experts(args)
    check_packages(args)
    check_tokenizer(args)
    check_checkpoints(args)
    check_datasets(args)


def check_experts(args: Namespace) -> None:
    """Raises: InputError for what megatron-core refuses when it makes groups, or builds layers."""
    if getattr(args, "num_experts", None) is None:
        return
    sharing, flag = args.expert_tensor_parallel_size, "--expert-tensor-parallel-size"
    ranks = sharing * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    if args.world_size % ranks:
        raise InputError(
            f"{flag} {sharing} (by default that of --tensor-model-parallel-size), "
            f"--expert-model-parallel-size {args.expert_model_parallel_size} and the stages make {ranks} "
            f"ranks, which do not divide the {args.world_size} there are; give {flag} 1, or other sizes"
        )
    layers, every = args.num_layers, args.moe_layer_freq
    if isinstance(every, list) and (len(every) != layers or not set(every) <= {0, 1}):
        raise InputError(f"--moe-layer-freq {every} must have a 0 or a 1 for each of --num-layers {layers}")
    if args.transformer_impl == "local" and getattr(args, "moe_latent_size", None):
        from megatron.compression.startup.implementation import needs_transformer_engine

        raise needs_transformer_engine("--moe-latent-size", "remove --moe-latent-size")


def check_packages(args: Namespace) -> None:
    """Raises: InputError for a flag that needs a package which is not installed."""
    needed = {"--wandb-project": (args.wandb_project, "wandb")}
    if args.optimizer not in ("adam", "sgd"):
        needed[f"--optimizer {args.optimizer}"] = (True, "emerging_optimizers")
    for flag, (given, module) in needed.items():
        if given and importlib.util.find_spec(module) is None:
            package = module.replace("_", "-")
            raise InputError(
                f"{flag} needs {module}, which is not installed: pip install {package}, or drop it"
            )


_FILE_TOKENIZERS = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")


def check_tokenizer(args: Namespace) -> None:
    """Check that the tokenizer is named and that its files are there.

    Raises: InputError: with the flag.
    """
    kind, model = args.tokenizer_type, args.tokenizer_model
    if kind in (None, "GPT2BPETokenizer") and not (args.vocab_file and args.merge_file):
        raise InputError(
            "no tokenizer: give --tokenizer-type and --tokenizer-model (GPT2BPETokenizer: --vocab-file and "
            "--merge-file), or --tokenizer-type NullTokenizer --vocab-size N for data made of numbers"
        )
    for flag, path in (("--vocab-file", args.vocab_file), ("--merge-file", args.merge_file)):
        if path and not os.path.isfile(path):
            raise InputError(f"{flag} {path}: no such file")
    if kind in (*_FILE_TOKENIZERS, "HuggingFaceTokenizer"):
        if not model:
            raise InputError(f"--tokenizer-type {kind} needs --tokenizer-model: its file or folder")
        # Hugging Face's hub names models by owner/name; anything else is a path.
        is_path = kind in _FILE_TOKENIZERS or model.startswith((".", "/", "~")) or model.count("/") > 1
        if is_path and not os.path.exists(model):
            raise InputError(f"--tokenizer-model {model}: no such file or folder")
    if kind in _FILE_TOKENIZERS[:3]:
        require_extra("sentencepiece", "tokenizers", f"--tokenizer-type {kind}")
    elif kind in ("HuggingFaceTokenizer", "GPT2BPETokenizer"):
        require_extra("transformers", "tokenizers", f"--tokenizer-type {kind}")


def check_checkpoints(args: Namespace) -> None:
    """Check the folder to load from, and what saving in the background needs.

    Raises: InputError: --load names a folder that is not there or is empty, without which Megatron would
    start from random weights; nvidia_resiliency_ext is missing.
    """
    load = args.load
    wanted = load and load != args.save and not args.pretrained_checkpoint and "://" not in load
    if wanted and not (os.path.isdir(load) and set(os.listdir(load)) - {"compression-auto.json"}):
        what = "the folder is empty" if os.path.isdir(load) else "no such folder"
        raise InputError(f"--load {load}: {what}; name a run's --save folder, or drop it")
    asynchronous = args.async_save and getattr(args, "async_strategy", "nvrx") == "nvrx"
    if asynchronous and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        raise InputError(
            "--async-save needs nvidia_resiliency_ext, which is not installed: pip install "
            "nvidia-resiliency-ext, add --async-strategy mcore, or drop --async-save"
        )


# What megatron-core's local layers would ignore, or end in a trace: argument -> its flag.
_NEEDS_TRANSFORMER_ENGINE = {
    **{"fp8": "--fp8-format", "fp4": "--fp4-format", "tp_comm_overlap": "--tp-comm-overlap"},
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
}


def check_local_layers(args: Namespace) -> None:
    """Raises: InputError for a flag that only Transformer Engine serves, under --transformer-impl local."""
    if args.transformer_impl != "local":
        return
    from megatron.compression.startup.implementation import needs_transformer_engine

    for name, flag in _NEEDS_TRANSFORMER_ENGINE.items():
        if getattr(args, name, None):
            raise needs_transformer_engine(flag, f"remove {flag}")
    sharded = getattr(args, "use_megatron_fsdp", False) or getattr(args, "use_torch_fsdp2", False)
    if getattr(args, "init_model_with_meta_device", False) and not sharded:
        raise InputError(
            "--init-model-with-meta-device leaves weights uninitialized without --use-megatron-fsdp: drop it"
        )
    backend = getattr(getattr(args, "attention_backend", None), "name", None)
    several = getattr(args, "context_parallel_size", 1) > 1
    latent = getattr(args, "multi_latent_attention", False)
    for flag, given in (("--context-parallel-size", several), ("--multi-latent-attention", latent)):
        if given and backend == "local":
            raise InputError(
                f"{flag} is not covered by --attention-backend local (megatron-core's unfused attention): "
                "use --attention-backend auto"
            )
    if latent and getattr(args, "qk_l2_norm", False):
        raise InputError("--qk-l2-norm does not go with --multi-latent-attention: drop one of the two")
    if several and getattr(args, "mtp_num_layers", None):
        raise needs_transformer_engine("--mtp-num-layers with --context-parallel-size", "drop one of the two")
    recomputed = getattr(args, "recompute_modules", None) or ()
    if "layernorm" in recomputed and importlib.util.find_spec("transformer_engine") is None:
        raise needs_transformer_engine("--recompute-modules layernorm", "leave layernorm out of it")
    predicts = getattr(args, "mtp_num_layers", None) and getattr(args, "sequence_parallel", False)
    if predicts and importlib.util.find_spec("apex") is None:
        raise needs_transformer_engine(
            "--mtp-num-layers with --sequence-parallel",
            "install apex, whose norms do, or remove one of the two flags",
        )


def check_evaluation(args: Namespace) -> None:
    """Raises: InputError without --eval-interval: Megatron divides by it, with --eval-iters 0 as well."""
    if not getattr(args, "eval_interval", None):
        raise InputError("--eval-interval is missing: give the iterations between evaluations, such as 1000")


def check_supported_data(args: Namespace) -> None:
    """Raises: InputError for a data flag of Megatron-LM that this entrypoint does not serve."""
    for name in ("sft", "fim_data", "hybrid_context_parallel", "dataloader_inter_document_masking"):
        if getattr(args, name, False):
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is not supported by this entrypoint: remove the flag")
