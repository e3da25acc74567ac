"""Pipeline parallelism: settings and refusals, channels that are normalised, sends under way."""

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


RECIPE = PipelineParallelConfig(compression="pipeline-6bit")
ODD = Namespace(**{**vars(ARGS), "hidden_size": 80})
"""A run whose channels are not whole groups of the recipe's 64."""


def test_channels_that_fit_are_accepted() -> None:
    RECIPE.check(ARGS)


def test_channels_that_do_not_fit_are_refused_in_one_line() -> None:
    """The error names the flag, the sizes and the fix."""
    line = rf"--pp-compression {PIPELINE} does not fit messages of \[32, 2, 80\] .*"
    with pytest.raises(CompressionConfigError, match=line + "change the codec's settings") as error:
        RECIPE.check(ODD)
    assert "\n" not in str(error.value)


def test_a_codec_of_any_channels_is_accepted() -> None:
    PipelineParallelConfig(compression="tah-quant").check(ODD)


def test_one_stage_sends_nothing_and_is_accepted() -> None:
    RECIPE.check(Namespace(**{**vars(ODD), "pipeline_model_parallel_size": 1}))


@pytest.mark.parametrize(
    ("settings", "smallest", "largest"),
    [("hadamard=off", 0.75, 9.0), ("normalize=standardize", 0.0, 0.15)],
)
def test_normalized_channels_keep_what_tells_tokens_apart(settings, smallest, largest) -> None:
    """Tokens differ by a tenth of a part that all share. 4 bits of the sum keep nothing of it.

    The error is relative to the difference between tokens.
    """
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(192, generator=generator)
    difference = torch.randn((64, 4, 192), generator=generator)
    x = 10 * mean + difference
    codec = parse_codec(f"int4:group=64,{settings}")
    decoded = codec.decode(codec.encode(x[None]), x.shape, x.dtype)[0]
    assert smallest < float((decoded - x).norm() / difference.norm()) < largest


class TestSendsInFlight:
    """Five sends of which two may be under way."""

    @pytest.fixture
    def waited(self) -> list[int]:
        """The numbers of sends that were waited for."""
        return []

    @pytest.fixture
    def sends(self, waited) -> SendsInFlight:
        return SendsInFlight(limit=2)

    @pytest.fixture
    def payloads(self, sends, waited) -> list[weakref.ref]:
        """Weak references to the payloads of five sends that have been added."""
        references = []
        for number in range(5):
            payload = torch.zeros(1)
            references.append(weakref.ref(payload))
            request = SimpleNamespace(wait=lambda number=number: waited.append(number))
            # A send holds its payload by what runs when it has ended, as the exchange's does.
            sends.add(Work(request, [payload].clear))
        return references

    def test_the_oldest_are_waited_for_when_there_are_too_many(self, payloads, waited) -> None:
        assert waited == [0, 1, 2]

    def test_payloads_live_as_long_as_their_sends(self, payloads) -> None:
        is_alive = [payload() is not None for payload in payloads[:4]]
        assert is_alive == [False, False, False, True]

    def test_a_flush_waits_for_all_in_order(self, sends, payloads, waited) -> None:
        sends.flush()
        assert waited == [0, 1, 2, 3, 4]
        assert len(sends) == 0

    def test_a_flush_frees_payloads(self, sends, payloads) -> None:
        sends.flush()
        assert not any(payload() is not None for payload in payloads)


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
