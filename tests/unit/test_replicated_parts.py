"""Which values of a bucket tensor-parallel ranks hold alike, and so get from the first of them."""

import torch

from megatron.compression.data_parallel.compressor import ParameterSpan
from megatron.compression.data_parallel.weights import replicated_parts

NUMEL = 100


def values_of(parts: list[torch.Tensor]) -> list[float]:
    """Return the values of all parts; a bucket's values are their positions."""
    return [float(value) for part in parts for value in part]


def span(start: int, end: int, **marks: bool) -> ParameterSpan:
    """Return a parameter at these positions, with Megatron's or our marks."""
    parameter = torch.nn.Parameter(torch.zeros(end - start))
    for name, value in marks.items():
        setattr(parameter, name, value)
    return ParameterSpan(f"from {start}", parameter, start, end)


BUCKET = torch.arange(float(NUMEL))
MATRIX = span(0, 60, tensor_model_parallel=True)
NORM = span(60, 64)
BIAS = span(70, 74, sees_rank_local_data=True)
"""A CAAT-Net bias: its gradients are summed over the ranks after alignment."""


def test_parameters_without_the_mark_of_a_cut_are_held_alike() -> None:
    assert values_of(replicated_parts(BUCKET, [MATRIX, NORM], ())) == [60, 61, 62, 63]


def test_parameters_that_are_cut_without_the_mark_are_not() -> None:
    assert replicated_parts(BUCKET, [MATRIX, NORM], {NORM.parameter}) == []


def test_gradients_that_are_summed_later_differ_still() -> None:
    """To align them before their sum would count the first rank's for all."""
    parts = replicated_parts(BUCKET, [NORM, BIAS], (), gradients=True)
    assert values_of(parts) == [60, 61, 62, 63]


def test_weights_of_such_parameters_are_held_alike() -> None:
    parts = replicated_parts(BUCKET, [NORM, BIAS], ())
    assert values_of(parts) == [60, 61, 62, 63, 70, 71, 72, 73]


def test_a_shard_has_the_part_that_lies_in_it() -> None:
    """Of a parameter that two shards share, each has its end."""
    first = BUCKET[:62]
    second = BUCKET[62:]
    assert values_of(replicated_parts(first, [NORM], ())) == [60, 61]
    assert values_of(replicated_parts(second, [NORM], (), first=62)) == [62, 63]


def test_parts_are_views_of_the_bucket() -> None:
    bucket = BUCKET.clone()
    (part,) = replicated_parts(bucket, [NORM], ())
    part.zero_()
    assert not bucket[60:64].any()
