"""The one place where a symbol of megatron-core, megatron.training, Transformer Engine or torch is
replaced.

symbols.py        replace, extend, around, follow, put, change_class, hide: checked, once, logged;
                  take_out restores the originals
running.py        which run a replaced function serves, and which runs are open
loop.py           the command line, the training loop, checkpoints
communication.py  what is sent between replicas, stages, experts' ranks and by Transformer Engine
process.py        the end of the job's process groups
gaps.py           repairs: the dataset helper, RoPE, weight gradients, torch's optimizers and
                  GPT-2's tokenizer

Each function names its symbol, why it is replaced and what it does not reach. A patch that is asked
for again changes nothing. Nothing is loaded before a function is called.
"""
