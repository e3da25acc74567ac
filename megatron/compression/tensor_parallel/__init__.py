"""Tensor parallelism: sites, autograd functions, layers, and the layer spec."""
