"""Compression in Megatron-Bridge: ``attach(cfg, tp=..., dp=...)`` returns the callback for its
``pretrain``."""

from megatron.compression.frontends.bridge import BridgeCompression, attach

__all__ = ["BridgeCompression", "attach"]
