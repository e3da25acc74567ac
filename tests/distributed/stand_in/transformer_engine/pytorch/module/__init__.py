"""As ``transformer_engine.pytorch.module``."""

from transformer_engine.pytorch.module import base as base
