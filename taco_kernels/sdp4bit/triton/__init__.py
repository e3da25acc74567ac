"""SDP4Bit's operations as Triton kernels; imported only where they run."""
