"""Training steps in which nobody waits for the flags of lossless payloads, repeated where one was cut.

A receiver that looks whether a payload is cut makes the host wait for the device, twice an all-reduce, and
behind each wait the device waits for the host. So in the forward and backward pass of a step nobody looks
(communication/rest.py). Behind the pass all ranks of the job ask once whether any payload was cut; then it is
taken again, looking, with the same micro-batches and random state, and its gradients are the exact ones.
"""

from argparse import Namespace
from collections.abc import Callable

from megatron.compression import patches
from megatron.compression.communication.rest import speculation
from megatron.compression.communication.run import Run
from megatron.compression.config import CompressionConfig
from megatron.compression.data_parallel.compressor import CodecGradients

LEAST_PAUSE, LONGEST_PAUSE = 8, 1024
"""Steps that look after one that was repeated, twice as many after each further one in a row: where no
payload fits, a ninth of the steps at most is taken twice, and soon hardly any."""


class Repetition:
    """Decides which steps look, and repeats those that should have.

    Args:
        run: whose error statistics a repeated pass takes anew.
        say: prints a line; called on every rank.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._pause, self._left = LEAST_PAUSE, 0
        self._restore: list[Callable[[], None]] = []

    def begin(self) -> bool:
        """Whether nobody looks in the step that begins."""
        if self._left:
            self._left -= 1
            return False
        bound = self._run.policy.error_bound
        self._restore = [one.kept() for one in (self._run.probe, bound) if one is not None]
        speculation.begin()
        return True

    def end(self) -> bool:
        """Whether the step is to be repeated. Collective over all ranks of the job."""
        if not speculation.end():
            self._pause = LEAST_PAUSE
            return False
        for restore in self._restore:
            restore()
        self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._say(
            f"compression: iteration {self._run.policy.iteration() + 1} is repeated: lossless payloads were "
            f"cut; the next {self._left} look first (lossless:escapes=0.12 has more room)"
        )
        return True


def attach(args: Namespace, config: CompressionConfig, run: Run, say: Callable[[str], None]) -> None:
    """Have training steps repeated in a run that has a lossless codec; else do nothing."""
    rules = run.policy.rules.items()  # whether weights fit is asked behind the optimizer's step
    if not any(getattr(rule.codec, "lossless", False) for name, rule in rules if name != "dp.weight"):
        return
    if reason := why_not(args, config, run):
        say(f"compression: lossless: the host waits for each message, since {reason}")
        return
    repetition = Repetition(run, say)
    patches.repeat_passes(repetition.begin, repetition.end)


def why_not(args: Namespace, config: CompressionConfig, run: Run) -> str | None:
    """Why a pass cannot be taken again: what it changes beside gradients. None if it can."""
    gradients = run.policy.rule("dp.gradient").codec
    if gradients is not None:
        if config.data_parallel.feedback != "none":
            return f"--dp-error-feedback {config.data_parallel.feedback} remembers what a pass has lost"
        if not isinstance(gradients, CodecGradients):
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
    if args.cuda_graph_impl != "none":
        return f"--cuda-graph-impl {args.cuda_graph_impl} replays what it has captured"
    if args.fp8 and args.fp8_recipe == "delayed":
        return "--fp8-recipe delayed remembers largest values"
    return None
