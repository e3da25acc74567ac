"""The launch scripts of mixtures of experts: the published models, and TINY runs with compressed tokens."""

import re

import pytest

from tests.distributed.spawn import spawn
from tests.distributed.test_examples import (
    ITERATIONS,
    check_training,
    command_line,
    one_and_thorough,
    train,
    validate,
)

# script -> parameters of the published model; layers; tensor, expert parallelism; experts, those of a token
MODELS = {
    "train_mixtral_8x7b": (46.70e9, 32, 1, 8, (8, 2)),
    "train_qwen3_30b_a3b": (30.53e9, 48, 1, 8, (128, 8)),
    "train_deepseek_v2_lite": (15.71e9, 27, 1, 8, (64, 6)),
}


@pytest.fixture(scope="module")
def validated(tmp_path_factory) -> dict[str, dict]:
    """What Megatron makes of every command line, without our compression."""
    directory = tmp_path_factory.mktemp("validated")
    lines = {}
    for script in MODELS:
        for name, tiny in ((script, "0"), (f"tiny {script}", "1")):
            lines[name] = command_line(directory, f"experts/{script}.sh", TINY=tiny, COMPRESSION="")
    return spawn(validate, 1, lines)[0]


@pytest.mark.parametrize("script", MODELS)
def test_flags_describe_the_published_model(validated, script):
    found = validated[script]
    assert found["parameters"] == pytest.approx(MODELS[script][0], rel=0.003)
    assert tuple(found[key] for key in ("layers", "tp", "ep", "experts")) == MODELS[script][1:]
    tiny = validated[f"tiny {script}"]
    assert tiny["parameters"] < 1e6
    assert tuple(tiny[key] for key in ("layers", "tp", "ep", "dp")) == (2, 1, 2, 2)


def test_tokens_travel_in_8_bits_unless_asked_otherwise(tmp_path):
    for script in MODELS:
        words = command_line(tmp_path, f"experts/{script}.sh")
        assert words[words.index("--ep-compression") + 1] == "int8"
        assert "--ep-compression" not in command_line(tmp_path, f"experts/{script}.sh", COMPRESSION="")
        engine = command_line(tmp_path, f"experts/{script}.sh", USE_TE="1")
        assert {"transformer_engine", "--moe-grouped-gemm"} <= set(
            engine
        ) and "--moe-grouped-gemm" not in words


@pytest.mark.parametrize(["script"], one_and_thorough(*((name,) for name in MODELS)))
def test_a_tiny_run_compresses_and_learns(tmp_path, script):
    output = train(tmp_path, f"experts/{script}.sh")
    check_training(output)
    (last,) = re.findall(
        rf"communication +{ITERATIONS}/ +{ITERATIONS} .*expert-parallel ratio: (\S+)", output
    )
    assert float(last) > 1.7  # rows of 128 values, beside them their probabilities, which stay exact
