"""Ladder residuals (arXiv 2501.06589): a block reads the stream without the sum of the block before it."""
