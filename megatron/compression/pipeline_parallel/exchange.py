"""What pipeline stages send each other, encoded on the way.

Every schedule of megatron-core sends through ``P2PCommunicator._communicate``, which a patch
replaces by ``PipelineExchange``: megatron-core's own functions send payloads in place of the
tensors, in the same order; what arrives is decoded at once or when the schedule waits for it.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication

from megatron.compression.codecs import Codec
from megatron.compression.communication import Decision, Run, Work
from megatron.compression.errors import CompressionConfigError, setting
from megatron.compression.pipeline_parallel.config import message_bytes

FORWARD = "pp.forward"
BACKWARD = "pp.backward"
SENT = ("send_next", "send_prev")
RECEIVED = ("recv_prev", "recv_next")
TRAFFIC = {"send_next": FORWARD, "recv_prev": FORWARD, "send_prev": BACKWARD, "recv_next": BACKWARD}
"""Traffic class of what megatron-core calls its messages."""

_ORDER = ("send_prev", "recv_prev", "send_next", "recv_next")
"""The order in which ``_batched_p2p_ops`` gives its requests."""


class Arrival:
    """A tensor that is being received: the schedule holds ``tensor``, the transport fills
    ``buffer``.

    Args:
        codec: encodes the message; None: it comes as it is.
        shape: of the tensor.
        dtype: of the tensor.
    """

    def __init__(self, codec: Codec | None, shape: torch.Size, dtype: torch.dtype) -> None:
        self._codec = codec
        self._shape = shape
        device = torch.cuda.current_device()
        if codec is None:
            self.tensor = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
            self.buffer = self.tensor
        else:
            # Empty until it is decoded, so that nobody reads it too early.
            self.tensor = torch.empty(0, dtype=dtype, device=device, requires_grad=True)
            size = message_bytes(codec, shape, dtype)
            self.buffer = torch.empty(1, size, dtype=torch.uint8, device=device)

    def decode(self, _: Any = None) -> None:
        """Fill the tensor from the payload, which has arrived."""
        if self._codec is not None:
            _used_here(self.buffer)
            # .data: the schedule holds this very leaf already, and a copy would cost as much as the
            # decoding
            self.tensor.data = self._codec.decode(self.buffer, self._shape, self.tensor.dtype)[0]
        self.buffer = None


class SendsInFlight:
    """A bounded queue of sends, each with the payload that the transport may still read, for which
    the computation need not wait. The oldest of more than ``limit`` is waited for, which bounds the
    memory."""

    def __init__(self, limit: int = 4) -> None:
        self.limit = limit
        self._sends: deque[Work] = deque()

    def __len__(self) -> int:
        return len(self._sends)

    def add(self, send: Work) -> None:
        """Add a send that has just been started, which holds its payload until it has been waited
        for."""
        self._sends.append(send)
        while len(self._sends) > self.limit:
            self._sends.popleft().wait()

    def flush(self) -> None:
        """Wait for all of them, in order."""
        while self._sends:
            self._sends.popleft().wait()


class PipelineExchange:
    """Sends between the pipeline stages of one run, compressed or not, and counts both.

    Both ends of a message decide from what they know alike: settings, iteration and size.
    """

    def __init__(self, run: Run) -> None:
        self.policy = run.policy
        self.ledger = run.ledger
        self.in_flight = SendsInFlight()

    def finish(self) -> None:
        """Wait for what a forward-backward pass has sent; called when the schedule's pass has
        ended."""
        self.in_flight.flush()

    def __call__(
        self,
        communicator: p2p_communication.P2PCommunicator,
        communicate: Callable,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Sequence[int] | None,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        """Exchange as ``P2PCommunicator._communicate`` does, with its arguments and results.

        Args:
            communicator: megatron-core's.
            communicate: its own method, for a run that compresses nothing between stages.
            tensor_send_next: activations for the next stage; None: nothing is sent there.
            tensor_send_prev: gradients for the stage before.
            recv_prev: whether activations come from the stage before.
            recv_next: whether gradients come from the next stage.
            tensor_shape: of what comes.
            wait_on_reqs: wait here, rather than hand out what the schedule waits for.

        Returns:
            What comes from the stage before and from the next one, and by message what to wait for.
        """
        refuse_ambiguous_batch(communicator)
        tensors = {"send_next": tensor_send_next, "send_prev": tensor_send_prev}
        if not self._compresses():
            for name in SENT:
                if tensors[name] is not None:
                    self._count_uncompressed(TRAFFIC[name], "off", tensors[name])
            return communicate(
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        if communicator.config.use_ring_exchange_p2p:
            raise CompressionConfigError(
                "pipeline compression does not reach torch.distributed.ring_exchange; set "
                "use_ring_exchange_p2p to False, or drop "
                f"{setting('pipeline_parallel.compression')}"
            )
        # Both directions have one shape, unless stages tell each other.
        shapes = dict.fromkeys(RECEIVED, tensor_shape)
        if communicator.config.variable_seq_lengths or communicator.config.mtp_standalone:
            from_prev, from_next = communicator._communicate_shapes(
                tensor_send_next, tensor_send_prev, recv_prev, recv_next
            )
            shapes = {"recv_prev": from_prev, "recv_next": from_next}
        expected = {"recv_prev": recv_prev, "recv_next": recv_next}
        with torch.no_grad():
            arrivals = {
                name: self._arrival(communicator, name, shapes[name])
                for name in RECEIVED
                if expected[name]
            }
            works = self._send(communicator, tensors, arrivals)
            if wait_on_reqs:
                # None, as megatron-core says that nothing is left to wait for.
                works = _complete(communicator, works, arrivals)
            else:
                for name, arrival in arrivals.items():
                    # The schedule waits when it needs the tensor; decoding belongs to the wait.
                    works[name] = works[name].then(arrival.decode)
        received = [arrivals[name].tensor if name in arrivals else None for name in RECEIVED]
        return *received, works

    def _compresses(self) -> bool:
        """Return whether any message between stages has a codec, in any iteration."""
        rule = self.policy.rule
        return rule(FORWARD).codec is not None or rule(BACKWARD).codec is not None

    def _decide(self, traffic: str, shape: Sequence[int], dtype: torch.dtype) -> Decision:
        return self.policy.decide(traffic, torch.Size(shape).numel() * dtype.itemsize)

    def _arrival(
        self,
        communicator: p2p_communication.P2PCommunicator,
        name: str,
        shape: Sequence[int] | None,
    ) -> Arrival:
        """Return what a message of this name and shape is received into."""
        dtype = communicator.config.pipeline_dtype
        if dtype is None or shape is None:
            raise RuntimeError(
                "pipeline_dtype and the tensor's shape must be known to receive from a stage"
            )
        codec = self._decide(TRAFFIC[name], shape, dtype).codec
        return Arrival(codec, torch.Size(shape), dtype)

    def _send(
        self,
        communicator: p2p_communication.P2PCommunicator,
        tensors: dict[str, torch.Tensor | None],
        arrivals: dict[str, Arrival],
    ) -> dict[str, Work]:
        """Encode what is sent, and start everything; return by message what the schedule waits
        for."""
        payloads: dict[str, torch.Tensor] = {}
        encoded: set[str] = set()
        for name in SENT:
            tensor = tensors[name]
            if tensor is None:
                continue
            payloads[name] = self._payload(communicator, TRAFFIC[name], tensor)
            if payloads[name] is not tensor:
                encoded.add(name)
        return self._start(communicator, payloads, encoded, arrivals)

    def _payload(
        self, communicator: p2p_communication.P2PCommunicator, traffic: str, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Count a message, and return what goes to the transport: uint8 ``[1, bytes]``, or the
        tensor itself."""
        codec, reason = self._decide(traffic, tensor.shape, tensor.dtype)
        if codec is None:
            self._count_uncompressed(traffic, reason, tensor)
            return tensor
        message_bytes(codec, tensor.shape, tensor.dtype)  # raises where the codec does not fit
        _used_here(tensor)
        payload = codec.encode(tensor[None])
        if codec.lossless:
            self.policy.overflow.note(codec, payload)
        # Both ends know a payload's size beforehand, so it travels alone.
        self.ledger.record(traffic, "compressed", "send", payload.nbytes, 0)
        self.ledger.record_plain(traffic, "send", tensor.nbytes, communicator.pp_group.size())
        # There is one site a stage and direction.
        site = f"pipeline stage {communicator.pp_group.rank()}"
        if self.policy.measures(site, traffic):
            self.policy.meter.measure(site, traffic, tensor, codec, bounded=False)
        return payload

    def _count_uncompressed(self, traffic: str, reason: str, tensor: torch.Tensor) -> None:
        self.ledger.record(traffic, reason, "send", tensor.nbytes, tensor.nbytes)

    def _start(
        self,
        communicator: p2p_communication.P2PCommunicator,
        payloads: dict[str, torch.Tensor],
        encoded: set[str],
        arrivals: dict[str, Arrival],
    ) -> dict[str, Work]:
        """Start everything by megatron-core's own functions, in its order.

        Returns:
            By message what the schedule waits for: nothing for a payload's send, which
            ``in_flight`` keeps.
        """
        batched = communicator.config.batch_p2p_comm
        start = p2p_communication._batched_p2p_ops if batched else p2p_communication._p2p_ops
        # The same order as megatron-core's, on both sides: payloads stand in the tensors' places.
        buffers = payloads | {name: arrival.buffer for name, arrival in arrivals.items()}
        requests = start(
            **{f"tensor_{name}": buffers.get(name) for name in TRAFFIC},
            group=communicator.pp_group,
            prev_pipeline_rank=communicator.prev_rank,
            next_pipeline_rank=communicator.next_rank,
        )
        if batched:
            requests = _by_message(requests, buffers)  # a list without names
        else:
            requests = {(name,): request for name, request in requests.items()}
        works: dict[str, Work] = {}
        # ``names`` are several where NCCL has one request for a batch: then the schedule waits for
        # all of it, unless payloads are all that is in it.
        for names, request in requests.items():
            work = Work(request)
            # Nobody but the transport reads a payload, so the schedule need not wait for it.
            if encoded.issuperset(names):
                # The finish holds the payloads: they live until the request has been waited for.
                sent = [payloads[name] for name in names]
                self.in_flight.add(Work(request, partial(_used_here, *sent)))
                work = Work.completed()
            works |= dict.fromkeys(names, work)
        return works


def _used_here(*tensors: torch.Tensor) -> None:
    """Keep memory from other use until the current stream has passed this point.

    Under ``--overlap-moe-expert-parallel-comm`` it may have been allocated, and be freed, on
    another stream.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())


def _complete(
    communicator: p2p_communication.P2PCommunicator,
    works: dict[str, Work],
    arrivals: dict[str, Arrival],
) -> None:
    """Wait for everything that the schedule has to wait for, and decode what has arrived."""
    config = communicator.config
    pending = [work for work in works.values() if not work.done]
    for work in pending:
        work.wait()
    if pending and config.batch_p2p_comm and config.batch_p2p_sync:
        torch.cuda.synchronize()  # as megatron-core does after batch_isend_irecv
    for arrival in arrivals.values():
        arrival.decode()


def _by_message(requests: list, messages: Collection[str]) -> dict[tuple[str, ...], Any]:
    """Return the requests of ``_batched_p2p_ops`` by what they send and receive.

    gloo has a request for each message, NCCL one for all.
    """
    # NCCL coalesces them into one request.
    if len(requests) != len(messages):
        (request,) = requests
        return {tuple(messages): request}
    order = [name for name in _ORDER if name in messages]
    return {(name,): request for name, request in zip(order, requests, strict=True)}


def refuse_ambiguous_batch(communicator: p2p_communication.P2PCommunicator) -> None:
    """Refuse virtual stages on two ranks with batched messages.

    A rank's next and previous stage are one peer there, which receives in its own order, so that
    activations and gradients would change places.

    Raises:
        CompressionConfigError: they are in use.
    """
    virtual = communicator.virtual_pipeline_model_parallel_size is not None
    if communicator.config.batch_p2p_comm and virtual and communicator.pp_group.size() == 2:
        raise CompressionConfigError(
            "virtual pipeline stages on two ranks mix up batched messages; use "
            "--overlap-p2p-communication (batch_p2p_comm False), or more than two pipeline ranks"
        )
