"""Dispatch by device: the reference on CPU tensors, the Triton kernels on CUDA tensors."""

from taco_kernels.reference import decode, decode_sum, decode_sum_encode, encode

__all__ = ["decode", "decode_sum", "decode_sum_encode", "encode"]
