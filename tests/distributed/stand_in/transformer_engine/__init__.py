"""A stand-in for Transformer Engine on the CPU: its layers' signatures, contracts and order of communication.

For tests of what replaces its communication functions. An fp8 tensor is a byte a value here.
"""
