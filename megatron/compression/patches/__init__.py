"""The one place where a symbol of megatron-core, megatron.training, Transformer Engine or torch is replaced.

symbols.py        replace, follow, put, change_class: checked, once, logged; hide a package
arguments.py      the command line
training.py       the training loop: begin, end, log lines, evaluations
checkpointing.py  what is saved and read
distributed.py    data-parallel sums and gathers; replicated and tied parameters
pipeline.py       what stages send each other
experts.py        what token dispatchers send, what routers sum
optimizer.py      the masters' copy; torch's Adam
tokenizers.py     GPT-2's, from the files of the command line
slots.py          the compiled dataset helper, the fused rotary embedding, fused weight gradients
transformer_engine.py  what its layers call to communicate

Each function names its symbol, why it is replaced and what it does not reach. A patch called again replaces
what it put there before, unless it says that it adds. Nothing is loaded before a function is called.
"""

from megatron.compression.patches.arguments import after_validating_arguments, with_extra_arguments
from megatron.compression.patches.checkpointing import (
    around_checkpoint_state,
    on_checkpoint_args,
    on_checkpoint_read,
)
from megatron.compression.patches.distributed import (
    on_gradient_sync,
    on_parameter_sync,
    on_replicated_gradient_sync,
    on_tied_embedding_gradient_sync,
)
from megatron.compression.patches.experts import on_router_reduction, through_token_exchange
from megatron.compression.patches.optimizer import (
    fuse_torch_adam,
    make_torch_adam_resumable,
    on_master_copy,
)
from megatron.compression.patches.pipeline import after_schedules, through_pipeline_exchange
from megatron.compression.patches.slots import (
    fill_rope_slot,
    fill_weight_gradient_slot,
    use_shipped_helpers,
)
from megatron.compression.patches.symbols import PatchError, change_class, follow, hide, put, replace
from megatron.compression.patches.tokenizers import build_gpt2_from_its_files
from megatron.compression.patches.training import (
    around_evaluate,
    around_model_building,
    around_pretrain,
    on_training_end,
    on_training_log,
    repeat_passes,
)
from megatron.compression.patches.transformer_engine import (
    before_gradient_sync,
    on_magnitude_reduction,
    through_exchanges,
)
