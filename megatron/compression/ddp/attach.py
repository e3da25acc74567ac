"""``attach``: puts compression into a model that ``DistributedDataParallel`` has wrapped."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from megatron.compression.communication.audit import BackendAudit
from megatron.compression.communication.site import Run
from megatron.compression.communication.topology import Topology
from megatron.compression.communication.work import InFlight
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.ddp.gradients import TRAFFIC, DdpGradients
from megatron.compression.ddp.torch_ddp import (
    check_join,
    check_supported,
    trained_parameters,
)
from megatron.compression.dimension import print_on_first_rank
from megatron.compression.errors import CompressionConfigError, spelled
from megatron.compression.names import Names
from megatron.compression.one_model import (
    REDUCE_NAMES,
    check_saved_memory,
    left_out_everything,
    log_if_on_one_host,
    open_run,
    sent_so_far,
    topology_of,
)
from megatron.compression.patches import symbols

NAMES = Names(REDUCE_NAMES)
"""What the user of ``attach`` types for the settings of data parallelism."""

_unscaled: "weakref.WeakSet[DdpCompression]" = weakref.WeakSet()
"""Models whose compressor has a memory, and whose loop has given no ``scaler``."""


def attach(
    model: DistributedDataParallel,
    reduce: str | None = "int8",
    *,
    start_iteration: int = 0,
    scaler: GradScaler | None = None,
    log: Callable[[str], None] = print_on_first_rank,
) -> "DdpCompression":
    """Compress the gradients that ``model`` sums over its ranks, by DDP's communication hook.

    Collective over the ranks of the model's process group. To be called once, before the first
    backward pass.

    Args:
        model: what ``DistributedDataParallel`` has returned, on any device.
        reduce: codec of the gradients (int8, sdp4bit, ...), or tagc; "none" or None = uncompressed.
        start_iteration: the first iteration that compresses, counted from 0.
        scaler: the loop's ``GradScaler``, which a compressor with a memory has to know; codecs do
            not ask for it.
        log: prints a line; called on every rank.

    Returns:
        What has been put into the model.

    Raises:
        CompressionConfigError: a codec, or a setting of DDP's, that is not covered.
    """
    if not isinstance(model, DistributedDataParallel):
        raise CompressionConfigError(
            "attach() takes one model under torch.nn.parallel.DistributedDataParallel, not a "
            f"{type(model).__name__}; wrap it before, and call attach() once for each model"
        )
    # The settings of data parallelism, with errors in the words of this call.
    with spelled(NAMES):
        config = DataParallelConfig(compression=reduce or "none", weights="none")
        config.check_ddp()
    compressor = config.compressor
    # Everything is refused before anything is changed.
    check_supported(model, compressor, DdpCompression.reduce_bucket.__qualname__)
    run = open_run(config, start_iteration, NAMES, "DDP", log)
    topology = topology_of(run, model.process_group, "DDP", log)
    try:
        compression = DdpCompression(model, run, topology, scaler, log)
    except CompressionConfigError:
        run.close()
        raise
    run.policy.iteration = lambda: compression.iteration
    if compressor is not None:
        log(f"compression: DDP: {compressor.describe()}")
        log_if_on_one_host(topology, "DDP", log)
    return compression


class DdpCompression:
    """Compression of one model under DDP.

    DDP calls ``reduce_bucket`` for its buckets, in the same order on all ranks, and waits for their
    futures when all have been called. All exchanges of a pass start inside these calls, so their
    order is the same everywhere, too, and DDP's own reduction of what parameters were used
    (``find_unused_parameters``) follows them on every rank:

        backward    gradients 0   gradients 1   gradients 2 (last)
        hook             start 0       start 1       start 2    complete all
        link             [ exchange 0 ][ exchange 1 ][ second exchange of 0 ] ...

    On a GPU nothing of this waits: kernels and exchanges are put on a stream of their own, and a
    future holds the event that DDP's stream waits for.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        run: Run,
        topology: Topology,
        scaler: GradScaler | None,
        log: Callable[[str], None],
    ) -> None:
        """Register the hook.

        Args:
            model: under DDP.
            run: policy, ledger and transports of this model.
            topology: of the ranks that hold the model.
            scaler: the loop's, for a compressor with a memory.
            log: prints a line; called on every rank.

        Raises:
            CompressionConfigError: DDP has a hook of its own already.
        """
        self.run = run
        self.topology = topology
        self.gradients = DdpGradients(trained_parameters(model), topology, run)
        self.iteration = 0
        """Backward passes that have reduced gradients; a run that resumes may set it."""
        self._log = log
        self._scaler = scaler
        self._loss_scale: torch.Tensor | None = None
        """Of this pass; None: there is no scaler, or no memory that has to know of it."""
        self._in_flight = InFlight()
        self._stream: torch.cuda.Stream | None = None
        """On a GPU: where buckets are reduced; made at its first use."""
        self._passes = 0
        """Like ``iteration``, but a resumed run begins with 0 as well."""
        # The model holds the hook, and so this; it must not be kept alive in turn.
        self._model = weakref.ref(model)
        # What torch.distributed is given in the first iteration is compared with the ledger.
        self.audit = BackendAudit(run.ledger, lambda: {"data parallel": [topology.group]})
        self.audit.start_with_first_forward([model])
        try:
            model.register_comm_hook(None, self.reduce_bucket)
        except RuntimeError as error:  # a builtin hook, which DDP keeps in C++ alone
            self.audit.abandon()
            raise CompressionConfigError(
                f"attach(): DDP takes one communication hook, before the first backward pass "
                f"({error}); drop _register_builtin_comm_hook()"
            ) from error
        if self.gradients.has_memory and scaler is None:
            _unscaled.add(self)
            symbols.extend(GradScaler, "step", ("optimizer",), _before_step, _check_scaled_step)

    def reduce_bucket(self, state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Start to average a bucket's gradients; DDP calls it in each backward pass.

        Args:
            state: nothing; hooks have one.
            bucket: DDP's.

        Returns:
            The future of the averages ``[n]``, which DDP waits for at the end of the pass.

        Raises:
            CompressionConfigError: the model is in a ``join`` that is not covered.
        """
        gradients = bucket.buffer()
        # Hooks come in the order of the buckets, so the first bucket begins a pass.
        if bucket.index() == 0:
            self._begin_pass(gradients.device)
        # DDP reads the averages from the future, and copies nothing where they are its own buffer.
        future: Future[torch.Tensor] = Future()
        if gradients.is_cuda:
            # With devices it holds the event of the stream on which it is completed.
            future = Future(devices=[gradients.device])
        with torch.no_grad(), self._on_own_stream(gradients.device):
            # The future is completed by whichever later hook moves this work to its end.
            work = self.gradients.start(gradients, bucket.parameters(), self._loss_scale)
            self._in_flight.add(work.then(lambda _: future.set_result(gradients)))
            if bucket.is_last():
                # Also on CPUs, which wait here: what DDP sends next comes after ours on all ranks.
                self._in_flight.wait()
        if bucket.is_last():
            self._end_pass()
        return future

    @contextlib.contextmanager
    def _on_own_stream(self, device: torch.device) -> Iterator[None]:
        """Put the body's kernels and exchanges on this model's stream, after what is there now."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # The bucket's gradients are on the current stream of the backward pass.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def _begin_pass(self, device: torch.device) -> None:
        """Before a pass's first bucket, at the same place on all ranks."""
        model = self._model()
        if model is not None:
            check_join(model)
        # Of a pass that raised in the middle.
        self._in_flight = InFlight()
        # In the second pass, since all ranks are here together: the check is a collective.
        if self._passes == 1:
            for line in self.audit.finish(self.topology.group):
                self._log(f"compression: {line}")
        warning = left_out_everything(self.run, self.iteration)
        if warning is not None:
            self._log(f"compression: DDP: {warning}")
        if self._scaler is not None and self.gradients.has_memory:
            # By its public method, which does not wait for the device.
            self._loss_scale = self._scaler.scale(torch.ones((), device=device))

    def _end_pass(self) -> None:
        """After a pass's last bucket."""
        # What others send until the next pass (an evaluation, a reference model) is not looked at.
        self.audit.stop()
        self._passes += 1
        self.iteration += 1

    def close(self) -> None:
        """End: gradients are averaged as DDP does it by itself; what a compressor remembers is
        dropped.

        The hook stays, since DDP takes one a model.
        """
        # Without rules the policy decides for no codec.
        self.run.policy.rules = {}
        # Memory of the size of the model.
        self.gradients.restore({})
        self.audit.abandon()
        _unscaled.discard(self)
        self.run.close()

    def summary(self) -> str:
        """One line: what this rank has sent, would have sent uncompressed, and keeps on the
        device."""
        line = sent_so_far(self.run.ledger, (TRAFFIC,))
        line += f"; device memory: {self.gradients.buffer_bytes() / 1e6:.3f} MB of buffers"
        return f"{line}, {self.gradients.memory_bytes() / 1e6:.3f} MB of kept gradients"

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a compressor of gradients remembers, for torch.distributed.checkpoint.

        By rank and parameter, ``rank0.NAME``, so for the same number of ranks, whatever buckets DDP
        makes; empty for codecs.
        """
        if not self.gradients.has_memory:
            return {}
        prefix = f"rank{dist.get_rank()}."
        return {prefix + name: values for name, values in self.gradients.left_over().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what ``state_dict`` gave, on the same number of ranks: it is added to the
        gradients of the next iteration.

        Raises:
            CompressionConfigError: the state is of another number of ranks, other settings or
                another model.
        """
        expected = self.state_dict()
        check_saved_memory(state, expected)
        prefix = f"rank{dist.get_rank()}."
        self.gradients.restore({name.removeprefix(prefix): state[name] for name in expected})


def _before_step(step: Callable, calls: list[Callable]) -> Callable:
    """Return what makes of ``GradScaler.step`` one that calls ``calls`` with the optimizer before."""

    def checked(scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any):
        for call in calls:
            call(scaler, optimizer)
        return step(scaler, optimizer, *args, **kwargs)

    return checked


def _check_scaled_step(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a loss scale under a memory that does not know of it.

    Raises:
        CompressionConfigError: the optimizer holds parameters of such a model.
    """
    # A scaler that is switched off multiplies by 1.
    if not scaler.is_enabled():
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # Other models of the process, with codecs or with a scaler of theirs, may be scaled.
    for compression in _unscaled:
        parameters = compression.gradients.parameters.values()
        if any(id(parameter) in stepped for parameter in parameters):
            name = compression.run.policy.rule(TRAFFIC).codec.name
            raise CompressionConfigError(
                f"reduce {name} keeps gradients for the next iteration, and GradScaler changes "
                "their scale; give attach() scaler=, or use a codec such as int8"
            )
