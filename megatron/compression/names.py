"""What things are called: the kinds of parallelism, our settings, and Megatron's arguments, in each
front end.

A setting has one path, ``tensor_parallel.backward``, which is its place in ``CompressionConfig``.
The user of the command line types ``--tp-compression SPEC BACKWARD`` for it, the author of a
training loop ``TensorParallelConfig(backward=...)``, and with Megatron-Bridge it is ``tp=(...,
...)``. Messages for users are written with paths, and spelled by the ``Names`` of the front end
that the user came through.

Nothing heavy is imported here: scripts read the tables without loading torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Parallelism:
    """One kind of parallelism, as the settings, the flags, the ledger and the reports call it."""

    name: str
    """Its field of ``CompressionConfig``."""
    flag: str
    """The flag of its codecs."""
    traffic: str
    """How its traffic classes begin, as in ``tp.forward``."""
    config: str
    """The class of its settings, exported by ``megatron.compression``."""
    second: str = "backward"
    """The field of the second value of its flag."""

    @property
    def title(self) -> str:
        """Its name in reports: ``tensor parallel``."""
        return self.name.replace("_", " ")


# The one place that knows how a kind of parallelism is called: flags, help, the log and reports
# follow it. A new kind is a row here, a field of CompressionConfig, and its classes of traffic in
# communication/ledger.py.
PARALLELISMS = {
    parallelism.name: parallelism
    for parallelism in (
        Parallelism("tensor_parallel", "--tp-compression", "tp.", "TensorParallelConfig"),
        Parallelism("pipeline_parallel", "--pp-compression", "pp.", "PipelineParallelConfig"),
        Parallelism("context_parallel", "--cp-compression", "cp.", "ContextParallelConfig"),
        Parallelism("expert_parallel", "--ep-compression", "ep.", "ExpertParallelConfig"),
        Parallelism("data_parallel", "--dp-compression", "dp.", "DataParallelConfig", "weights"),
    )
}
"""By name. The order is that of ``--help`` and of the log; data parallelism alone sends no
activations."""
ACTIVATIONS = tuple(name for name in PARALLELISMS if name != "data_parallel")
"""Dimensions that send activations."""

COMMUNICATORS = "MEGATRON_COMPRESSION_COMMUNICATORS"
NODE_SIZE = "MEGATRON_COMPRESSION_NODE_SIZE"
"""Variables of the environment that set ``communicators`` and ``data_parallel.node_size``."""

FLAGS: dict[str, tuple[str, ...]] = {
    # Each kind of parallelism has a flag of one value or two: --tp-compression SPEC [BACKWARD].
    **{
        parallelism.flag: (
            f"{parallelism.name}.compression",
            f"{parallelism.name}.{parallelism.second}",
        )
        for parallelism in PARALLELISMS.values()
    },
    # The others take one value each.
    "--tp-compression-layers": ("tensor_parallel.layers",),
    "--tp-compression-overlap": ("tensor_parallel.overlap",),
    "--caat-net-sync-fraction": ("caat_net.sync_fraction",),
    "--data-centres": ("local_steps.data_centres",),
    "--data-centre-rank": ("local_steps.data_centre",),
    "--local-steps": ("local_steps.steps",),
    "--outer-address": ("local_steps.address",),
    "--outer-compression": ("local_steps.compression",),
    "--outer-lr": ("local_steps.learning_rate",),
    "--outer-momentum": ("local_steps.momentum",),
    "--outer-fragments": ("local_steps.fragments",),
    "--outer-delay": ("local_steps.delay",),
    "--outer-mixing": ("local_steps.mixing",),
    "--outer-timeout-minutes": ("local_steps.timeout_minutes",),
    "--compression-min-mb": ("tensor_parallel.min_mb",),
    "--compression-loss-budget": ("loss_budget",),
    "--compression-loss-interval": ("loss_interval",),
    "--compression-start-iteration": ("start_iteration",),
    "--compression-transport": ("transport",),
    "--compression-error-bound": ("error_bound",),
    "--validate-uncompressed": ("validate_uncompressed",),
    "--compression-report": ("report",),
}
"""Flag -> paths of the settings that it takes, one a value. ``min_mb`` is every dimension's."""


DDP_FIELDS = {
    "fp8_param_gather": "fp8_param_gather",
    "reuse_grad_buf_for_mxfp8_param_ag": "reuse_grad_buf_for_mxfp8_param_ag",
    "ddp_reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
    "nccl_ub": "nccl_ub",
}
"""Megatron's argument -> its field of ``DistributedDataParallelConfig``, which a loop of one's own
sets."""


_OTHER_FLAGS = {"nccl_ub": "--use-nccl-ub"}
"""Megatron's arguments whose flag has another name."""


def flag_of_argument(name: str) -> str:
    """Return the flag of one of Megatron's arguments: ``--seq-length`` for ``seq_length``."""
    return _OTHER_FLAGS.get(name, f"--{name.replace('_', '-')}")


def path_of_traffic(traffic: str) -> str:
    """Return the setting that holds the codec of a traffic class: ``tensor_parallel.backward`` for
    ``tp.backward``."""
    for parallelism in PARALLELISMS.values():
        if traffic.startswith(parallelism.traffic):
            break
    if traffic == "dp.outer":
        return "data_parallel.outer"
    is_second = traffic.endswith((".backward", ".weight"))
    return f"{parallelism.name}.{parallelism.second if is_second else 'compression'}"


def setting(path: str) -> str:
    """A reference to one of our settings, such as ``tensor_parallel.min_mb``, for a message."""
    return f"{{{path}}}"


def argument(name: str) -> str:
    """A reference to an argument of Megatron's by its name in ``args``, for a message."""
    return f"{{args.{name}}}"


# A path has letters, digits, underscores and points: "{}" or "{x=1}" in a message are what they
# are.
_REFERENCE = re.compile(r"\{([a-z_][a-z0-9_.]*)\}")
"""What ``setting`` and ``argument`` return."""


@dataclass(frozen=True)
class Names:
    """What one front end's user types for settings and for Megatron's arguments.

    Args:
        settings: path of a setting -> what the user types. A path that is missing is shown as it
            is.
        arguments: Megatron's argument -> what the user types; one that is missing is shown as its
            flag.
    """

    settings: Mapping[str, str]
    arguments: Mapping[str, str] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """The text that the user types for a setting's path, or for ``args.NAME``."""
        # Without a name of its own an argument is its flag: --seq-length for args.seq_length.
        if path.startswith("args."):
            name = path.removeprefix("args.")
            return self.arguments.get(name, flag_of_argument(name))
        if path.endswith(".min_mb"):  # one setting on the command line, a field of each dimension
            path = "tensor_parallel.min_mb"
        return self.settings.get(path, path)

    def resolve(self, text: str) -> str:
        """``text`` with each reference replaced by what the user types."""
        return _REFERENCE.sub(lambda reference: self.of(reference[1]), text)


def _names_of_flags() -> Names:
    """Return what a command line calls each setting.

    A flag with two values sets two settings: of ``--flag VALUE SECOND`` the first is named
    ``--flag`` and the other ``--flag SECOND``.
    """
    names = {
        "auto": "--compression auto",
        "communicators": COMMUNICATORS,
        "data_parallel.node_size": NODE_SIZE,
        "data_parallel.outer": "--dp-compression outer=",  # a part of the first value
    }
    for flag, paths in FLAGS.items():
        names[paths[0]] = flag
        # A second value has no flag of its own: it is named as --help shows it.
        for path in paths[1:]:
            names[path] = f"{flag} {path.rpartition('.')[2].upper()}"
    return Names(names)


def _names_in_python() -> Names:
    """Return what Python calls each setting: the field of its dimension's config."""
    names = {
        "tensor_parallel.min_mb": "min_mb",
        "data_parallel.outer": "DataParallelConfig.compression outer=",
    }
    # What the command line has is what can be set; in Python each setting is a field of one class.
    for path in FLAG_NAMES.settings:
        owner, _, name = path.rpartition(".")
        if path in names:
            continue
        if owner in PARALLELISMS:
            names[path] = f"{PARALLELISMS[owner].config}.{name}"
        elif owner == "caat_net":
            names[path] = f"CaatNetConfig.{name}"
        elif owner == "local_steps":
            names[path] = f"LocalStepsConfig.{name}"
        else:
            names[path] = f"CompressionConfig.{name}"
    arguments = {
        name: f"DistributedDataParallelConfig.{field}" for name, field in DDP_FIELDS.items()
    }
    return Names(names, arguments)


FLAG_NAMES = _names_of_flags()
"""The command line's."""
PYTHON_NAMES = _names_in_python()
"""A training loop's of one's own."""
