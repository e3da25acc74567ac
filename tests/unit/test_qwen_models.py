"""The table of dense models, and `--qwen-model` as Megatron flags."""

import argparse
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import transformers

from megatron import host

host.install()

from megatron.training.arguments import add_megatron_arguments  # noqa: E402

from megatron.compression.huggingface import session  # noqa: E402
from megatron.compression.huggingface.config import config_from_model, model_from_config  # noqa: E402
from megatron.compression.huggingface.flags import SWITCHES, add_qwen_arguments, expand, find_model  # noqa: E402
from megatron.compression.huggingface.mapping import hugging_face_names  # noqa: E402
from megatron.compression.huggingface.models import (  # noqa: E402
    MODELS,
    ModelError,
    megatron_flags,
    model_from_args,
    padded_vocabulary,
)
from megatron.compression.huggingface.session import newest_iteration  # noqa: E402

# Parameters of the published weights, tied embeddings counted once.
PUBLISHED_PARAMETERS = {
    "2.5-0.5b": 494_032_768,
    "2.5-1.5b": 1_543_714_304,
    "2.5-3b": 3_085_938_688,
    "2.5-7b": 7_615_616_512,
    "2.5-14b": 14_770_033_664,
    "2.5-32b": 32_763_876_352,
    "2.5-72b": 72_706_203_648,
    "3-0.6b": 596_049_920,
    "3-1.7b": 1_720_574_976,
    "3-4b": 4_022_468_096,
    "3-8b": 8_190_735_360,
    "3-14b": 14_768_307_200,
    "3-32b": 32_762_123_264,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Megatron's parser with ours added."""
    return add_qwen_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


# In a process of its own: `megatron.host` replaces the tensor factories that the meta device needs.
COUNT = """
import json, sys, torch, transformers
configs = json.load(sys.stdin)
found = {}
for name, config in configs.items():
    shapes = []
    for layers in (2, 3):
        kind = {"qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "llama": "LlamaConfig"}[config["model_type"]]
        config["num_hidden_layers"] = layers
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**config))
        shapes.append({name: parameter.numel() for name, parameter in model.named_parameters()})
    found[name] = shapes
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def hugging_face_parameters() -> dict[str, list[dict[str, int]]]:
    """For each model, the parameters and their sizes of transformers' own class with 2 and with 3 layers."""
    configs = {name: config_from_model(model, "bfloat16") for name, model in MODELS.items()}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], input=json.dumps(configs), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name, hugging_face_parameters) -> None:
    """Hugging Face's own classes, built from our numbers, have the published number of parameters."""
    two, three = (sum(sizes.values()) for sizes in hugging_face_parameters[name])
    assert two + (MODELS[name].layers - 2) * (three - two) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", MODELS)
def test_tensor_names_are_hugging_faces(name, hugging_face_parameters) -> None:
    for layers, sizes in enumerate(hugging_face_parameters[name], start=2):
        assert set(hugging_face_names(dataclasses.replace(MODELS[name], layers=layers))) == set(sizes)


@pytest.mark.parametrize("name", MODELS)
def test_flags_and_config_describe_the_same_model(name, parser) -> None:
    expanded, _ = expand(["--qwen-model", name])
    assert model_from_args(parser.parse_args(expanded)) == MODELS[name]
    assert model_from_config(config_from_model(MODELS[name], "bfloat16")) == MODELS[name]


def test_transformers_reads_and_writes_the_config(tmp_path) -> None:
    for name in ("2.5-7b", "3-4b", "llama-3-8b", "llama-3.1-8b"):
        (tmp_path / "config.json").write_text(json.dumps(config_from_model(MODELS[name], "bfloat16")))
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        assert config.rope_parameters["rope_theta"] == MODELS[name].rotary_base
        assert config.dtype == torch.bfloat16
        config.save_pretrained(tmp_path)
        assert find_model(str(tmp_path)) == MODELS[name]


def test_every_tensor_parallel_size_in_use_divides_the_vocabularies() -> None:
    for model in MODELS.values():
        for tensor_parallel in (1, 2, 4, 8, 16):
            assert padded_vocabulary(model, tensor_parallel) == model.vocabulary
    assert padded_vocabulary(MODELS["3-8b"], 3) % 3 == 0


def test_the_users_flags_win(parser) -> None:
    given = ["--qwen-model", "3-8b", "--num-layers", "4", "--hidden-dropout=0.1", "--kv-channels", "64"]
    expanded, added = expand(given)
    assert not {"--num-layers", "--hidden-dropout", "--kv-channels"} & set(added)
    assert expanded == added + given
    args = parser.parse_args(expanded)
    assert (args.num_layers, args.hidden_dropout, args.kv_channels) == (4, 0.1, 64)
    assert (args.hidden_size, args.qk_layernorm, args.add_qkv_bias) == (4096, True, False)


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_can_be_left_out(switch, parser) -> None:
    name = {"qk-layernorm": "3-8b", "use-rope-scaling": "llama-3.1-8b"}.get(switch, "2.5-7b")
    with_it, _ = expand(["--qwen-model", name])
    without, added = expand(["--qwen-model", name, f"--no-{switch}"])
    assert f"--{switch}" in with_it and f"--{switch}" not in added
    destination = parser._option_string_actions[f"--{switch}"].dest
    values = [getattr(parser.parse_args(arguments), destination) for arguments in (with_it, without)]
    assert values[0] != values[1]


def test_a_vocabulary_of_the_users_own_is_padded_by_megatron() -> None:
    for flag in ("--vocab-size", "--padded-vocab-size", "--make-vocab-size-divisible-by"):
        _, added = expand(["--qwen-model", "2.5-7b", flag, "512"])
        assert "--padded-vocab-size" not in added
    _, added = expand(["--qwen-model", "2.5-7b", "--tensor-model-parallel-size", "5"])
    assert added[added.index("--padded-vocab-size") + 1] == "152065"
    assert added[added.index("--vocab-size") + 1] == "152064"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-layers", "2"], "--qwen-model is missing"),
        (["--qwen-model", "2.5-8b"], "--qwen-model 2.5-8b is unknown; choose one of 2.5-0.5b"),
        (["--qwen-model", "2.5-7b", "--no-qk-layernorm"], "--no-qk-layernorm.*does not set"),
        (["--qwen-model", "."], "config.json is missing"),
    ],
)
def test_errors_name_the_flag(arguments, message) -> None:
    with pytest.raises(ModelError, match=message):
        expand(arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type 'llama3'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type 'yarn'"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_theta": 1e6 + 0.5}, "rope_theta"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ],
)
def test_configs_that_are_not_covered_are_refused(change, message) -> None:
    config = config_from_model(MODELS["2.5-7b"], "bfloat16") | change
    with pytest.raises(ModelError, match=message):
        model_from_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--normalization", "LayerNorm"], "--normalization RMSNorm"),
        (["--add-qkv-bias"], "--add-qkv-bias .*, --qk-layernorm"),
        (["--use-rope-scaling"], "--use-rope-scaling"),
        (["--rotary-percent", "0.5"], "--rotary-percent"),
        (["--apply-layernorm-1p"], "--apply-layernorm-1p"),
    ],
)
def test_arguments_of_another_model_are_refused(change, message, parser) -> None:
    arguments = expand(["--qwen-model", "3-8b", *change])[0]
    with pytest.raises(ModelError, match=message):
        model_from_args(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("sizes", "vocabulary"),
    [((512, 640), 512), ((151936, 151680), 151680), ((None, 640), 640), ((512, None), 512)],
)
def test_vocabulary_of_trained_arguments(sizes, vocabulary, parser) -> None:
    args = parser.parse_args(expand(["--qwen-model", "3-8b"])[0])
    args.vocab_size, args.padded_vocab_size = sizes
    assert model_from_args(args).vocabulary == vocabulary


def test_a_caat_net_is_no_qwen_model(parser) -> None:
    """It is another function of the same weights: no export to a format that cannot say so."""
    args = parser.parse_args(expand(["--qwen-model", "3-8b"])[0])
    args.caat_net_sync_fraction = 0.5
    with pytest.raises(ModelError, match="--caat-net-sync-fraction"):
        model_from_args(args)


def test_newest_iteration_of_a_checkpoint(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"there is no Megatron checkpoint"):
        newest_iteration(str(tmp_path))
    for written, folder in (("release", "release"), ("120", "iter_0000120")):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(f"{written}\n")
        (tmp_path / folder).mkdir()
        with pytest.raises(ModelError, match=r"save with --ckpt-format torch_dist"):
            newest_iteration(str(tmp_path))
        (tmp_path / folder / "metadata.json").write_text("{}")
        assert newest_iteration(str(tmp_path)) == tmp_path / folder


@pytest.mark.parametrize("given", [["--tensor-model-parallel-size", "3"], ["--tensor-model-parallel-size=3"]])
def test_a_conversion_pads_for_its_tensor_parallel_size(given) -> None:
    """Three ranks do not divide the vocabulary, however the size is written."""
    flags = session._command_line(MODELS["2.5-0.5b"], torch.bfloat16, given)
    rows = int(flags[flags.index("--padded-vocab-size") + 1])
    assert rows % 3 == 0 and 0 < rows - MODELS["2.5-0.5b"].vocabulary < 3


def test_flags_are_strings_with_or_without_value() -> None:
    flags = megatron_flags(MODELS["2.5-7b"])
    assert flags["--num-layers"] == "28" and flags["--swiglu"] is None and "--kv-channels" not in flags
    assert megatron_flags(MODELS["3-8b"])["--kv-channels"] == "128"
