"""Compression of the keys and values that ranks of context parallelism gather."""
