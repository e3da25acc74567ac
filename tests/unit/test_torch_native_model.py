"""Models of torch-native layers against megatron-core's local spec; the flags that choose."""

from argparse import Namespace

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron.compression.frontends.megatron_lm.enable import gpt_layer_spec
from megatron.compression.patches import gaps
from megatron.compression.torch_native.attention import SDPACoreAttention
from megatron.compression.torch_native.spec import leave_out_causal_mask, rotary
from tests.distributed.tiny_gpt import QWEN, build_gpt
from tests.unit.one_rank import DEVICE, config, one_rank  # noqa: F401  (a fixture for every test here)


def megatron_core_layers(model_config):
    """megatron-core's local spec; its QK norm needs apex, so torch's takes its place."""
    settings = model_config.transformer
    spec = get_gpt_layer_local_spec(normalization=settings.normalization)
    if settings.qk_layernorm:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = WrappedTorchNorm
    return spec


def build(layer_spec, **changes) -> torch.nn.Module:
    """A tiny model with weights that depend on the seed alone."""
    torch.manual_seed(11)
    return build_gpt(config(**changes), positions="rope", layers=layer_spec).to(DEVICE)


def train(model: torch.nn.Module, with_mask: bool, iterations: int = 10) -> list[float]:
    """Losses of a few Adam steps on random tokens."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mask = torch.ones(24, 24).triu(1).bool()[None, None] if with_mask else None
    losses = []
    for iteration in range(iterations):
        generator = torch.Generator(DEVICE).manual_seed(iteration % 3)
        tokens = torch.randint(0, 64, (2, 25), generator=generator)
        positions = torch.arange(24).expand(2, -1)
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


MODELS = {"gpt": {"normalization": "LayerNorm"}, "qwen": QWEN}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_ten_iterations_give_megatron_cores_losses(name) -> None:
    """fp32: the torch-native block against megatron-core's local spec, from the same weights."""
    reference = build(megatron_core_layers, **MODELS[name])
    expected = train(reference, with_mask=True)
    assert isinstance(
        reference.decoder.layers[0].self_attention.core_attention, DotProductAttention
    )
    for with_mask in (False, True):
        model = build(gpt_layer_spec, **MODELS[name])
        assert isinstance(model.decoder.layers[0].self_attention.core_attention, SDPACoreAttention)
        assert model.state_dict().keys() == reference.state_dict().keys()
        losses = train(model, with_mask)
        torch.testing.assert_close(losses, expected, rtol=2e-5, atol=0)
    assert expected[-1] < expected[0] - 0.3, "it must really have trained"


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
)
def test_recomputation_draws_the_same_dropout(recompute) -> None:
    """Attention dropout is redrawn from the state that the first forward began with."""
    losses = []
    for settings in ({}, recompute):
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        model = build(gpt_layer_spec, **MODELS["qwen"], attention_dropout=0.3, **settings)
        losses.append(train(model, with_mask=False, iterations=4))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)


@pytest.mark.slow
def test_rope_fusion_works_without_transformer_engine(monkeypatch) -> None:
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", None)
    with pytest.raises(ValueError, match="apply_rope_fusion is not available"):
        config(apply_rope_fusion=True)
    assert gaps.fill_rope_slot(rotary) and gaps.fill_rope_slot(rotary)
    expected = train(build(gpt_layer_spec, **MODELS["qwen"]), with_mask=False)
    monkeypatch.delattr(rope_utils, "_apply_rotary_pos_emb_bshd")  # the unfused path cannot run
    losses = train(build(gpt_layer_spec, **MODELS["qwen"], apply_rope_fusion=True), with_mask=False)
    torch.testing.assert_close(losses, expected, rtol=2e-5, atol=0)


def test_causal_mask_is_left_out_unless_documents_reset_it() -> None:
    usual = dict(transformer_impl="local", reset_attention_mask=False)
    args = Namespace(**usual, create_attention_mask_in_dataloader=True)
    assert "--no-create-attention-mask-in-dataloader" in leave_out_causal_mask(args)
    assert not args.create_attention_mask_in_dataloader
    assert leave_out_causal_mask(args) is None
    for change in ({"reset_attention_mask": True}, {"transformer_impl": "transformer_engine"}):
        args = Namespace(**usual | change, create_attention_mask_in_dataloader=True)
        assert leave_out_causal_mask(args) is None
        assert args.create_attention_mask_in_dataloader
