"""Each hooked layer against a serial layer and against megatron-core's own, from one seed."""

import pytest
import torch
import torch.nn.functional as F

from megatron.compression.codecs import IdentityCodec
from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import (
    HIDDEN,
    device_of,
    runtime_with,
    start_model_parallel,
    transformer_config,
)

WIDE = 4 * HIDDEN
TOKENS = (SEQUENCE, BATCH) = (16, 2)
TACO_BOUND = 0.045  # two hops of e4m3 at group 128: 0.026 * sqrt(2), with room for small tensors


def _layer(kind: str, compressed: bool, world_size: int, codec, rank: int):
    """One layer with weights that do not depend on the world size, with or without our subclass."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers as core

    from megatron.compression.tensor_parallel import layers as ours
    from megatron.compression.tensor_parallel.site import TensorParallelSite

    config = transformer_config(world_size)
    init = torch.nn.init.xavier_normal_
    torch.manual_seed(3)
    module, prefix = (ours, "Compressed") if compressed else (core, "")
    if kind == "row":
        layer = getattr(module, prefix + "RowParallelLinear")(
            WIDE,
            HIDDEN,
            config=config,
            init_method=init,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )
    elif kind == "column":
        layer = getattr(module, prefix + "ColumnParallelLinear")(
            HIDDEN, WIDE, config=config, init_method=init, gather_output=False
        )
    else:
        layer = getattr(module, prefix + "VocabParallelEmbedding")(
            WIDE, HIDDEN, config=config, init_method=init
        )
    if compressed:
        group = parallel_state.get_tensor_model_parallel_group()
        layer.site = TensorParallelSite(kind, group, runtime_with(codec))
    return layer.to(device_of(rank))


def _slice(tensor: torch.Tensor, dim: int, rank: int, world_size: int) -> torch.Tensor:
    return tensor.chunk(world_size, dim)[rank].contiguous()


def _run(kind: str, layer, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Forward and backward on fixed data; whole-tensor inputs are cut for this rank."""
    generator = torch.Generator().manual_seed(11)
    device = device_of(rank)
    x = torch.randn(*TOKENS, WIDE if kind == "row" else HIDDEN, generator=generator).to(device)
    gradient = torch.randn(*TOKENS, WIDE if kind == "column" else HIDDEN, generator=generator).to(device)
    if kind == "embedding":
        ids = torch.randint(0, WIDE, TOKENS, generator=generator).to(device)
        output = layer(ids)
        output.backward(gradient)
        return {"output": output.detach(), "weight.grad": layer.weight.grad}
    if kind == "row":
        x = _slice(x, -1, rank, world_size)
    else:
        gradient = _slice(gradient, -1, rank, world_size)
    x.requires_grad_()
    output, _ = layer(x)
    output.backward(gradient)
    result = {"output": output.detach(), "x.grad": x.grad, "weight.grad": layer.weight.grad}
    return {**result, "bias.grad": layer.bias.grad}


def _serial(kind: str, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The same layer in one piece, cut to what this rank holds of it."""
    torch.manual_seed(3)
    shape = {"row": (HIDDEN, WIDE), "column": (WIDE, HIDDEN), "embedding": (WIDE, HIDDEN)}[kind]
    weight = torch.nn.init.xavier_normal_(torch.empty(shape)).to(device_of(rank)).requires_grad_()
    generator = torch.Generator().manual_seed(11)
    device = weight.device
    x = torch.randn(*TOKENS, WIDE if kind == "row" else HIDDEN, generator=generator).to(device)
    gradient = torch.randn(*TOKENS, WIDE if kind == "column" else HIDDEN, generator=generator).to(device)
    if kind == "embedding":
        ids = torch.randint(0, WIDE, TOKENS, generator=generator).to(device)
        output = F.embedding(ids, weight)
        output.backward(gradient)
        return {"output": output.detach(), "weight.grad": _slice(weight.grad, 0, rank, world_size)}
    bias = torch.zeros(shape[0], device=device, requires_grad=True)
    x.requires_grad_()
    output = F.linear(x, weight, bias)
    output.backward(gradient)
    if kind == "row":
        return {
            "output": output.detach(),
            "x.grad": _slice(x.grad, -1, rank, world_size),
            "weight.grad": _slice(weight.grad, 1, rank, world_size),
            "bias.grad": bias.grad,
        }
    return {
        "output": _slice(output.detach(), -1, rank, world_size),
        "x.grad": x.grad,
        "weight.grad": _slice(weight.grad, 0, rank, world_size),
        "bias.grad": _slice(bias.grad, 0, rank, world_size),
    }


# What the layer's collective produces; everything else must not change at all.
_COMMUNICATED = {"row": "output", "column": "x.grad", "embedding": "output"}


def _worker(rank: int, world_size: int) -> dict[str, float]:
    start_model_parallel(world_size)
    errors = {}
    for kind, communicated in _COMMUNICATED.items():
        serial = _serial(kind, rank, world_size)
        core = _run(kind, _layer(kind, False, world_size, None, rank), rank, world_size)
        identity = _run(kind, _layer(kind, True, world_size, IdentityCodec(), rank), rank, world_size)
        taco = _run(kind, _layer(kind, True, world_size, None, rank), rank, world_size)
        assert set(core) == set(identity) == set(taco) == set(serial)
        for name, value in core.items():
            torch.testing.assert_close(
                identity[name], serial[name], rtol=1e-5, atol=1e-5, msg=f"{kind} {name}"
            )
            if world_size == 2 or name != communicated:  # more ranks: gloo's order of summation is not ours
                assert torch.equal(identity[name], value), (
                    f"{kind} {name}: identity codec must change nothing"
                )
            if name != communicated:
                assert torch.equal(taco[name], value), f"{kind} {name} does not depend on the codec"
        exact = serial[communicated]
        errors[kind] = float((taco[communicated] - exact).norm() / exact.norm())
    return errors


@pytest.mark.parametrize("world_size", [2, 4])
def test_layers(world_size: int) -> None:
    """Identity codec: bitwise megatron-core's layer. TACO: within the codec's bound, and really lossy."""
    for errors in spawn(_worker, world_size):
        for kind, error in errors.items():
            assert 1e-4 < error < TACO_BOUND, (kind, error)
