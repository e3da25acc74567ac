"""What pipeline stages send each other, encoded on the way.

Every schedule of megatron-core sends through ``P2PCommunicator._communicate``; a seam hands those calls to
``PipelineExchange``. It replaces the tensors by their payloads, has megatron-core's own functions send
them in the same order, and decodes what arrives, at once or when the schedule waits for it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication

from megatron.compression.codecs import MessageCodec
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.probe import ErrorProbe
from megatron.compression.config_errors import CompressionConfigError
from megatron.compression.pipeline_parallel.codecs import backward_codec, forward_codec
from megatron.compression.pipeline_parallel.config import PipelineParallelCompression
from megatron.compression.pipeline_parallel.in_flight import Send, SendsInFlight
from megatron.compression.pipeline_parallel.streams import MessageStreams
from taco_kernels import Stream

FORWARD, BACKWARD = "pp.forward", "pp.backward"


class Arrival:
    """A tensor on its way: what the schedule holds until it waits for the message."""

    def __init__(
        self,
        codec: MessageCodec | None,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device | int,
        random: Stream | None = None,
    ) -> None:
        self.codec = codec
        self.random = random
        self.shape = shape
        size = shape if codec is None else 0  # empty until it is decoded, so that nobody reads it too early
        self.tensor = torch.empty(size, dtype=dtype, device=device, requires_grad=True)
        self.buffer = self.tensor
        """What the transport fills."""
        if codec is not None:
            self.buffer = torch.empty(codec.wire_bytes(shape), dtype=torch.uint8, device=device)

    def take(self) -> None:
        """Fill the tensor from the payload, which has arrived; a second call does nothing."""
        if self.codec is not None and self.buffer is not None:
            # .data: the schedule holds this very leaf already, and a copy would cost as much as the decoding
            self.tensor.data = self.codec.decode(self.buffer, self.shape, self.tensor.dtype, self.random)
            self.buffer = None


@dataclass
class Handle:
    """A request of the transport, as the schedule knows it: ``wait``."""

    request: Any
    arrival: Arrival | None = None
    put_off: bool = False
    """A payload's send, which ``SendsInFlight`` waits for: nobody else has to."""

    def wait(self) -> None:
        """Wait for the request (on NCCL: the current stream does) and decode what it brought."""
        if self.put_off:
            return
        self.request.wait()
        if self.arrival is not None:
            self.arrival.take()


class PipelineExchange:
    """Sends between pipeline stages, compressed or not, and counts both.

    Args:
        settings: what the command line says.
        ledger: counts pp.forward and pp.backward.
        probe: gets the relative error of a stage's payloads.
        iteration: the zero-based iteration that all ranks are in. It is asked before the first message of an
            iteration, when the forward step has not run yet.
        seed: the job's, for codecs that round with random numbers.
        replica: this rank's data-parallel rank, which the stages of a pipeline share.
        validate_uncompressed: send without a codec while the ledger is told of an evaluation.
    """

    def __init__(
        self,
        settings: PipelineParallelCompression,
        ledger: Ledger,
        probe: ErrorProbe,
        iteration: Callable[[], int],
        seed: int = 0,
        replica: Callable[[], int] = lambda: 0,
        validate_uncompressed: bool = False,
    ) -> None:
        self.settings = settings
        self.ledger = ledger
        self.probe = probe
        self.iteration = iteration
        self.codecs: dict[str, MessageCodec | None] = {
            FORWARD: forward_codec(settings),
            BACKWARD: backward_codec(settings),
        }
        self.streams = MessageStreams(seed)
        self.replica = replica
        self.validate_uncompressed = validate_uncompressed
        self.in_flight = SendsInFlight()
        self.put_off_sends = True
        """Whether the computation goes on before a payload has been sent."""

    def begin(self) -> None:
        """Before each forward-backward pass of a schedule, on every rank."""
        if not self.ledger.evaluating:  # several passes in one iteration, which are never repeated
            self.streams.restart()

    def finish(self) -> None:
        """Behind each pass: what it has sent has arrived."""
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
        tensor_shape: tuple[int, ...] | None,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        """Stand in for ``P2PCommunicator._communicate`` with its arguments and results.

        Args:
            communicate: the original, bound.

        Raises:
            CompressionConfigError: a set-up in which the two directions' messages would be mixed up.
        """
        refuse_ambiguous_batch(communicator)
        codecs = {channel: self._codec_now(channel) for channel in (FORWARD, BACKWARD)}
        if codecs[FORWARD] is None and codecs[BACKWARD] is None:
            for channel, tensor in ((FORWARD, tensor_send_next), (BACKWARD, tensor_send_prev)):
                if tensor is not None:
                    self.ledger.record(channel, self._kind(channel), "send", tensor.nbytes, tensor.nbytes)
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
                "use_ring_exchange_p2p to False, or drop --pp-compression"
            )
        shapes = (tensor_shape, tensor_shape)
        if communicator.config.variable_seq_lengths or communicator.config.mtp_standalone:
            shapes = communicator._communicate_shapes(
                tensor_send_next, tensor_send_prev, recv_prev, recv_next
            )
        arrive = partial(self._arrival, communicator)
        with torch.no_grad():
            from_prev = arrive(FORWARD, codecs[FORWARD], shapes[0]) if recv_prev else None
            from_next = arrive(BACKWARD, codecs[BACKWARD], shapes[1]) if recv_next else None
            payloads = {
                "send_next": self._payload(communicator, FORWARD, codecs[FORWARD], tensor_send_next),
                "send_prev": self._payload(communicator, BACKWARD, codecs[BACKWARD], tensor_send_prev),
            }
            encoded = {"send_next": codecs[FORWARD], "send_prev": codecs[BACKWARD]}
            encoded = {name for name, codec in encoded.items() if codec is not None}
            requests = self._send(communicator, payloads, encoded, from_prev, from_next, wait_on_reqs)
        return (
            from_prev.tensor if from_prev else None,
            from_next.tensor if from_next else None,
            requests,
        )

    def _codec_now(self, channel: str) -> MessageCodec | None:
        if self._exact_evaluation() or self.iteration() < self.settings.tah_start_iteration:
            return None
        return self.codecs[channel]

    def _exact_evaluation(self) -> bool:
        return self.validate_uncompressed and self.ledger.evaluating

    def _kind(self, channel: str) -> str:
        """The ledger's kind of an uncompressed message."""
        if self.codecs[channel] is None:
            return "off"
        return "evaluation" if self._exact_evaluation() else "warmup"

    def _arrival(
        self,
        communicator: p2p_communication.P2PCommunicator,
        channel: str,
        codec: MessageCodec | None,
        shape,
    ) -> Arrival:
        dtype = communicator.config.pipeline_dtype
        if dtype is None or shape is None:
            raise RuntimeError("pipeline_dtype and the tensor's shape must be known to receive from a stage")
        random = self._random(communicator, channel, codec, -1 if channel == FORWARD else 1)
        return Arrival(codec, torch.Size(shape), dtype, torch.cuda.current_device(), random)

    def _random(
        self,
        communicator: p2p_communication.P2PCommunicator,
        channel: str,
        codec: MessageCodec | None,
        distance: int = 0,
    ) -> Stream | None:
        """Random numbers' address for the next message of the stage at ``distance``, 0 being this one."""
        if codec is None or not codec.rounds_randomly:
            return None
        sender = (communicator.pp_group.rank() + distance) % communicator.pp_group.size()
        return self.streams.next(self.iteration(), channel == BACKWARD, sender, not distance, self.replica())

    def _payload(
        self,
        communicator: p2p_communication.P2PCommunicator,
        channel: str,
        codec: MessageCodec | None,
        tensor: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """What goes to the transport for ``tensor``, counted."""
        if tensor is None:
            return None
        if codec is None:
            self.ledger.record(channel, self._kind(channel), "send", tensor.nbytes, tensor.nbytes)
            return tensor
        random = self._random(communicator, channel, codec)
        payload = codec.encode(tensor, random)
        self.ledger.record(channel, "compressed", "send", payload.nbytes, 0)
        self.ledger.record_plain(channel, "send", tensor.nbytes, communicator.pp_group.size())
        site = f"pipeline stage {communicator.pp_group.rank()}"
        if self.probe.due(site, channel, self.iteration()):
            decoded = codec.decode(payload, tensor.shape, tensor.dtype, random)
            self.probe.observe(site, channel, tensor, decoded)
        return payload

    def _send(
        self,
        communicator: p2p_communication.P2PCommunicator,
        payloads: dict[str, torch.Tensor | None],
        encoded: set[str],
        from_prev: Arrival | None,
        from_next: Arrival | None,
        wait_on_reqs: bool,
    ) -> Any:
        """Hand everything to megatron-core's own functions; None when all of it has arrived."""
        config = communicator.config
        batched = config.batch_p2p_comm
        if batched and not wait_on_reqs:
            raise RuntimeError("batched point-to-point messages are waited for at once")
        start = p2p_communication._batched_p2p_ops if batched else p2p_communication._p2p_ops
        requests = start(
            tensor_send_prev=payloads["send_prev"],
            tensor_recv_prev=from_prev.buffer if from_prev else None,
            tensor_send_next=payloads["send_next"],
            tensor_recv_next=from_next.buffer if from_next else None,
            group=communicator.pp_group,
            prev_pipeline_rank=communicator.prev_rank,
            next_pipeline_rank=communicator.next_rank,
        )
        arrivals = {"recv_prev": from_prev, "recv_next": from_next}
        messages = [name for name, message in (payloads | arrivals).items() if message is not None]
        if batched:
            requests = _by_message(requests, messages)
        else:
            requests = {(name,): request for name, request in requests.items()}
        put_off = set()
        for names, request in requests.items():
            if encoded.issuperset(names):
                requests[names] = send = Send(request, [payloads[name] for name in names])
                self.in_flight.add(send)
                put_off |= {names} if self.put_off_sends else set()
        if not wait_on_reqs:
            return {
                name: Handle(request, arrivals.get(name), (name,) in put_off)
                for (name,), request in requests.items()
            }
        needed = [request for names, request in requests.items() if names not in put_off]
        for request in needed:
            request.wait()
        if batched and config.batch_p2p_sync and needed:
            torch.cuda.synchronize()  # as megatron-core does behind batch_isend_irecv
        for arrival in (from_prev, from_next):
            if arrival is not None:
                arrival.take()
        return None


def _by_message(requests: list, messages: Collection[str]) -> dict[tuple[str, ...], Any]:
    """Requests of ``_batched_p2p_ops`` by what they send and receive: one each, or one for all (NCCL)."""
    if len(requests) != len(messages):
        (request,) = requests
        return {tuple(messages): request}
    order = [name for name in ("send_prev", "recv_prev", "send_next", "recv_next") if name in messages]
    return {(name,): request for name, request in zip(order, requests, strict=True)}


def refuse_ambiguous_batch(communicator: p2p_communication.P2PCommunicator) -> None:
    """Refuse virtual stages on two ranks with batched messages.

    There a rank's next and previous stage are one peer, which takes messages in the order of its receives,
    not in that of the sends: activations and gradients would silently change places.

    Raises:
        CompressionConfigError: that set-up.
    """
    config = communicator.config
    if (
        config.batch_p2p_comm
        and communicator.virtual_pipeline_model_parallel_size is not None
        and communicator.pp_group.size() == 2
    ):
        raise CompressionConfigError(
            "virtual pipeline stages on two ranks mix up batched messages; use "
            "--overlap-p2p-communication (batch_p2p_comm False), or more than two pipeline ranks"
        )
