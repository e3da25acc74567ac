"""Hugging Face models: the table, `--qwen-model` as Megatron flags, tensors of a parameter."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.training.arguments import add_megatron_arguments
from safetensors.torch import save_file

from megatron.compression.errors import InputError
from megatron.compression.huggingface import weights
from megatron.compression.huggingface.models import (
    LLAMA3_ROPE,
    MODELS,
    DenseModel,
    add_qwen_arguments,
    expand,
    find_model,
    megatron_flags,
    model_from_config,
)

REPO = Path(__file__).parents[2]
DENSE = {name: model for name, model in MODELS.items() if not model.experts}

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
}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Megatron's parser with ours added."""
    return add_qwen_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def config_of(model: DenseModel) -> dict:
    """The config.json of a model, as of transformers 4."""
    config = {
        "model_type": model.family,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
    }
    config |= {"num_hidden_layers": model.layers, "num_attention_heads": model.heads}
    config |= {"num_key_value_heads": model.groups, "max_position_embeddings": model.positions}
    config |= {
        "rms_norm_eps": model.norm_epsilon,
        "vocab_size": model.vocabulary,
        "hidden_act": "silu",
    }
    config |= {"rope_theta": model.rotary_base, "tie_word_embeddings": model.tied}
    if model.family != "qwen2":
        config["head_dim"] = model.head_dim
    return config


@pytest.mark.parametrize("name", DENSE)
def test_parameters_are_the_published_ones(name) -> None:
    model = DENSE[name]
    queries = model.heads * model.head_dim
    keys_and_values = 2 * model.groups * model.head_dim
    # Biases of q, k and v; or the norms of q and k.
    more = queries + keys_and_values if model.family == "qwen2" else 2 * model.head_dim
    attention = model.hidden * (2 * queries + keys_and_values)
    mlp = 3 * model.hidden * model.ffn
    norms = 2 * model.hidden
    embeddings = 1 if model.tied else 2
    outside = model.hidden * model.vocabulary * embeddings + model.hidden
    in_layers = model.layers * (attention + mlp + norms + more)
    assert in_layers + outside == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", MODELS)
def test_flags_have_the_sizes_of_the_model(name, parser) -> None:
    model = MODELS[name]
    args = parser.parse_args(expand(["--qwen-model", name])[0])
    assert args.num_layers == model.layers
    assert args.hidden_size == model.hidden
    assert args.ffn_hidden_size == model.ffn
    assert args.num_attention_heads == model.heads
    assert args.num_query_groups == model.groups
    assert (args.kv_channels or model.hidden // model.heads) == model.head_dim


@pytest.mark.parametrize("name", MODELS)
def test_flags_have_the_variant_of_the_model(name, parser) -> None:
    model = MODELS[name]
    args = parser.parse_args(expand(["--qwen-model", name])[0])
    assert args.padded_vocab_size == args.vocab_size == model.vocabulary
    assert args.untie_embeddings_and_output_weights != model.tied
    assert args.add_qkv_bias == (model.family == "qwen2")
    assert args.qk_layernorm == (model.family == "qwen3")
    assert args.num_experts == (model.experts or None)
    assert not args.use_rope_scaling


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if not model.experts])
def test_a_folder_and_a_name_are_the_same_model(name, tmp_path) -> None:
    model = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config_of(model)))
    assert find_model(str(tmp_path)) == model
    assert find_model(f"qwen{name}") == model


def test_the_users_flags_win(parser) -> None:
    typed = "--qwen-model 3-8b --num-layers 4 --hidden-dropout=0.1 --kv-channels 64".split()
    expanded, added = expand(typed)
    assert not {"--num-layers", "--hidden-dropout", "--kv-channels"} & set(added)
    assert expanded == added + typed
    args = parser.parse_args(expanded)
    assert (args.num_layers, args.hidden_dropout, args.kv_channels) == (4, 0.1, 64)
    assert (args.hidden_size, args.qk_layernorm, args.add_qkv_bias) == (4096, True, False)


@pytest.mark.parametrize(
    "flag", ["--vocab-size", "--padded-vocab-size", "--make-vocab-size-divisible-by"]
)
def test_a_vocabulary_of_the_users_is_padded_by_megatron(flag: str) -> None:
    _, added = expand(["--qwen-model", "2.5-7b", flag, "512"])
    assert "--padded-vocab-size" not in added


@pytest.mark.parametrize(
    "words", [["--tensor-model-parallel-size", "5"], ["--tensor-model-parallel-size=5"]]
)
def test_a_published_vocabulary_is_padded_to_the_ranks(words: list[str]) -> None:
    _, added = expand(["--qwen-model", "2.5-7b", *words])
    assert added[added.index("--padded-vocab-size") + 1] == "152065"
    assert added[added.index("--vocab-size") + 1] == "152064"


@pytest.mark.parametrize("name", MODELS)
def test_published_vocabularies_need_no_padding_for_16_ranks(name: str) -> None:
    model = MODELS[name]
    assert megatron_flags(model, 16)["--padded-vocab-size"] == str(model.vocabulary)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-layers", "2"], "--qwen-model is missing"),
        (["--qwen-model", "2.5-8b"], "--qwen-model 2.5-8b is unknown; choose one of 2.5-0.5b"),
    ],
)
def test_errors_name_the_flag(arguments, message) -> None:
    with pytest.raises(InputError, match=message):
        expand(arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type 'llama3'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number"),
        ({"num_attention_heads": None}, "num_attention_heads must be a whole number"),
        (
            {"num_attention_heads": "4"},
            "num_attention_heads must be a whole number from 1 on, not '4'",
        ),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be"),
        ({"hidden_size": 3583}, "hidden_size 3583 must be a multiple of num_attention_heads 28"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number above 0, not inf"),
        ({"rope_theta": float("nan")}, "rope_theta must be"),
        ({"rope_theta": "1e6"}, "rope_theta must be a number above 0, not '1e6'"),
        ({"rope_theta": 1e6 + 0.5}, "rope_theta must be a whole number"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"layer_types": 3}, "layer_types other than full_attention"),
        ({"layer_types": ["sliding_attention"]}, "layer_types other than full_attention"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number"),
    ],
)
def test_configs_that_are_not_covered_are_refused(change, message) -> None:
    config = config_of(MODELS["2.5-7b"]) | change
    with pytest.raises(InputError, match=message):
        model_from_config(config)


@pytest.mark.parametrize(
    "content",
    [b"[]", b"null", b'{"model_type": "qw', b"\xff\xfe", b"[" * 100_000],
    ids=["a list", "null", "cut off", "not UTF-8", "nested too deeply"],
)
def test_a_config_that_cannot_be_read_is_one_line(content: bytes, tmp_path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json .*download it again") as error:
        find_model(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"weight_map": []}', b"{"])
def test_an_index_that_cannot_be_read_is_one_line(content: bytes, tmp_path) -> None:
    model = model_from_config(config_of(MODELS["3-8b"]))
    (tmp_path / weights.INDEX_FILE).write_bytes(content)
    with pytest.raises(InputError, match=r"index\.json cannot be read .*download it again"):
        weights.read(torch.nn.Module(), model, tmp_path)


def test_llama_3_1_is_a_folder() -> None:
    """Its scaling of low frequencies and its base become flags."""
    config = config_of(MODELS["3-8b"]) | {"model_type": "llama", "rope_theta": 5e5}
    config["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0, **LLAMA3_ROPE}
    flags = megatron_flags(model_from_config(config))
    assert (flags["--rope-scaling-factor"], flags["--rotary-base"]) == ("8.0", "500000")
    assert "--use-rope-scaling" in flags and "--qk-layernorm" not in flags


def test_missing_files_and_other_tensors_are_named(tmp_path) -> None:
    model = model_from_config(config_of(MODELS["3-8b"]) | {"model_type": "llama"})
    chunk = torch.nn.Module()
    with pytest.raises(InputError, match=weights.SINGLE_FILE):
        weights.read(chunk, model, tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / weights.SINGLE_FILE)
    with pytest.raises(InputError, match="a llama model differ in tensors: a, lm_head"):
        weights.read(chunk, model, tmp_path)


CONVERSIONS = """
import sys
from pathlib import Path
sys.path.insert(0, "scripts")
import convert_hf
for name in ("unknown iteration", "empty", "cut", "weights of a list"):
    folder = Path(sys.argv[1], name)
    try:
        if name == "weights of a list":
            convert_hf.import_model(folder, "unused", None)
        else:
            convert_hf.dtype_of(convert_hf.newest_iteration(str(folder)))
    except convert_hf.InputError as error:
        print("REFUSED", str(error).replace("\\n", "NEWLINE"))
"""


def test_a_checkpoint_that_cannot_be_exported_is_one_line(tmp_path: Path) -> None:
    """scripts/convert_hf.py runs in a process of its own, since it hides the GPUs."""
    unknown = tmp_path / "unknown iteration"
    unknown.mkdir()
    (unknown / "latest_checkpointed_iteration.txt").write_text("latest\n")
    (tmp_path / "empty").mkdir()
    cut = tmp_path / "cut" / "iter_0000003"
    cut.mkdir(parents=True)
    (cut.parent / "latest_checkpointed_iteration.txt").write_text("3")
    (cut / "metadata.json").write_text('{"sharded_backend": "torch_dist"')
    model = tmp_path / "weights of a list"
    model.mkdir()
    (model / "config.json").write_text('{"dtype": [1]}')
    words = [sys.executable, "-W", "ignore", "-c", CONVERSIONS, str(tmp_path)]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert len(refused) == 4 and "NEWLINE" not in done.stdout
    assert "holds 'latest', which is no iteration" in refused[0]
    assert "no torch_dist checkpoint in iter_0000000; save with" in refused[1]
    assert "its arguments cannot be read" in refused[2]
    assert "weights of [1] are not covered; give --dtype bfloat16, float16, float32" in refused[3]
