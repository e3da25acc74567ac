"""TAH-Quant as Triton kernels: codes, then entropy and widths on the device, then the extra bits."""
