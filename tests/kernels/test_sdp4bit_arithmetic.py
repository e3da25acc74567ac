"""What SDP4Bit's kernels compute another way on a GPU than in the interpreter, checked on the CPU."""
