"""megatron-core's flex dispatcher (DeepEP, HybridEP, NCCL-EP), which gives way to alltoall.

Flex permutes and sends tokens inside one kernel, past torch.distributed, and sums the experts'
outputs there: no payload fits in between. So where tokens are compressed alltoall sends them. Both
dispatchers give every expert the same tokens and every token the same sum; what they differ in are
some settings that flex alone has, which are refused rather than dropped.

Front ends switch the settings before a model is built (``switch_to_alltoall``). A model that has
been built with flex all the same gets other dispatchers (hooks.py).
"""

from typing import Any

from megatron.compression.errors import SettingError, argument, setting

FLEX = "flex"
ALLTOALL = "alltoall"
_DEFAULT_BACKEND = "deepep"
"""megatron-core's. A config of alltoall is refused with ncclep, which needs flex."""

_DISPATCH_FUNCTIONS = {
    "deepep": "fused_dispatch",
    "hybridep": "hybrid_ep_dispatch",
    "ncclep": "nccl_ep_dispatch",
}
"""What megatron-core's dispatcher calls of each backend; None where its package is missing."""

_OF_FLEX_ALONE = ("moe_expert_rank_capacity_factor", "moe_paged_stash")
"""Settings that change what is computed or kept, and that alltoall would not honour: a rank's
budget of tokens, and the stash of activations that needs it."""


def backend_of(settings: Any) -> str:
    """Return what sends flex's tokens: deepep, hybridep or ncclep."""
    return getattr(settings, "moe_flex_dispatcher_backend", None) or _DEFAULT_BACKEND


def sends_by_flex(settings: Any) -> bool:
    """Return whether experts' ranks send each other tokens by flex.

    Args:
        settings: Megatron's arguments, or a model's ``TransformerConfig``.
    """
    several = (settings.expert_model_parallel_size or 1) > 1
    return several and settings.moe_token_dispatcher_type == FLEX


def refuse_settings_of_flex(settings: Any, path: str) -> None:
    """Refuse what flex alone has, by name: with alltoall it would silently do nothing.

    Args:
        settings: Megatron's arguments, or a model's ``TransformerConfig``.
        path: our setting that compresses tokens.

    Raises:
        SettingError: a rank's budget of tokens, or paged stashing.
    """
    if not has_settings_of_its_own(settings):
        return
    in_use = [name for name in _OF_FLEX_ALONE if getattr(settings, name, None)]
    ours = setting(path)
    value = getattr(settings, in_use[0])
    raise SettingError(
        f"args.{in_use[0]}",
        None if value is True else value,
        f"works with the flex dispatcher alone, and {ours} sends tokens by alltoall",
        f"drop {' and '.join(argument(name) for name in in_use)}, or drop {ours}",
    )


def has_settings_of_its_own(settings: Any) -> bool:
    """Return whether settings are in use that flex alone has, so that it cannot be switched."""
    # Each is None or False unless it is set. A megatron-core may lack one of them.
    return any(getattr(settings, name, None) for name in _OF_FLEX_ALONE)


def can_run(backend: str) -> bool:
    """Return whether megatron-core finds the package of a backend here."""
    # Settings are read without megatron-core, too.
    from megatron.core.transformer.moe import token_dispatcher

    return getattr(token_dispatcher, _DISPATCH_FUNCTIONS[backend], None) is not None


def switch_to_alltoall(settings: Any) -> None:
    """Have a model that is yet to be built send tokens by alltoall.

    Args:
        settings: Megatron's arguments, or a model's ``TransformerConfig``.
    """
    settings.moe_token_dispatcher_type = ALLTOALL
    settings.moe_flex_dispatcher_backend = _DEFAULT_BACKEND
    # The older name of flex with deepep, which megatron-core refuses without flex.
    settings.moe_enable_deepep = False


def switched(backend: str, path: str) -> str:
    """Return the line for the log about a dispatcher that was switched.

    Args:
        backend: what would have sent flex's tokens.
        path: our setting that compresses tokens.
    """
    dispatcher = argument("moe_token_dispatcher_type")
    ours = setting(path)
    return (
        f"{dispatcher} {FLEX} ({backend}) is switched to {ALLTOALL}: {backend} sends tokens inside "
        f"its kernels, past {ours}. Drop {ours} to keep {FLEX}"
    )


def not_compared(backend: str) -> str:
    """Return the line for the log about a dispatcher that auto has switched without a
    comparison."""
    dispatcher = argument("moe_token_dispatcher_type")
    return (
        f"{dispatcher} {FLEX} ({backend}) is switched to {ALLTOALL}: {backend} is not installed "
        f"here, so {setting('auto')} has not compared the two"
    )
