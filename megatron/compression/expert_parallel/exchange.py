"""What stands in for the functions by which megatron-core's token dispatchers communicate.

A dispatcher says which of its ways is under way; the functions then know whose tokens these are. What is not
tokens (probabilities, routing maps, counts) goes as megatron-core sends it and is counted as ep.other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.compression.communication.collectives import WithBackward
from megatron.compression.expert_parallel.site import TokenSite
from megatron.compression.tensor_parallel.layers import has_backward

OTHER = "ep.other"

Way = Mapping[dist.ProcessGroup, TokenSite]
"""The sites of a layer's way there or back, by the group that communicates."""


class TokenExchange:
    """Exchanges of all dispatchers of this process, whichever run they are of: sites know their own."""

    def __init__(self) -> None:
        self._way: Way | None = None
        self._tokens: torch.Tensor | None = None
        self._exact = False

    @contextmanager
    def under_way(self, way: Way, tokens: torch.Tensor | None = None, exact: bool = False) -> Iterator[None]:
        """While a dispatcher's own method runs.

        Args:
            tokens: what is compressed; None: everything that is sent meanwhile.
            exact: nothing is.
        """
        before = self._way, self._tokens, self._exact
        self._way, self._tokens, self._exact = way, tokens, exact
        try:
            yield
        finally:
            self._way, self._tokens, self._exact = before

    def all_to_all(
        self,
        original: Callable,
        group: dist.ProcessGroup,
        x: torch.Tensor,
        came: Sequence[int] | None = None,
        to: Sequence[int] | None = None,
        use_nccl_stream: bool = False,
    ) -> torch.Tensor:
        """For ``all_to_all``: ``x [n, ...]`` in rows."""
        site = self._site(group)
        if site is None:
            return original(group, x, came, to, use_nccl_stream)
        came, to = _numbers(came), _numbers(to)
        if self._compresses(site, x, x.nbytes):
            return WithBackward.apply(
                x,
                lambda x: site.all_to_all_rows(x, site.forward, to, came),
                lambda gradient: site.all_to_all_rows(gradient, site.backward, came, to),
            )
        rows = len(x) if came is None else sum(came)
        received = rows * x.shape[1:].numel() * x.element_size()
        self._count(site, x, ("all_to_all", x.nbytes), ("all_to_all", received))
        return original(group, x, came, to, use_nccl_stream)

    def gather(
        self,
        original: Callable,
        x: torch.Tensor,
        tensor_parallel_output_grad: bool = True,
        group: dist.ProcessGroup | None = None,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """For ``gather_from_sequence_parallel_region``: ``[n, ...]`` of every rank; gradients are summed."""
        site = self._site(group)
        if site is None:
            return original(x, tensor_parallel_output_grad, group, output_split_sizes, use_global_buffer)
        sizes = _numbers(output_split_sizes)
        if sizes is not None:
            there, back, why = _traffic(site, self._sends_tokens(x))
            return WithBackward.apply(
                x,
                lambda x: site.all_gather_rows(x, there, sizes, why),
                lambda gradient: site.reduce_scatter_rows(gradient, back, sizes, why),
            )
        nbytes = x.nbytes * group.size()
        if self._compresses(site, x, nbytes):
            return WithBackward.apply(
                x,
                lambda x: site.message(site.forward, "all_gather", nbytes).start(x).wait(),
                lambda gradient: site.message(site.backward, "reduce_scatter", nbytes).start(gradient).wait(),
            )
        self._count(site, x, ("all_gather", nbytes), ("reduce_scatter", nbytes))
        return original(x, tensor_parallel_output_grad, group, None, use_global_buffer)

    def reduce_scatter(
        self,
        original: Callable,
        x: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """For ``reduce_scatter_to_sequence_parallel_region``: this rank's part; gradients are gathered."""
        site = self._site(group)
        if site is None:
            return original(x, group, input_split_sizes, use_global_buffer)
        sizes = _numbers(input_split_sizes)
        if sizes is not None:
            there, back, why = _traffic(site, self._sends_tokens(x))
            return WithBackward.apply(
                x,
                lambda x: site.reduce_scatter_rows(x, there, sizes, why),
                lambda gradient: site.all_gather_rows(gradient, back, sizes, why),
            )
        nbytes = x.nbytes
        if self._compresses(site, x, nbytes):
            return WithBackward.apply(
                x,
                lambda x: site.message(site.forward, "reduce_scatter", nbytes).start(x).wait(),
                lambda gradient: site.message(site.backward, "all_gather", nbytes).start(gradient).wait(),
            )
        self._count(site, x, ("reduce_scatter", x.nbytes), ("all_gather", x.nbytes))
        return original(x, group, None, use_global_buffer)

    def _site(self, group: dist.ProcessGroup | None) -> TokenSite | None:
        if self._way is None or group is None or group.size() == 1:
            return None
        return self._way.get(group)

    def _sends_tokens(self, x: torch.Tensor) -> bool:
        return not self._exact and (self._tokens is None or x is self._tokens)

    def _compresses(self, site: TokenSite, x: torch.Tensor, nbytes: int) -> bool:
        return self._sends_tokens(x) and site.compresses(nbytes, site.forward, site.backward)

    def _count(self, site: TokenSite, x: torch.Tensor, there: tuple[str, int], back: tuple[str, int]) -> None:
        """Count what megatron-core sends itself: now, and in the backward that will come."""
        forward, backward, why = _traffic(site, self._sends_tokens(x))
        site.count(forward, why or site.decide(forward, there[1]).why, *there)
        if has_backward(x):
            site.count(backward, why or site.decide(backward, back[1]).why, *back)


TOKEN_EXCHANGE = TokenExchange()
"""The one through which dispatchers send: they call functions of a module, which stand there once."""


def _traffic(site: TokenSite, tokens: bool) -> tuple[str, str, str | None]:
    """Traffic classes of forward and backward, and why they are exact (None: the policy says)."""
    return (site.forward, site.backward, None) if tokens else (OTHER, OTHER, "exact")


def _numbers(sizes: Sequence[int] | None) -> list[int] | None:
    """Splits as plain numbers; megatron-core has them as numpy's or torch's, on the host."""
    return None if sizes is None else [int(size) for size in sizes]
