"""An entrypoint as Megatron-LM's own: a model config, and nothing of this project."""

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from parts import forward_step, train_valid_test_datasets_provider

if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        container, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step
    )
