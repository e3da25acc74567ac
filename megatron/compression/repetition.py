"""Training passes that are repeated without lossless codecs where a payload overflowed.

A training step's forward and backward pass notes flags on the device (communication/overflow.py). At its end
all ranks ask once whether there was an overflow; then the pass is repeated, with the same micro-batches and
random state, lossless codecs off, and its gradients are the exact ones.
"""

from argparse import Namespace
from collections.abc import Callable

from megatron.compression.communication.overflow import State
from megatron.compression.communication.site import Run
from megatron.compression.config import CompressionConfig
from megatron.compression.data_parallel.codec_gradients import CodecGradients
from megatron.compression.errors import SettingError
from megatron.compression.patches import loop

LEAST_PAUSE, LONGEST_PAUSE = 8, 1024
"""Steps without lossless codecs after a repeated one, twice as many after each further one in a row."""


class Repetition:
    """Decides in which steps lossless codecs are on, and which are repeated."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._pause, self._left = LEAST_PAUSE, 0
        self._forget: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """A step's first pass begins."""
        if self._left:
            self._left -= 1
            self._run.overflow.state = State.OFF
            return
        self._forget = self._run.policy.meter.kept()
        self._run.overflow.begin()

    def end(self) -> bool:
        """A pass has ended. Whether to repeat it. Collective over all ranks of the job."""
        overflow = self._run.overflow
        if overflow.state is State.OFF:
            overflow.state = State.ASKED
            return False
        if not overflow.end():
            self._pause = LEAST_PAUSE
            return False
        self._forget()
        overflow.state = State.OFF
        self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._say(
            f"compression: iteration {self._run.policy.iteration() + 1} is repeated uncompressed: lossless "
            f"payloads overflowed; the next {self._left} iterations are uncompressed too "
            "(lossless:escapes=0.12 has more room)"
        )
        return True


def attach(
    args: Namespace, config: CompressionConfig, run: Run, say: Callable[[str], None]
) -> None:
    """Have training passes repeated in a run that has a lossless codec; else do nothing."""
    rules = run.policy.rules.items()  # updated weights are asked about at the optimizer's step
    codecs = [codec for name, rule in rules if name != "dp.weight" for codec in rule.codecs]
    if not any(getattr(codec, "lossless", False) for codec in codecs):
        return
    if args.cuda_graph_impl != "none":
        run.overflow.state = State.OFF
        say(
            "compression: lossless is off: in a CUDA graph nobody can read whether a payload overflowed"
        )
        return
    if reason := why_not(args, config, run):
        refuse_stages(config, reason)
        say(f"compression: lossless: the host waits before each message, since {reason}")
        return
    repetition = Repetition(run, say)
    loop.repeat_passes(repetition.begin, repetition.end)


def refuse_stages(config: CompressionConfig, reason: str) -> None:
    """Raises: CompressionConfigError: lossless codecs between stages; no pass can be repeated, for a
    reason."""
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
    """Why a pass cannot be repeated: what it changes other than gradients. None if it can."""
    gradients = run.policy.rule("dp.gradient").codec
    if gradients is not None and not isinstance(gradients, CodecGradients):
        return f"--dp-compression {gradients.name} may remember gradients"
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
