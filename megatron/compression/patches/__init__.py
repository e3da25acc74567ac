"""The one place where a symbol of megatron-core, megatron.training, Transformer Engine or torch is replaced.

symbols.py        replace, around, follow, put, change_class: checked, once, logged; hide a package
loop.py           the command line, the training loop, checkpoints
communication.py  what is sent between replicas, stages, experts' ranks and by Transformer Engine
gaps.py           the dataset helper, RoPE, weight gradients, torch's Adam and GPT-2's tokenizer

Each function names its symbol, why it is replaced and what it does not reach. A patch called again replaces
what it put there before, unless it says that it adds. Nothing is loaded before a function is called.
"""
