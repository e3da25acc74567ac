"""What the scripts share: how a setting is written, and the launch of a run's ranks."""

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
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.compression.names import PARALLELISMS  # noqa: E402

FLAGS = {kind.name.removesuffix("_parallel"): kind.flag for kind in PARALLELISMS.values()}
"""By dimension: the flag that takes a setting's specs."""
SETTINGS_HELP = (
    'none, a spec (int6:group=64), two ("int4 int6": forward and backward, or gradients and weights), with '
    'further flags after them if need be ("tagc --compression-start-iteration 0"), in quotes'
)
_VARIABLES = "MEGATRON_COMPRESSION_"


@dataclass(frozen=True)
class BenchSetting:
    """What a run compresses in one dimension."""

    text: str
    """As on the command line, and as in results."""
    specs: tuple[str, ...]
    """Of one codec or two."""
    flags: tuple[str, ...]
    """More of pretrain_gpt.py's, and MEGATRON_COMPRESSION_...=VALUE."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the run."""
        return dict(word.split("=", 1) for word in self.flags if word.startswith(_VARIABLES))

    def words(self, dimension: str) -> list[str]:
        """The flags of a run of pretrain_gpt.py."""
        specs = [] if self.specs == ("none",) else [FLAGS[dimension], *self.specs]
        words = [*specs, *(word for word in self.flags if not word.startswith(_VARIABLES))]
        tensor = {"--taco", "taco-paper", FLAGS["tensor"]}.intersection(words)
        if tensor and "--compression-min-mb" not in words:  # every message, however it is asked for
            words += ["--compression-min-mb", "0"]
        return words


def parse_setting(text: str) -> BenchSetting:
    """``int4 int6 --validate-uncompressed`` -> its specs and flags; the run itself refuses what they name.

    Raises: ArgumentTypeError: no spec, or more than two.
    """
    words = shlex.split(text)
    count = next(
        (i for i, word in enumerate(words) if word.startswith(("--", _VARIABLES))), len(words)
    )
    if count not in (1, 2):
        raise ArgumentTypeError(f"{text!r}: give one codec, or two, and then flags")
    flags = [
        part
        for word in words[count:]
        for part in word.split("=", 1 if word.startswith("--") else 0)
    ]
    return BenchSetting(text, tuple(words[:count]), tuple(flags))


def gpu_count() -> int:
    """CUDA devices that a run would see, without loading CUDA into this process."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    return int(
        subprocess.check_output([sys.executable, "-c", code], text=True, stderr=subprocess.DEVNULL)
    )


def torchrun(
    ranks: int,
    script: str | Path,
    words: Sequence[object],
    show: Callable[[str], float | None] = lambda line: None,
    limit: float = threading.TIMEOUT_MAX,
    rate: str = "",
    **environment: str,
) -> None:
    """Run ranks of a script on this host to their end, each line of output given to ``show``.
    After ``limit`` seconds the ranks are ended; what ``show`` returns is a new limit from then on.
    ``rate``: of the link between two nodes of two_nodes.sh, each with half of them.

    Raises: RuntimeError: they failed or were ended; has the output's end.
    """

    def started(seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, process.terminate)
        timer.daemon = True
        timer.start()
        return timer

    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    if rate:
        command = [str(ROOT / "scripts/two_nodes.sh"), rate]
        environment |= {"RANKS": str(ranks // 2), "PYTHON": sys.executable}
    command += [str(ROOT / script), *map(str, words)]
    shared = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **environment,
    }
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end = deque([shlex.join(command) + "\n"], maxlen=100)
    with subprocess.Popen(command, cwd=ROOT, env=shared, **pipes) as process:
        timer = started(limit)
        try:
            for line in process.stdout:
                end.append(line)
                if (seconds := show(line)) is not None:
                    timer.cancel()
                    timer = started(seconds)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            process.terminate()
            process.communicate()  # no rank stays, and no network namespace
            sys.exit("stopped")
        how = "failed" if timer.is_alive() else "was ended at its limit"
        timer.cancel()
    if process.returncode:
        said = [line for line in end if line.startswith("error:")][:1] or end
        raise RuntimeError(f"the run {how}; its output ends with\n{''.join(said)}")


def rules_of(args: Namespace, words: list[str]) -> dict:
    """The policy's rules where ``words`` are our flags, and ``args`` Megatron's."""
    from megatron.compression import flags

    own, _megatrons = flags.add_flags(ArgumentParser()).parse_known_args(words)
    return flags.resolve(Namespace(**vars(args) | vars(own))).rules(args.train_iters)


def train(change: Callable) -> None:
    """One rank of a run of pretrain_gpt.py; ``change`` is called with Megatron's arguments, what
    ``compression.enable`` returned, and the model's config, before ``pretrain``."""
    from megatron.compression import startup
    from megatron.compression.errors import one_line_errors

    startup.prepare()  # before megatron.training is imported

    from megatron.core.enums import ModelType
    from megatron.training import training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    from megatron.compression import setup
    from megatron.compression.startup import entrypoint

    with one_line_errors():
        args = entrypoint.parse_arguments()
        model_config = gpt_config_from_args(args)
        change(args, setup.enable(args, model_config), model_config)
        container = pretrain_cfg_container_from_args(args, model_config)
        parts = (
            entrypoint.train_valid_test_datasets,
            ModelType.encoder_or_decoder,
            entrypoint.forward_step,
        )
        entrypoint.train_to_the_end(lambda: training.pretrain(container, *parts))
