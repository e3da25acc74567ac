"""An entrypoint of one's own, with the two lines of this project in it."""

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from parts import forward_step, train_valid_test_datasets_provider

from megatron import compression

if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=compression.add_arguments)
    model_config = gpt_config_from_args(args)
    compression.enable(args, model_config)
    container = pretrain_cfg_container_from_args(args, model_config)
    pretrain(
        container, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step
    )
