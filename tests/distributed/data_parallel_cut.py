"""Parameters that tensor-parallel ranks hold parts of without Megatron's mark: worker of a test."""

from dataclasses import replace

import torch

from tests.distributed.tiny_ddp import Setup, Training, start

OFFSET = "decoder.layers.0.self_attention.core_attention.softmax_offset"


def cut_worker(rank: int) -> tuple[float, float]:
    """Relative error of a gradient and of its weight against the uncompressed run; TP 2 x DP 2."""
    from megatron.compression.replicated_parameters import cut_without_mark

    start(rank, tensor_ranks=2)
    setup = Setup(softmax="learnable")
    plain = replace(setup, distributed_optimizer=False, overlap=False)
    expected, compressed = (
        Training(rank, replace(plain, settings=settings)) for settings in ({}, {"compression": "identity"})
    )
    assert sorted(cut_without_mark(compressed.model).values()) == [OFFSET, OFFSET.replace("0", "1")]
    for training in (expected, compressed):
        training.step()
    gradient = _error(expected, compressed, OFFSET, "main_grad")
    expected, compressed = (
        Training(rank, replace(setup, settings=settings))
        for settings in ({}, {"compression": "sdp4bit", "weights": "int8"})
    )
    for training in (expected, compressed):
        for _ in range(4):
            training.step()
        training.settle()
    norms = torch.cat(
        [p.detach().float() for n, p in compressed.model.named_parameters() if "layernorm" in n]
    )
    ranks: list[torch.Tensor] = [torch.empty_like(norms) for _ in range(4)]
    torch.distributed.all_gather(ranks, norms)
    assert all(torch.equal(one, norms) for one in ranks), "replicas are alike"
    return gradient, _error(expected, compressed, OFFSET, "data")


def _error(expected: Training, compressed: Training, name: str, what: str) -> float:
    """Relative L2 error of a parameter that starts from zeros, or of its gradient."""
    first, second = (
        getattr(dict(training.model.named_parameters())[name], what).float()
        for training in (expected, compressed)
    )
    assert first.any()
    return float((second - first).norm() / first.norm())
