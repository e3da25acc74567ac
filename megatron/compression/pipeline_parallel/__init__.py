"""Compression of what pipeline stages send each other."""
