"""Pipeline parallelism: settings and what is refused; channels that are normalised; sends under way."""

import dataclasses
import weakref
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron.compression.codecs import parse_codec
from megatron.compression.communication import Ledger, Policy, Run, Work
from megatron.compression.errors import CompressionConfigError
from megatron.compression.pipeline_parallel.config import PipelineParallelConfig
from megatron.compression.pipeline_parallel.exchange import (
    BACKWARD,
    FORWARD,
    PipelineExchange,
    SendsInFlight,
)
from tests.unit.megatron_args import parsed

ARGS = parsed(pipeline_model_parallel_size=2, sequence_parallel=True)


def names(config: PipelineParallelConfig) -> tuple[str | None, str | None]:
    """Canonical names of what goes forward and back."""
    pair = config.forward_codec, config.backward_codec
    return tuple(None if codec is None else codec.name for codec in pair)


PIPELINE = "int6:group=64,scales=single,normalize=standardize,outliers=on"
BACK = "int6:group=32,scales=single,hadamard=off,outliers=on"


@pytest.mark.parametrize(
    "settings, expected",
    (
        ({}, (None, None)),
        ({"compression": "int8"}, ("int8", "int8")),
        ({"compression": "tah-quant"}, ("tah-quant", "int6:group=32,scales=single,hadamard=off")),
        ({"compression": "taco", "backward": "none"}, ("taco", None)),
        ({"backward": "sdp4bit"}, (None, "sdp4bit")),
        ({"compression": "pipeline-6bit"}, (PIPELINE, BACK)),
        ({"compression": "pipeline-6bit", "backward": "int8"}, (PIPELINE, "int8")),
    ),
    ids=str,
)
def test_codecs(settings: dict, expected: tuple) -> None:
    """The gradients' codec is the one that the activations' names, where nobody chooses it."""
    config = PipelineParallelConfig(**settings)
    assert names(config) == expected and config.enabled == (expected != (None, None))
    assert PipelineParallelConfig(**dataclasses.asdict(config)) == config, "reports and checkpoints"
    assert config.describe() == "pipeline parallelism: activations as {}, gradients as {}".format(
        *(name or "uncompressed" for name in expected)
    )


def test_two_codecs_of_a_sum_are_refused() -> None:
    line = "int4/int6: .* codec is PipelineParallelConfig.backward"
    with pytest.raises(CompressionConfigError, match=line):
        PipelineParallelConfig(compression="int4/int6")


def test_channels_that_do_not_fit() -> None:
    """Refused before the first iteration, with the flag, the sizes and the fix; not where nothing is sent."""
    config = PipelineParallelConfig(compression="pipeline-6bit")
    config.check(ARGS)
    odd = Namespace(**{**vars(ARGS), "hidden_size": 80})
    line = rf"--pp-compression {PIPELINE} does not fit messages of \[32, 2, 80\] .*"
    with pytest.raises(CompressionConfigError, match=line + "change the codec's settings") as error:
        config.check(odd)
    assert "\n" not in str(error.value)
    PipelineParallelConfig(compression="tah-quant").check(odd)
    config.check(Namespace(**{**vars(odd), "pipeline_model_parallel_size": 1}))


def test_normalized_channels_keep_what_tells_tokens_apart() -> None:
    """4 bits of a large common part are worthless; standardised they are not."""
    generator = torch.Generator().manual_seed(0)
    mean, apart = (torch.randn(shape, generator=generator) for shape in ((192,), (64, 4, 192)))
    x = 10 * mean + apart
    for settings, least, most in (
        ("hadamard=off", 0.75, 9.0),
        ("normalize=standardize", 0.0, 0.15),
    ):
        codec = parse_codec(f"int4:group=64,{settings}")
        found = codec.decode(codec.encode(x[None]), x.shape, x.dtype)[0]
        assert least < float((found - x).norm() / apart.norm()) < most


def test_sends_in_flight_are_waited_for_in_order() -> None:
    """The oldest one when there are too many; all at the end; payloads are alive until then."""
    waited = []
    requests = [
        SimpleNamespace(wait=lambda number=number: waited.append(number)) for number in range(5)
    ]
    payloads = [torch.zeros(1) for _ in requests]
    alive = [weakref.ref(payload) for payload in payloads]
    sends = SendsInFlight(limit=2)
    for request in requests:
        sends.add(Work(request, [payloads.pop(0)].clear))
    assert waited == [0, 1, 2] and [one() is not None for one in alive] == [False] * 3 + [True] * 2
    sends.flush()
    assert (
        waited == [0, 1, 2, 3, 4]
        and len(sends) == 0
        and not any(one() is not None for one in alive)
    )


@pytest.mark.parametrize("traffic", [FORWARD, BACKWARD])
@pytest.mark.parametrize("tokens, reason", [(511, "small"), (512, "compressed")])
def test_messages_under_the_threshold_go_uncompressed(
    traffic: str, tokens: int, reason: str
) -> None:
    """A threshold in bytes: 512 tokens of 1024 values in bf16 are 1 MB."""
    ledger = Ledger()
    rules = PipelineParallelConfig(compression="int8", min_mb=1.0).rules(0)
    exchange = PipelineExchange(Run(Policy(rules, ledger), ledger))
    assert exchange._decide(traffic, (tokens, 1, 1024), torch.bfloat16).reason == reason
