"""Modules of a transformer layer on torch's own kernels: no Transformer Engine and no apex.

`--transformer-impl local` is built from these. They have megatron-core's interfaces, state and
numbers.
"""
