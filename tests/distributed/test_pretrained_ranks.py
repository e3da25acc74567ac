"""Three real ranks of a small Llama of SmolLM2's architecture agree with the simulated ones."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.compression.huggingface.models import DenseModel
from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import (
    SEQUENCE,
    VOCABULARY,
    batch,
    build_tiny_gpt,
    run_with,
    start_model_parallel,
)

RANKS = 3
LLAMA = DenseModel(
    family="llama",
    layers=2,
    hidden=72,
    ffn=96,
    heads=9,
    groups=3,
    head_dim=8,
    vocabulary=VOCABULARY,
    tied=True,
    norm_epsilon=1e-5,
    rotary_base=10_000,
    positions=SEQUENCE,
)
MEGATRON = dict(
    hidden_size=LLAMA.hidden,
    ffn_hidden_size=LLAMA.ffn,
    num_attention_heads=LLAMA.heads,
    num_query_groups=LLAMA.groups,
    normalization="RMSNorm",
    layernorm_epsilon=LLAMA.norm_epsilon,
    add_bias_linear=False,
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
)
"""The same model as fields of a ``TransformerConfig``."""
CODECS = ("none", "int8", "int4", "taco", "taco:outliers=off")


class Pass(NamedTuple):
    """What a forward and a backward have given."""

    losses: Tensor
    """Of the tokens, flat."""
    norm: Tensor
    """Gradient of the first layer's first norm, which every tensor-parallel message reaches."""
    projection: Tensor
    """Gradient of the first layer's attention projection [h, n], this rank's columns."""


def simulated_model():
    """Return the simulation's model in fp32, with weights that give losses of some size."""
    from scripts.accuracy.model import GPT, ModelConfig

    config = ModelConfig(
        vocabulary=VOCABULARY,
        layers=LLAMA.layers,
        hidden=LLAMA.hidden,
        heads=LLAMA.heads,
        sequence=SEQUENCE,
        dtype=torch.float32,
        qwen=LLAMA,
        ranks=RANKS,
        stages=1,
    )
    model = GPT(config)
    model.initialise(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def simulate(codec: str) -> Pass:
    """Return what the simulated ranks give; the projection's gradient in whole."""
    from scripts.accuracy import layers
    from scripts.accuracy.exchange import Exchange
    from scripts.accuracy.settings import setting_of

    model = simulated_model()
    setting = setting_of(codec, RANKS)
    layers.attach(Exchange(setting))
    model.use(setting)
    inputs = batch(0, 0, 1)
    losses = model(inputs["input_ids"], inputs["labels"])
    losses.mean().backward()
    block = model.blocks[0]
    return Pass(losses.detach(), block.norm1.weight.grad, block.projection.grad)


def copy_weights(chunk: torch.nn.Module, rank: int) -> None:
    """Give a rank of Megatron's model its slices of the simulated model's weights."""
    source = simulated_model()
    with torch.no_grad():
        chunk.embedding.word_embeddings.weight.copy_(source.words.chunk(RANKS)[rank])
        chunk.decoder.final_layernorm.weight.copy_(source.norm.weight)
        for layer, block in zip(chunk.decoder.layers, source.blocks, strict=True):
            attention = layer.self_attention
            layer.input_layernorm.weight.copy_(block.norm1.weight)
            layer.pre_mlp_layernorm.weight.copy_(block.norm2.weight)
            attention.linear_qkv.weight.copy_(block.qkv.chunk(RANKS)[rank])
            attention.linear_proj.weight.copy_(block.projection.chunk(RANKS, dim=1)[rank])
            # The simulation alternates rows of gate and value, Megatron has one after the other.
            of_rank = block.fc1.chunk(RANKS)[rank]
            layer.mlp.linear_fc1.weight.copy_(torch.cat([of_rank[0::2], of_rank[1::2]]))
            layer.mlp.linear_fc2.weight.copy_(block.fc2.chunk(RANKS, dim=1)[rank])


def worker(rank: int, world_size: int) -> dict[str, Pass]:
    """Return a real rank's pass by codec."""
    start_model_parallel(world_size)
    results = {}
    for codec in CODECS:
        chunk = build_tiny_gpt(
            rank, world_size, run_with(codec), tied=True, positions="rope", **MEGATRON
        )
        copy_weights(chunk, rank)
        losses = chunk(**batch(0, rank, 1))
        losses.mean().backward()
        layer = chunk.decoder.layers[0]
        results[codec] = Pass(
            losses.detach().flatten(),
            layer.input_layernorm.weight.grad,
            layer.self_attention.linear_proj.weight.grad,
        )
    return results


@pytest.fixture(scope="module")
def real() -> list[dict[str, Pass]]:
    """Passes of three gloo ranks, by codec."""
    return spawn(worker, RANKS)


@pytest.mark.parametrize("codec", CODECS)
def test_real_ranks_agree_with_the_simulation(codec: str, real: list[dict[str, Pass]]) -> None:
    """fp32 products round differently, so that a value may fall into another step of the codec."""
    expected = simulate(codec)
    for rank, of_rank in enumerate(real):
        result = of_rank[codec]
        torch.testing.assert_close(result.losses, expected.losses, rtol=0, atol=2e-4)
        assert relative(result.norm, expected.norm) < 2e-3
        columns = expected.projection.chunk(RANKS, dim=1)[rank]
        assert relative(result.projection, columns) < 2e-3


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
def test_codecs_change_what_is_compared(codec: str, real: list[dict[str, Pass]]) -> None:
    """Their own differences are far above the tolerances of the comparison."""
    exact = real[0]["none"]
    changed = real[0][codec]
    assert (changed.losses - exact.losses).abs().max() > 2e-3
    assert relative(changed.norm, exact.norm) > 4e-3


def relative(x: Tensor, exact: Tensor) -> float:
    """Return the relative L2 distance of two tensors."""
    return float((x - exact).norm() / exact.norm())
