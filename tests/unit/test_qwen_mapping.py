"""Hugging Face tensors to Megatron parameters: pure functions, and safetensors files."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.compression.huggingface.files import INDEX, SINGLE, TensorReader, TensorWriter, finish_index
from megatron.compression.huggingface.mapping import (
    hugging_face_names,
    merge_qkv,
    pad_vocabulary,
    rule_for,
    shard,
    split_qkv,
    unshard,
)
from megatron.compression.huggingface.models import MODELS, DenseModel, ModelError

HEADS, GROUPS, HEAD_DIM, HIDDEN = 6, 2, 4, 10


def tiny(family: str, tied: bool = False) -> DenseModel:
    """Few layers, sizes that divide nothing by accident."""
    return DenseModel(
        family=family,
        layers=3,
        hidden=HIDDEN,
        ffn=14,
        heads=HEADS,
        groups=GROUPS,
        head_dim=HEAD_DIM,
        vocabulary=11,
        tied=tied,
        positions=64,
    )


def projections(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v whose first value of each row says which projection and head it is: 100 + head, 200, 300."""
    result = []
    for base, heads in ((100, HEADS), (200, GROUPS), (300, GROUPS)):
        numbers = torch.arange(heads).repeat_interleave(HEAD_DIM) + base
        result.append(numbers.float().reshape(-1, *[1] * len(shape)).expand(-1, *shape).clone())
    return tuple(result)


def test_qkv_rows_go_by_query_group() -> None:
    merged = merge_qkv(*projections(HIDDEN), GROUPS)
    assert merged.shape == ((HEADS + 2 * GROUPS) * HEAD_DIM, HIDDEN)
    heads = merged[::HEAD_DIM, 0].int().tolist()
    assert heads == [100, 101, 102, 200, 300, 103, 104, 105, 201, 301]


@pytest.mark.parametrize("shape", [(HIDDEN,), ()])
def test_split_qkv_undoes_merge(shape) -> None:
    parts = tuple(torch.randn_like(part) for part in projections(*shape))
    for got, want in zip(split_qkv(merge_qkv(*parts, GROUPS), HEADS, GROUPS), parts, strict=True):
        assert torch.equal(got, want)


def test_a_tensor_parallel_rank_gets_whole_query_groups() -> None:
    merged = merge_qkv(*projections(HIDDEN), GROUPS)
    first, second = (shard(merged, "rows", rank, 2)[::HEAD_DIM, 0].int().tolist() for rank in range(2))
    assert first == [100, 101, 102, 200, 300] and second == [103, 104, 105, 201, 301]


def test_gate_and_up_are_cut_each_for_itself() -> None:
    gate, up = torch.arange(8)[:, None].expand(8, 3), 10 + torch.arange(8)[:, None].expand(8, 3)
    part = shard(torch.cat((gate, up)), "gate and up", 1, 4)
    assert part[:, 0].tolist() == [2, 3, 12, 13]


@pytest.mark.parametrize("partition", ["replicated", "rows", "vocabulary", "gate and up", "columns"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_unshard_undoes_shard(partition, world_size) -> None:
    full = torch.randn(16, 8)
    parts = [shard(full, partition, rank, world_size) for rank in range(world_size)]
    assert torch.equal(unshard(parts, partition), full)
    if partition != "replicated":
        assert parts[0].numel() * world_size == full.numel()


def test_vocabulary_padding_is_zeros_at_the_end() -> None:
    table = torch.randn(11, HIDDEN)
    padded = pad_vocabulary(table, 16)
    assert torch.equal(padded[:11], table) and (padded[11:] == 0).all() and padded.shape == (16, HIDDEN)
    assert torch.equal(rule_for("output_layer.weight", tiny("qwen2")).split(padded)[0], table)
    with pytest.raises(ModelError, match="--padded-vocab-size only 8"):
        pad_vocabulary(table, 8)


# Parameters of a GPT model of our layers, for one layer.
PARAMETERS = [
    "embedding.word_embeddings.weight",
    "decoder.layers.2.input_layernorm.weight",
    "decoder.layers.2.self_attention.linear_qkv.weight",
    "decoder.layers.2.self_attention.linear_proj.weight",
    "decoder.layers.2.pre_mlp_layernorm.weight",
    "decoder.layers.2.mlp.linear_fc1.weight",
    "decoder.layers.2.mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
]
EXTRA = {
    "qwen2": ["decoder.layers.2.self_attention.linear_qkv.bias"],
    "qwen3": [
        "decoder.layers.2.self_attention.q_layernorm.weight",
        "decoder.layers.2.self_attention.k_layernorm.weight",
    ],
}


@pytest.mark.parametrize("family", EXTRA)
def test_parameters_cover_every_tensor_once(family) -> None:
    model = tiny(family)
    sources = [source for name in PARAMETERS + EXTRA[family] for source in rule_for(name, model).sources]
    expected = [name for name in hugging_face_names(model) if "layers." not in name or "layers.2." in name]
    assert sorted(sources) == sorted(expected)


@pytest.mark.parametrize("family", EXTRA)
def test_every_rule_undoes_itself(family) -> None:
    model = tiny(family)
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": GROUPS * HEAD_DIM, "v_proj": GROUPS * HEAD_DIM}
    for name in PARAMETERS + EXTRA[family]:
        rule = rule_for(name, model)
        count = [rows.get(source.split(".")[-2], 14 if "proj" in source else 11) for source in rule.sources]
        sources = [torch.randn(n, HIDDEN) if "weight" in name else torch.randn(n) for n in count]
        for got, want in zip(rule.split(rule.merge(*sources)), sources, strict=True):
            assert torch.equal(got, want)


def test_tied_embeddings_are_the_output_layers_source() -> None:
    assert rule_for("output_layer.weight", tiny("qwen3", tied=True)).sources == ("model.embed_tokens.weight",)
    assert rule_for("output_layer.weight", tiny("qwen3")).sources == ("lm_head.weight",)


def test_transformer_engines_names_of_the_norms_are_known() -> None:
    for ours, theirs in (
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ):
        rules = [rule_for(f"decoder.layers.1.{name}", tiny("qwen2")).sources for name in (ours, theirs)]
        assert rules[0] == rules[1]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "decoder.layers.0.self_attention.linear_qkv.bias"),
        ("qwen2", "decoder.layers.0.self_attention.q_layernorm.weight"),
        ("qwen2", "embedding.position_embeddings.weight"),
        ("qwen2", "decoder.layers.0.mlp.linear_fc1.bias"),
    ],
)
def test_parameters_that_a_qwen_lacks_are_named(family, name) -> None:
    with pytest.raises(ModelError, match=name):
        rule_for(name, tiny(family))


def test_heads_must_be_a_multiple_of_groups() -> None:
    with pytest.raises(ModelError, match="num_attention_heads 28"):
        dataclasses.replace(MODELS["2.5-7b"], groups=3)


def tensors() -> dict[str, torch.Tensor]:
    """A few of different dtypes and shapes, views among them."""
    base = torch.randn(6, 8)
    return {"a": base, "b": base.t()[:3], "c": base[1:3].bfloat16(), "d": torch.randn(3, dtype=torch.float16)}


@pytest.mark.parametrize(("file_bytes", "files"), [(10**9, 1), (200, 2)])
def test_files_round_trip(file_bytes, files, tmp_path) -> None:
    writer = TensorWriter(tmp_path, file_bytes=file_bytes)
    wanted = tensors()
    for name, tensor in wanted.items():
        writer.add(name, tensor)
    finish_index(tmp_path, writer.close())
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    assert (tmp_path / (SINGLE if files == 1 else INDEX)).is_file()
    reader = TensorReader(tmp_path)
    assert reader.names() == set(wanted)
    for name, tensor in wanted.items():
        assert reader.read(name).dtype == tensor.dtype and torch.equal(reader.read(name), tensor)


def test_files_of_two_writers_share_an_index(tmp_path) -> None:
    wanted = tensors()
    written = []
    for number, names in enumerate((("a", "b"), ("c", "d"))):
        writer = TensorWriter(tmp_path, number)
        for name in names:
            writer.add(name, wanted[name])
        written += writer.close()
    finish_index(tmp_path, written)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    assert set(load_file(tmp_path / index["weight_map"]["c"])) == {"c", "d"}
    for name, tensor in wanted.items():
        got = TensorReader(tmp_path).read(name)
        assert got.dtype == tensor.dtype and torch.equal(got, tensor)


def test_missing_files_and_tensors_are_named(tmp_path) -> None:
    with pytest.raises(ModelError, match=SINGLE):
        TensorReader(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match="no tensor model"):
        TensorReader(tmp_path).read("model.norm.weight")
