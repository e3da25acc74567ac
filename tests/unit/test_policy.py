"""One decision a message: its layer, its size, the iteration, the error bound, evaluations."""

from types import SimpleNamespace

import pytest

from megatron.compression.communication import CommSite, Ledger, Policy, Run
from megatron.compression.communication.meter import ErrorMeter
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.names import FLAG_NAMES
from megatron.compression.tensor_parallel.config import TensorParallelConfig

LARGE = 2**21


def _policy(
    now=lambda: 0, *, validate_uncompressed=False, bound=None, start=0, **settings
) -> Policy:
    config = TensorParallelConfig(**{"compression": "taco", "min_mb": 1.0, **settings})
    rules = {**config.rules(start), **DataParallelConfig(compression="int8").rules(start)}
    return Policy(rules, Ledger(), now, validate_uncompressed, bound or ErrorMeter())


def test_choice_follows_layer_error_iteration_and_size() -> None:
    """The kind says why a message is uncompressed; one of the threshold's size is compressed."""
    iteration = [0]
    bound = ErrorMeter(0.05)
    policy = _policy(lambda: iteration[0], bound=bound, start=3, layers="1,output")

    def kind(site="site", layer=1, traffic="tp.forward", size=LARGE) -> str:
        decision = policy.decide(traffic, size, site, layer)
        assert (decision.codec is not None) == (decision.reason == "compressed")
        return decision.reason

    for iteration[0] in (0, 2):
        assert kind() == "warmup"
    iteration[0] = 3
    assert kind() == kind(layer="output") == kind(size=None) == kind(size=2**20) == "compressed"
    assert kind(size=2**20 - 1) == "small"
    assert kind(layer=0) == kind(layer="embedding") == kind(layer=None) == "excluded"
    bound.tripped["site", "tp.backward"] = 0.1
    assert kind(traffic="tp.backward") == "guarded"
    assert kind() == kind(site="other", traffic="tp.backward") == "compressed"
    assert kind(traffic="pp.forward") == kind(traffic="tp.other") == "off"
    assert _policy(min_mb=0.0).decide("tp.forward", 0).reason == "compressed"


@pytest.mark.parametrize("flag", [True, False])
def test_evaluations_concern_activations_alone(flag: bool) -> None:
    """--validate-uncompressed: what is sent of activations, in evaluations, whatever its size."""
    policy = _policy(validate_uncompressed=flag)
    assert policy.decide("tp.forward", LARGE).reason == "compressed"
    policy.ledger.evaluating = True
    assert policy.decide("tp.forward", LARGE).reason == ("evaluation" if flag else "compressed")
    assert policy.decide("tp.forward", 1).reason == ("evaluation" if flag else "small")
    assert policy.decide("dp.gradient", LARGE).reason == "compressed"


@pytest.mark.parametrize(
    "settings, sends_itself",
    [
        ({"compression": "int8"}, True),
        ({"compression": "int8", "backward": "none"}, True),
        ({"compression": "none", "backward": "int8"}, True),
        ({"compression": "none"}, False),
    ],
    ids=str,
)
def test_a_layer_sends_itself_where_either_direction_is_compressed(
    settings: dict, sends_itself: bool
) -> None:
    """Else megatron-core's own functions send both."""
    policy = _policy(**settings)
    site = CommSite("fc1", SimpleNamespace(size=lambda: 2), Run(policy, policy.ledger))
    assert site.pair("tp.forward", "tp.backward", LARGE).compressed is sends_itself


def test_codecs_by_site_and_layer() -> None:
    """The last part that names a site counts; without a codec of its own the first does; none is excluded."""
    policy = _policy(
        compression="tensor-6bit;fc2=int5:group=64;@0-1,output=int8;fc2@1=none",
        backward="none;qkv=int4",
    )

    def name(site: str, layer, traffic="tp.forward") -> str | None:
        decision = policy.decide(traffic, LARGE, site, layer)
        assert decision.reason == ("compressed" if decision.codec else "excluded")
        return decision.codec and decision.codec.name

    fc2 = "decoder.layers.{}.mlp.linear_fc2"
    proj = "decoder.layers.{}.self_attention.linear_proj"
    assert [name(fc2.format(n), n) for n in range(3)] == ["int8", None, "int5:group=64"]
    assert [name(proj.format(n), n) for n in range(3)] == ["int8", "int8", "int6:outliers=on"]
    assert (
        name("output_layer", "output") == "int8"
        and name("embedding", "embedding") == "int6:outliers=on"
    )
    assert name(proj.format(0), 0, "tp.backward") is None
    for site in ("decoder.layers.0.self_attention.linear_qkv", "decoder.layers.0.self_attention"):
        assert name(site, 0, "tp.backward") == "int4"
    assert (
        _policy(compression="none;@3=int6").decide("tp.backward", LARGE, "x", 3).codec.name
        == "int6"
    )
    every = TensorParallelConfig(compression="int6;fc1=lossless;@2=none").codecs
    assert {codec.name for codec in every} == {"int6", "lossless"}


FC1, FC2, QKV = (
    f"decoder.layers.{{}}.{name}"
    for name in ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_q_up_proj")
)
SENT = [
    *((FC1.format(layer), layer, "tp.backward") for layer in range(3)),
    *((FC2.format(layer), layer, "tp.forward") for layer in range(3)),
    *((QKV.format(layer), layer, "tp.backward") for layer in range(3)),
    ("embedding.word_embeddings", "embedding", "tp.forward"),
    ("output_layer", "output", "tp.backward"),
]
"""What three layers with multi-latent attention send without sequence parallelism."""


@pytest.mark.parametrize(
    ("settings", "unmet"),
    [
        ({"compression": "int8;fc1=int4;fc2@0=int6;@1-2=int6"}, []),
        ({"compression": "none;fc2@output=int8"}, ["--tp-compression fc2@output=int8"]),
        ({"compression": "int8;@2=int4", "layers": "0-1"}, ["--tp-compression @2=int4"]),
        ({"compression": "int8;fc2@0=int4; fc2=int6"}, ["--tp-compression fc2@0=int4"]),
        ({"compression": "int8;fc1=int4", "backward": "int8"}, ["--tp-compression fc1=int4"]),
        (
            {"compression": "int8", "backward": "int8;fc2=int6"},
            ["--tp-compression BACKWARD fc2=int6"],
        ),
        ({"compression": "int8", "layers": "0, 7-8"}, ["--tp-compression-layers 7-8"]),
        ({"overlap": "halves"}, []),
    ],
)
def test_parts_that_no_message_goes_by(settings: dict, unmet: list[str]) -> None:
    parts = TensorParallelConfig(**settings).unmet_parts(SENT)
    assert {FLAG_NAMES.resolve(part) for part in parts} == set(unmet)
