"""--caat-net-sync-fraction: its values, what it is refused with, and which checkpoints it loads."""

from types import SimpleNamespace

import pytest

from megatron.compression import CompressionConfigError
from megatron.compression.caat_net.config import CaatNetConfig, check_checkpoint
from megatron.compression.flags import resolve
from tests.unit.megatron_args import parsed


def _config(*flags: str, **megatron) -> CaatNetConfig:
    args = parsed(*flags, **{"tensor_model_parallel_size": 4, "hidden_size": 768, **megatron})
    return resolve(args).caat_net


def test_flag_and_default() -> None:
    """Off is 1; the first int(h * p) channels are shared."""
    assert not _config().enabled
    assert not _config("--caat-net-sync-fraction", "1").enabled
    settings = _config("--caat-net-sync-fraction", "0.3")
    assert settings.enabled and settings.shared_channels(768) == 230
    assert _config("--caat-net-sync-fraction", "0.5", "--taco").shared_channels(64) == 32


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan"), float("inf")])
def test_fractions_that_are_none(fraction) -> None:
    """Above 0, at most 1."""
    with pytest.raises(CompressionConfigError, match="a part of the channels: above 0"):
        CaatNetConfig(sync_fraction=fraction)


@pytest.mark.parametrize(
    ("megatron", "reason"),
    [
        ({"tensor_model_parallel_size": 1}, "--tensor-model-parallel-size 1"),
        ({"sequence_parallel": True}, "--sequence-parallel splits one residual stream"),
        ({"distribute_saved_activations": True}, "--distribute-saved-activations"),
        ({"num_experts": 8}, "--num-experts routes tokens"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl local"),
        ({"group_query_attention": True, "num_query_groups": 2}, "--num-query-groups 2"),
        ({"hidden_size": 1}, "shares none of 1 channels"),
    ],
)
def test_what_it_is_refused_with(megatron, reason) -> None:
    """One line with the flag and the reason; at fraction 1 the same flags pass."""
    with pytest.raises(CompressionConfigError, match=reason) as error:
        _config("--caat-net-sync-fraction", "0.5", **megatron)
    assert "\n" not in str(error.value)
    _config("--caat-net-sync-fraction", "1", **megatron)


@pytest.mark.parametrize(
    ("saved", "ours", "reason"),
    [
        ((0.5, 4), (0.5, 4), None),
        ((None, 4), (1.0, 2), None),  # written without the flag, by Megatron-LM itself
        ((0.5, 4), (0.5, 2), "CAAT-Net of 4 residual streams"),
        ((0.5, 4), (0.25, 4), "--caat-net-sync-fraction 0.5"),
        ((0.5, 4), (1.0, 4), "--caat-net-sync-fraction 0.5"),
        ((None, 4), (0.5, 4), "1 is an ordinary model"),
    ],
)
def test_checkpoints_belong_to_fraction_and_ranks(saved, ours, reason) -> None:
    """Another function of the same weights is refused; ordinary checkpoints stay free."""

    def args(fraction, ranks):
        flags = {} if fraction is None else {"caat_net_sync_fraction": fraction}
        return SimpleNamespace(tensor_model_parallel_size=ranks, **flags)

    if reason is None:
        check_checkpoint(args(*saved), args(*ours))
        return
    with pytest.raises(CompressionConfigError, match=reason):
        check_checkpoint(args(*saved), args(*ours))
