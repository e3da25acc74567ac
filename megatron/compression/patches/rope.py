"""The slot of the fused rotary embedding."""

from collections.abc import Callable

from megatron.compression.patches.symbols import put


def fill_rope_slot(rotary: Callable) -> bool:
    """Put ``rotary`` where megatron-core keeps Transformer Engine's fused kernel, if that is missing.

    Why: ``rope_utils.fused_apply_rotary_pos_emb`` is None without Transformer Engine, and then
    ``--apply-rope-fusion`` is refused. It is read at each call. Packed sequences have a slot of their own.

    Returns:
        Whether ``rotary`` is in the slot.
    """
    from megatron.core.models.common.embeddings import rope_utils

    if rope_utils.fused_apply_rotary_pos_emb is None:
        put(rope_utils, "fused_apply_rotary_pos_emb", rotary, "the slot of Transformer Engine's kernel")
    return rope_utils.fused_apply_rotary_pos_emb is rotary
