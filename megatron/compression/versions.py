"""The one place where versions are pinned. setup.py, scripts/setup.sh and the start-up check read it."""

MEGATRON_CORE_VERSION = "0.19.2"
TORCH_VERSION = "2.11.0"
TRITON_VERSION = "3.6.0"

PINNED = [
    f"megatron-core=={MEGATRON_CORE_VERSION}",
    f"torch=={TORCH_VERSION}",
    f"triton=={TRITON_VERSION}",
]
