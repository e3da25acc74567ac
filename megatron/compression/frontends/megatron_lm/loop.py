"""Megatron-LM's training loop as the host of a session."""

from argparse import ArgumentParser, Namespace
from typing import Any

from megatron.training import get_tokenizer, print_rank_0
from megatron.training.training import num_floating_point_operations

from megatron.compression import flags
from megatron.compression.caat_net.config import check_checkpoint
from megatron.compression.config import CompressionConfig, names_on_command_line
from megatron.compression.frontends.megatron_lm import checks
from megatron.compression.names import Names
from megatron.compression.report import check_report_directory, megatron_seconds, megatron_track
from megatron.compression.session import Host


class Log:
    """Prints our lines on rank 0.

    Lines are kept until training begins, so that they stand together, last before iteration 1.
    """

    def __init__(self) -> None:
        self._lines: list[str] | None = []
        """Kept ones; None: lines are printed at once."""

    def keep(self) -> None:
        """Keep lines from now on."""
        if self._lines is None:
            self._lines = []

    def __call__(self, line: str) -> None:
        if self._lines is None:
            print_rank_0(line)
        else:
            self._lines.append(line)

    def show(self) -> None:
        """Print what was kept, and every further line at once."""
        lines, self._lines = self._lines, None
        for line in lines or []:
            print_rank_0(line)


LOG = Log()
"""The process's: lines come from parsing on, before there is a session."""


class MegatronLoop(Host):
    """Megatron-LM's training loop, by its arguments, which the loop goes on changing."""

    broadcasts_batch = True

    def __init__(self, args: Namespace) -> None:
        self.arguments = args
        self.log_interval = args.log_interval
        self.iteration = self._current_iteration

    @property
    def names(self) -> Names:
        """The flags that the user has typed for settings."""
        return names_on_command_line(self.arguments)

    def checked_config(self) -> CompressionConfig:
        """Return what the flags say about compression, once they and Megatron's have been checked.

        Raises:
            CompressionConfigError: a setting that cannot be honoured.
            InputError: what would make Megatron's loop fail, data of another tokenizer, or a
                report's folder that cannot be written.
        """
        checks.check_evaluation(self.arguments)
        checks.check_vocabulary(self.arguments, get_tokenizer().vocab_size)
        config = flags.resolve(self.arguments)
        check_report_directory(config.report, self.arguments.load is not None)
        return config

    def flops(self) -> float:
        """Return the floating-point operations of an iteration, over all ranks."""
        samples = self.arguments.global_batch_size
        return num_floating_point_operations(self.arguments, samples)

    def _current_iteration(self) -> int:
        """Return the zero-based iteration, which is known before the first message. A run that only
        evaluates sets ``args.iteration`` alone."""
        # curr_iteration is set when an iteration begins, iteration when a checkpoint is loaded.
        counted = getattr(self.arguments, "curr_iteration", 0)
        loaded = getattr(self.arguments, "iteration", 0)
        return max(counted, loaded)

    def log(self, line: str) -> None:
        LOG(line)

    def track(self, scalars: dict[str, float], iteration: int) -> None:
        megatron_track(scalars, iteration)

    def seconds(self) -> float:
        return megatron_seconds()

    def train_iters(self) -> int | None:
        return self.arguments.train_iters

    def settings(self) -> dict[str, Any]:
        """Return Megatron's own arguments, without those of this machine and moment."""
        # They are in the report under compression.
        ours = vars(flags.add_flags(ArgumentParser()).parse_args([]))
        settings = {}
        for name, value in sorted(vars(self.arguments).items()):
            if name in ours or name.startswith("_") or name == "rank":
                continue
            is_json = isinstance(value, bool | int | float | str | None)
            settings[name] = value if is_json else str(value)
        return settings

    def training_begins(self) -> None:
        LOG.show()

    def check_checkpoint(self, checkpoint_arguments: Namespace) -> None:
        check_checkpoint(checkpoint_arguments, args=self.arguments)

    def continues(self) -> bool:
        return not self.arguments.finetune
