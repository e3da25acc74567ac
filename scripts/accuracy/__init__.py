"""What a tensor-parallel codec costs in loss: training with simulated tensor parallelism on one device.

Run from the repository's root as ``python -m scripts.accuracy.run``; see docs/results/accuracy.md.
"""
