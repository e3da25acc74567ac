"""Each hooked layer against a serial layer and against megatron-core's own, from one seed."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.spawn import spawn
from tests.distributed.tiny_gpt import (
    HIDDEN,
    device_of,
    run_with,
    start_model_parallel,
    transformer_config,
)

WIDE = 4 * HIDDEN
TOKENS = (SEQUENCE, BATCH) = (16, 2)
TACO_BOUND = 0.045  # two hops of e4m3 at group 128: 0.026 * sqrt(2), with room for small tensors


def _layer(kind, sequence_parallel, compressed, world_size, codec, rank, **settings):
    """One layer with weights that do not depend on the world size, with or without our subclass."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers as core

    from megatron.compression.communication.site import CommSite
    from megatron.compression.tensor_parallel import layers as ours

    config = transformer_config(world_size, sequence_parallel=sequence_parallel)
    init = torch.nn.init.xavier_normal_
    torch.manual_seed(3)
    module, prefix = (ours, "Compressed") if compressed else (core, "")
    names = {"row": "RowParallelLinear", "column": "ColumnParallelLinear"}
    sizes = (HIDDEN, WIDE) if kind == "column" else (WIDE, HIDDEN)
    options = {
        "row": dict(bias=True, input_is_parallel=True, skip_bias_add=False),
        "column": dict(gather_output=False),
        "embedding": dict(reduce_scatter_embeddings=sequence_parallel),
    }[kind]
    layer = getattr(module, prefix + names.get(kind, "VocabParallelEmbedding"))(
        *sizes, config=config, init_method=init, **options
    )
    if compressed:
        group = parallel_state.get_tensor_model_parallel_group()
        layer.site = CommSite(kind, group, run_with(codec, **settings))
    return layer.to(device_of(rank))


def _cut(tensor: torch.Tensor, dim: int, rank: int, world_size: int) -> torch.Tensor:
    return tensor.chunk(world_size, dim)[rank].contiguous()


def _data(kind: str, device) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole layer's input (token ids for the embedding) and output gradient."""
    generator = torch.Generator().manual_seed(11)
    if kind == "embedding":
        x = torch.randint(0, WIDE, (BATCH, SEQUENCE), generator=generator)
        return x.to(device), torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator).to(device)
    x = torch.randn(*TOKENS, WIDE if kind == "row" else HIDDEN, generator=generator)
    gradient = torch.randn(*TOKENS, WIDE if kind == "column" else HIDDEN, generator=generator)
    return x.to(device), gradient.to(device)


def _run(
    kind: str, sequence_parallel: bool, layer, rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """Forward and backward on this rank's part of the data."""
    x, gradient = _data(kind, device_of(rank))

    cut = partial(_cut, rank=rank, world_size=world_size)
    if kind == "embedding":
        if sequence_parallel:
            gradient = cut(gradient.transpose(0, 1), 0)
        output = layer(x)
        output.backward(gradient)
        return {"output": output.detach(), "weight.grad": layer.weight.grad}
    if kind == "row":
        x = cut(x, -1)
        gradient = cut(gradient, 0) if sequence_parallel else gradient
    else:
        gradient = cut(gradient, -1)
        x = cut(x, 0) if sequence_parallel else x
    x.requires_grad_()
    output, _ = layer(x)
    output.backward(gradient)
    result = {"output": output.detach(), "x.grad": x.grad, "weight.grad": layer.weight.grad}
    if kind == "row" and sequence_parallel:
        return result  # the bias gradient is this rank's share; finalize_model_grads sums it
    return {**result, "bias.grad": layer.bias.grad}


def _serial(
    kind: str, sequence_parallel: bool, rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """The same layer in one piece, cut to what this rank holds of it."""
    torch.manual_seed(3)
    shape = {"row": (HIDDEN, WIDE), "column": (WIDE, HIDDEN), "embedding": (WIDE, HIDDEN)}[kind]
    weight = torch.nn.init.xavier_normal_(torch.empty(shape)).to(device_of(rank)).requires_grad_()
    x, gradient = _data(kind, weight.device)

    cut = partial(_cut, rank=rank, world_size=world_size)
    if kind == "embedding":
        output = F.embedding(x, weight)
        output.backward(gradient)
        output = output.detach()
        output = cut(output.transpose(0, 1), 0) if sequence_parallel else output
        return {"output": output, "weight.grad": cut(weight.grad, 0)}
    bias = torch.zeros(shape[0], device=weight.device, requires_grad=True)
    x.requires_grad_()
    output = F.linear(x, weight, bias)
    output.backward(gradient)
    if kind == "row":
        result = {
            "output": cut(output.detach(), 0) if sequence_parallel else output.detach(),
            "x.grad": cut(x.grad, -1),
            "weight.grad": cut(weight.grad, 1),
        }
        return result if sequence_parallel else {**result, "bias.grad": bias.grad}
    return {
        "output": cut(output.detach(), -1),
        "x.grad": cut(x.grad, 0) if sequence_parallel else x.grad,
        "weight.grad": cut(weight.grad, 0),
        "bias.grad": cut(bias.grad, 0),
    }


# What depends on a collective; everything else must not change at all.
_COMMUNICATED = {
    ("row", False): {"output"},
    ("column", False): {"x.grad"},
    ("embedding", False): {"output"},
    ("row", True): {"output", "x.grad", "weight.grad"},
    ("column", True): {"output", "x.grad", "weight.grad"},
    ("embedding", True): {"output", "weight.grad"},
}


def layers_worker(rank: int, world_size: int) -> dict[str, float]:
    start_model_parallel(world_size)
    errors = {}
    for (kind, sequence_parallel), communicated in _COMMUNICATED.items():

        def run(
            compressed, codec="taco", kind=kind, sequence_parallel=sequence_parallel, **settings
        ):
            layer = _layer(kind, sequence_parallel, compressed, world_size, codec, rank, **settings)
            return _run(kind, sequence_parallel, layer, rank, world_size)

        serial = _serial(kind, sequence_parallel, rank, world_size)
        core = run(False)
        identity = run(True, "identity")
        taco = run(True)
        assert set(core) == set(identity) == set(taco) == set(serial)
        for name, value in core.items():
            case = f"{kind} sequence_parallel={sequence_parallel} {name}"
            torch.testing.assert_close(identity[name], serial[name], rtol=1e-5, atol=1e-5, msg=case)
            # With more ranks the backend sums in another order; on CUDA a GEMM in two halves
            # rounds otherwise.
            if value.is_cpu and (world_size == 2 or name not in communicated):
                assert torch.equal(identity[name], value), f"{case}: identity changes bits"
            else:
                torch.testing.assert_close(identity[name], value, rtol=1e-5, atol=1e-5, msg=case)
            if name in communicated:
                exact = serial[name]
                errors[case] = float((taco[name] - exact).norm() / exact.norm())
            else:
                assert torch.equal(taco[name], identity[name]), f"{case}: depends on the codec"
    return errors


@pytest.mark.parametrize("world_size", [2, 4])
def test_layers(world_size: int) -> None:
    """Identity has the bits of megatron-core's layer; TACO is lossy, within its bound."""
    for errors in spawn(layers_worker, world_size):
        assert all(1e-4 < error < TACO_BOUND for error in errors.values()), errors
