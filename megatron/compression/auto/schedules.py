"""How a model hides what tensor parallelism sends: a run of ``--compression auto`` tries each way."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron.compression.auto.candidates import SCHEDULES
from megatron.compression.auto.measurement import of_any_rank
from megatron.compression.communication.run import Run
from megatron.compression.config import CompressionConfig
from megatron.compression.errors import CompressionConfigError, without_fix
from megatron.compression.tensor_parallel import block, hooks

ROOM = 0.05
"""Of a device's memory, which has to be left for a try: halves took 0.5 % more (docs/results/iterations.md),
chunks take another output of a layer."""


def shortage() -> str | None:
    """Why a schedule is not to be tried: the largest iteration so far leaves too little memory on some rank.

    Collective over all ranks.
    """
    reason = None
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        left = (free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()) / total
        if left < ROOM:
            reason = (
                f"iterations leave {100 * max(left, 0):.1f} % of a device's memory, under {100 * ROOM:.0f} %"
            )
    return of_any_rank(reason)


class Schedules:
    """Those of ``SCHEDULES`` that a run can have. Made by all ranks together.

    Args:
        args: Megatron's, validated.
        config: as decided, with a codec of tensor parallelism.
        chunks: the model chunks of this pipeline stage, attached.
        exact: no bit of the run is to change.
    """

    def __init__(
        self,
        args: Namespace,
        config: CompressionConfig,
        run: Run,
        chunks: Sequence[torch.nn.Module],
        exact: bool,
    ) -> None:
        self._args, self._decided, self._run, self._chunks = args, config, run, chunks
        self._exact = exact
        reasons = {name: of_any_rank(self._why_not(name)) for name in SCHEDULES}
        self.names = [name for name, reason in reasons.items() if reason is None]
        """That are possible on all ranks."""
        self.impossible = {name: reason for name, reason in reasons.items() if reason is not None}
        """The others, with the reason."""

    def take(self, name: str | None) -> CompressionConfig:
        """Go by a schedule from the next iteration on; None: by none of them.

        Returns: The config that says so.
        """
        config = self._config(name)
        for chunk in self._chunks:
            hooks.schedule(chunk, config.tensor_parallel, block.TriedHalvesBlock)
        return config

    def _config(self, name: str | None) -> CompressionConfig:
        more = {} if name is None else SCHEDULES[name]
        return replace(self._decided, tensor_parallel=replace(self._decided.tensor_parallel, **more))

    def _why_not(self, name: str) -> str | None:
        if self._exact:
            return "it adds up in another order, and no bit is to change"
        groups = {site.group for chunk in self._chunks for site in hooks.sites_of(chunk)}
        if not all(self._run.transports.transport(group).overlaps for group in groups):
            return "a collective over symmetric memory fills the device"
        try:
            config = self._config(name)
            config.check(self._args)
            for chunk in self._chunks if config.tensor_parallel.halves else ():
                block.check_layers(chunk)
        except CompressionConfigError as error:
            return without_fix(error)  # nobody has asked for it
        return None
