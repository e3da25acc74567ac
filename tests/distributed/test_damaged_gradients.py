"""One rank's gradient is damaged.

There is an overflow in any bucket of a lossless reduction, or a NaN that Megatron is asked to look
for.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from tests.distributed.spawn import spawn
from tests.distributed.tiny_ddp import Setup, Training, start

RANKS = 2
LOSSLESS = Setup(
    settings={"compression": "lossless"}, dtype=torch.float32, distributed_optimizer=False
)
DAMAGED = {
    "the first bucket": "output_layer.weight",
    "a later bucket": "decoder.layers.0.mlp.linear_fc1.weight",
    "the last bucket": "embedding.word_embeddings.weight",
}
"""A parameter in each: gradients are complete from the output backwards."""


def damage(model: nn.Module, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the next gradient of a parameter by ``change(gradient)``."""
    parameter = dict(model.named_parameters())[name]

    def change_once(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return change(gradient)

    handle = parameter.register_hook(change_once)


def scatter_exponents(gradient: torch.Tensor) -> torch.Tensor:
    """Scale values by powers of two from 2^-30 to 2^30, for which lossless payloads lack room."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 31, gradient.shape, generator=generator)
    return gradient * torch.exp2(exponents.float())


def reduced(rank: int, setup: Setup, name: str) -> tuple[torch.Tensor, set[str]]:
    """Reduce gradients of which rank 1 has damaged a parameter's.

    Args:
        rank: this rank.
        setup: the training.
        name: of the parameter.

    Returns:
        All gradients, and the ledger's kinds.
    """
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    from tests.distributed.tiny_ddp import batch_of

    training = Training(rank, setup)
    training.ddp.zero_grad_buffer()
    loss = training.ddp(**batch_of(0, rank)).float().mean()
    if rank == 1:
        damage(training.model, name, scatter_exponents)
    loss.backward()
    finalize_model_grads([training.ddp])
    gradients = [parameter.main_grad.view(-1) for parameter in training.model.parameters()]
    return torch.cat(gradients), training.kinds()


def overflow_worker(rank: int, ranks: int) -> dict[str, tuple[bool, set[str]]]:
    """Return by bucket whether its bits are the uncompressed run's, and the ledger's kinds."""
    start(rank)
    outcomes = {}
    for bucket, name in DAMAGED.items():
        exact, _ = reduced(rank, replace(LOSSLESS, settings={}), name)
        gradients, kinds = reduced(rank, LOSSLESS, name)
        outcomes[bucket] = torch.equal(gradients, exact), kinds
    return outcomes


@cache
def overflows() -> list[dict[str, tuple[bool, set[str]]]]:
    """Return the results of ``overflow_worker`` by rank."""
    return spawn(overflow_worker, RANKS)


@pytest.mark.parametrize("bucket", DAMAGED)
def test_lossless_gradients_keep_every_bit_where_a_bucket_overflows(bucket: str) -> None:
    for outcomes in overflows():
        equal, kinds = outcomes[bucket]
        assert equal
        assert "compressed" in kinds, "the other buckets travel in codes"


CHECKED = {
    "uncompressed": Setup(check_for_nan=True),
    "int8": Setup(check_for_nan=True, settings={"compression": "int8"}),
    "int8, plain DDP": Setup(
        check_for_nan=True, settings={"compression": "int8"}, distributed_optimizer=False
    ),
    "lossless": Setup(check_for_nan=True, settings={"compression": "lossless"}),
}


def set_nan(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with a NaN in its first place."""
    gradient = gradient.clone()
    gradient.view(-1)[0] = float("nan")
    return gradient


def nan_worker(rank: int, ranks: int) -> dict[str, str]:
    """Return by set-up the first line of the error that a NaN raises, or an empty text."""
    start(rank)
    errors = {}
    for name, setup in CHECKED.items():
        training = Training(rank, setup)
        training.step()

        def spoil(model: nn.Module) -> None:
            damage(model, "decoder.layers.0.mlp.linear_fc1.weight", set_nan)

        try:
            training.step(spoil)
            errors[name] = ""
        except RuntimeError as error:
            errors[name] = str(error).splitlines()[0]
    return errors


@cache
def nan_errors() -> list[dict[str, str]]:
    """Return the results of ``nan_worker`` by rank."""
    return spawn(nan_worker, RANKS)


@pytest.mark.parametrize("setup", CHECKED)
def test_megatrons_check_for_nan_in_gradients_sees_them_under_compression(setup: str) -> None:
    for errors in nan_errors():
        assert "found NaN in local grad norm" in errors[setup]
