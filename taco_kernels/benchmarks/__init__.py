"""Benchmarks: ``python -m taco_kernels.benchmarks codec`` and ``collectives``."""
