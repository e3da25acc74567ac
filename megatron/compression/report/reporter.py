"""Follows a run: makes the log line, scalars and history out of the ledger, and the report at the
end."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.compression.communication.ledger import KINDS, TRAFFIC, Ledger, bytes_sent
from megatron.compression.communication.meter import ErrorMeter
from megatron.compression.loss_meter import LossCost
from megatron.compression.report.figures import LOSS_METER, MB, log_line, scalars
from megatron.compression.report.history import History
from megatron.compression.report.render import write_report


class Reporter:
    """Called after Megatron's ``training_log`` and around its ``evaluate``, on every rank.

    Bytes are averages over all ranks: what one GPU sends in one iteration. What cannot be written
    (a full disk, a folder that was removed, a tracker that is gone) is said once and never ends the
    run.

    Args:
        ledger: counts the bytes of the run.
        meter: measures the errors of its codecs.
        log_interval: iterations between two lines.
        settings: what the report stores about the run, JSON-ready.
        directory: the report's folder; None writes no report.
        train_iters: asked when a line is printed (``--train-samples`` leaves it open at the start).
        track: writes scalars to the run's trackers, at an iteration.
        small_hint: the flag and its value that leave small messages uncompressed, named once where
            some are.
        clock: seconds spent in training iterations, read at log intervals.
    """

    def __init__(
        self,
        ledger: Ledger,
        meter: ErrorMeter,
        *,
        log_interval: int,
        settings: dict[str, Any],
        directory: str | None,
        train_iters: Callable[[], int | None],
        track: Callable[[dict[str, float], int], None],
        small_hint: str,
        clock: Callable[[], float],
    ) -> None:
        self.ledger = ledger
        self.meter = meter
        self.log_interval = log_interval
        self.settings = settings
        self.directory = Path(directory) if directory else None
        self.train_iters = train_iters
        self.track = track
        self.small_hint = small_hint
        self.clock = clock
        self.history = History(self.directory)
        # What the last line has told: the next one has what has come since.
        self._logged_seconds = self.clock()
        self._logged_totals = _totals(ledger)
        self._iterations_since_log = 0
        self._losses: dict[str, torch.Tensor] = {}
        self._losses_since_log = 0
        self._last_iteration = 0
        self._bytes_of_reports = 0
        self._split = "valid"
        self._topics_said: set[str] = set()

    def on_training_log(self, iteration: int, losses: dict[str, torch.Tensor]) -> None:
        """Count one iteration; at the log interval, print and store what was sent since the last
        one.

        Args:
            iteration: counted from 1.
            losses: scalars by name, on the last pipeline stage; empty elsewhere and for skipped
                iterations.
        """
        self._iterations_since_log += 1
        self._last_iteration = iteration
        # Skipped iterations and other stages have no losses; their bytes and times count all the
        # same.
        if losses:
            self._losses_since_log += 1
            for name, value in losses.items():  # fp32 sums, as Megatron's own line has them
                self._losses[name] = self._losses.get(name, 0.0) + value.detach().float()
        if iteration % self.log_interval == 0:
            self._log_interval_ends(iteration)

    def _log_interval_ends(self, iteration: int) -> None:
        """Print and store the interval's means. Collective over all ranks of the job."""
        seconds = self.clock()
        passed = seconds - self._logged_seconds
        self._logged_seconds = seconds
        milliseconds = 1000 * passed / self._iterations_since_log
        per_iteration, between_nodes = self._mean_bytes_of_all_ranks()
        mean_losses = {
            name: float(total) / self._losses_since_log for name, total in self._losses.items()
        }
        self._losses = {}
        self._losses_since_log = 0
        self._iterations_since_log = 0
        # All ranks have taken part in the sum above. The last rank goes on: it is on the last
        # pipeline stage, which has the losses, and Megatron logs there too.
        if not _is_last_rank():
            return
        print(log_line(iteration, self.train_iters(), per_iteration, between_nodes), flush=True)
        self._say_what_stays_uncompressed(per_iteration)
        values = scalars(per_iteration)
        self._guarded("writing scalars", lambda: self.track(values, iteration))
        row = {
            "iteration": iteration,
            "losses": mean_losses,
            "milliseconds_per_iteration": milliseconds,
            "bytes_per_iteration": per_iteration,
        }
        # Data parallelism alone knows which of its links cross nodes.
        if between_nodes:
            row["bytes_between_nodes"] = between_nodes
        self._append(row)

    def on_loss_cost(self, iteration: int, cost: LossCost) -> None:
        """Track and store what compression costs in loss; on every rank, the last one writes.

        Args:
            iteration: counted from 1.
            cost: by all pairs of passes so far.
        """
        if not _is_last_rank():
            return
        values = {
            "compression/cost in % of loss": cost.percent,
            "compression/standard error of the cost": cost.standard_error,
        }
        self._guarded("writing scalars", lambda: self.track(values, iteration))
        self._append(
            {"iteration": iteration, "split": LOSS_METER, "losses": {}, "cost": cost.asdict()}
        )

    def before_evaluate(self, split: str) -> None:
        """Count the traffic of an evaluation of ``valid`` or ``test`` separately from here on."""
        self._split = split
        self.ledger.phase = "eval"

    def after_evaluate(self, losses: dict[str, torch.Tensor] | None) -> None:
        """Store an evaluation's losses (on the last rank; None: it failed) and count training
        again."""
        self.ledger.phase = "train"
        if losses and _is_last_rank():
            values = {name: float(value) for name, value in losses.items()}
            self._append(
                {"iteration": self._last_iteration, "split": self._split, "losses": values}
            )

    def finish(self) -> None:
        """Gather every rank's ledger, errors and memory on the last rank and write the report
        there.

        Collective over all ranks of the job.
        """
        if self.directory is None:
            return
        last_rank = dist.get_world_size() - 1
        local = {"ledger": self.ledger.rows(), "errors": self.meter.rows(), "memory": peak_memory()}
        # gather_object wants a list on the rank that gathers, and None on all others.
        gathered = [None] * dist.get_world_size() if _is_last_rank() else None
        dist.gather_object(local, gathered, dst=last_rank)
        if gathered is not None:
            self._guarded("writing the report", lambda: self._write(gathered))

    def _write(self, gathered: list[dict]) -> None:
        report = {
            "settings": self.settings,
            "world_size": len(gathered),
            "history": self.history.rows(),
            "ledger_by_rank": [local["ledger"] for local in gathered],
            "errors": _mean_errors([row for local in gathered for row in local["errors"]]),
            "memory_by_rank": [local["memory"] for local in gathered],
            "bytes_of_a_report": self._bytes_of_reports,
        }
        # A run that is shorter than its log interval has a ledger and no interval.
        was_logged = any("bytes_per_iteration" in row for row in report["history"])
        if self._last_iteration and not was_logged:
            self._say_once(
                "short",
                f"the report has neither times nor bytes an iteration: --log-interval "
                f"{self.log_interval} is longer than the run",
            )
        for line in write_report(report, self.directory):
            print(f" compression: {line}", flush=True)

    def _mean_bytes_of_all_ranks(self) -> tuple[dict, dict]:
        """Return the mean over the ranks of the bytes of an iteration since the last line.

        Returns:
            Pairs of bytes by traffic and kind; by traffic, what of them is known to have crossed
            nodes.
        """
        # The ledger counts from the start of the run, so what was logged before is taken off. fp64
        # holds the sum over ranks exactly up to 2^53 bytes.
        totals = _totals(self.ledger)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        summed = (totals - self._logged_totals).double().to(device)
        dist.all_reduce(summed)
        # The ledger does not know this all-reduce; report.md names its size.
        self._bytes_of_reports = bytes_sent("all_reduce", summed.nbytes, dist.get_world_size())
        values = summed.cpu() / dist.get_world_size() / max(1, self._iterations_since_log)
        self._logged_totals = totals
        return _by_name(values)

    def _say_what_stays_uncompressed(self, per_iteration: dict) -> None:
        small = sum(kinds.get("small", {}).get("sent", 0.0) for kinds in per_iteration.values())
        if small:
            self._say_once(
                "small",
                f"{small / MB:.3f} MB per iteration and GPU go uncompressed: these messages are "
                f"under {self.small_hint}",
            )

    def _append(self, row: dict) -> None:
        self._guarded("writing the report's history", lambda: self.history.append(row))

    def _guarded(self, purpose: str, action: Callable[[], None]) -> None:
        """Do something that a run can do without; a failure is said once."""
        try:
            action()
        except Exception as error:  # a tracker raises what it likes
            reason = getattr(error, "strerror", None)
            if not reason:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._say_once(purpose, f"{purpose} failed ({reason}); training goes on without it")

    def _say_once(self, topic: str, line: str) -> None:
        if topic not in self._topics_said:
            self._topics_said.add(topic)
            print(f" compression: {line}", flush=True)


def _is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


_BETWEEN_NODES = "between nodes"
_COUNTED = [(traffic, kind) for traffic in TRAFFIC for kind in (*KINDS, _BETWEEN_NODES)]
"""The order in which ``_totals`` puts what a ledger has counted."""


def _totals(ledger: Ledger) -> torch.Tensor:
    """Return int64 ``[n, 2]``: sent and uncompressed bytes in the order of ``_COUNTED``."""
    totals = ledger.totals()
    between_nodes = ledger.between_nodes()
    pairs = []
    for traffic, kind in _COUNTED:
        if kind == _BETWEEN_NODES:
            pairs.append(between_nodes[traffic])
        else:
            pairs.append(totals[traffic][kind])
    return torch.tensor(pairs, dtype=torch.int64)


def _by_name(totals: torch.Tensor) -> tuple[dict, dict]:
    """Return what ``_totals`` has put in order, without zeros.

    Returns:
        Pairs of bytes by traffic and kind; by traffic what crossed nodes.
    """
    by_kind: dict[str, dict] = {}
    between_nodes = {}
    for (traffic, kind), (sent, uncompressed) in zip(_COUNTED, totals.tolist(), strict=True):
        # In files the uncompressed bytes are "plain", also in reports of earlier versions.
        pair = {"sent": sent, "plain": uncompressed}
        if kind == _BETWEEN_NODES:
            if uncompressed:
                between_nodes[traffic] = pair
        elif sent or uncompressed:
            by_kind.setdefault(traffic, {})[kind] = pair
    return by_kind, between_nodes


def _mean_errors(rows: list[dict]) -> list[dict]:
    """Return one row a site and traffic class.

    Errors are means over the ranks that have the site; the peak is the largest of any rank.
    """
    by_site: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        by_site.setdefault((row["site"], row["traffic"]), []).append(row)
    merged = []
    for same_site in by_site.values():
        # Name, traffic class and number of samples are the same on all ranks that have the site.
        mean = dict(same_site[0])
        for key in ("relative_error", "ordinary_error"):
            mean[key] = sum(row[key] for row in same_site) / len(same_site)
        peaks = [row["peak"] for row in same_site if row["peak"] is not None]
        mean["peak"] = max(peaks, default=None)
        merged.append(mean)
    return merged


def peak_memory() -> dict[str, int]:
    """Return this rank's memory in bytes.

    On a GPU ``allocated``, the peak of torch's allocator, and ``device_used``, what every process
    together has taken on the device now; elsewhere ``resident``, the peak of the process.
    """
    if not torch.cuda.is_available():
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    free, total = torch.cuda.mem_get_info()
    return {"allocated": torch.cuda.max_memory_allocated(), "device_used": total - free}


def track(tensorboard: Any, wandb: Any, scalars: dict[str, float], iteration: int) -> None:
    """Write scalars to a run's trackers.

    Args:
        tensorboard: a ``SummaryWriter``, or None.
        wandb: the module of Weights & Biases or a run of it, or None.
        scalars: values by name.
        iteration: counted from 1.
    """
    if tensorboard is not None:
        for tag, value in scalars.items():
            tensorboard.add_scalar(tag, value, iteration)
    if wandb is not None:
        wandb.log(scalars, iteration)


def megatron_track(scalars: dict[str, float], iteration: int) -> None:
    """Write scalars to Megatron's trackers, on the rank that has them."""
    from megatron.training import global_vars

    track(global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer(), scalars, iteration)


def megatron_seconds() -> float:
    """Return the seconds spent in training iterations so far, without evaluation and saving.

    Megatron takes its "elapsed time per iteration" from the same timer. The value is current right
    after ``training_log`` at a log interval.
    """
    from megatron.training import get_timers

    return get_timers()("interval-time", log_level=0).active_time()
