"""Settings of expert parallelism: specs, what follows from them, and what is refused."""

import pytest

from megatron.compression.errors import CompressionConfigError
from megatron.compression.expert_parallel.config import ExpertParallelConfig
from megatron.compression.flags import resolve
from megatron.compression.names import FLAG_NAMES
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


PREPROCESS_GRAPH = {
    "moe_token_dispatcher_type": "flex",
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
}
"""Graphs of layers that leave out the exchange, and hold what precedes it."""


def test_a_graph_of_what_precedes_the_exchange_is_accepted() -> None:
    resolved("--ep-compression", "int8", **PREPROCESS_GRAPH)
    padded = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
    resolved("--ep-compression", "int8", **PREPROCESS_GRAPH, **padded)


@pytest.mark.parametrize(
    ("flags", "megatron", "message"),
    [
        ("int8", {"num_experts": None}, "--ep-compression given, but the model has no experts"),
        (
            "int8",
            {"moe_token_dispatcher_type": "flex", "moe_expert_rank_capacity_factor": 1.5},
            "^--moe-expert-rank-capacity-factor 1.5 works with the flex dispatcher alone, and "
            "--ep-compression sends tokens by alltoall; drop --moe-expert-rank-capacity-factor, or "
            "drop --ep-compression$",
        ),
        (
            "int8",
            {"moe_expert_rank_capacity_factor": 1.5, "moe_paged_stash": True},
            "drop --moe-expert-rank-capacity-factor and --moe-paged-stash, or drop",
        ),
        ("int8", {"moe_dispatch_fwd_dtype": "mxfp8"}, "^--moe-dispatch-fwd-dtype mxfp8 shortens"),
        (
            "int8",
            {"moe_token_dispatcher_type": "flex", "cuda_graph_impl": "full_iteration"},
            "captures the exchange of experts' tokens, whose sizes the host reads",
        ),
        (
            "int8",
            {**PREPROCESS_GRAPH, "moe_router_padding_for_quantization": True},
            "^--cuda-graph-modules moe_preprocess captures how many tokens a rank sends, which "
            "alltoall reads on the host with --moe-router-padding-for-quantization; drop one",
        ),
        (
            "int8",
            {**PREPROCESS_GRAPH, "moe_expert_capacity_factor": 1.5},
            "^--cuda-graph-modules moe_preprocess .* with --moe-expert-capacity-factor",
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


FLEX = {"moe_token_dispatcher_type": "flex"}


class TestFlexDispatcher:
    """It gives way to alltoall where tokens are compressed."""

    @pytest.mark.parametrize("backend", ["deepep", "hybridep", "ncclep"])
    def test_alltoall_takes_its_place_and_a_line_says_so(self, backend: str) -> None:
        flex = FLEX | {"moe_flex_dispatcher_backend": backend, "moe_enable_deepep": True}
        config, args = resolved("--ep-compression", "int8", **flex)
        (line,) = config.replace_flex_dispatcher(args)
        assert FLAG_NAMES.resolve(line) == (
            f"--moe-token-dispatcher-type flex ({backend}) is switched to alltoall: {backend} "
            "sends tokens inside its kernels, past --ep-compression. Drop --ep-compression to keep "
            "flex"
        )
        assert args.moe_token_dispatcher_type == "alltoall"
        # What megatron-core refuses beside alltoall.
        assert args.moe_flex_dispatcher_backend == "deepep"
        assert not args.moe_enable_deepep
        assert not config.replace_flex_dispatcher(args), "it is said once"

    @pytest.mark.parametrize(
        ("flags", "megatron"),
        [
            ("--tp-compression int8", {}),
            ("--ep-compression none", {}),
            ("--ep-compression int8", {"expert_model_parallel_size": 1}),
        ],
        ids=["other traffic", "uncompressed", "one rank has all experts"],
    )
    def test_it_stays_where_nothing_of_it_is_compressed(self, flags: str, megatron: dict) -> None:
        megatron = FLEX | {"tensor_model_parallel_size": 2} | megatron
        config, args = resolved(*flags.split(), **megatron)
        assert not config.replace_flex_dispatcher(args)
        assert args.moe_token_dispatcher_type == "flex"

    def test_experts_of_one_rank_are_said_to_send_nothing(self) -> None:
        """Ranks that share an expert are tensor parallelism's, as with alltoall."""
        one_rank = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 2}
        config, args = resolved("--ep-compression", "int8", **FLEX | one_rank)
        assert "has no effect here" in config.describe(args)[0]


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
