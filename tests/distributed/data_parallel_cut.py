"""Parameters that tensor-parallel ranks hold parts of without Megatron's mark: worker of a test."""

from dataclasses import replace

import torch

from tests.distributed.tiny_ddp import Setup, Training, start

OFFSET = "decoder.layers.0.self_attention.core_attention.softmax_offset"
SCALE = "decoder.layers.1.mlp.scale.weight"


def add_scale(model: torch.nn.Module) -> None:
    """A user's own layer: scales what the second layer's fc1 gives. It cuts its weight by hand."""
    from megatron.core import parallel_state
    from megatron.core.transformer import MegatronModule
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    mlp = model.decoder.layers[1].mlp

    class Scale(MegatronModule):
        def __init__(self) -> None:
            super().__init__(model.config)
            width = mlp.linear_fc1.weight.shape[0]
            self.weight = torch.nn.Parameter(torch.zeros(width, dtype=model.config.params_dtype))

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            state = self.state_dict(prefix="", keep_vars=True)
            groups = {"tp_group": parallel_state.get_tensor_model_parallel_group()}
            groups["dp_cp_group"] = metadata["dp_cp_group"]
            return make_sharded_tensors_for_checkpoint(
                state, prefix, {"weight": 0}, sharded_offsets, **groups
            )

    mlp.scale = Scale()
    mlp.linear_fc1.register_forward_hook(
        lambda module, given, result: (result[0] * (1 + mlp.scale.weight), result[1])
    )


def cut_worker(rank: int) -> dict[str, tuple[float, float]]:
    """Error of gradients and of weights against the uncompressed run, relative, by parameter; TP 2 x DP 2."""
    from megatron.compression.replicated_parameters import cut_without_mark

    start(rank, tensor_ranks=2)
    setup = Setup(softmax="learnable", change=add_scale)
    found = {}
    plain = replace(setup, distributed_optimizer=False, overlap=False)
    expected, compressed = (
        Training(rank, replace(plain, settings=settings)) for settings in ({}, {"compression": "identity"})
    )
    assert sorted(cut_without_mark(compressed.model).values()) == sorted(
        (OFFSET, OFFSET.replace("0", "1"), SCALE)
    )
    for training in (expected, compressed):
        training.step()
    gradients = {name: _error(expected, compressed, name, "main_grad") for name in (OFFSET, SCALE)}
    expected, compressed = (
        Training(rank, replace(setup, settings=settings))
        for settings in ({}, {"compression": "sdp4bit", "weights": "int8"})
    )
    for training in (expected, compressed):
        for _ in range(4):
            training.step()
        training.settle()
    for name, error in gradients.items():
        found[name] = error, _error(expected, compressed, name, "data")
    norms = torch.cat(
        [p.detach().float() for n, p in compressed.model.named_parameters() if "layernorm" in n]
    )
    ranks: list[torch.Tensor] = [torch.empty_like(norms) for _ in range(4)]
    torch.distributed.all_gather(ranks, norms)
    assert all(torch.equal(one, norms) for one in ranks), "replicas are alike"
    return found


def _error(expected: Training, compressed: Training, name: str, what: str) -> float:
    """Relative L2 error of a parameter that starts from zeros, or of its gradient."""
    first, second = (
        getattr(dict(training.model.named_parameters())[name], what).float()
        for training in (expected, compressed)
    )
    assert first.any()
    return float((second - first).norm() / first.norm())
