"""Megatron's own command line in pretrain_gpt.py: its flags beside ours, whole words, one-line refusals.

That launch scripts of Megatron's users parse: tests/distributed/test_launch_scripts.py.
"""

import argparse
import sys

import pytest
from megatron.training.arguments import parse_args

from megatron.compression.errors import InputError
from megatron.compression.setup import add_arguments


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


def test_flags_are_added_once(parser):
    """By `-m megatron.compression` to a script that adds them itself."""
    with pytest.raises(InputError, match="drop -m megatron"):
        add_arguments(parser)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--DDP-impl local", "unrecognized arguments: --DDP-impl local"),  # removed from Megatron-LM
        ("--tensor-model-parallel 2", "unrecognized arguments: --tensor-model-parallel 2; did you mean"),
        ("--normalization BatchNorm", "argument --normalization: invalid choice: 'BatchNorm'"),
        ("--num-layers many", "argument --num-layers: invalid int value: 'many'"),
        ("--lr", "argument --lr: expected one argument"),
    ],
)
def test_bad_words_name_the_flag(parser, words, message):
    with pytest.raises(InputError, match=message):
        parser.parse_args(words.split())


def test_help_shows_megatrons_flags_and_ours(parser, capsys):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--tensor-model-parallel-size", "--use-distributed-optimizer", "--taco"):
        assert flag in text
