"""CAAT-Net (arXiv 2506.19645): tensor parallelism that synchronises part of the channels."""
