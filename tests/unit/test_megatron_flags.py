"""Every flag that Megatron's examples, its GPT CI and Qwen launch scripts use parses in pretrain_gpt.py.

tests/data/megatron_flags_used.tsv counts them: how many of 41 Megatron examples, 15 Qwen scripts and 205 CI
cases use each, with the type, choices and default that its users rely on.
"""

import argparse
import csv
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.enums import AttnBackend
from megatron.training.arguments import parse_args

from megatron.compression.errors import InputError
from megatron.compression.setup import add_arguments

TABLE = Path(__file__).parents[1] / "data" / "megatron_flags_used.tsv"

# Flags whose value is not a plain number, string or choice: (command-line words, parsed value).
SPECIAL_VALUES: dict[str, tuple[list[str], Any]] = {
    "--transformer-impl": (["transformer_engine"], "transformer_engine"),  # local is our default
    "--attention-backend": (["unfused"], AttnBackend.unfused),
    "--no-rope-freq": (["([0]*3+[1]*1)*2"], [0, 0, 0, 1, 0, 0, 0, 1]),
    "--tokenizer-type": (["HuggingFaceTokenizer"], "HuggingFaceTokenizer"),
    "--window-attn-skip-freq": (["4"], 4),
    "--window-size": (["(127,0)"], (127, 0)),
}

# Flags that set an attribute of another name.
DESTINATIONS = {
    "--apply-layernorm-1p": "layernorm_zero_centered_gamma",
    "--fp8-format": "fp8",
    "--norm-epsilon": "layernorm_epsilon",
    "--use-mcore-models": "deprecated_use_mcore_models",
    "--use-nccl-ub": "nccl_ub",
}

# Flags seen in scripts of this kind that megatron-core 0.19.2 does not define, so neither do we.
REFUSED = {
    "--dataset": "only Pai-Megatron-Patch; use --data-path or --train-data-path",
    "--extra-vocab-size": "only Pai-Megatron-Patch; use --padded-vocab-size",
    "--max-padding-length": "only Pai-Megatron-Patch, for its fine-tuning data; sequences are packed here",
    "--patch-tokenizer-type": "only Pai-Megatron-Patch; use --tokenizer-type HuggingFaceTokenizer",
    "--train-mode": "only Pai-Megatron-Patch; pretrain_gpt.py pretrains, --sft fine-tunes",
    "--use-legacy-models": "removed from Megatron-LM together with megatron.legacy",
    "--DDP-impl": "removed from Megatron-LM: there is one implementation",
    "--data-impl": "removed from Megatron-LM: indexed datasets are always memory-mapped",
    "--fp8-hybrid": "replaced in Megatron-LM by --fp8-format hybrid",
    "--use-custom-fsdp": "renamed in Megatron-LM to --use-megatron-fsdp",
    "--no-async-tensor-model-parallel-allreduce": "removed from Megatron-LM",
}


# Defaults of ours in place of Megatron's: what runs without Transformer Engine, and its old tokenizer.
OUR_DEFAULTS = {"--tokenizer-type": "'GPT2BPETokenizer'", "--transformer-impl": "'local'"}


def flag_rows() -> list[dict[str, str]]:
    with TABLE.open(newline="") as stream:
        return list(csv.DictReader(stream, delimiter="\t"))


ROWS = {row["flag"]: row for row in flag_rows()}
PARSED = {flag: row for flag, row in ROWS.items() if flag != "--help"}  # --help ends the program


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """The parser that megatron.training.arguments.parse_args builds with our flags in it."""
    built = []

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        built.append(add_arguments(parser))
        return parser

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain_gpt.py"])
        parse_args(provider)
    return built[0]


def destination(row: dict[str, str]) -> str:
    """The attribute of the namespace: what `dest=` says in the table, else the flag's own name."""
    named = re.search(r"dest=(\w+)", row["type/choices"])
    own = row["flag"].removeprefix("--").replace("-", "_")
    return named[1] if named else DESTINATIONS.get(row["flag"], own)


def value_for(row: dict[str, str]) -> tuple[list[str], Any]:
    """Words for the command line and the value they have to become; a choice differs from the default."""
    flag, kind = row["flag"], row["type/choices"]
    if flag in SPECIAL_VALUES:
        return SPECIAL_VALUES[flag]
    if kind.startswith("store_true"):
        return [], True
    if kind.startswith("store_false"):
        return [], False
    if kind.startswith(("(", "[")):
        choices = re.findall(r"'([^']*)'|(\d+)", kind)
        values = [text or int(number) for text, number in choices]
        value = next(value for value in values if repr(value) != row["default"])
        return [str(value)], value
    base, _, count = kind.partition(" nargs=")
    values = {"int": [7, 11], "float": [0.375, 2e-05], "str": ["first", "second"], "None": ["a/b", "c"]}[base]
    if count in ("+", "*"):
        return [str(value) for value in values], values
    return [str(values[0])], values[0]


def test_the_table_is_whole():
    assert len(ROWS) == 192
    assert {row["defined_in"] for row in ROWS.values()} == {"wheel0.19.2"}
    assert not set(REFUSED) & set(ROWS)


@pytest.mark.parametrize("flag", PARSED)
def test_flag_reaches_its_destination(parser, flag):
    row = PARSED[flag]
    words, expected = value_for(row)
    unset = parser.parse_args([])
    parsed = parser.parse_args([flag, *words])
    name = destination(row)
    default = OUR_DEFAULTS.get(row["flag"], row["default"])
    assert repr(getattr(unset, name)) == default, "the default that scripts rely on has moved"
    value = getattr(parsed, name)
    assert value == expected and type(value) is type(expected)
    assert value != getattr(unset, name)
    others = {key for key in vars(parsed) if getattr(parsed, key) != getattr(unset, key)}
    assert others == {name}, "one flag must set one destination"


def test_all_flags_in_one_command_line(monkeypatch):
    words = [word for flag, row in PARSED.items() for word in (flag, *value_for(row)[0])]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words, "--taco"])
    args = parse_args(add_arguments)
    for row in PARSED.values():
        assert getattr(args, destination(row)) == value_for(row)[1], row["flag"]
    assert args.taco == "", "with no settings of its own"


@pytest.mark.parametrize("flag", REFUSED)
def test_unknown_flag_is_refused_by_name(parser, flag):
    with pytest.raises(InputError, match=f"unrecognized arguments: {flag} 1"):
        parser.parse_args([flag, "1"])


def test_flags_are_added_once(parser):
    """By `-m megatron.compression` to a script that adds them itself."""
    with pytest.raises(InputError, match="drop -m megatron"):
        add_arguments(parser)


def test_flags_are_not_abbreviated(parser):
    with pytest.raises(InputError, match="unrecognized arguments: --tensor-model-parallel 2; did you mean"):
        parser.parse_args(["--tensor-model-parallel", "2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--normalization", "BatchNorm"], "argument --normalization: invalid choice: 'BatchNorm'"),
        (["--num-layers", "many"], "argument --num-layers: invalid int value: 'many'"),
        (["--lr"], "argument --lr: expected one argument"),
    ],
)
def test_bad_value_names_the_flag(parser, words, message):
    with pytest.raises(InputError, match=message):
        parser.parse_args(words)


def test_help_shows_megatrons_flags_and_ours(parser, capsys):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--tensor-model-parallel-size", "--use-distributed-optimizer", "--taco"):
        assert flag in text
