"""The connection between data centres: each rank with the rank of its number in the others.

A data centre is a job of its own, whose torch.distributed knows its own ranks alone: no collective
of a training step can meet another data centre. What crosses is sent here and nowhere else.

    data centre 0   rank 0   rank 1   ...        one gloo group a column, in host memory
                      |        |
    data centre 1   rank 0   rank 1   ...

Gloo rather than NCCL: payloads are small and late, a kernel that waits for them would hold the GPU,
and NCCL's watchdog would end the process instead of this module's line. A thread copies, sends and
receives, so that training goes on meanwhile.

A store at ``--outer-address``, kept by rank 0 of data centre 0, holds what each data centre says of
itself: its settings, and the iteration of its newest exchange, which a line about a late one quotes.

One exchange of a payload on a GPU, by thread:

    training    start: event -> ... iterations ... -> wait: payloads to the GPU, on its stream
    this one        copy to pinned memory, on a stream of its own -> gloo -> done

The memory of the payload is free once it is copied: this thread waits for its stream before gloo
reads the copy, and holds the payload until then.
"""

import datetime
import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.compression.communication.gloo import wait_at_exit
from megatron.compression.errors import InputError

ITERATION = "the iteration"
"""What lines call the iteration at which a data centre starts."""
SECONDS_BETWEEN_LINES = 30.0
"""How often a line says that another data centre is waited for."""
_GRACE_SECONDS = 60.0
"""By how much gloo's limit for connecting is longer than ours, so that the error is ours."""
_NEWS_SECONDS = 5.0
"""How long the store may take to answer, before a line goes without its answer."""
_GLOO_LIMIT = datetime.timedelta(days=7)
"""For an exchange. It may be under way for as long as its delay, over a slow link, so that only
``wait`` can tell when one is late."""


class DataCentreLostError(InputError):
    """Another data centre did not answer in time, or closed the connection."""


@dataclass
class Exchange:
    """One exchange with the other data centres, which may be under way."""

    iteration: int
    """Of this run, after which it was started."""
    payload: torch.Tensor
    """uint8 ``[bytes]``, this data centre's for all; of a scatter ``[data centres, bytes]``. In host
    memory from the moment on at which it has been copied there."""
    device: torch.device
    """Of the payload that was given, where those that arrive are wanted."""
    is_scatter: bool = False
    """The payload has a row for each data centre, which gets that row alone."""
    ready: Any = None
    """The CUDA event after which the payload is complete; None on a CPU."""
    payloads: torch.Tensor | None = None
    """uint8 ``[data centres, bytes]`` in host memory, once all have arrived."""
    error: Exception | None = None
    """Why none arrive; a ``ConnectionError`` where another data centre is the reason."""
    done: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0
    """How long it took, once it is done."""


class DataCentreLink:
    """This rank's connection to the ranks of its number in the other data centres.

    Args:
        address: HOST:PORT of the store.
        data_centres: how many there are.
        data_centre: this one's number.
        seconds: how long to wait for another one before giving up.
        log: prints a line; called on every rank.
    """

    def __init__(
        self,
        address: str,
        data_centres: int,
        data_centre: int,
        seconds: float,
        log: Callable[[str], None],
    ) -> None:
        self.address = address
        self.size = data_centres
        self.index = data_centre
        self.seconds = seconds
        self.log = log
        self.rank = dist.get_rank()
        self._store = self._open_store()
        self._group: Any = None
        self._stream: Any = None
        """Of copies from a GPU; None: there have been none."""
        self._queue: queue.Queue[Exchange] = queue.Queue()
        self._newest: dict[int, int] = {}
        """By data centre, the iteration after which it has begun its newest exchange, as far as this
        rank knows."""
        self._inquiry: threading.Thread | None = None
        """Asks the store for news; alive where the store does not answer."""
        self.exchanges = 0
        """Exchanges started so far."""

    def _open_store(self) -> dist.Store:
        host, _, port = self.address.rpartition(":")
        keeps_store = self.index == 0 and self.rank == 0
        limit = datetime.timedelta(seconds=self.seconds)
        if not keeps_store:
            self.log(f"local steps: connecting to data centre 0 at {self.address}")
        try:
            return dist.TCPStore(
                host, int(port), is_master=keeps_store, wait_for_workers=False, timeout=limit
            )
        except (RuntimeError, ValueError) as error:
            if keeps_store:
                raise InputError(
                    f"--outer-address {self.address}: this rank cannot listen there "
                    f"({str(error).splitlines()[0]}); give a free port of this host"
                ) from error
            raise DataCentreLostError(
                f"data centre 0 does not answer at --outer-address {self.address} within "
                f"{self.seconds:.0f} s: start it, or open the port between the data centres"
            ) from error

    def others(self) -> list[int]:
        """Return the numbers of the other data centres."""
        return [number for number in range(self.size) if number != self.index]

    def agree(self, settings: dict[str, Any]) -> None:
        """Compare settings with those of the other data centres, and connect to them.

        Args:
            settings: by the name that a user types; plain values, the same on all ranks here.

        Raises:
            InputError: another data centre has another value, named.
            DataCentreLostError: one does not come in time.
        """
        try:
            self._compare(settings)
        except dist.DistNetworkError as error:
            raise DataCentreLostError(
                f"data centre 0 closed the connection at --outer-address {self.address}: its own "
                "log says why; start all data centres again"
            ) from error
        self._connect()
        # A daemon: a process that ends must not wait for a data centre that is gone.
        threading.Thread(target=self._work, name="data-centre-link", daemon=True).start()

    def _compare(self, settings: dict[str, Any]) -> None:
        """Compare settings with those of the other data centres.

        Args:
            settings: as for ``agree``.

        Raises:
            InputError: another data centre has another value, named.
        """
        # One rank speaks for its data centre; every rank reads what the others say.
        if self.rank == 0:
            self._store.set(f"settings/{self.index}", json.dumps(settings))
        for number in self.others():
            self._await_keys(number, f"settings/{number}")
            theirs = json.loads(self._store.get(f"settings/{number}"))
            for name, value in settings.items():
                if theirs.get(name) != value:
                    raise InputError(
                        f"{name} {value} here, {theirs.get(name)} in data centre {number}: "
                        f"{_fix_of(name)}"
                    )

    def _connect(self) -> None:
        """Connect to the same rank of every other data centre."""
        limit = datetime.timedelta(seconds=self.seconds + _GRACE_SECONDS)
        prefix = dist.PrefixStore(f"rank{self.rank}", self._store)
        wait_at_exit()
        try:
            # Not a group of torch.distributed's: that knows the ranks of this job alone. The
            # constructor connects.
            self._group = dist.ProcessGroupGloo(prefix, self.index, self.size, limit)
        except RuntimeError as error:
            raise DataCentreLostError(
                "the ranks of another data centre are not reached "
                f"({str(error).splitlines()[0]}): open the ports between the hosts, and name the "
                "network by GLOO_SOCKET_IFNAME"
            ) from error
        # Connecting had a limit; exchanges have none but that of ``wait``.
        self._group._set_default_timeout(_GLOO_LIMIT)

    def _await_keys(self, number: int, key: str) -> None:
        """Wait until a data centre has written a key, with a line now and then.

        Raises:
            DataCentreLostError: it has not come in time.
            DistNetworkError: data centre 0 has ended, and the store with it.
        """
        begin = time.monotonic()
        while True:
            elapsed = time.monotonic() - begin
            remaining = self.seconds - elapsed
            if remaining <= 0:
                raise DataCentreLostError(
                    f"data centre {number} has not started within {elapsed:.0f} s: see its log, and "
                    f"that one was started with --data-centre-rank {number}; start all within "
                    "--outer-timeout-minutes of each other, or raise it"
                )
            # In short waits, so that a line can say in between who is missing.
            wait = datetime.timedelta(seconds=min(remaining, SECONDS_BETWEEN_LINES))
            try:
                self._store.wait([key], wait)
                return
            except dist.DistStoreError:  # the wait is over, and the key is not there
                self.log(f"local steps: waiting for data centre {number} to start")

    def start(self, payload: torch.Tensor, iteration: int, is_scatter: bool = False) -> Exchange:
        """Start to exchange payloads with the other data centres.

        Collective over the data centres, in the same order on each.

        Args:
            payload: uint8 ``[bytes]``, of one size in all data centres; not changed afterwards.
            iteration: of this run.
            is_scatter: ``[data centres, bytes]``: each data centre gets its row, and one of each.
        """
        exchange = Exchange(iteration, payload, payload.device, is_scatter)
        if payload.is_cuda:
            exchange.ready = torch.cuda.Event()
            exchange.ready.record()
        self.exchanges += 1
        self._queue.put(exchange)
        return exchange

    def _publish(self, iteration: int) -> None:
        """Tell the other data centres that this one has begun an exchange."""
        try:
            self._store.set(f"round/{self.index}", str(iteration))
        except RuntimeError:
            # The store is lost with data centre 0. The exchange itself will say so.
            pass

    def _work(self) -> None:
        """Carry out exchanges one after the other; the thread's body."""
        while True:
            exchange = self._queue.get()
            self._carry_out(exchange)
            # The next one comes after H iterations, and this one holds all payloads.
            del exchange

    def _carry_out(self, exchange: Exchange) -> None:
        """Send and receive; whatever goes wrong is raised by ``wait``, on the thread of training."""
        begin = time.monotonic()
        try:
            if self.rank == 0:
                self._publish(exchange.iteration)
            exchange.payloads = self._gather(exchange)
            for number in self.others():
                self._note(number, exchange.iteration)
        except Exception as error:
            exchange.error = error
        exchange.seconds = time.monotonic() - begin
        exchange.done.set()

    def _gather(self, exchange: Exchange) -> torch.Tensor:
        """Return uint8 ``[data centres, bytes]``, every data centre's payload.

        Raises:
            ConnectionError: another data centre has closed the connection.
        """
        on_gpu = exchange.ready is not None
        if on_gpu:
            exchange.payload = self._copy_to_host(exchange.payload, exchange.ready)
        payload = exchange.payload
        row = payload.shape[-1]
        payloads = torch.empty(self.size, row, dtype=torch.uint8, pin_memory=on_gpu)
        try:
            if exchange.is_scatter:
                # Rows of equal length, so no lengths are given.
                self._group.alltoall_base(payloads, payload, [], []).wait()
            else:
                self._group.allgather([list(payloads)], [payload]).wait()
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        return payloads

    def _copy_to_host(self, payload: torch.Tensor, ready: Any) -> torch.Tensor:
        """Return a payload in pinned host memory, once it is complete."""
        # A new thread is on device 0, where every rank of a host would make a context.
        torch.cuda.set_device(payload.device)
        # A stream of this thread's: on that of training the copy would queue behind its kernels.
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
            host.copy_(payload, non_blocking=True)
        # Before gloo reads the copy, and before the payload's memory is given to something else:
        # its allocator knows the stream of training alone.
        self._stream.synchronize()
        return host

    def wait(self, exchange: Exchange) -> torch.Tensor:
        """Return uint8 ``[data centres, bytes]`` of an exchange, on the payload's device.

        The limit counts from here: an exchange that is not due yet is not late.

        Raises:
            DataCentreLostError: another data centre has closed the connection, or has not answered
                within the limit. Lines before that say who is waited for.
        """
        begin = time.monotonic()
        while not exchange.done.wait(min(SECONDS_BETWEEN_LINES, self.seconds)):
            elapsed = time.monotonic() - begin
            self._ask_for_news()
            late = self._late()
            if elapsed >= self.seconds:
                raise DataCentreLostError(self._lost_line(late, elapsed, exchange.iteration))
            self.log(
                f"local steps: waiting for data centre {late} for {elapsed:.0f} s, "
                f"{self._news(late, exchange.iteration)}; this one is at iteration "
                f"{exchange.iteration}"
            )
        if isinstance(exchange.error, ConnectionError):
            self._ask_for_news()
            late = self._late()
            raise DataCentreLostError(
                f"data centre {late} closed the connection, "
                f"{self._news(late, exchange.iteration)}; this one is at iteration "
                f"{exchange.iteration}. Its own log says why. Restart all data centres from their "
                "last common checkpoint"
            ) from exchange.error
        if exchange.error is not None:
            # Of this process alone, such as host memory that cannot be pinned.
            raise exchange.error
        # From pinned memory, so the host does not wait for the copy.
        return exchange.payloads.to(exchange.device, non_blocking=True)

    def _ask_for_news(self) -> None:
        """Bring up to date how far the other data centres are, if the store answers soon.

        A store whose host is stopped or cut off does not answer, and its client has no limit: so a
        thread asks, and the line is written without its answer.
        """
        if self._inquiry is None or not self._inquiry.is_alive():
            self._inquiry = threading.Thread(
                target=self._read_rounds, name="data-centre-news", daemon=True
            )
            self._inquiry.start()
        self._inquiry.join(_NEWS_SECONDS)

    def _read_rounds(self) -> None:
        """Read from the store which exchanges the other data centres have begun."""
        for number in self.others():
            key = f"round/{number}"
            try:
                if self._store.check([key]):
                    self._note(number, int(self._store.get(key)))
            except RuntimeError:
                # The store is lost with data centre 0; what is known already still holds.
                return

    def _note(self, number: int, iteration: int) -> None:
        """Remember that a data centre has begun the exchange after an iteration."""
        self._newest[number] = max(iteration, self._newest.get(number, iteration))

    def _late(self) -> int:
        """Return the number of the data centre that is furthest behind, as far as is known."""
        return min(self.others(), key=lambda number: self._newest.get(number, -1))

    def _news(self, number: int, iteration: int) -> str:
        """Return how far a data centre is, as a clause.

        Args:
            number: the data centre's.
            iteration: after which the exchange that is waited for was begun.
        """
        newest = self._newest.get(number)
        if newest is None:
            return "which has begun no exchange yet"
        if newest >= iteration:
            return "which has begun this exchange too, so the link is slow or lost"
        return f"whose newest exchange was after its iteration {newest}"

    def _lost_line(self, number: int, elapsed: float, iteration: int) -> str:
        """Return the error of a data centre that is later than the limit.

        Args:
            number: the data centre's.
            elapsed: seconds since this one waits.
            iteration: after which the exchange that is waited for was begun.
        """
        return (
            f"data centre {number} has not answered for {elapsed:.0f} s, "
            f"{self._news(number, iteration)}: see its log and the link; restart all data centres "
            "from their last common checkpoint, or raise --outer-timeout-minutes"
        )


def _fix_of(name: str) -> str:
    """Return how data centres get the same value of a setting."""
    if name == ITERATION:
        return "give all data centres --ckpt-step of a checkpoint that all of them have"
    return "give all data centres the same"
