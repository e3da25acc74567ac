"""All that a rank of pretrain_gpt.py ever loads; the server of server.py imports it once."""

import argparse
import functools
import gc
import importlib

from megatron.compression.frontends import megatron_lm

megatron_lm.prepare()

for name in (
    "megatron.compression.frontends.megatron_lm.entrypoint",
    "megatron.compression.frontends.megatron_lm.model_alone",
    "megatron.compression.huggingface.weights",
    # Megatron and torch load these while a run goes on.
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.text.models",
    "torch._dynamo",
    "torch._inductor.utils",
    "torch.onnx",
    "torch.utils._device",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "matplotlib.pyplot",
    "tensorboard.summary.writer.event_file_writer",
    "pytest",
):
    importlib.import_module(name)


def read_flags_once() -> None:
    """Cache the help texts that the parser reads from source, which take each rank a second."""
    from megatron.training.argument_utils import ArgumentGroupFactory as Factory
    from megatron.training.arguments import add_megatron_arguments

    from megatron.compression.flags import add_flags

    read = Factory._get_field_docstrings
    cached = functools.cache(lambda config: read(object.__new__(Factory), config))
    Factory._get_field_docstrings = lambda self, config: cached(config)
    add_flags(add_megatron_arguments(argparse.ArgumentParser()))


read_flags_once()
gc.collect()
gc.freeze()  # nothing of this is garbage later: collections in the ranks need not walk it
