"""The settings of ``fsdp2.attach``, and what is refused before a rank is asked."""

import pytest
import torch

from megatron.compression import CompressionConfigError
from megatron.compression.fsdp2 import attach


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"gather": "gradients-4bit"},
            "gather gradients-4bit is a recipe for gradients; give it as reduce, and lossless "
            "or int8 for "
            "the weights",
        ),
        (
            {"gather": "auto"},
            "gather auto is neither a codec nor a recipe; give a codec such as int8 or lossless",
        ),
        (
            {"reduce": "auto"},
            "reduce auto is neither a codec nor a recipe; give the recipe gradients-4bit",
        ),
        (
            {"gather": "sdp4bit"},
            "gather sdp4bit: SDP4Bit sends differences to the last weights, which FSDP2 frees "
            "after each "
            "use; use lossless or int8",
        ),
        (
            {"reduce": "pipeline-6bit"},
            "reduce pipeline-6bit is a recipe of PipelineParallelConfig.compression; reduce has "
            "gradients-4bit",
        ),
        (
            {"gather": "taco:group=48"},
            "gather: taco:group=48: group=48 is not supported; choose one of 32, 64, 128, 256",
        ),
    ],
    ids=lambda value: next(iter(value.items())) if isinstance(value, dict) else "",
)
def test_a_codec_is_refused_under_the_argument_that_has_it(settings: dict, line: str) -> None:
    """The line says what to give; ``gather`` is never reported as ``reduce``."""
    with pytest.raises(CompressionConfigError) as error:
        attach(torch.nn.Linear(2, 2), **settings)
    assert str(error.value) == line


def test_a_list_of_models_is_refused() -> None:
    """The ``attach`` of megatron-core takes one; here each model has its own call."""
    line = r"^attach\(\) takes one module, .*, not a list; call it once for each model$"
    with pytest.raises(CompressionConfigError, match=line):
        attach([torch.nn.Linear(2, 2)])
