"""Compression of tokens on their way to experts and back."""
