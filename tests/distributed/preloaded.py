"""Imported once by the fork server of forked.py: everything that a rank of pretrain_gpt.py loads."""

from megatron import host
from megatron.compression.versions import MEGATRON_CORE_VERSION

host.prepare(MEGATRON_CORE_VERSION)

from megatron.compression import entrypoint, weave  # noqa: E402, F401
