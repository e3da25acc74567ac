"""Megatron's own command line in pretrain_gpt.py: its flags beside ours, one-line refusals.

That launch scripts of Megatron's users parse: tests/distributed/test_launch_scripts.py.
"""

import argparse
import sys

import pytest
import torch
from megatron.training.arguments import core_transformer_config_from_args, parse_args

from megatron.compression.errors import InputError
from megatron.compression.frontends.megatron_lm import enable, loop
from megatron.compression.frontends.megatron_lm.enable import add_arguments


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
    """`-m megatron.compression` is refused for a script that adds them itself."""
    with pytest.raises(InputError, match="drop -m megatron"):
        add_arguments(parser)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--DDP-impl local",
            "unrecognized arguments: --DDP-impl local",
        ),  # removed from Megatron-LM
        (
            "--tensor-model-parallel 2",
            "unrecognized arguments: --tensor-model-parallel 2; did you mean",
        ),
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


def test_help_shows_one_value_or_two(parser, capsys):
    """A flag takes at most two; argparse would say that any number can follow."""
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = capsys.readouterr().out
    for flag in ("--tp-compression SPEC [BACKWARD]", "--dp-compression SPEC [WEIGHTS]"):
        assert flag in text
    assert "[BACKWARD ...]" not in text and "[WEIGHTS ...]" not in text


@pytest.mark.parametrize("flags", ["--ep-compression int8:group=64", "--tp-compression int8"])
def test_flex_is_switched_to_alltoall_where_tokens_are_compressed(
    parser, monkeypatch, flags
) -> None:
    """Megatron makes the model's config of the changed arguments, and accepts it."""
    words = """--transformer-impl transformer_engine --expert-model-parallel-size 2
        --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type flex --disable-bias-linear
        --moe-flex-dispatcher-backend ncclep --swiglu --no-rope-fusion --num-layers 2 --hidden-size 64
        --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --train-iters 4 --bf16"""
    args = parser.parse_args(f"{words} {flags}".split())
    args.params_dtype = torch.bfloat16
    args.data_parallel_size = 2
    args.ffn_hidden_size = 256
    args.kv_channels = 16
    monkeypatch.setattr(enable, "LOG", loop.Log())
    monkeypatch.setattr(enable.host, "is_active", lambda: False)
    enable.adapt_arguments(args)
    switched = "--moe-token-dispatcher-type flex (ncclep) is switched to alltoall"
    lines = [line for line in enable.LOG._lines if line.startswith(switched)]
    if "--ep-compression" in flags:
        assert len(lines) == 1
        config = core_transformer_config_from_args(args)
        assert config.moe_token_dispatcher_type == "alltoall"
    else:
        assert not lines
        assert args.moe_token_dispatcher_type == "flex"


@pytest.mark.parametrize(
    "flags", ["--taco", "--tp-compression none int8", "--compression auto", ""]
)
def test_user_buffers_are_off_with_compression(parser, monkeypatch, flags) -> None:
    """They are off in the arguments and in the config of them, with a line; else they stay."""
    words = """--transformer-impl transformer_engine --tensor-model-parallel-size 2
        --sequence-parallel --tp-comm-overlap --tp-comm-overlap-rs-dgrad
        --num-layers 2 --hidden-size 64 --num-attention-heads 4
        --seq-length 64 --micro-batch-size 2 --train-iters 4 --bf16 --no-rope-fusion"""
    args = parser.parse_args(f"{words} {flags}".split())
    args.params_dtype = torch.bfloat16
    args.data_parallel_size = 1
    args.ffn_hidden_size = 256
    args.kv_channels = 16
    monkeypatch.setattr(enable, "LOG", loop.Log())
    monkeypatch.setattr(enable.host, "is_active", lambda: False)
    enable.adapt_arguments(args)
    lines = enable.LOG._lines
    config = core_transformer_config_from_args(args)
    stay_on = not flags
    assert [
        line for line in lines if line.startswith("--tp-comm-overlap is switched off")
    ] == lines[1:]
    assert len(lines[1:]) == (not stay_on)
    for name in (
        "tp_comm_overlap",
        "tp_comm_overlap_rs_dgrad",
        "tp_comm_overlap_ag",
        "tp_comm_bulk_wgrad",
    ):
        assert getattr(args, name) == getattr(config, name) == stay_on, name
