"""The layers' common base: settings, and the gather of a row-parallel layer's output gradient."""

import torch

from transformer_engine.pytorch.distributed import Quantized, Quantizer, gather_along_first_dim


class NeverAside:
    """The store of a layer whose weight gradients are computed at once."""

    def delay_wgrad_compute(self) -> bool:
        return False


class TransformerEngineBaseModule(torch.nn.Module):
    """A product of ``[tokens, in]`` with this rank's part of ``weight``."""

    def __init__(
        self,
        size_in,
        size_out,
        tp_group,
        parallel_mode,
        sequence_parallel=False,
        fp8=False,
        fuse=False,
    ):
        super().__init__()
        self.tp_group = tp_group
        self.tp_size = tp_group.size()
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel
        self.quantizer = Quantizer() if fp8 else None
        self.fuse_wgrad_accumulation = fuse
        self.wgrad_store = NeverAside()
        self.weight_names = ["weight"]
        self.use_bias = False
        self.apply_bias = False
        self.weight = torch.nn.Parameter(torch.randn(size_out, size_in) / size_in**0.5)

    @staticmethod
    def grad_output_preprocess(module, grad_output, row_parallel_mode):
        """Gather the whole sequence's gradient where ranks hold slices of it."""
        if row_parallel_mode and module.sequence_parallel:
            grad_output, _ = gather_along_first_dim(
                grad_output.contiguous(), module.tp_group, quantizer=module.quantizer
            )
        return plain(grad_output)


def plain(x):
    """Return a tensor of floats, dequantized where it is in bytes."""
    if isinstance(x, Quantized):
        return x.dequantize()
    return x


def add_weight_gradient(module, x, grad_output):
    """Compute a weight's gradient, or put it into the layer's store.

    Args:
        module: the layer.
        x: its whole input, ``[tokens, in]``.
        grad_output: ``[tokens, out]``.

    Returns:
        The gradient that the autograd function returns for the weight.
    """
    weight = module.weight

    def compute(x, grad_output):
        gradient = grad_output.t() @ x
        if not module.fuse_wgrad_accumulation:
            return gradient
        weight.main_grad.add_(gradient)
        return None

    if module.wgrad_store.delay_wgrad_compute():
        module.wgrad_store.put([x, grad_output], compute)
        gradient = None
    else:
        gradient = compute(x, grad_output)
    if not module.fuse_wgrad_accumulation:
        return gradient
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)  # a dummy for the hooks of a bucket
