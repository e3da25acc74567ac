"""Settings of expert parallelism: specs, what follows from them, and what is refused, in one line."""

import pytest

from megatron.compression.errors import CompressionConfigError
from megatron.compression.expert_parallel.config import ExpertParallelConfig
from megatron.compression.flags import resolve
from tests.unit.megatron_args import EXPERTS, parsed


def resolved(*flags: str, **megatron):
    """The config and the arguments of a run with experts."""
    args = parsed(*flags, **EXPERTS | dict(tensor_model_parallel_size=1) | megatron)
    return resolve(args), args


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (None, None)),
        ({"compression": "int8"}, ("int8", "int8")),
        ({"compression": "int8", "backward": "none"}, ("int8", None)),
        ({"backward": "int6"}, (None, "int6")),
    ],
)
def test_codecs(settings: dict, expected: tuple) -> None:
    """Of tokens on both ways, and of their gradients."""
    config = ExpertParallelConfig(**settings)
    rules = config.rules(3)
    names = [rules[one].codec and rules[one].codec.name for one in ("ep.forward", "ep.backward")]
    assert tuple(names) == expected and rules["ep.forward"].start_iteration == 3
    assert config.enabled == (expected != (None, None))


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
def test_refusals(flags: str, megatron: dict, message: str) -> None:
    """What would travel uncompressed, or cannot be encoded, names the flag and the reason."""
    with pytest.raises(CompressionConfigError, match=message):
        resolved("--ep-compression", *flags.split(), **megatron)


def test_described_and_idle() -> None:
    """The log says how tokens travel, or why none do; ranks that share an expert are tensor parallel."""
    config, args = resolved("--ep-compression", "int8", "none")
    assert config.describe(args) == [
        "expert parallelism: tokens to experts and back as int8, their gradients as uncompressed"
    ]
    args.expert_model_parallel_size = 1
    assert "has no effect here: --expert-model-parallel-size is 1" in config.describe(args)[0]
    args.moe_token_dispatcher_type, args.expert_tensor_parallel_size = "allgather", 2
    assert "has no effect" not in config.describe(args)[0]
    config, args = resolved("--tp-compression", "int8")
    args.tensor_model_parallel_size = args.expert_tensor_parallel_size = 1
    assert "has no effect here: --tensor-model-parallel-size is 1" in config.describe(args)[0]
    args.expert_tensor_parallel_size = 2
    assert "has no effect" not in config.describe(args)[0]


def test_tensor_parallel_experts_need_a_codec_of_rows() -> None:
    """Ranks that share an expert send each other any number of tokens; not where experts are whole."""
    shared = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    with pytest.raises(CompressionConfigError, match="or give --expert-tensor-parallel-size 1"):
        resolved("--tp-compression", "lossless", **shared)
    resolved("--tp-compression", "lossless", tensor_model_parallel_size=2)
    resolved("--tp-compression", "lossless", **shared, moe_pad_expert_input_to_capacity=True)
    resolved("--taco", **shared)
