"""Compressed communication for Megatron-LM: tensor, data and pipeline parallelism.

An overlay of the ``megatron`` namespace: ``megatron.compression`` stands beside the wheel's
``megatron.core`` and ``megatron.training``.
"""
