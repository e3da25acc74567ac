"""Codecs for communication as device code of its own: needs torch and triton, knows nothing of
Megatron.

Each package is a codec with a wire format, a definition in plain torch (``reference.py``) that
serves CPU tensors, and Triton kernels (``launch.py``) that serve CUDA tensors and give the same
bytes:

- ``taco``: Hadamard transform and two scales, fp8 and int8 to int4, in any direction (arXiv
2604.24088)
- ``sdp4bit``: gradients and weight differences of data parallelism (arXiv 2410.15526)
- ``tah_quant``: activations between pipeline stages (arXiv 2506.01352)
- ``channel_norm``: integers of channels without their mean and spread
- ``lossless``: exponents in fewer bits, every value exactly
- ``bitmap_sparse``: the largest values and a bitmap
- ``count_sketch``: sparse sums that add up without being decoded (arXiv 2402.07529, 2504.05638)

``residual_norm`` is no codec: a residual add with the norm behind it, which interleaved halves do
while a message travels.

``symmetric_memory`` has TACO's collectives as one kernel each, over peer memory. ``common`` is what
all share; ``python -m taco_kernels.benchmarks`` times them. To read one codec, begin with its
``reference.py``.
"""

__version__ = "0.3.0"
