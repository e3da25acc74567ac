"""Local steps of one run: rounds between iterations, the start, and the anchor in the weights.

    training begins     the data centres compare settings and weights, and take the anchor
    iteration ends      fragments whose turn it is are sent, and others, sent earlier, applied
    evaluation, save    the weights hold the anchor meanwhile, then the local weights again

Between rounds nothing here communicates.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.compression.codecs.identity import IdentityCodec
from megatron.compression.communication.ledger import Ledger
from megatron.compression.communication.objects import gather_objects
from megatron.compression.errors import InputError
from megatron.compression.local_steps.checkpoint import StateInCheckpoints
from megatron.compression.local_steps.config import LocalStepsConfig
from megatron.compression.local_steps.link import ITERATION, DataCentreLink, Exchange
from megatron.compression.local_steps.masters import MasterShard
from megatron.compression.local_steps.outer_optimizer import OuterOptimizer
from megatron.compression.local_steps.samples import take_share
from megatron.compression.local_steps.schedule import fragment_bounds
from taco_kernels.common import ceil_div

TRAFFIC = "dp.outer"
"""The ledger's class of what crosses between data centres."""


@dataclass
class Flight:
    """A fragment that was sent and is not yet applied."""

    fragment: int
    iteration: int
    """After which it was sent."""
    exchange: Exchange | None
    """None: its payloads come from a checkpoint."""
    payloads: torch.Tensor | None = None
    """uint8 ``[data centres, bytes]``, where they have arrived."""
    is_summed: bool = True
    """False while pieces are on their way to be summed, between more than two data centres."""


class LocalSteps:
    """This rank's part in the rounds of a run.

    Args:
        config: settings; with one data centre nothing is exchanged, and only checkpoints of more
            are told from others.
        ledger: counts what is sent.
        log: prints a line; called on every rank.
    """

    def __init__(
        self, config: LocalStepsConfig, ledger: Ledger, log: Callable[[str], None]
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.log = log
        self.checkpoint = StateInCheckpoints(log)
        self.shard: MasterShard | None = None
        """Known from the first checkpoint or iteration on."""
        self.outer: OuterOptimizer | None = None
        self.link: DataCentreLink | None = None
        self.bounds: list[tuple[int, int]] = []
        """Begin and end of each fragment in this rank's vector."""
        self.flights: list[Flight] = []
        self._local_weights: torch.Tensor | None = None
        """Set aside while the weights hold the anchor; uint8."""
        self._layout = ""
        self._began = False

    # The start

    def check_job(self) -> None:
        """Refuse a job whose ranks lie in several data centres; before they load checkpoints, each
        from its data centre's folder. Collective over the job.

        Raises:
            InputError: ranks were started with different numbers of their data centre.
        """
        if self.config.enabled:
            check_one_side(self.config.data_centre)

    def follow(self, optimizer: Any) -> None:
        """Make the vector of this rank's masters. Collective inside this data centre."""
        if self.shard is not None:
            return
        self.shard = MasterShard(optimizer)
        self.bounds = fragment_bounds(self.shard.numel, self.config.fragments, self.shard.tail)
        layouts = "".join(gather_objects(self.shard.layout()))
        self._layout = hashlib.sha256(layouts.encode()).hexdigest()

    def begin(self, optimizer: Any, iteration: int) -> None:
        """Take the anchor, and meet the other data centres. Collective over all of them.

        Args:
            optimizer: megatron-core's; None where the run does not train.
            iteration: how many iterations the run has had.

        Raises:
            InputError: another data centre has other settings, weights or iterations.
            DataCentreLostError: one does not come in time.
        """
        if self._began or optimizer is None:
            return
        self._began = True
        if not self.config.enabled:
            self._begin_without_others(optimizer)
            return
        self.follow(optimizer)
        self._take_anchor()
        config = self.config
        self.link = DataCentreLink(
            config.address,
            config.data_centres,
            config.data_centre,
            config.timeout_minutes * 60,
            self.log,
        )
        self.link.agree(config.common() | parallel_sizes() | {ITERATION: iteration})
        self._compare_weights(iteration)
        payload = sum(self._payload_bytes(fragment) for fragment in range(config.fragments))
        sent = (2 if self._sends_pieces else 1) * payload
        self.log(
            f"local steps: all {config.data_centres} data centres have met; rank 0 sends "
            f"{sent / 1e6:,.3f} MB a round to each other one"
        )

    def _begin_without_others(self, optimizer: Any) -> None:
        """Continue a run of several data centres in one: from the anchor, which the weights of its
        checkpoint are."""
        if self.checkpoint.saved is None:
            return
        try:
            self.follow(optimizer)
        except TypeError:  # another optimizer, which has loaded nothing of that checkpoint's
            return
        self.shard.take_weights()
        before = self.checkpoint.saved["data_centres"]
        self.log(
            f"local steps: the checkpoint is of {before} data centres, this run is one: it starts "
            "from the anchor"
        )

    def _take_anchor(self) -> None:
        """Make the outer optimizer: of the checkpoint's state, or of the masters as they are."""
        config = self.config
        saved = self.checkpoint.saved
        tensors = self.checkpoint.tensors
        if saved is not None and tensors is None:
            # Weights were loaded without the state beside them: they are the anchor's.
            self.shard.take_weights()
            self.log(
                "local steps: starts from the checkpoint's weights, the anchor, without its "
                "momentum: the checkpoint was made at other parallel sizes, or its optimizer is "
                "not loaded"
            )
        masters = self.shard.read(0, self.shard.numel)
        spans = [self._span_sent(fragment) for fragment in range(config.fragments)]
        self.outer = OuterOptimizer(
            masters,
            config.codec,
            config.learning_rate,
            config.momentum,
            config.data_centres,
            spans,
        )
        if tensors is None:
            return
        same_data_centres = saved["data_centres"] == config.data_centres
        # Anchor and momentum are the same everywhere; residual memories, local weights and what is
        # in flight belong to a data centre among so many.
        for name, values in self.outer.state().items():
            is_common = name in ("anchor", "velocity")
            if name in tensors and (same_data_centres or is_common):
                values.copy_(tensors[name])
        if same_data_centres:
            if "weights" in tensors:
                self.shard.set_weights(tensors["weights"])
            self._restore_flights(saved, tensors)
            return
        self.shard.mix(self.outer.anchor, 0, self.shard.numel, 0.0)
        self.shard.publish()
        self.log(
            f"local steps: the checkpoint is of {saved['data_centres']} data centres, this run has "
            f"{config.data_centres}: it starts from the anchor"
        )

    def _restore_flights(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Take up what was in flight when the checkpoint was saved, if this run can apply it.

        Args:
            saved: the checkpoint's plain values.
            tensors: this rank's tensors, by name.
        """
        if not self._fits_messages(saved):
            return
        for number, (fragment, iteration, is_summed) in enumerate(saved["flights"]):
            payloads = tensors.get(f"flight.{number}")
            if payloads is None:
                payloads = self._nothing()
            self.flights.append(Flight(fragment, iteration, None, payloads, is_summed))

    def _compare_weights(self, iteration: int) -> None:
        """Refuse data centres whose anchors or layouts differ."""
        # Eight bytes of the layout, sixteen of the values.
        local = torch.frombuffer(
            bytearray.fromhex(self.shard.layout()) + digest(self.outer.anchor), dtype=torch.uint8
        )
        received = self.link.wait(self.link.start(local, iteration))
        for number in self.link.others():
            if torch.equal(received[number], local):
                continue
            if not torch.equal(received[number, :8], local[:8]):
                raise InputError(
                    f"data centre {number} has another model, or other buckets: give all data "
                    "centres the same flags"
                )
            raise InputError(
                f"data centre {number} starts from other weights: give all data centres the same "
                "--seed, or --load the same checkpoint"
            )

    # Rounds

    def iteration_ended(self, iteration: int) -> None:
        """Send the fragments whose turn it is, and apply those whose delay is over.

        Args:
            iteration: how many iterations the run has had, skipped ones too.
        """
        if self.outer is None:
            return
        schedule = self.config.schedule
        # Sent before anything is applied: without a delay a fragment does both in this iteration.
        for fragment in schedule.starting(iteration):
            self._send(fragment, iteration)
        # Half-way, so that both exchanges have the same time; by the iteration, not by what has
        # arrived, since all data centres start exchanges in the same order.
        for flight in self.flights:
            if iteration == flight.iteration + ceil_div(self.config.delay, 2):
                self._send_sum(flight, iteration)
        ending = schedule.ending(iteration)
        if not ending:
            return
        due = [flight for flight in self.flights if flight.fragment in ending]
        for flight in due:
            self._apply(flight, iteration)
        self.flights = [flight for flight in self.flights if flight not in due]
        self.shard.publish()

    def _span_sent(self, fragment: int) -> tuple[int, int]:
        """Return begin and end of what this rank sends of a fragment; equal where it sends nothing."""
        begin, end = self.bounds[fragment]
        # What is not sent, a copy of the tied embedding, is at the end of the vector: it shortens
        # the last fragment, and may be all of it.
        return begin, max(begin, min(end, self.shard.sent))

    def _payload_bytes(self, fragment: int) -> int:
        """Return the bytes of one payload of a fragment: of all of it, or of a piece."""
        begin, end = self._span_sent(fragment)
        codec = self.config.codec or IdentityCodec()
        pieces = self.config.data_centres if self._sends_pieces else 1
        return codec.payload_bytes((ceil_div(end - begin, pieces),)) if end > begin else 0

    @property
    def _sends_pieces(self) -> bool:
        """True where each data centre sums a piece; two send each other everything."""
        return self.config.data_centres > 2

    def _nothing(self) -> torch.Tensor:
        """Return the payloads of a fragment that this rank has nothing of."""
        return torch.empty(self.config.data_centres, 0, dtype=torch.uint8)

    def _send(self, fragment: int, iteration: int) -> None:
        """Encode this rank's difference of a fragment, and start to exchange it."""
        begin, end = self._span_sent(fragment)
        if end == begin:
            # The ranks of this number have nothing of it in any data centre.
            self.flights.append(Flight(fragment, iteration, None, self._nothing()))
            return
        weights = self.shard.read(begin, end)
        if self._sends_pieces:
            payload = self.outer.encode_pieces(weights, begin)
        else:
            payload = self.outer.encode(weights, begin)
        exchange = self.link.start(payload, iteration, is_scatter=self._sends_pieces)
        flight = Flight(fragment, iteration, exchange, is_summed=not self._sends_pieces)
        self.flights.append(flight)
        self._count(fragment, "all_to_all" if self._sends_pieces else "all_gather")

    def _send_sum(self, flight: Flight, iteration: int) -> None:
        """Sum this data centre's piece of a fragment, and start to send the sum to all; only once,
        and nothing where no pieces are sent."""
        if flight.is_summed:
            return
        begin, end = self._span_sent(flight.fragment)
        pieces = self._arrived(flight).to(self.shard.device)
        payload = self.outer.encode_sum(pieces, begin, end)
        flight.exchange = self.link.start(payload, iteration)
        flight.payloads = None
        flight.is_summed = True
        self._count(flight.fragment, "all_gather")

    def _count(self, fragment: int, operation: str) -> None:
        """Count one exchange of a fragment: a payload to each other data centre."""
        begin, end = self._span_sent(fragment)
        receivers = self.config.data_centres - 1
        sent = receivers * self._payload_bytes(fragment)
        self.ledger.record(TRAFFIC, "compressed", operation, sent, link="inter")
        values = end - begin
        if self._sends_pieces:
            values = ceil_div(values, self.config.data_centres)
        uncompressed = receivers * 4 * values
        instead = f"instead_of_{operation}"
        self.ledger.record(TRAFFIC, "compressed", instead, 0, uncompressed, link="inter")

    def _arrived(self, flight: Flight) -> torch.Tensor:
        """Return uint8 ``[data centres, bytes]`` of a flight; wait for it if need be."""
        if flight.payloads is None:
            flight.payloads = self.link.wait(flight.exchange)
        return flight.payloads

    def _apply(self, flight: Flight, iteration: int) -> None:
        """Move the anchor by what all data centres have sent, and the masters towards it."""
        self._send_sum(flight, iteration)  # without a delay, or with one of an iteration
        payloads = self._arrived(flight).to(self.shard.device)
        sent_begin, sent_end = self._span_sent(flight.fragment)
        if sent_end > sent_begin and self._sends_pieces:
            self.outer.step_sums(payloads, sent_begin, sent_end)
        elif sent_end > sent_begin:
            self.outer.step(payloads, sent_begin, sent_end)
        # All of the fragment: a copy of the tied embedding that was not sent gets the values of the
        # one that was, on the first stage.
        begin, end = self.bounds[flight.fragment]
        self.shard.align(self.outer.anchor, begin, end, self.ledger)
        self.shard.mix(self.outer.anchor[begin:end], begin, end, self.config.local_share)
        if flight.exchange is not None:
            of_fragments = ""
            if self.config.fragments > 1:
                of_fragments = f", fragment {flight.fragment + 1} of {self.config.fragments}"
            self.log(
                f"local steps: round after iteration {flight.iteration}{of_fragments}: "
                f"{payloads.shape[1] / 1e6:,.3f} MB from rank 0 in {flight.exchange.seconds:.2f} s,"
                f" applied after iteration {iteration}"
            )

    # The anchor in the weights

    @contextlib.contextmanager
    def anchor_in_weights(self) -> Iterator[None]:
        """Have the model's weights hold the anchor in the body. Collective inside this data
        centre.

        Where the body raises, they stay the anchor: putting the local weights back is collective,
        and a rank whose disk is full would wait for ranks that wait for it, instead of ending.
        """
        if self.outer is None:
            yield
            return
        with torch.no_grad():
            # What overlaps with the next forward pass is completed first.
            self.shard.gather()
            self._local_weights = self.shard.weights()
            self.shard.set_weights_to(self.outer.anchor)
        yield
        with torch.no_grad():
            self.shard.set_weights(self._local_weights)
        self._local_weights = None

    # Checkpoints

    def add_state(self, state_dict: dict[str, Any], optimizer: Any, is_loading: bool) -> None:
        """Put the state into a checkpoint that is saved, or ask for it in one that is loaded.

        Args:
            state_dict: Megatron's; without "optimizer" the checkpoint holds weights alone.
            optimizer: megatron-core's.
            is_loading: it is a template of what is to be read.
        """
        if not self.config.enabled or "optimizer" not in state_dict or optimizer is None:
            return
        if not is_loading:
            self._add_own_state(state_dict)
            return
        saved = self.checkpoint.saved
        if saved is None:
            return
        self.follow(optimizer)
        if saved["layout"] == self._layout:
            self.checkpoint.request(state_dict, self._templates(saved))

    def _add_own_state(self, state_dict: dict[str, Any]) -> None:
        """Put this rank's state into a checkpoint that is saved; waits for what is in flight."""
        tensors = self.outer.state()
        tensors["weights"] = self._local_weights
        if self._local_weights is None:  # a checkpoint that is not saved by ``save_checkpoint``
            tensors["weights"] = self.shard.weights()
        for number, flight in enumerate(self.flights):
            tensors[f"flight.{number}"] = self._arrived(flight)
        flights = [[f.fragment, f.iteration, f.is_summed] for f in self.flights]
        plain = {
            "data_centres": self.config.data_centres,
            "messages": self._messages(),
            "schedule": self._schedule(),
            "layout": self._layout,
            "flights": flights,
        }
        self.checkpoint.save(state_dict, tensors, plain)

    def _messages(self) -> list[object]:
        """Return what payloads depend on: those of other settings cannot be read."""
        common = self.config.common()
        return [common["--outer-compression"], common["--outer-fragments"]]

    def _schedule(self) -> list[int]:
        """Return what decides when a payload that is in flight is applied."""
        return [self.config.steps, self.config.delay]

    def _fits_messages(self, saved: dict[str, Any]) -> bool:
        """Return whether this run goes on with a checkpoint's residual memory, and with what was in
        flight.

        At another schedule what was in flight would never be due, or be applied beside the next
        difference, which holds it as well. It is dropped with the memory of what encoding it lost:
        the anchor has not moved, so the next difference holds both.
        """
        if saved["messages"] != self._messages():
            return False
        return not saved["flights"] or saved.get("schedule") == self._schedule()

    def _templates(self, saved: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return tensors to load into, by name: what fits this run of what was saved."""
        shard = self.shard
        templates = {}
        for name in ("anchor", "velocity"):
            templates[name] = torch.zeros(shard.numel, dtype=torch.float32, device=shard.device)
        if saved["data_centres"] != self.config.data_centres:
            return templates
        templates["weights"] = torch.zeros_like(shard.weights())
        if not self._fits_messages(saved):
            self.log(
                "local steps: --outer-compression, --outer-fragments, --local-steps or "
                "--outer-delay are not the checkpoint's: what was in flight, and the residual "
                "memory, are dropped"
            )
            return templates
        if self.config.codec is not None:
            templates["residual"] = torch.zeros_like(templates["anchor"])
            spans = [self._span_sent(fragment) for fragment in range(self.config.fragments)]
            for begin, end in spans if self._sends_pieces else ():
                size = ceil_div(end - begin, self.config.data_centres)
                templates[f"sum_residual.{begin}"] = torch.zeros(size, device=shard.device)
        for number, (fragment, _, _) in enumerate(saved["flights"]):
            size = self._payload_bytes(fragment)
            payloads = torch.zeros(self.config.data_centres, size, dtype=torch.uint8)
            templates[f"flight.{number}"] = payloads
        return templates

    def loaded(self, state_dict: dict[str, Any]) -> None:
        """Take what has been read of a checkpoint."""
        self.checkpoint.loaded(state_dict)

    def take_share(self, loader: Any) -> None:
        """Have a training data loader read this data centre's samples."""
        if self.config.enabled:
            take_share(loader, self.config.data_centres, self.config.data_centre)


def parallel_sizes() -> dict[str, int]:
    """Return what decides which rank holds what, by the flag that sets it."""
    return {
        "the number of ranks": dist.get_world_size(),
        "--tensor-model-parallel-size": parallel_state.get_tensor_model_parallel_world_size(),
        "--pipeline-model-parallel-size": parallel_state.get_pipeline_model_parallel_world_size(),
        "--context-parallel-size": parallel_state.get_context_parallel_world_size(),
        "--expert-model-parallel-size": parallel_state.get_expert_model_parallel_world_size(),
    }


def check_one_side(data_centre: int) -> None:
    """Refuse a job whose ranks lie in several data centres. Collective over the job.

    Raises:
        InputError: ranks were started with different numbers of their data centre.
    """
    numbers = gather_objects(data_centre)
    for rank, number in enumerate(numbers):
        if number != numbers[0]:
            raise InputError(
                f"--data-centre-rank {number} on rank {rank}, {numbers[0]} on rank 0 of the same "
                "job: every step would cross between data centres. Start one torchrun in each data "
                "centre, with a --master-addr inside it"
            )


def digest(vector: torch.Tensor) -> bytes:
    """Return 16 bytes, which differ, but for chance, where a bit of an fp32 vector differs or values
    change places."""
    sums = torch.zeros(2, dtype=torch.int64, device=vector.device)
    # Integers, whose sums wrap around and do not depend on the order of adding.
    for piece in vector.view(torch.int32).split(2**24):
        values = piece.to(torch.int64)
        weights = torch.arange(1, len(values) + 1, device=vector.device)
        sums[0] = sums[0] * 31 + values.sum()
        sums[1] += (values * weights).sum()
    return sums.cpu().numpy().tobytes()
