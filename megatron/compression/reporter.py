"""Turns the ledger into what users see: the log line, TensorBoard scalars, and the report's history."""

import datetime
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.compression.config import CompressionConfigError
from megatron.compression.data_parallel.tagc_monitor import monitor_line, monitor_scalars
from megatron.compression.report import write_report
from megatron.compression.runtime import CompressionRuntime
from megatron.compression.telemetry import CHANNELS, KINDS, Ledger

HISTORY_FILE = "history.jsonl"
MB = 1e6


class Reporter:
    """Follows a run through the seams of ``training_log`` and ``evaluate``.

    Bytes are averages over all ranks: what one GPU sends in one iteration.

    Args:
        runtime: ledger and probe.
        log_interval: Megatron's ``--log-interval``.
        train_iters: Megatron's ``--train-iters``.
        settings: the run's settings, for the report (JSON-ready).
        tensorboard: a ``SummaryWriter`` on the last rank, else None.
    """

    def __init__(
        self,
        runtime: CompressionRuntime,
        log_interval: int,
        train_iters: int,
        settings: dict[str, Any],
        tensorboard: Any = None,
    ) -> None:
        self.runtime = runtime
        self.log_interval = log_interval
        self.train_iters = train_iters
        self.settings = settings
        self.tensorboard = tensorboard
        directory = runtime.config.report.compression_report
        self.directory = Path(directory) if directory else None
        self._iterations_since_log = 0
        self._logged_totals = _flat_totals(runtime.ledger)
        self._last_iteration = 0
        self._split = "valid"
        self._said: set[str] = set()

    def on_training_log(self, iteration: int, losses: dict[str, torch.Tensor]) -> None:
        """Count one iteration; at the log interval, print and store what was sent since the last one."""
        self._iterations_since_log += 1
        self._last_iteration = iteration
        if iteration % self.log_interval:
            return
        per_iteration, between_nodes = self._bytes_per_iteration()
        sketches = self._sketches()
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        print(log_line(iteration, self.train_iters, per_iteration, between_nodes), flush=True)
        if sketches is not None and self.runtime.gradient_kind() == "compressed":
            print(f" compression: {monitor_line(sketches)}", flush=True)
        self._say_what_stays_uncompressed(per_iteration)
        if self.tensorboard is not None:
            for tag, value in tensorboard_scalars(per_iteration).items():
                self.tensorboard.add_scalar(tag, value, iteration)
            for tag, value in monitor_scalars(sketches).items():
                self.tensorboard.add_scalar(tag, value, iteration)
        row = {"iteration": iteration, "losses": _floats(losses), "bytes_per_iteration": per_iteration}
        row |= {"bytes_between_nodes": between_nodes} if between_nodes else {}
        self._append(row | monitor_scalars(sketches))

    def before_evaluate(self, split: str) -> None:
        """Keep the traffic of an evaluation apart."""
        self._split = split
        self.runtime.ledger.evaluating = True

    def after_evaluate(self, losses: dict[str, torch.Tensor] | None) -> None:
        """Store an evaluation's losses."""
        self.runtime.ledger.evaluating = False
        if losses and dist.get_rank() == dist.get_world_size() - 1:
            self._append({"iteration": self._last_iteration, "split": self._split, "losses": _floats(losses)})

    def finish(self) -> None:
        """Gather every rank's ledger and probe on the last rank and write the report there."""
        if self.directory is None:
            return
        world, last = dist.get_world_size(), dist.get_world_size() - 1
        own = {"ledger": self.runtime.ledger.rows(), "errors": self.runtime.probe.rows()}
        gathered = [None] * world if dist.get_rank() == last else None
        dist.gather_object(own, gathered, dst=last)
        if gathered is None:
            return
        report = {
            "settings": self.settings,
            "world_size": world,
            "history": read_history(self.directory / HISTORY_FILE),
            "ledger_by_rank": [part["ledger"] for part in gathered],
            "errors": _mean_errors([row for part in gathered for row in part["errors"]]),
        }
        write_report(report, self.directory)

    def _bytes_per_iteration(self) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, dict]]:
        """By channel and kind, and by channel what of it is known to have crossed nodes."""
        totals = _flat_totals(self.runtime.ledger)
        difference = torch.tensor(
            [now - before for now, before in zip(totals, self._logged_totals, strict=True)],
            dtype=torch.float64,
            device=_reduction_device(),
        )
        dist.all_reduce(difference)
        values = (difference / dist.get_world_size() / max(1, self._iterations_since_log)).tolist()
        self._logged_totals, self._iterations_since_log = totals, 0
        pairs = iter(zip(values[::2], values[1::2], strict=True))
        result = {}
        for channel in CHANNELS:
            kinds = {kind: next(pairs) for kind in KINDS}
            used = {
                kind: {"sent": sent, "plain": plain} for kind, (sent, plain) in kinds.items() if sent or plain
            }
            if used:
                result[channel] = used
        crossed = zip(CHANNELS, pairs, strict=True)
        between = {channel: {"sent": sent, "plain": plain} for channel, (sent, plain) in crossed if plain}
        return result, between

    def _sketches(self) -> torch.Tensor | None:
        """What TAGC's sketches could not recover since the last log line, summed over the ranks."""
        monitor = getattr(self.runtime.gradient_sync, "monitor", None)
        if monitor is None:
            return None
        reading = monitor.take().to(_reduction_device())
        dist.all_reduce(reading)
        return reading

    def _say_what_stays_uncompressed(self, per_iteration: dict) -> None:
        if self.runtime.tensor_parallel_codec is None or "small" in self._said:
            return
        small = sum(kinds.get("small", {}).get("sent", 0.0) for kinds in per_iteration.values())
        if small:
            self._said.add("small")
            threshold = self.runtime.config.tensor_parallel.taco_min_message_mb
            print(
                f" compression: {small / MB:.3f} MB per iteration and GPU are in tensors under "
                f"--taco-min-message-mb {threshold:g} and go uncompressed",
                flush=True,
            )

    def _append(self, row: dict) -> None:
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(self.directory / HISTORY_FILE, "a") as history:
                history.write(json.dumps(row) + "\n")


def check_report_directory(directory: str | None, resuming: bool) -> None:
    """Refuse to mix two runs in one report folder.

    Raises:
        CompressionConfigError: the folder holds another run's history, or is a file.
    """
    if directory is None:
        return
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise CompressionConfigError(f"--compression-report {directory} is a file; name a folder")
    if (path / HISTORY_FILE).exists() and not resuming:
        raise CompressionConfigError(
            f"--compression-report {directory} already holds a run's report; name another folder or remove it"
        )


def read_history(path: Path) -> list[dict]:
    """The history's rows in order; where a resumed run repeated an iteration, its last row counts."""
    rows: dict[tuple, dict] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["iteration"], row.get("split")] = row
    return sorted(rows.values(), key=lambda row: row["iteration"])


def _reduction_device() -> torch.device:
    """Where tensors live that all ranks reduce."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def log_line(iteration: int, train_iters: int, per_iteration: dict, between_nodes: dict | None = None) -> str:
    """Our line behind Megatron's: megabytes sent by one GPU in one iteration, by channel."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    line = f" [{now}] communication {iteration:8d}/{train_iters:8d} |"
    for channel, kinds in per_iteration.items():
        sent, plain = channel_total(kinds)
        line += f" {channel} (MB): {sent / MB:.3f}"
        line += f" of {plain / MB:.3f} |" if sent != plain else " |"
        if between_nodes and channel in between_nodes:
            pair = between_nodes[channel]
            line += f" between nodes: {pair['sent'] / MB:.3f} of {pair['plain'] / MB:.3f} |"
    sent, plain = tensor_parallel_total(per_iteration)
    if sent and plain != sent:
        line += f" tensor-parallel ratio: {plain / sent:.3f} |"
    return line


def tensorboard_scalars(per_iteration: dict) -> dict[str, float]:
    """Scalars of one log interval: bytes a channel, and the tensor-parallel ratio."""
    scalars = {}
    for channel, kinds in per_iteration.items():
        sent, plain = channel_total(kinds)
        scalars[f"communication/{channel} bytes"] = sent
        scalars[f"communication/{channel} uncompressed bytes"] = plain
    sent, plain = tensor_parallel_total(per_iteration)
    if sent:
        scalars["communication/tensor-parallel ratio"] = plain / sent
    return scalars


def channel_total(kinds: dict[str, dict[str, float]]) -> tuple[float, float]:
    """(sent, plain) of a channel, without the error probe's own traffic."""
    used = [pair for kind, pair in kinds.items() if kind != "probe"]
    return sum(pair["sent"] for pair in used), sum(pair["plain"] for pair in used)


def tensor_parallel_total(per_iteration: dict) -> tuple[float, float]:
    """(sent, plain) of all tensor-parallel channels, what is left exact included."""
    totals = [channel_total(kinds) for channel, kinds in per_iteration.items() if channel.startswith("tp.")]
    return sum(sent for sent, _ in totals), sum(plain for _, plain in totals)


def _flat_totals(ledger: Ledger) -> list[int]:
    totals, between = ledger.totals(), ledger.between_nodes()
    kinds = [value for channel in CHANNELS for kind in KINDS for value in totals[channel][kind]]
    return kinds + [value for channel in CHANNELS for value in between[channel]]


def _floats(losses: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in losses.items()}


def _mean_errors(rows: list[dict]) -> list[dict]:
    """One row a site and channel; its ranks hold the same values, so they are averaged only to be sure."""
    merged: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        merged.setdefault((row["site"], row["channel"]), []).append(row)
    return [
        {**same[0], "relative_error": sum(row["relative_error"] for row in same) / len(same)}
        for same in merged.values()
    ]
