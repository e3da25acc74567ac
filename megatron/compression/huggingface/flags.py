"""`--qwen-model`: the model's flags go before the user's own, so that those win."""

import argparse
from pathlib import Path

from megatron.compression.huggingface.config import model_from_config, read_config
from megatron.compression.huggingface.models import (
    EXPERT_MODELS,
    MODELS,
    DenseModel,
    ModelError,
    megatron_flags,
)

_MODELS = {**MODELS, **EXPERT_MODELS}

# Flags without a value that an expansion may hold: --no-<name> leaves one out.
SWITCHES = (
    *("group-query-attention", "swiglu", "disable-bias-linear", "add-qkv-bias", "qk-layernorm"),
    *("use-rope-scaling", "untie-embeddings-and-output-weights"),
)
# A size of the vocabulary that the user gives takes the model's padded size with it.
_VOCABULARY_FLAGS = ("--vocab-size", "--padded-vocab-size", "--make-vocab-size-divisible-by")


def add_qwen_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--qwen-model`` and the switches' opposites (an ``extra_args_provider``)."""
    group = parser.add_argument_group("qwen")
    group.add_argument(
        "--qwen-model",
        metavar="MODEL",
        help=f"One of {', '.join(_MODELS)} (a qwen in front may be), or a folder with a Hugging Face "
        "config.json. Expands to Megatron's flags, each of which can be overridden by giving it.",
    )
    for switch in SWITCHES:
        group.add_argument(
            f"--no-{switch}",
            action="store_true",
            dest=f"qwen_no_{switch.replace('-', '_')}",
            help=f"Leave --{switch} out of what --qwen-model expands to.",
        )
    return parser


def find_model(name: str) -> DenseModel:
    """The model of a ``--qwen-model`` value: a name of the table, or a Hugging Face folder.

    Raises: ModelError: neither.
    """
    if name not in _MODELS and Path(name).is_dir():
        return model_from_config(read_config(name))
    if (known := name.removeprefix("qwen")) in _MODELS:
        return _MODELS[known]
    raise ModelError(
        f"--qwen-model {name} is unknown; choose one of {', '.join(_MODELS)}, or give a folder with a "
        "Hugging Face config.json"
    )


def as_arguments(flags: dict[str, str | None]) -> list[str]:
    """Flags with their values, None for one that takes none, as a command line."""
    return [word for pair in flags.items() for word in pair if word is not None]


def tensor_parallel_size(arguments: list[str]) -> int:
    """What a command line says of it (``--tensor-model-parallel-size 4``, or with an equals sign); else 1."""
    reader = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    reader.add_argument("--tensor-model-parallel-size", type=int, default=1)
    return reader.parse_known_args(arguments)[0].tensor_model_parallel_size


def expand(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Put the flags of ``--qwen-model`` before the user's own.

    A flag that the user gives is left out of the expansion. So is ``--padded-vocab-size`` where the user
    gives ``--vocab-size`` or ``--make-vocab-size-divisible-by``: Megatron then pads as it always does.

    Returns: The whole command line without the program's name, and the part that was added.
    Raises: ModelError: no model, an unknown one, or a switch that the model does not set.
    """
    reader = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    reader.add_argument("--qwen-model")
    known, _ = reader.parse_known_args(arguments)
    if known.qwen_model is None:
        raise ModelError(f"--qwen-model is missing; choose one of {', '.join(_MODELS)}")
    flags = megatron_flags(find_model(known.qwen_model), tensor_parallel_size(arguments))
    given = {argument.split("=", 1)[0] for argument in arguments if argument.startswith("--")}
    for switch in SWITCHES:
        if f"--no-{switch}" not in given:
            continue
        if f"--{switch}" not in flags:
            raise ModelError(
                f"--no-{switch}: --qwen-model {known.qwen_model} does not set --{switch}; drop it"
            )
        del flags[f"--{switch}"]
    if given.intersection(_VOCABULARY_FLAGS):
        flags.pop("--padded-vocab-size", None)
    added = as_arguments({flag: value for flag, value in flags.items() if flag not in given})
    return added + arguments, added
