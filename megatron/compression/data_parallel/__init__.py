"""Compressed data parallelism: gradients and weights of Megatron's DDP and distributed
optimizer."""
