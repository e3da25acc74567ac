"""What pipeline stages send each other, encoded on the way.

Every schedule of megatron-core sends through ``P2PCommunicator._communicate``, which a patch replaces by
``PipelineExchange``: megatron-core's own functions send payloads in place of the tensors, in the same order;
what arrives is decoded at once or when the schedule waits for it.
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

FORWARD, BACKWARD = "pp.forward", "pp.backward"
RECEIVED = ("recv_prev", "recv_next")
TRAFFIC = {"send_next": FORWARD, "recv_prev": FORWARD, "send_prev": BACKWARD, "recv_next": BACKWARD}
"""Traffic class of what megatron-core calls its messages."""


class Arrival:
    """A tensor that is being received: the schedule holds ``tensor``, the transport fills ``buffer``."""

    def __init__(self, codec: Codec | None, shape: torch.Size, dtype: torch.dtype) -> None:
        self._codec, self._shape = codec, shape
        device = torch.cuda.current_device()
        size = (
            shape if codec is None else 0
        )  # empty until it is decoded, so that nobody reads it too early
        self.tensor = torch.empty(size, dtype=dtype, device=device, requires_grad=True)
        self.buffer = self.tensor
        if codec is not None:
            size = message_bytes(codec, shape, dtype)
            self.buffer = torch.empty(1, size, dtype=torch.uint8, device=device)

    def decode(self, _: Any = None) -> None:
        """Fill the tensor from the payload, which has arrived."""
        if self._codec is not None:
            _used_here(self.buffer)
            # .data: the schedule holds this very leaf already, and a copy would cost as much as the decoding
            self.tensor.data = self._codec.decode(self.buffer, self._shape, self.tensor.dtype)[0]
        self.buffer = None


class SendsInFlight:
    """A bounded queue of sends, each with the payload that the transport may still read, for which the
    computation need not wait. The oldest of more than ``limit`` is waited for, which bounds the memory."""

    def __init__(self, limit: int = 4) -> None:
        self.limit = limit
        self._sends: deque[Work] = deque()

    def __len__(self) -> int:
        return len(self._sends)

    def add(self, send: Work) -> None:
        """Add a send that has just been started, which holds its payload until it has been waited for."""
        self._sends.append(send)
        while len(self._sends) > self.limit:
            self._sends.popleft().wait()

    def flush(self) -> None:
        """Wait for all of them, in order."""
        while self._sends:
            self._sends.popleft().wait()


class PipelineExchange:
    """Sends between pipeline stages, compressed or not, and counts both. Both ends of a message decide from
    what they know alike: settings, iteration and size."""

    def __init__(self, run: Run) -> None:
        self.policy = run.policy
        self.ledger = run.ledger
        self.in_flight = SendsInFlight()

    def finish(self) -> None:
        """After each forward-backward pass of a schedule: what it has sent has arrived."""
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
        """``P2PCommunicator._communicate``, with its arguments and results."""
        refuse_ambiguous_batch(communicator)
        tensors = {"send_next": tensor_send_next, "send_prev": tensor_send_prev}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if all(self.policy.rule(traffic).codec is None for traffic in (FORWARD, BACKWARD)):
            for name, tensor in tensors.items():
                self._count_uncompressed(TRAFFIC[name], "off", tensor)
            sent = {"tensor_send_next": tensor_send_next, "tensor_send_prev": tensor_send_prev}
            due = {"recv_prev": recv_prev, "recv_next": recv_next}
            return communicate(**sent, **due, tensor_shape=tensor_shape, wait_on_reqs=wait_on_reqs)
        if communicator.config.use_ring_exchange_p2p:
            raise CompressionConfigError(
                "pipeline compression does not reach torch.distributed.ring_exchange; set "
                f"use_ring_exchange_p2p to False, or drop {setting('pipeline_parallel.compression')}"
            )
        shapes = (tensor_shape, tensor_shape)
        if communicator.config.variable_seq_lengths or communicator.config.mtp_standalone:
            shapes = communicator._communicate_shapes(
                tensor_send_next, tensor_send_prev, recv_prev, recv_next
            )
        arrivals = {}
        with torch.no_grad():
            for name, shape, due in zip(RECEIVED, shapes, (recv_prev, recv_next), strict=True):
                if due:
                    arrivals[name] = self._arrival(
                        communicator.config.pipeline_dtype, TRAFFIC[name], shape
                    )
            payloads = {
                name: self._payload(communicator, TRAFFIC[name], x) for name, x in tensors.items()
            }
            encoded = {name for name, payload in payloads.items() if payload is not tensors[name]}
            works = self._start(communicator, payloads, encoded, arrivals)
            if wait_on_reqs:
                works = _complete(communicator, works, arrivals)
            else:
                works |= {
                    name: works[name].then(arrival.decode) for name, arrival in arrivals.items()
                }
        received = (arrivals[name].tensor if name in arrivals else None for name in RECEIVED)
        return *received, works

    def _decide(self, traffic: str, shape: Sequence[int], dtype: torch.dtype) -> Decision:
        return self.policy.decide(traffic, torch.Size(shape).numel() * dtype.itemsize)

    def _arrival(
        self, dtype: torch.dtype | None, traffic: str, shape: Sequence[int] | None
    ) -> Arrival:
        if dtype is None or shape is None:
            raise RuntimeError(
                "pipeline_dtype and the tensor's shape must be known to receive from a stage"
            )
        return Arrival(self._decide(traffic, shape, dtype).codec, torch.Size(shape), dtype)

    def _payload(
        self, communicator: p2p_communication.P2PCommunicator, traffic: str, tensor: torch.Tensor
    ) -> torch.Tensor:
        """What goes to the transport for a tensor, counted: uint8 ``[1, bytes]``, or the tensor itself."""
        codec, why = self._decide(traffic, tensor.shape, tensor.dtype)
        if codec is None:
            self._count_uncompressed(traffic, why, tensor)
            return tensor
        message_bytes(codec, tensor.shape, tensor.dtype)  # speaks where the codec does not fit
        _used_here(tensor)
        payload = codec.encode(tensor[None])
        if codec.lossless:
            self.policy.overflow.note(codec, payload)
        self.ledger.record(traffic, "compressed", "send", payload.nbytes, 0)
        self.ledger.record_plain(traffic, "send", tensor.nbytes, communicator.pp_group.size())
        meter, site = self.policy.meter, f"pipeline stage {communicator.pp_group.rank()}"
        if self.policy.measures(site, traffic):
            meter.measure(site, traffic, tensor, codec, bounded=False)
        return payload

    def _count_uncompressed(self, traffic: str, why: str, tensor: torch.Tensor) -> None:
        self.ledger.record(traffic, why, "send", tensor.nbytes, tensor.nbytes)

    def _start(
        self,
        communicator: p2p_communication.P2PCommunicator,
        payloads: dict[str, torch.Tensor],
        encoded: set[str],
        arrivals: dict[str, Arrival],
    ) -> dict[str, Work]:
        """Start everything by megatron-core's own functions. By message what the schedule waits for: nothing
        for a payload's send, which ``in_flight`` keeps."""
        batched = communicator.config.batch_p2p_comm
        start = p2p_communication._batched_p2p_ops if batched else p2p_communication._p2p_ops
        buffers = payloads | {name: arrival.buffer for name, arrival in arrivals.items()}
        requests = start(
            **{f"tensor_{name}": buffers.get(name) for name in TRAFFIC},
            group=communicator.pp_group,
            prev_pipeline_rank=communicator.prev_rank,
            next_pipeline_rank=communicator.next_rank,
        )
        if batched:
            requests = _by_message(requests, buffers)
        else:
            requests = {(name,): request for name, request in requests.items()}
        works: dict[str, Work] = {}
        for names, request in requests.items():
            work = Work(request)
            if encoded.issuperset(names):
                held = [
                    payloads[name] for name in names
                ]  # alive until the request has been waited for
                self.in_flight.add(Work(request, partial(_used_here, *held)))
                work = Work.completed()
            works |= dict.fromkeys(names, work)
        return works


def _used_here(*tensors: torch.Tensor) -> None:
    """Keep memory from other use until the current stream has passed this place. Under
    ``--overlap-moe-expert-parallel-comm`` it may have been allocated, and be freed, on another stream."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())


def _complete(
    communicator: p2p_communication.P2PCommunicator,
    works: dict[str, Work],
    arrivals: dict[str, Arrival],
) -> None:
    """Wait for everything that the schedule has to wait for, and decode what has arrived."""
    config, pending = communicator.config, [work for work in works.values() if not work.done]
    for work in pending:
        work.wait()
    if pending and config.batch_p2p_comm and config.batch_p2p_sync:
        torch.cuda.synchronize()  # as megatron-core does after batch_isend_irecv
    for arrival in arrivals.values():
        arrival.decode()


def _by_message(requests: list, messages: Collection[str]) -> dict[tuple[str, ...], Any]:
    """Requests of ``_batched_p2p_ops`` by what they send and receive: one each, or one for all (NCCL)."""
    if len(requests) != len(messages):
        (request,) = requests
        return {tuple(messages): request}
    order = [
        name for name in ("send_prev", "recv_prev", "send_next", "recv_next") if name in messages
    ]
    return {(name,): request for name, request in zip(order, requests, strict=True)}


def refuse_ambiguous_batch(communicator: p2p_communication.P2PCommunicator) -> None:
    """Raises: CompressionConfigError: virtual stages on two ranks with batched messages: a rank's next and
    previous stage are one peer, which receives in an order of its own, so that activations and gradients
    change places."""
    virtual = communicator.virtual_pipeline_model_parallel_size is not None
    if communicator.config.batch_p2p_comm and virtual and communicator.pp_group.size() == 2:
        raise CompressionConfigError(
            "virtual pipeline stages on two ranks mix up batched messages; use "
            "--overlap-p2p-communication (batch_p2p_comm False), or more than two pipeline ranks"
        )
