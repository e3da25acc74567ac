"""What the layers share: the gather of a row-parallel layer's output gradient, settings."""

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
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_group.size(), parallel_mode
        self.sequence_parallel = sequence_parallel
        self.quantizer = Quantizer() if fp8 else None
        self.fuse_wgrad_accumulation, self.wgrad_store = fuse, NeverAside()
        self.weight_names, self.use_bias, self.apply_bias = ["weight"], False, False
        self.weight = torch.nn.Parameter(torch.randn(size_out, size_in) / size_in**0.5)

    @staticmethod
    def grad_output_preprocess(module, grad_output, row_parallel_mode):
        """The whole sequence's gradient, where ranks hold slices of it."""
        if row_parallel_mode and module.sequence_parallel:
            grad_output, _ = gather_along_first_dim(
                grad_output.contiguous(), module.tp_group, quantizer=module.quantizer
            )
        return plain(grad_output)


def plain(x):
    """A tensor of floats again."""
    return x.dequantize() if isinstance(x, Quantized) else x


def add_weight_gradient(module, x, grad_output):
    """Now or put aside; what autograd is to be given for it."""
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
