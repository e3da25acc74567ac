"""Tensor parallelism: settings, hooks, layers with their autograd functions, interleaved halves."""
