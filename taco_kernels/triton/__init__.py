"""Fused codec kernels in Triton, one file an operation; ``reference.py`` is what each must reproduce."""
