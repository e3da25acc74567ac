"""What Megatron's own checks of the command line say, in one line with flags, numbers and the fix.

Megatron checks by assertions, many of them bare: ``assert args.hidden_size %
args.num_attention_heads == 0``. The line of such an assertion is read back from the traceback and
told with the values that ``args`` has. Where a newcomer needs to hear what to do, ``_SENTENCES``
has a sentence for the message or the condition.
"""

import re
import traceback
from argparse import Namespace
from collections.abc import Callable

from megatron.compression.errors import explains, first_line, raised_in

_OPERATORS = {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}
_NO_FLAGS = ("data_parallel_size", "world_size", "total_model_size", "rank", "params_dtype")
"""Arguments that Megatron computes: nobody can type them."""


def _world_size(args: Namespace) -> str:
    """The ranks that were started are no multiple of those that a replica of the model needs."""
    needed = 1
    # Ranks of one replica of the model: the product of these three sizes. The rest of the world is
    # data-parallel.
    sizes = []
    for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"):
        size = getattr(args, f"{name}_size")
        needed *= size
        if size > 1:
            sizes.append(f"--{name.replace('_', '-')}-size {size}")
    ranks = "1 rank was" if args.world_size == 1 else f"{args.world_size} ranks were"
    return (
        f"{' times '.join(sizes)} needs a multiple of {needed} ranks, but {ranks} started: "
        f"torchrun --nproc-per-node {needed}, or lower the sizes"
    )


def _batch_size(args: Namespace) -> str:
    """The global batch cannot be cut into the ranks' micro-batches."""
    ranks = args.data_parallel_size
    times = f" times {ranks} data-parallel ranks" if ranks > 1 else ""
    return (
        f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
        f"{args.micro_batch_size}{times}: give a multiple of {args.micro_batch_size * ranks}"
    )


def _heads(args: Namespace) -> str:
    """Heads that do not divide the hidden size leave no size of a head."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    # Suggest the nearest number of heads that works.
    divisors = [number for number in range(1, hidden + 1) if hidden % number == 0]
    nearest = min(divisors, key=lambda number: abs(number - heads))
    return (
        f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: give heads "
        f"that divide it, such as {nearest}, or the size of a head by --kv-channels"
    )


_SENTENCES: dict[str, str | Callable[[Namespace], str]] = {
    "is not divisible by total_model_size": _world_size,
    "eval_global_batch_size": _batch_size,
    "args.hidden_size % args.num_attention_heads == 0": _heads,
    "args.save_interval is not None": "--save needs --save-interval, the iterations between "
    "checkpoints, such as --save-interval 1000: give it, or drop --save",
    "not args.bf16": "--fp16 and --bf16 exclude each other: drop one",
    "not args.fp16": "--fp16 and --bf16 exclude each other: drop one",
    "expected iteration-based training": "--train-iters and --train-samples exclude each other: "
    "drop one",
    "expected sample-based training": "--train-iters and --train-samples exclude each other: drop "
    "one",
    "either num-layers or encoder-num-layers": "--num-layers is missing: give it",
    "args.encoder_seq_length is not None": "--seq-length is missing: give it",
    "either train-iters or train-samples": "--train-iters is missing: give the number of "
    "iterations",
    "num_experts must be non None": "--expert-model-parallel-size needs a mixture of experts: add "
    "--num-experts N, or drop it",
    "not supported with gradient accumulation fusion": "--use-torch-fsdp2 is not supported with "
    "gradient accumulation fusion: add --no-gradient-accumulation-fusion",
    "only supported with distributed optimizer": "--overlap-param-gather only supported with "
    "distributed optimizer, megatron fsdp, or dist_muon: add --use-distributed-optimizer, or drop "
    "it",
    "GEMM overlap can happen only when sequence parallelism": "--tp-comm-overlap needs "
    "--sequence-parallel: add it, or drop --tp-comm-overlap",
    "When interleaved schedule is used, pipeline": "--num-layers-per-virtual-pipeline-stage needs "
    "--pipeline-model-parallel-size 2 or more: raise it, or drop virtual stages",
    "Number of layers should be divisible": lambda args: (
        f"--num-layers {args.num_layers} is not a multiple of --pipeline-model-parallel-size "
        f"{args.pipeline_model_parallel_size}: change one of them"
    ),
    "Number of experts should be a multiple": lambda args: (
        f"--num-experts {args.num_experts} is not a multiple of --expert-model-parallel-size "
        f"{args.expert_model_parallel_size}: change one of them"
    ),
    "seq-length should be a multiple of 2 * context": lambda args: (
        f"--seq-length {args.seq_length} is not a multiple of 2 times --context-parallel-size "
        f"{args.context_parallel_size}: change one of them"
    ),
}
"""Part of a message, or of a bare assertion's condition -> the line, or what makes it of the
arguments."""


@explains(
    "validate_args",
    "core_transformer_config_from_args",
    "gpt_config_from_args",
    "initialize_model_parallel",
    "build_pretraining_data_loader",
    "get_optimizer_param_scheduler",
)
def megatrons_own_check(error: BaseException, args: Namespace | None) -> str | None:
    """The line of one of Megatron's own checks. Where parsing has not returned yet, the arguments
    are those of the function that checks them."""
    args = args or _checked_arguments(error)
    # No heads, and the like: Megatron divides by them before anybody checks.
    if isinstance(error, ZeroDivisionError):
        return _zero(error, args)
    is_check = type(error) is Exception  # which get_optimizer_param_scheduler raises
    if not (is_check or isinstance(error, AssertionError | ValueError | RuntimeError)):
        return None
    # A bare assertion has no text: its source line is the message.
    text = str(error).strip().splitlines()
    if text:
        message = text[0]
    else:
        source = traceback.extract_tb(error.__traceback__)[-1].line or ""
        message = source.removeprefix("assert ").strip()
    if sentence := _sentence(message, args):
        return sentence
    if not text:
        return _condition(message, args)
    # Megatron's check of required arguments: "num_layers argument is None".
    missing = re.fullmatch(r"(\w+) argument is None", message)
    if missing:
        return f"--{missing[1].replace('_', '-')} is missing: give it"
    return _with_flags(message, args)


def _sentence(message: str, args: Namespace | None) -> str | None:
    """The sentence of ``_SENTENCES`` for a message or a condition; None: there is none."""
    for fragment, sentence in _SENTENCES.items():
        if fragment not in message:
            continue
        if isinstance(sentence, str):
            return sentence
        if args is not None:
            return sentence(args)
    return None


@explains("parse_and_validate_args")
def before_the_checks(error: BaseException, args: Namespace | None) -> str | None:
    """The line of what is asserted before Megatron's own checks, as of --use-checkpoint-args
    without a checkpoint."""
    if isinstance(error, AssertionError) and raised_in(error, "parse_and_validate_args"):
        return first_line(error)
    return None


def _checked_arguments(error: BaseException) -> Namespace | None:
    """The ``args`` of the innermost function that the exception came through and that has such."""
    arguments = None
    trace = error.__traceback__
    while trace is not None:
        candidate = trace.tb_frame.f_locals.get("args")
        if isinstance(candidate, Namespace):
            arguments = candidate
        trace = trace.tb_next
    return arguments


def _condition(condition: str, args: Namespace | None) -> str:
    """A bare assertion's condition as a sentence, with the values of its arguments."""
    names = re.findall(r"\bargs\.(\w+)", condition)

    def typed(name: str) -> str:
        value = getattr(args, name, None)
        return _flag(name) if value is None else f"{_flag(name)} {value}"

    # The common forms of conditions, each as a sentence; any other is shown as it stands, with
    # flags for names.
    missing = re.fullmatch(r"args\.(\w+) is not None", condition)
    if missing:
        return f"{_flag(missing[1])} is missing: give it"
    multiple = re.fullmatch(r"args\.(\w+) % args\.(\w+) == 0", condition)
    if multiple:
        return f"{typed(multiple[1])} must be a multiple of {typed(multiple[2])}"
    comparison = re.fullmatch(r"args\.(\w+) (<|<=|>|>=) (?:args\.(\w+)|(\S+))", condition)
    if comparison:
        name, operator, bound_name, number = comparison.groups()
        bound = typed(bound_name) if bound_name else number
        return f"{typed(name)} must be {_OPERATORS[operator]} {bound}"
    absent = re.fullmatch(r"not args\.(\w+)", condition)
    if absent:
        return f"{_flag(absent[1])} cannot be given here: drop it"
    line = re.sub(r"\bargs\.(\w+)", lambda match: _flag(match[1]), condition)
    values = ", ".join(typed(name) for name in dict.fromkeys(names))
    return f"required: {line} (given: {values})" if values else f"required: {line}"


def _zero(error: BaseException, args: Namespace | None) -> str | None:
    """The line for a division by an argument that is 0."""
    # The divisor is one of the arguments in the failing line, the one that is 0.
    source = traceback.extract_tb(error.__traceback__)[-1].line or ""
    for name in re.findall(r"\bargs\.(\w+)", source):
        if getattr(args, name, None) == 0:
            return f"{_flag(name)} 0 must be a number >= 1"
    return None


def _flag(name: str) -> str:
    """The flag that a user types for an argument; words for those that Megatron computes."""
    if name in _NO_FLAGS:
        return name.replace("_size", " size").replace("_", "-")
    return f"--{name.replace('_', '-')}"


def _with_flags(message: str, args: Namespace | None) -> str:
    """A message with flags for the names of arguments in it, ``seq_length`` or ``seq-length``."""

    # One word alone, such as "fp16" or "save", may be an ordinary one: only names of several words
    # are flags.
    def flag(match: re.Match) -> str:
        name = match[0].removeprefix("args.").replace("-", "_")
        several_words = "_" in name
        if several_words and args is not None and hasattr(args, name):
            return _flag(name)
        return match[0]

    return re.sub(r"(?<![\w./-])(?:args\.)?[a-z0-9]+(?:[_-][a-z0-9]+)*(?![\w/-])", flag, message)
