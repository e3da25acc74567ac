"""Measures what a tensor-parallel codec costs in loss: tensor parallelism is simulated on one
device.

Run it from the repository's root as ``python -m scripts.accuracy.run``; see
docs/results/accuracy.md.
"""
