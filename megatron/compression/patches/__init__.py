"""The one place where a symbol of megatron-core, megatron.training, Transformer Engine or torch is replaced.

symbols.py        replace, around, follow, put, change_class: checked, once, logged; hide a package
loop.py           the command line, the training loop, checkpoints
communication.py  what is sent between replicas, stages, experts' ranks and by Transformer Engine
gaps.py           the dataset helper, RoPE, weight gradients, torch's Adam and GPT-2's tokenizer

Each function names its symbol, why it is replaced and what it does not reach. A patch called again replaces
what it put there before, unless it says that it adds. Nothing is loaded before a function is called.
"""

from megatron.compression.patches.communication import (
    after_schedules,
    before_gradient_sync,
    on_gradient_sync,
    on_magnitude_reduction,
    on_parameter_sync,
    on_replicated_gradient_sync,
    on_router_reduction,
    on_tied_embedding_gradient_sync,
    through_exchanges,
    through_pipeline_exchange,
    through_token_exchange,
)
from megatron.compression.patches.gaps import (
    build_gpt2_from_its_files,
    fill_rope_slot,
    fill_weight_gradient_slot,
    fuse_torch_adam,
    make_torch_adam_resumable,
    on_master_copy,
    use_shipped_helpers,
)
from megatron.compression.patches.loop import (
    after_validating_arguments,
    around_checkpoint_state,
    around_evaluate,
    around_model_building,
    around_pretrain,
    before_training,
    on_checkpoint_args,
    on_checkpoint_read,
    on_training_end,
    on_training_log,
    repeat_passes,
    with_extra_arguments,
)
from megatron.compression.patches.symbols import PatchError, around, change_class, hide, put, replace
