"""Mistakes of a first run: each is one line with the flags as typed, the numbers, and what to do.

Most are found by Megatron's own assertions (``megatron_checks``), some by ours (``checks``).
"""

import sys

import pytest
from megatron.training import arguments

from megatron.compression import add_arguments
from megatron.compression.errors import InputError, explain
from megatron.compression.frontends.megatron_lm import checks
from tests.distributed.launch import tiny_flags


def line_of(monkeypatch, flags: str, without: str = "", ranks: int = 1) -> str:
    """Return the line that a run of the tiny model ends with.

    Args:
        monkeypatch: sets the command line and the environment.
        flags: flags besides the tiny model's.
        ranks: how many ranks the run has.
        without: a flag of the tiny model to leave out, with its value.
    """
    words = tiny_flags(*flags.split())
    if without:
        index = words.index(without)
        del words[index : index + 2]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    args = arguments.parse_args(add_arguments)
    try:
        arguments.validate_args(args)
        checks.check_numbers(args)
        checks.check_gradients(args)
        arguments.core_transformer_config_from_args(args)
    except (InputError, AssertionError, ValueError, ArithmeticError) as error:
        line = explain(error)
    else:
        pytest.fail(f"{words} was accepted")
    assert line is not None and "\n" not in line
    return line


@pytest.mark.parametrize(
    ("flags", "ranks", "line"),
    [
        (
            "--tensor-model-parallel-size 4",
            2,
            "--tensor-model-parallel-size 4 needs a multiple of 4 ranks, but 2 ranks were "
            "started: torchrun "
            "--nproc-per-node 4, or lower the sizes",
        ),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            1,
            "--tensor-model-parallel-size 2 times --pipeline-model-parallel-size 2 needs a "
            "multiple of 4 "
            "ranks, but 1 rank was started: torchrun --nproc-per-node 4, or lower the sizes",
        ),
        (
            "--global-batch-size 4",
            3,
            "--global-batch-size 4 is not a multiple of --micro-batch-size 2 times 3 "
            "data-parallel ranks: "
            "give a multiple of 6",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers 3",
            2,
            "--num-layers 3 is not a multiple of --pipeline-model-parallel-size 2: change one "
            "of them",
        ),
        (
            "--context-parallel-size 2 --seq-length 30",
            2,
            "--seq-length 30 is not a multiple of 2 times --context-parallel-size 2: change "
            "one of them",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 31",
            2,
            "--seq-length 31 is not a multiple of --tensor-model-parallel-size 2, over which "
            "--sequence-parallel splits it: change one of them",
        ),
        (
            "--tensor-model-parallel-size 8",
            8,
            "--num-attention-heads (4) must be a multiple of --tensor-model-parallel-size (8).",
        ),
    ],
)
def test_a_size_that_the_ranks_cannot_hold(monkeypatch, flags, ranks, line) -> None:
    """Ranks, batches, layers and sequences are named with their numbers."""
    assert line_of(monkeypatch, flags, ranks=ranks) == line


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--hidden-size 100 --num-attention-heads 3",
            "--hidden-size 100 is not a multiple of --num-attention-heads 3: give heads that "
            "divide it, such "
            "as 2, or the size of a head by --kv-channels",
        ),
        (
            "--seq-length 64",
            "--max-position-embeddings (32) must be greater than or equal to --seq-len",
        ),
        ("--min-lr 1", "--min-lr 1.0 must be at most --lr 0.001"),
        ("--fp16 --bf16", "--fp16 and --bf16 exclude each other: drop one"),
        ("--train-samples 100", "--train-iters and --train-samples exclude each other: drop one"),
        ("--micro-batch-size 0", "--micro-batch-size 0 must be above 0"),
        ("--num-attention-heads 0", "--num-attention-heads 0 must be a number >= 1"),
        ("--num-layers 0", "--num-layers 0 must be a number >= 1"),
        ("--attention-dropout 2", "--attention-dropout 2 must be a share from 0 to below 1"),
        (
            "--log-memory-interval 3 --log-interval 2",
            "--log-memory-interval 3 must be a multiple of --log-interval 2",
        ),
        (
            "--group-query-attention --num-query-groups 3",
            "--num-query-groups 3 does not divide --num-attention-heads 4: give a divisor",
        ),
        (
            "--num-experts 4 --moe-router-topk 8",
            "--moe-router-topk 8 is more than --num-experts 4: lower it",
        ),
        (
            "--num-experts 4 --expert-model-parallel-size 3",
            "--num-experts 4 is not a multiple of --expert-model-parallel-size 3: change one "
            "of them",
        ),
    ],
)
def test_a_number_that_does_not_fit(monkeypatch, flags, line) -> None:
    """Megatron's own errors have an expression, no numbers, or come once the model is built."""
    assert line_of(monkeypatch, flags).startswith(line)


@pytest.mark.parametrize(
    ("flags", "without", "line"),
    [
        (
            "--save /tmp/checkpoints",
            "",
            "--save needs --save-interval, the iterations between checkpoints, such as "
            "--save-interval 1000: "
            "give it, or drop --save",
        ),
        ("", "--lr", "--lr is missing: give the learning rate, such as --lr 1e-4"),
        ("", "--train-iters", "--train-iters is missing: give the number of iterations to train"),
        ("", "--num-layers", "--num-layers is missing: give it"),
        ("", "--hidden-size", "--hidden-size is missing: give it"),
        ("", "--seq-length", "--seq-length is missing: give it"),
        ("", "--micro-batch-size", "--micro-batch-size is missing: give it"),
        (
            "--tp-comm-overlap",
            "",
            "--tp-comm-overlap needs --sequence-parallel: add it, or drop --tp-comm-overlap",
        ),
        (
            "--expert-model-parallel-size 2",
            "",
            "--expert-model-parallel-size needs a mixture of experts: add --num-experts N, or "
            "drop it",
        ),
        (
            "--overlap-param-gather",
            "",
            "--overlap-param-gather only supported with distributed optimizer, megatron fsdp, "
            "or dist_muon: "
            "add --use-distributed-optimizer, or drop it",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_reason(monkeypatch, flags, without, line) -> None:
    """The flag that needs it, where another one does."""
    assert line_of(monkeypatch, flags, without) == line


def test_gradients_that_megatron_does_not_divide_are_refused(monkeypatch) -> None:
    """FSDP2 leaves them whole: their norm would be the number of tokens times too large."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    flags = (
        "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights"
    )
    line = (
        "--calculate-per-token-loss does not work with --use-torch-fsdp2: this megatron-core "
        "does not"
    )
    assert line_of(monkeypatch, f"{flags} --calculate-per-token-loss").startswith(line)
