"""The torch-native modules against megatron-core's: same numbers, clear refusals."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType

from megatron.compression.patches import gaps
from megatron.compression.torch_native.attention import SDPACoreAttention
from megatron.compression.torch_native.norm import RowRMSNorm, TorchLayerNorm, TorchRMSNorm
from megatron.compression.torch_native.spec import block_spec, rotary
from tests.unit.one_rank import DEVICE, config, one_rank  # noqa: F401  (a fixture for every test here)

SEQUENCE = 12
BATCH = 3
HEADS = 4
HEAD_DIM = 16


def attentions(groups: int, **changes) -> tuple[SDPACoreAttention, DotProductAttention]:
    """Ours and megatron-core's with the same settings."""
    settings = config(num_query_groups=groups, **changes)
    arguments = (settings, 2, AttnMaskType.causal, "self")
    return SDPACoreAttention(*arguments), DotProductAttention(*arguments)


def random_qkv(groups: int, dtype=torch.float32) -> list[torch.Tensor]:
    """Return views of one qkv: query [s, b, heads, d], key and value [s, b, groups, d]."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    shape = (SEQUENCE, BATCH, groups, (HEADS // groups + 2) * HEAD_DIM)
    mixed = torch.randn(shape, generator=generator).to(dtype)
    query, key, value = mixed.split([HEADS // groups * HEAD_DIM, HEAD_DIM, HEAD_DIM], dim=3)
    query = query.reshape(SEQUENCE, BATCH, HEADS, HEAD_DIM)
    return [tensor.detach().requires_grad_() for tensor in (query, key, value)]


def document_mask() -> torch.Tensor:
    """Return the mask of documents that end differently a sample: [b, 1, s, s], True = hidden."""
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool().repeat(BATCH, 1, 1)
    for sample in range(BATCH):
        mask[sample, 4 + sample :, : 4 + sample] = True
    return mask[:, None]


def padding_mask() -> torch.Tensor:
    """The last keys of each sample are padding: [b, 1, 1, s]."""
    lengths = torch.tensor([SEQUENCE, 7, 5])
    return (torch.arange(SEQUENCE)[None] >= lengths[:, None])[:, None, None]


def output_and_gradients(attention, groups: int, mask) -> list[torch.Tensor]:
    """The context and the gradients of query, key and value for a fixed random output gradient."""
    inputs = random_qkv(groups)
    context = attention(*inputs, mask)
    assert context.shape == (SEQUENCE, BATCH, HEADS * HEAD_DIM)
    gradient = torch.randn(context.shape, generator=torch.Generator(DEVICE).manual_seed(4))
    return [context.detach(), *torch.autograd.grad(context, inputs, gradient)]


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("make_mask", [lambda: None, document_mask, padding_mask])
def test_attention_agrees_with_dot_product_attention(groups, make_mask) -> None:
    ours, reference = attentions(groups)
    mine = output_and_gradients(ours, groups, make_mask())
    theirs = output_and_gradients(reference, groups, make_mask())
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fewer_queries_than_keys_are_the_last(dtype) -> None:
    """Queries are the second part of a sequence; keys of the first get gradients, too."""
    ours, _ = attentions(2)
    complete = random_qkv(2, dtype)
    parts = random_qkv(2, dtype)
    query, key, value = parts
    outputs = (
        ours(*complete, None),
        torch.cat([ours(query[:5], key[:5], value[:5], None), ours(query[5:], key, value, None)]),
    )
    for output in outputs:
        output.square().sum().backward()
    tolerance = dict(rtol=0.05, atol=0.05) if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(*outputs, **tolerance)
    for actual, expected in zip(parts, complete, strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, **tolerance)
    with pytest.raises(ValueError, match="12 queries over 3 keys"):
        ours(query, key[-3:], value[-3:], None)


def test_dropout_draws_from_the_tensor_parallel_random_state() -> None:
    attention, _ = attentions(2, attention_dropout=0.5)
    inputs = random_qkv(2)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    start = tracker.get_states()
    outer = torch.cuda.get_rng_state()
    first = attention(*inputs, None)
    second = attention(*inputs, None)
    assert torch.equal(torch.cuda.get_rng_state(), outer), (
        "the state outside the tracker must not move"
    )
    tracker.set_states(start)
    again = attention(*inputs, None)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    exact = attentions(2)[0](*inputs, None)
    tracker.set_states(start)
    mean = torch.stack([attention(*inputs, None) for _ in range(400)]).mean(0)
    assert (mean - exact).abs().mean() < 0.1 * exact.abs().mean()
    attention.eval()
    assert torch.equal(attention(*inputs, None), exact)


@pytest.mark.parametrize(
    ("changes", "flag", "instead"),
    [
        ({"window_size": (4, 0)}, "--window-size", "--attention-backend local"),
        ({"softmax_type": "learnable"}, "--softmax-type learnable", "--attention-backend local"),
        ({"qk_clip": True}, "--qk-clip", "--transformer-impl transformer_engine"),
        ({"attention_backend": AttnBackend.local}, "--attention-backend local", "auto"),
    ],
)
def test_refusals_at_build_time_name_the_flag_and_the_way_out(changes, flag, instead) -> None:
    settings = config()
    for name, value in changes.items():
        setattr(settings, name, value)
    with pytest.raises(ValueError) as refusal:
        SDPACoreAttention(settings, 1, AttnMaskType.causal, "self")
    assert flag in str(refusal.value) and instead in str(refusal.value)


def test_refusals_at_run_time() -> None:
    attention, _ = attentions(2)
    with pytest.raises(ValueError, match="packed sequences"):
        attention(*random_qkv(2), None, packed_seq_params=object())
    with pytest.raises(ValueError, match="attention bias"):
        attention(*random_qkv(2), None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="attention mask type padding_causal"):
        SDPACoreAttention(config(), 1, AttnMaskType.padding_causal, "self")


@pytest.mark.parametrize("norm", [TorchLayerNorm, TorchRMSNorm])
def test_gamma_and_dtypes(norm) -> None:
    """Gamma is stored less 1; bf16 is fp32 rounded; an fp32 residual gives the weights' dtype."""
    plain = norm(config(), 48)
    centred = norm(config(layernorm_zero_centered_gamma=True), 48)
    assert (plain.weight == 1).all() and (centred.weight == 0).all()
    gamma = torch.randn(48)
    x = torch.randn(6, 48)
    with torch.no_grad():
        plain.weight.copy_(gamma)
        centred.weight.copy_(gamma - 1)
    torch.testing.assert_close(centred(x), plain(x))
    module = norm(config(), 256)
    x = (torch.randn(64, 256) * 30 + 5).bfloat16()
    exact = module(x.float())
    torch.testing.assert_close(module.bfloat16()(x).float(), exact, rtol=2**-7, atol=1e-6)
    residual = x.float().requires_grad_()
    y = module(residual)
    y.float().square().sum().backward()
    assert (
        y.dtype == module.weight.grad.dtype == torch.bfloat16
        and residual.grad.dtype == torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_norm_agrees_with_torch(dtype) -> None:
    x = torch.randn(40, 3, 2, 24, dtype=dtype).transpose(0, 1).requires_grad_()
    gamma = torch.randn(24, dtype=dtype, requires_grad=True)
    grad = torch.randn(x.shape, dtype=dtype)
    results = {}
    for name, function in (
        ("ours", RowRMSNorm.apply),
        ("torch", lambda *a: F.rms_norm(a[0], (24,), *a[1:])),
    ):
        y = function(x, gamma, 1e-6)
        results[name] = [y, *torch.autograd.grad(y, (x, gamma), grad)]
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    for got, want in zip(results["ours"], results["torch"], strict=True):
        torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("rotated", [16, 10])
def test_rotary_agrees_with_megatron_core(rotated) -> None:
    angles = torch.outer(
        torch.arange(SEQUENCE).float(), 100.0 ** -torch.linspace(0, 1, rotated // 2)
    )
    freqs = torch.cat((angles, angles), -1)[:, None, None]
    query = random_qkv(2)[0]
    grad = torch.randn(query.shape)
    for interleaved in (False, True):
        results = []
        for function in (rotary, lambda t, f, i: rope_utils._apply_rotary_pos_emb_bshd(t, f, i)):
            y = function(query, freqs, interleaved)
            results.append([y, *torch.autograd.grad(y, query, grad)])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    exact = rotary(query.detach(), freqs)
    assert torch.equal(
        rotary(query.detach().bfloat16().float(), freqs).bfloat16(), rotary(query.bfloat16(), freqs)
    )
    assert not torch.equal(exact, query)


def test_rope_fusion_slot_of_transformer_engine_is_left_alone(monkeypatch) -> None:
    theirs = object()
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", theirs)
    assert not gaps.fill_rope_slot(rotary)
    assert rope_utils.fused_apply_rotary_pos_emb is theirs


def test_norm_refusals() -> None:
    with pytest.raises(ValueError, match="--fused-residual-rmsnorm"):
        TorchRMSNorm(config(fused_residual_rmsnorm=True, normalization="RMSNorm"), 8)
    with pytest.raises(ValueError, match="memory_efficient_layer_norm"):
        TorchLayerNorm(config(memory_efficient_layer_norm=True), 8)


def test_graphs_of_layers_own_what_torch_has_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-core would free it before the backward's capture if Transformer Engine is there."""
    monkeypatch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", True)
    monkeypatch.setattr(cuda_graphs, "make_weak_ref", lambda tensor: tensor[:0], raising=False)
    monkeypatch.setattr(cuda_graphs, "make_weakref", cuda_graphs.make_weakref)
    x = torch.ones(4)
    x.is_from_global_mempool = True
    assert len(cuda_graphs.make_weakref(x, inplace=False)) == 0
    block_spec(config(cuda_graph_impl="local"))
    assert cuda_graphs.make_weakref(x) is x and len(x) == 4
