"""examples/paper: published settings as Megatron reads them, variants, and TINY runs that train."""

import re
import subprocess

import pytest

from tests.distributed.spawn import spawn
from tests.distributed.test_examples import DATA, command_line, validate

# {(script, MODEL): (parameters, (TP, PP, DP), iterations,
#   (global batch, sequence, learning rate, least learning rate, iterations of its decay))}
RUNS = {
    ("taco", "gpt-350m"): (354.9e6, (4, 1, 2), 20000, (256, 2048, 3e-4, 3e-5, 70000)),
    ("taco", "qwen2.5-7b"): (7.616e9, (2, 2, 2), 100, (64, 512, 3e-4, 3e-5, 100)),
    ("taco", "qwen3-0.6b"): (0.596e9, (2, 2, 2), 200, (64, 512, 1e-5, 1e-5, 200)),
    ("sdp4bit", "125m"): (125e6, (1, 1, 8), 80000, (256, 2048, 6e-4, 6e-5, 70000)),
    ("sdp4bit", "350m"): (354.9e6, (1, 1, 8), 80000, (256, 2048, 3e-4, 3e-5, 70000)),
    ("sdp4bit", "1.3b"): (1.316e9, (1, 1, 8), 80000, (256, 2048, 2e-4, 2e-5, 70000)),
    ("sdp4bit", "2.7b"): (2.65e9, (1, 1, 8), 80000, (256, 2048, 1.6e-4, 1.6e-5, 70000)),
    ("sdp4bit", "6.7b"): (6.66e9, (1, 1, 8), 80000, (256, 2048, 1.2e-4, 1.2e-5, 70000)),
    ("tah_quant", "gpt2-xl"): (1.558e9, (1, 8, 1), 724, (32, 1024, 5e-6, 5e-6, 724)),
    ("tah_quant", "qwen2.5-3b"): (3.086e9, (1, 4, 1), 724, (32, 1024, 5e-6, 5e-6, 724)),
    ("tagc", "gpt2"): (124e6, (1, 1, 2), 20000, (240, 512, 6e-4, 6e-5, 600000)),
    ("caat_net", "130m"): (134e6, (8, 1, 1), 20000, (256, 2048, 6e-4, 6e-5, 20000)),
    ("caat_net", "1b"): (1.345e9, (8, 1, 1), 20000, (512, 2048, 3e-4, 3e-5, 20000)),
    ("caat_net", "7b"): (6.738e9, (8, 1, 1), 20000, (1024, 4096, 3e-4, 3e-5, 20000)),
}
NONE = ["none"] * 4
TACO = "taco:outliers=off"
E5M2 = "taco:format=fp8-e5m2,group=256,outliers=off"
WEIGHTS = "sdp4bit:intra=4,group=2048,hadamard=off"
# {(script, MODEL, VARIANT or the default): codecs of tensor parallelism, pipeline parallelism,
#   gradients, weights}
VARIANTS = {
    ("taco", "gpt-350m"): [TACO, *NONE[1:]],
    ("taco", "qwen3-0.6b"): [TACO, TACO, "none", "none"],
    ("sdp4bit", "125m"): ["none", "none", "sdp4bit", WEIGHTS],
    ("tah_quant", "gpt2-xl"): ["none", "tah-quant", "none", "none"],
    ("tagc", "gpt2"): ["none", "none", "tagc:wire=sketch", "none"],
    ("taco", "gpt-350m", "none"): NONE,
    ("taco", "gpt-350m", "e5m2"): [E5M2, *NONE[1:]],
    ("taco", "gpt-350m", "per-tensor"): ["examples.paper.per_tensor_fp8:PerTensorFp8", *NONE[1:]],
    ("taco", "qwen2.5-7b", "3d"): [TACO, "tah-quant", "sdp4bit", WEIGHTS],
    ("sdp4bit", "125m", "tlq"): ["none", "none", "sdp4bit:hadamard=off", "none"],
    ("tah_quant", "gpt2-xl", "tile"): ["none", "tah-quant:allocation=tile", "none", "none"],
    ("tagc", "gpt2", "all"): ["none", "none", "tagc:wire=sketch,layers=all", "none"],
}


def script(name: str) -> str:
    return f"paper/{name}.sh"


@pytest.fixture(scope="module")
def validated(tmp_path_factory) -> dict:
    """Megatron's arguments of every command line."""
    folder = tmp_path_factory.mktemp("validated")
    lines = {key: command_line(folder, script(key[0]), MODEL=key[1], MOCK="1") for key in RUNS}
    for key in (key for key in VARIANTS if len(key) == 3):
        lines[key] = command_line(folder, script(key[0]), MODEL=key[1], VARIANT=key[2], MOCK="1")
    ends = ("--decoder-first-pipeline-num-layers", "3", "--decoder-last-pipeline-num-layers", "3")
    eight = {"MODEL": "qwen2.5-3b", "PP": "8", "GPUS_PER_NODE": "8", "MOCK": "1"}
    lines["eight stages"] = command_line(folder, script("tah_quant"), *ends, **eight)
    lines["ordinary"] = command_line(folder, script("caat_net"), FRACTION="1", MOCK="1")
    return spawn(validate, 1, lines)[0]


@pytest.mark.parametrize("key", RUNS, ids="-".join)
def test_published_settings(validated, key):
    parameters, layout, iterations, schedule = RUNS[key]
    run = validated[key]
    assert run["parameters"] == pytest.approx(parameters, rel=0.01)
    assert (run["tp"], run["pp"], run["dp"]) == layout
    assert (run["train_iters"], run["schedule"]) == (iterations, schedule)
    assert run["evaluation"] == (100, 10)
    assert run["fp32"] == (key[0] == "tah_quant")
    assert run["fraction"] == (0.5 if key[0] == "caat_net" else 1.0)


@pytest.mark.parametrize("key", VARIANTS, ids="-".join)
def test_a_variant_has_its_codecs(validated, key):
    assert validated[key]["specs"] == VARIANTS[key]


def test_the_paper_compresses_every_message_of_qwen3_alone(validated):
    assert validated["taco", "qwen3-0.6b"]["least_mb"] == 0
    assert validated["taco", "gpt-350m"]["least_mb"] == 8


def test_a_fraction_of_one_is_an_ordinary_model(validated):
    assert validated["ordinary"]["fraction"] == 1


def test_36_layers_fit_on_eight_stages(validated):
    eight = validated["eight stages"]
    assert (eight["pp"], eight["dp"], eight["layers"]) == (8, 1, 36)


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("taco", {"MODEL": "8b", **DATA}, "error: MODEL=8b is unknown; use gpt-350m"),
        (
            "sdp4bit",
            {"VARIANT": "half", "MOCK": "1"},
            "error: VARIANT=half is unknown; use all, weights",
        ),
        (
            "taco",
            {"PRECISION": "fp64", **DATA},
            "error: PRECISION=fp64 is unknown; use bf16, fp16 or fp32",
        ),
        (
            "taco",
            {"DATA_PATH": "x", "TINY": "1"},
            "error: TOKENIZER_MODEL is not set: give the tokenizer",
        ),
        (
            "taco",
            {"MODEL": "qwen2.5-7b", **DATA},
            "error: HF_DIR is not set: give the Hugging Face folder",
        ),
        ("tah_quant", DATA, "error: PRETRAINED is not set: give a Megatron checkpoint"),
    ],
)
def test_unknown_names_and_runs_without_their_weights_are_refused(
    tmp_path, name, variables, message
):
    with pytest.raises(subprocess.CalledProcessError) as failure:
        command_line(tmp_path, script(name), **variables)
    assert failure.value.returncode == 2 and message in failure.value.stderr


def test_runs_that_differ_keep_checkpoints_of_their_own(tmp_path) -> None:
    """One that found another's would go on from there, and train nothing."""
    int8 = "--tp-compression int8 --compression-min-mb 0"
    runs = [
        ("caat_net", {}),
        ("caat_net", {"COMPRESSION": int8}),
        ("taco", {}),
        ("taco", {"COMPRESSION": int8}),
        ("taco", {"VARIANT": "none"}),
        ("taco", {"VARIANT": "none", "TP": "2", "PP": "2"}),
        ("tah_quant", {"VARIANT": "none"}),
        ("tah_quant", {"VARIANT": "none", "PRECISION": "bf16"}),
    ]
    folders = []
    for name, variables in runs:
        words = command_line(tmp_path, script(name), **DATA, PRETRAINED="gpt2", **variables)
        folders.append(words[words.index("--save") + 1])
    assert len(set(folders)) == len(runs)
    for folder in folders:
        assert re.fullmatch(r"checkpoints/[\w.,=-]+", folder), "a name without spaces"
