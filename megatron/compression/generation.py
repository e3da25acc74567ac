"""Greedy text from a tensor-parallel model by plain forwards, as a check of trained checkpoints.

Every token costs a forward of the whole sequence: there is no cache of keys and values. What it shows is the
model's own function and its traffic, which the ledger counts under evaluation.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.compression.communication.ledger import Ledger


@torch.no_grad()
def next_token_logits(
    model: torch.nn.Module, tokens: torch.Tensor, group: dist.ProcessGroup, ledger: Ledger
) -> torch.Tensor:
    """The logits behind the last token, bit for bit the same on every rank of the group.

    Args:
        model: a GPT model in evaluation mode, wrapped or not, that ends on this rank.
        tokens: ids ``[b, s]``.
        ledger: counts the all-gather of the logits (the layers count theirs).
    Returns: fp32 ``[b, v]``, padding of the vocabulary included.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    own = model(tokens, positions, None)[:, -1].float().contiguous()
    if group.size() == 1:
        return own
    gathered = own.new_empty(group.size() * own.shape[0], own.shape[1])
    dist.all_gather_into_tensor(gathered, own, group=group)
    ledger.record_uncompressed("tp.other", "exact", "all_gather", gathered.nbytes, group.size())
    return gathered.view(group.size(), *own.shape).transpose(0, 1).flatten(1)


def generate_greedily(
    model: torch.nn.Module,
    prompt: Sequence[int],
    new_tokens: int,
    vocabulary: int,
    group: dist.ProcessGroup,
    ledger: Ledger,
    end: int | None = None,
) -> list[int]:
    """The likeliest continuation, one token at a time.

    Args:
        prompt: token ids, at least one.
        vocabulary: ids from here on are padding and never chosen.
        group: the tensor-parallel group; all its ranks call this and get the same tokens.
        end: id that ends the text, itself included.
    Returns: The new tokens.
    """
    model.eval()
    device = next(model.parameters()).device
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(new_tokens):
        logits = next_token_logits(model, tokens, group, ledger)[:, :vocabulary]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        if tokens[0, -1] == end:
            break
    return tokens[0, len(prompt) :].tolist()
