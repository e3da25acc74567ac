"""Training passes that are repeated without lossless codecs where a payload overflowed.

A training step's forward and backward pass notes flags on the device (communication/overflow.py).
At its end all ranks ask once whether there was an overflow; then the pass is repeated, with the
same micro-batches and random state, lossless codecs off, and its gradients are the exact ones.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.compression.communication.overflow import State
from megatron.compression.communication.site import Run
from megatron.compression.config import CompressionConfig
from megatron.compression.data_parallel.codec_gradients import CodecGradients
from megatron.compression.errors import SettingError
from megatron.compression.patches import loop

if TYPE_CHECKING:
    from megatron.compression.session import Session

LEAST_PAUSE = 8
LONGEST_PAUSE = 1024
"""Steps without lossless codecs after a repeated one, twice as many after each further one in a
row."""


class Repetition:
    """Decides in which steps lossless codecs are on, and which are repeated."""

    def __init__(self, run: Run, log: Callable[[str], None]) -> None:
        self._run = run
        self._log = log
        self._pause = LEAST_PAUSE
        """Steps without lossless codecs after the next repeated one."""
        self._left = 0
        """Steps of the present pause that are still to come."""
        self._forget: Callable[[], None] = lambda: None
        """Forgets what the meter has measured since ``begin``."""

    def begin(self) -> None:
        """Note that a step's first pass begins."""
        # A pause: lossless codecs have overflowed lately, and would again.
        if self._left:
            self._left -= 1
            self._run.overflow.state = State.OFF
            return
        # What the pass measures is forgotten if the pass is repeated.
        self._forget = self._run.policy.meter.snapshot()
        self._run.overflow.begin()

    def end(self) -> bool:
        """Return whether to repeat the pass that has ended. Collective over all ranks of the
        job."""
        overflow = self._run.overflow
        # The repeated pass, or one of a pause, has ended.
        if overflow.state is State.OFF:
            overflow.state = State.ASKED
            return False
        if not overflow.end():
            # It fitted: the next overflow is taken for a single one.
            self._pause = LEAST_PAUSE
            return False
        self._forget()
        overflow.state = State.OFF
        self._left = self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._log(
            f"compression: iteration {self._run.policy.iteration() + 1} is repeated uncompressed: "
            f"lossless payloads overflowed; the next {self._left} iterations are uncompressed too "
            "(lossless:escapes=0.12 has more room)"
        )
        return True


def follow(session: "Session") -> Repetition | None:
    """Have training passes repeated in a run with a lossless codec, where they can be.

    Returns:
        What decides which passes are repeated; None: no codec overflows, or passes cannot be
        repeated, which is logged.

    Raises:
        CompressionConfigError: lossless codecs between stages, and passes cannot be repeated.
    """
    config = session.config
    run = session.run
    log = session.host.log
    arguments = session.host.arguments
    codecs = []
    for traffic, rule in run.policy.rules.items():
        if traffic != "dp.weight":  # updated weights are asked about at the optimizer's step
            codecs += rule.codecs
    if not any(getattr(codec, "lossless", False) for codec in codecs):
        return None
    if arguments.cuda_graph_impl != "none":
        # For the whole run: graphs are captured once.
        run.overflow.state = State.OFF
        log(
            "compression: lossless is off: in a CUDA graph nobody can read whether a payload "
            "overflowed"
        )
        return None
    reason = why_not(arguments, config, run)
    if reason:
        refuse_stages(config, reason)
        log(f"compression: lossless: the host waits before each message, since {reason}")
        return None
    loop.follow_passes()
    return Repetition(run, log)


def refuse_stages(config: CompressionConfig, reason: str) -> None:
    """Refuse lossless codecs between stages where no pass can be repeated, for a reason.

    Raises:
        CompressionConfigError: there are some.
    """
    stages = config.pipeline_parallel
    if any(
        codec is not None and codec.lossless
        for codec in (stages.forward_codec, stages.backward_codec)
    ):
        raise SettingError(
            stages.path("compression"),
            "lossless",
            f"repeats a pass with an overflow, which cannot be done here: {reason}",
            "choose another codec",
        )


def why_not(args: Namespace, config: CompressionConfig, run: Run) -> str | None:
    """Return why a pass cannot be repeated: what it changes other than gradients. None if it can.

    Args:
        args: Megatron's.
        config: the run's settings.
        run: its policy says what compresses gradients, which may remember them.
    """
    gradients = run.policy.rule("dp.gradient").codec
    if gradients is not None and not isinstance(gradients, CodecGradients):
        return f"--dp-compression {gradients.name} may remember gradients"
    # Counters and states that a second pass would change a second time.
    for name, reason in {
        "num_experts": "counts the tokens of experts",
        "mtp_num_layers": "adds up losses for the log",
        "qk_clip": "keeps the largest logits",
        "log_max_attention_logit": "keeps the largest logits",
        "te_rng_tracker": "keeps random states in place",
    }.items():
        if getattr(args, name, None):
            return f"--{name.replace('_', '-')} {reason}"
    if args.rerun_mode != "validate_results":
        return f"--rerun-mode {args.rerun_mode} keeps no micro-batches to repeat a step with"
    if args.fp8 and args.fp8_recipe == "delayed":
        return "--fp8-recipe delayed remembers largest values"
    return None
