"""A stand-in for Transformer Engine on the CPU, for tests of what replaces its communication.

Its layers have TE's signatures, contracts and order of communication. An fp8 tensor is a byte a
value here.
"""
