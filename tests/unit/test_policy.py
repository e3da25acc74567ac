"""One decision a message: its layer, its size, the iteration, the error bound, evaluations."""

from types import SimpleNamespace

import pytest

from megatron.compression.communication import CommSite, Ledger, Policy, Run
from megatron.compression.communication.meter import ErrorMeter
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.names import FLAG_NAMES
from megatron.compression.tensor_parallel.config import TensorParallelConfig

LARGE = 2**21


def policy_of(
    now=lambda: 0, *, validate_uncompressed=False, bound=None, start=0, **settings
) -> Policy:
    """Return the policy of a run with tensor and data parallelism; others have no rule.

    Args:
        now: returns the iteration.
        validate_uncompressed: whether activations are uncompressed in evaluations.
        bound: the error meter.
        start: the first compressed iteration.
        settings: of tensor parallelism, where they are not taco from 1 MiB on.
    """
    config = TensorParallelConfig(**{"compression": "taco", "min_mb": 1.0, **settings})
    rules = {**config.rules(start), **DataParallelConfig(compression="int8").rules(start)}
    return Policy(rules, Ledger(), now, validate_uncompressed, bound or ErrorMeter())


def reason(policy: Policy, traffic="tp.forward", size=LARGE, site="site", layer=1) -> str:
    """Return why a message is compressed or not.

    Args:
        policy: the policy that decides.
        traffic: the traffic class.
        size: its uncompressed bytes.
        site: name of the module that sends it.
        layer: the number or name of the layer.
    """
    decision = policy.decide(traffic, size, site, layer)
    assert (decision.codec is not None) == (decision.reason == "compressed")
    return decision.reason


class TestReason:
    @pytest.mark.parametrize("iteration", [0, 2])
    def test_before_the_first_compressed_iteration(self, iteration: int) -> None:
        assert reason(policy_of(lambda: iteration, start=3)) == "warmup"

    def test_from_the_first_compressed_iteration_on(self) -> None:
        assert reason(policy_of(lambda: 3, start=3)) == "compressed"

    @pytest.mark.parametrize(
        ("size", "expected"),
        [(LARGE, "compressed"), (2**20, "compressed"), (2**20 - 1, "small"), (None, "compressed")],
        ids=["large", "the threshold", "a byte less", "unknown"],
    )
    def test_a_message_below_the_threshold_is_small(self, size, expected: str) -> None:
        assert reason(policy_of(), size=size) == expected

    def test_without_a_threshold_no_message_is_small(self) -> None:
        assert reason(policy_of(min_mb=0.0), size=0) == "compressed"

    @pytest.mark.parametrize(
        ("layer", "expected"),
        [
            (1, "compressed"),
            ("output", "compressed"),
            (0, "excluded"),
            ("embedding", "excluded"),
            (None, "excluded"),
        ],
    )
    def test_only_chosen_layers_are_compressed(self, layer, expected: str) -> None:
        assert reason(policy_of(layers="1,output"), layer=layer) == expected

    def test_a_site_over_the_error_bound_is_guarded_in_that_direction(self) -> None:
        bound = ErrorMeter(0.05)
        policy = policy_of(bound=bound)
        bound.tripped["site", "tp.backward"] = 0.1
        assert reason(policy, "tp.backward") == "guarded"
        assert reason(policy, "tp.forward") == "compressed"
        assert reason(policy, "tp.backward", site="other") == "compressed"

    @pytest.mark.parametrize("traffic", ["pp.forward", "tp.other"])
    def test_traffic_without_a_rule_is_off(self, traffic: str) -> None:
        assert reason(policy_of(), traffic) == "off"


@pytest.mark.parametrize("validate_uncompressed", [True, False])
class TestEvaluation:
    def test_training_is_compressed(self, validate_uncompressed: bool) -> None:
        policy = policy_of(validate_uncompressed=validate_uncompressed)
        assert reason(policy) == "compressed"

    def test_activations_are_uncompressed_if_the_flag_says_so(self, validate_uncompressed) -> None:
        policy = policy_of(validate_uncompressed=validate_uncompressed)
        policy.ledger.phase = "eval"
        assert reason(policy) == ("evaluation" if validate_uncompressed else "compressed")

    def test_the_flag_comes_before_the_size(self, validate_uncompressed: bool) -> None:
        policy = policy_of(validate_uncompressed=validate_uncompressed)
        policy.ledger.phase = "eval"
        assert reason(policy, size=1) == ("evaluation" if validate_uncompressed else "small")

    def test_gradients_are_no_activations(self, validate_uncompressed: bool) -> None:
        policy = policy_of(validate_uncompressed=validate_uncompressed)
        policy.ledger.phase = "eval"
        assert reason(policy, "dp.gradient") == "compressed"


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
    """Megatron-core's own functions send both directions of other layers."""
    policy = policy_of(**settings)
    site = CommSite("fc1", SimpleNamespace(size=lambda: 2), Run(policy, policy.ledger))
    assert site.pair("tp.forward", "tp.backward", LARGE).compressed is sends_itself


def test_errors_are_measured_in_training_alone() -> None:
    """An evaluation between two log lines does not enter the report's errors."""
    policy = policy_of(bound=ErrorMeter(interval=1))
    policy.ledger.phase = "eval"
    assert not policy.measures("fc1", "tp.forward")
    policy.ledger.phase = "train"
    assert policy.measures("fc1", "tp.forward")


FC2 = "decoder.layers.{}.mlp.linear_fc2"
PROJ = "decoder.layers.{}.self_attention.linear_proj"


class TestSites:
    """``;SITE@LAYERS=SPEC``: of the parts that name a message the last one counts."""

    @pytest.fixture
    def policy(self) -> Policy:
        return policy_of(
            compression="tensor-6bit;fc2=int5:group=64;@0-1,output=int8;fc2@1=none",
            backward="none;qkv=int4",
        )

    @staticmethod
    def codec(policy: Policy, site: str, layer, traffic: str = "tp.forward") -> str | None:
        """Return the name of a message's codec; a message without one is excluded.

        Args:
            policy: the policy that decides.
            site: the module's name, with a place for the layer.
            layer: its number or name.
            traffic: the traffic class.
        """
        decision = policy.decide(traffic, LARGE, site.format(layer), layer)
        if decision.codec is None:
            assert decision.reason == "excluded"
            return None
        assert decision.reason == "compressed"
        return decision.codec.name

    def test_the_last_part_that_names_a_site_counts(self, policy) -> None:
        """Part @0-1 takes fc2 of layer 0, fc2@1 that of layer 1, and fc2 the others."""
        assert self.codec(policy, FC2, 0) == "int8"
        assert self.codec(policy, FC2, 1) is None
        assert self.codec(policy, FC2, 2) == "int5:group=64"

    def test_the_first_part_is_for_sites_that_no_other_names(self, policy) -> None:
        assert self.codec(policy, PROJ, 0) == "int8"
        assert self.codec(policy, PROJ, 1) == "int8"
        assert self.codec(policy, PROJ, 2) == "int6:outliers=on"
        assert self.codec(policy, "embedding", "embedding") == "int6:outliers=on"

    def test_the_output_layer_is_named_as_a_layer(self, policy) -> None:
        assert self.codec(policy, "output_layer", "output") == "int8"

    def test_the_backward_has_parts_of_its_own(self, policy) -> None:
        assert self.codec(policy, PROJ, 0, "tp.backward") is None

    @pytest.mark.parametrize("name", ["self_attention.linear_qkv", "self_attention"])
    def test_qkv_names_the_module_and_the_attention_that_sends_for_it(self, policy, name) -> None:
        site = f"decoder.layers.0.{name}"
        assert self.codec(policy, site, 0, "tp.backward") == "int4"

    def test_a_layer_is_compressed_where_the_first_part_is_none(self) -> None:
        policy = policy_of(compression="none;@3=int6")
        assert self.codec(policy, "x", 3, "tp.backward") == "int6"

    def test_the_config_lists_the_codecs_of_all_parts(self) -> None:
        codecs = TensorParallelConfig(compression="int6;fc1=lossless;@2=none").codecs
        assert {codec.name for codec in codecs} == {"int6", "lossless"}


FC1 = "decoder.layers.{}.mlp.linear_fc1"
QKV = "decoder.layers.{}.self_attention.linear_q_up_proj"
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
def test_parts_that_no_message_goes_by_are_named(settings: dict, unmet: list[str]) -> None:
    parts = TensorParallelConfig(**settings).unmet_parts(SENT)
    assert {FLAG_NAMES.resolve(part) for part in parts} == set(unmet)
