"""Benchmarks: see ``python -m taco_kernels.benchmarks --help``."""
