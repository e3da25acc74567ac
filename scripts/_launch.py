"""What the scripts share: how a setting is written on the command line, and how a run's ranks are
started.

The scripts beside this file import it: Python looks into a script's own folder first.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The code of this checkout is what runs, in the ranks too, whatever checkout is installed.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.compression.names import PARALLELISMS  # noqa: E402

DIMENSIONS = [name.removesuffix("_parallel") for name in PARALLELISMS]
"""tensor, pipeline, context, expert and data."""
SETTINGS_HELP = (
    "none, a codec such as int6:group=64, or two codecs in quotes: forward and backward, or under data "
    'parallelism gradients and weights ("int4 int6"). More flags of pretrain_gpt.py may follow in the same '
    'quotes ("tagc --compression-start-iteration 0")'
)
VARIABLES = "MEGATRON_COMPRESSION_"
"""How the environment variables begin that a setting may set."""


@dataclass(frozen=True)
class BenchSetting:
    """What a run compresses, and how: one value of --codecs."""

    text: str
    """The setting as it was typed. Tables and results show it."""
    specs: tuple[str, ...]
    """One codec or two, for the dimension that is measured; ("none",): uncompressed."""
    flags: tuple[str, ...]
    """More words of the command line, and MEGATRON_COMPRESSION_...=VALUE."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the run."""
        return dict(word.split("=", 1) for word in self.flags if word.startswith(VARIABLES))

    def words(self, dimension: str) -> list[str]:
        """Return the flags for pretrain_gpt.py that compress a dimension in this way."""
        words = []
        if self.specs != ("none",):
            words += [PARALLELISMS[f"{dimension}_parallel"].flag, *self.specs]
        words += [word for word in self.flags if not word.startswith(VARIABLES)]
        # Tensor parallelism leaves messages below 8 MiB alone by default. A benchmark compares
        # codecs, so every message is compressed, however tensor parallelism is asked for.
        asks_for_tensor = {"--taco", "taco-paper", "--tp-compression"}.intersection(words)
        if asks_for_tensor and "--compression-min-mb" not in words:
            words += ["--compression-min-mb", "0"]
        return words


def parse_setting(text: str) -> BenchSetting:
    """Read a setting such as ``int4 int6 --validate-uncompressed``. The run itself refuses unknown
    codecs.

    Raises:
        ArgumentTypeError: no codec, or more than two.
    """
    # Codecs come first, then flags and variables.
    words = shlex.split(text)
    specs = []
    while words and not words[0].startswith(("--", VARIABLES)):
        specs.append(words.pop(0))
    if len(specs) not in (1, 2):
        raise ArgumentTypeError(f"{text!r}: give one codec, or two, and then flags")
    flags = []
    for word in words:
        if word.startswith("--"):
            # --flag=value as two words, so that settings are compared by what they mean.
            flags += word.split("=", 1)
        else:
            flags.append(word)
    return BenchSetting(text, tuple(specs), tuple(flags))


def output_file(text: str) -> Path:
    """Return the path of a file to write, for argparse.

    Raises:
        ArgumentTypeError: it cannot be written. A benchmark should say so before it runs.
    """
    try:
        open(text, "a").close()
    except OSError as error:
        raise ArgumentTypeError(f"can't open {text!r}: {error.strerror}") from None
    return Path(text)


def gpu_count() -> int:
    """Return how many CUDA devices a run would see. CUDA is not loaded into this process."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    command = [sys.executable, "-c", code]
    return int(subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL))


class Deadline:
    """Ends a process when its time is over.

    Args:
        process: what is ended, by SIGTERM.
    """

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self._timer: threading.Timer | None = None

    def set(self, seconds: float) -> None:
        """Give the process so many seconds from now, instead of what it had."""
        self.cancel()
        self._timer = threading.Timer(seconds, self._process.terminate)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Give the process all the time it wants."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_over(self) -> bool:
        """Return whether the process has been ended."""
        return self._timer is not None and not self._timer.is_alive()


def torchrun(
    ranks: int,
    script: str | Path,
    words: Sequence[object],
    show: Callable[[str], float | None] = lambda line: None,
    limit: float = threading.TIMEOUT_MAX,
    rate: str = "",
    **environment: str,
) -> None:
    """Run the ranks of a script on this host to their end.

    Args:
        ranks: number of processes.
        script: what they run, relative to the repository.
        words: its command line.
        show: called with each line of output. A number that it returns is a new limit from then on.
        limit: seconds, after which the ranks are ended.
        rate: of the link between two nodes that two_nodes.sh makes of this host, such as 10gbit.
            Each node has half of the ranks. Empty: all ranks are on one node.
        environment: variables to set.

    Raises:
        RuntimeError: the ranks failed or were ended; the message has the end of their output.
    """
    if rate:
        # two_nodes.sh starts torchrun in each of its nodes.
        command = [str(ROOT / "scripts/two_nodes.sh"), rate]
        environment |= {"RANKS": str(ranks // 2), "PYTHON": sys.executable}
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}"]
    command += [str(ROOT / script), *map(str, words)]
    variables = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        # One hardware queue keeps the order in which communication and GEMMs were launched.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **environment,
    }
    # SIGTERM then raises KeyboardInterrupt here, so that the ranks are ended as by Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # What an error shows: the command, and the end of what it printed.
    last_lines = deque([shlex.join(command) + "\n"], maxlen=100)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        deadline = Deadline(process)
        deadline.set(limit)
        try:
            for line in process.stdout:
                last_lines.append(line)
                new_limit = show(line)
                if new_limit is not None:
                    deadline.set(new_limit)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            process.terminate()
            process.communicate()  # no rank stays, and no network namespace
            sys.exit("stopped")
        was_ended = deadline.is_over
        deadline.cancel()
    if process.returncode:
        reason = "was ended at its limit" if was_ended else "failed"
        # A run that refuses its settings says why in one line; else the whole end is shown.
        errors = [line for line in last_lines if line.startswith("error:")]
        shown = errors[:1] or last_lines
        raise RuntimeError(f"the run {reason}; its output ends with\n{''.join(shown)}")


def rules_of(args: Namespace, words: list[str]) -> dict:
    """Return the rules of the compression policy for some flags of ours.

    Args:
        args: Megatron's arguments of the run.
        words: our flags, such as ``--tp-compression int8``.
    """
    from megatron.compression import flags

    # What is not ours was parsed by Megatron.
    compression_args, _ = flags.add_flags(ArgumentParser()).parse_known_args(words)
    merged = Namespace(**vars(args) | vars(compression_args))
    return flags.resolve(merged).rules(args.train_iters)


def train(change: Callable) -> None:
    """Run one rank of pretrain_gpt.py, after a change.

    Args:
        change: called before ``pretrain`` with Megatron's arguments, the session that
            ``compression.enable`` returned, and the model's config.
    """
    from megatron.compression.errors import one_line_errors
    from megatron.compression.frontends import megatron_lm

    megatron_lm.prepare()  # before megatron.training is imported

    from megatron.core.enums import ModelType
    from megatron.training import training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    from megatron.compression import enable
    from megatron.compression.frontends.megatron_lm import entrypoint

    with one_line_errors():
        args = entrypoint.parse_arguments()
        model_config = gpt_config_from_args(args)
        # What pretrain_gpt.py does, with a change in between.
        session = enable(args, model_config)
        change(args, session, model_config)
        container = pretrain_cfg_container_from_args(args, model_config)

        def pretrain() -> None:
            training.pretrain(
                container,
                entrypoint.train_valid_test_datasets,
                ModelType.encoder_or_decoder,
                entrypoint.forward_step,
            )

        entrypoint.train_to_the_end(pretrain)
