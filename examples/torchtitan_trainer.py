"""A trainer for torchtitan 0.3 whose FSDP2 sends compressed weights and gradients.

    torchrun --nproc-per-node 8 -m torchtitan.train --module examples.torchtitan_trainer \\
        --config compressed_llama3_8b --reduce sdp4bit

torchtitan takes any module that has a function of the name of ``--config``. The fields of
``Config`` are flags of its command line, so ``--gather`` and ``--reduce`` are.
"""

from dataclasses import dataclass, fields

from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.trainer import Trainer

from megatron.compression.fsdp2 import attach


class CompressedTrainer(Trainer):
    """torchtitan's trainer, with ``attach`` after it has sharded the model's parts."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's settings and two codecs."""

        gather: str = "lossless"
        """Codec of the weights, or none."""
        reduce: str = "int8"
        """Codec of the gradients, or none."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # A pipeline's rank has several parts. Each is a model of its own to FSDP2.
        self.compression = [attach(part, config.gather, config.reduce) for part in self.model_parts]

    def close(self) -> None:
        """Say what was sent, and end."""
        for number, compression in enumerate(self.compression):
            print(f"part {number}: {compression.summary()}", flush=True)
        super().close()


def compressed_llama3_8b() -> CompressedTrainer.Config:
    """Return torchtitan's settings of Llama 3 8B for the trainer of this file."""
    settings = llama3_8b()
    return CompressedTrainer.Config(
        **{field.name: getattr(settings, field.name) for field in fields(settings)}
    )
