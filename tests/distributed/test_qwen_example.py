"""examples/qwen/pretrain_qwen_taco.sh: the models it names, and a tiny run with compression."""

import argparse
import math
import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron import host

host.install()

from megatron.training.arguments import add_megatron_arguments  # noqa: E402

from megatron.compression.huggingface.models import MODELS, add_qwen_arguments, expand  # noqa: E402
from megatron.compression.setup import add_arguments  # noqa: E402
from tests.distributed.launch import environment, start_as_torchrun  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "qwen" / "pretrain_qwen_taco.sh"


def run_script(path_first: str, *arguments: str, **variables: str) -> str:
    """What the script prints, with a folder put before all others on PATH."""
    path = {"PATH": f"{path_first}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(SCRIPT), *arguments],
        cwd=ROOT,
        env=environment(**path, **variables),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def echo_torchrun(tmp_path) -> str:
    """A folder with a torchrun that prints its arguments, one a line."""
    fake = tmp_path / "torchrun"
    fake.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    fake.chmod(0o755)
    return str(tmp_path)


def test_every_model_has_a_full_size_command_line(echo_torchrun) -> None:
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser = add_qwen_arguments(add_arguments(parser))
    for name in MODELS:
        words = run_script(echo_torchrun, "--lr", "2e-4", QWEN_MODEL=name).splitlines()
        program = words.index(str(ROOT / "pretrain_qwen.py"))
        args = parser.parse_args(expand(words[program + 1 :])[0])
        assert (args.num_layers, args.hidden_size) == (MODELS[name].layers, MODELS[name].hidden)
        assert args.taco is not None and args.sequence_parallel and args.tensor_model_parallel_size == 4
        assert args.lr == 2e-4, "what follows the script's name wins"
        assert args.save == args.load == f"checkpoints/qwen{name}"


def test_compression_is_a_variable(echo_torchrun) -> None:
    """None of it, all three dimensions, and the default of the tiny size."""
    for variables, words in (
        ({"COMPRESSION": ""}, set()),
        ({"COMPRESSION": "--compression taco-paper"}, {"--compression", "taco-paper"}),
        ({"TINY": "1"}, {"--taco", "--compression-min-mb"}),
    ):
        printed = run_script(echo_torchrun, **variables).splitlines()
        assert {word for word in printed if "compression" in word or "taco" in word[:6]} == words


def test_the_layers_are_a_variable(echo_torchrun) -> None:
    """As in the other scripts: torch-native layers, or Transformer Engine's."""
    for variables, implementation in (({}, "local"), ({"USE_TE": "1"}, "transformer_engine")):
        printed = run_script(echo_torchrun, **variables).splitlines()
        assert printed[printed.index("--transformer-impl") + 1] == implementation
        assert "--sequence-parallel" in printed


def test_a_tiny_run_compresses_and_learns(echo_torchrun) -> None:
    tiny = {"TINY": "1", "QWEN_MODEL": "3-8b", "TRAIN_ITERS": "12"}
    words = run_script(echo_torchrun, "--seed", "7", "--num-workers", "0", **tiny).splitlines()
    run = start_as_torchrun(words).finish(timeout=240)
    assert run.returncode == 0, run.output[-3000:]
    log = run.output
    assert "qwen: --qwen-model adds --group-query-attention" in log
    losses = [float(loss) for loss in re.findall(r"iteration .* lm loss: (\S+)", log)]
    assert len(losses) == 12 and all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 0.3
    ratios = [float(ratio) for ratio in re.findall(r"tensor-parallel ratio: (\S+)", log)]
    assert len(ratios) == 12 and min(ratios) > 1.8
