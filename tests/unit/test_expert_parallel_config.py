"""Settings of expert parallelism: specs, what follows from them, and what is refused."""

import pytest

from megatron.compression.errors import CompressionConfigError
from megatron.compression.expert_parallel.config import ExpertParallelConfig
from megatron.compression.flags import resolve
from tests.unit.megatron_args import EXPERTS, parsed


def resolved(*flags: str, **megatron):
    """Return the config and the arguments of a run with experts."""
    args = parsed(*flags, **EXPERTS | dict(tensor_model_parallel_size=1) | megatron)
    return resolve(args), args


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ({}, None, None),
        ({"compression": "int8"}, "int8", "int8"),
        ({"compression": "int8", "backward": "none"}, "int8", None),
        ({"backward": "int6"}, None, "int6"),
    ],
)
def test_tokens_and_their_gradients_have_codecs(settings: dict, forward, backward) -> None:
    config = ExpertParallelConfig(**settings)
    rules = config.rules(3)
    codecs = [rules["ep.forward"].codec, rules["ep.backward"].codec]
    assert [codec and codec.name for codec in codecs] == [forward, backward]
    assert config.enabled == (forward is not None or backward is not None)


def test_the_first_compressed_iteration_is_in_the_rules() -> None:
    assert ExpertParallelConfig().rules(3)["ep.forward"].start_iteration == 3


@pytest.mark.parametrize(
    ("flags", "megatron", "message"),
    [
        ("int8", {"num_experts": None}, "--ep-compression given, but the model has no experts"),
        (
            "int8",
            {"moe_token_dispatcher_type": "flex"},
            r"flex \(deepep\) sends tokens inside its kernels",
        ),
        ("int8:group=256", {"hidden_size": 128}, "encodes 256 values together, .* a token's 128"),
        ("int8", {"moe_latent_size": 64}, "a token's 64: use int8:group=64"),
        ("sdp4bit", {"moe_latent_size": 96}, "a token's 96: choose another codec"),
        ("lossless", {}, "lossless codes whole messages"),
        ("tah-quant", {}, "tah-quant looks at all tokens of a message"),
        ("int4:normalize=standardize", {}, "looks at all tokens"),
        ("int8/int6", {}, "a token is sent once, so one codec"),
        ("int8 lossless", {}, "--ep-compression BACKWARD lossless codes"),
    ],
)
def test_what_cannot_be_encoded_is_refused(flags: str, megatron: dict, message: str) -> None:
    """The error names the flag and the reason; nothing travels uncompressed unsaid."""
    with pytest.raises(CompressionConfigError, match=message):
        resolved("--ep-compression", *flags.split(), **megatron)


class TestLog:
    @pytest.fixture
    def experts(self):
        return resolved("--ep-compression", "int8", "none")

    @pytest.fixture
    def one_tensor_rank(self):
        """A run in which tensor parallelism, which is compressed, has one rank."""
        config, args = resolved("--tp-compression", "int8")
        args.tensor_model_parallel_size = 1
        args.expert_tensor_parallel_size = 1
        return config, args

    def test_it_says_how_tokens_travel(self, experts) -> None:
        config, args = experts
        assert config.describe(args) == [
            "expert parallelism: tokens to experts and back as int8, "
            "their gradients as uncompressed"
        ]

    def test_experts_of_one_rank_send_nothing(self, experts) -> None:
        config, args = experts
        args.expert_model_parallel_size = 1
        assert "has no effect here: --expert-model-parallel-size is 1" in config.describe(args)[0]

    def test_the_allgather_dispatcher_sends_between_ranks_of_an_expert(self, experts) -> None:
        config, args = experts
        args.expert_model_parallel_size = 1
        args.moe_token_dispatcher_type = "allgather"
        args.expert_tensor_parallel_size = 2
        assert "has no effect" not in config.describe(args)[0]

    def test_one_tensor_parallel_rank_sends_nothing(self, one_tensor_rank) -> None:
        config, args = one_tensor_rank
        assert "has no effect here: --tensor-model-parallel-size is 1" in config.describe(args)[0]

    def test_ranks_that_share_an_expert_are_tensor_parallel(self, one_tensor_rank) -> None:
        config, args = one_tensor_rank
        args.expert_tensor_parallel_size = 2
        assert "has no effect" not in config.describe(args)[0]


SHARED = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
"""Two ranks share an expert: they send each other any number of tokens."""


def test_ranks_that_share_an_expert_need_a_codec_of_rows() -> None:
    with pytest.raises(CompressionConfigError, match="or give --expert-tensor-parallel-size 1"):
        resolved("--tp-compression", "lossless", **SHARED)


@pytest.mark.parametrize(
    ("flags", "megatron"),
    [
        ("--tp-compression lossless", {"tensor_model_parallel_size": 2}),
        ("--tp-compression lossless", {**SHARED, "moe_pad_expert_input_to_capacity": True}),
        ("--taco", SHARED),
    ],
    ids=["whole experts", "as many tokens for each expert", "a codec of rows"],
)
def test_other_codecs_and_experts_are_accepted(flags: str, megatron: dict) -> None:
    resolved(*flags.split(), **megatron)
