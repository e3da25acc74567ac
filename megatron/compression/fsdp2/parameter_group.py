"""What ``fully_shard`` gathers and reduces together, and everything of torch's FSDP2 that is not
public.

torch offers ``set_custom_all_gather`` and ``set_custom_reduce_scatter``; which parameters a module
sends, over which ranks and in which types is private. All private names that compression leans on
are in this file, and ``parameter_groups`` checks them before anything is changed, so that another
torch is refused in one line.

    module of fully_shard  ->  FSDPParamGroup  ->  FSDPParam, one a parameter
                               what is sent        this rank's shard of it, padded to the
                                                   same size on all ranks
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from megatron.compression.errors import CompressionConfigError

DEVELOPED_WITH = "2.11"
"""The torch whose FSDP2 this was written for; later ones have been tried too (docs/versions.md)."""

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultAllocMixin,
        DefaultReduceScatter,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        is_bw,
    )
except ImportError as error:
    raise ImportError(
        f"compression of FSDP2 is for torch {DEVELOPED_WITH}; torch {torch.__version__} keeps "
        f"parts of FSDP2 elsewhere ({error}): install the versions of constraints.txt"
    ) from error

__all__ = ["AllGather", "DefaultAllocMixin", "ParameterGroup", "ReduceScatter", "is_bw"]

_GROUP_NAMES = (
    "fsdp_params",
    "modules",
    "mesh_info",
    "post_forward_mesh_info",
    "offload_policy",
    "device",
    "gradient_divide_factor",
    "all_reduce_grads",
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "_all_reduce_hook",
)
_PARAMETER_NAMES = (
    "sharded_param",
    "padded_sharded_param_size",
    "_sharded_param_data",
    "_sharded_local_tensor",
    "_module_info",
    "mp_policy",
)


@dataclass(frozen=True)
class GatherPart:
    """The weights of one type in a gather's row of several types."""

    dtype: torch.dtype
    spans: tuple[tuple[int, int], ...]
    """Begin and end of each shard in the row, in bytes."""

    def values(self, row: torch.Tensor) -> torch.Tensor:
        """Return ``[n]`` of this type, copied from a row, uint8 ``[bytes]``."""
        # Together they begin at an address that fits the type; in the row they may not.
        return torch.cat([row[begin:end] for begin, end in self.spans]).view(self.dtype)

    def write(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Write ``[W, n]`` of this type into their places in rows, uint8 ``[W, bytes]``."""
        as_bytes = values.view(torch.uint8)
        position = 0
        for begin, end in self.spans:
            size = end - begin
            rows[:, begin:end] = as_bytes[:, position : position + size]
            position += size


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """The parameters that one module of ``fully_shard`` gathers and reduces together."""

    fsdp: Any
    """torch's ``FSDPParamGroup``."""
    names: tuple[str, ...]
    """Of the parameters, as in the root module's ``named_parameters``."""

    def __str__(self) -> str:
        return f"the module of {self.names[0]}"

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """This rank's shards, DTensors. FSDP may put others in their place, so they are asked for
        anew."""
        return [shard.sharded_param for shard in self.fsdp.fsdp_params]

    @property
    def piece_shapes(self) -> list[torch.Size]:
        """The shape of this rank's shard of each parameter, padding included; the same on all
        ranks."""
        return [shard.padded_sharded_param_size for shard in self.fsdp.fsdp_params]

    @property
    def shard_sizes(self) -> list[int]:
        """Values of each shard, padding included."""
        return [shape.numel() for shape in self.piece_shapes]

    @property
    def device(self) -> torch.device:
        """The device of the shards."""
        return self.fsdp.device

    @property
    def gather_dtypes(self) -> set[torch.dtype]:
        """The types that the weights are gathered in."""
        return set(self._gathered_in)

    @property
    def _gathered_in(self) -> list[torch.dtype]:
        """The type that each parameter is gathered in."""
        return [
            shard.mp_policy.param_dtype or shard.sharded_param.dtype
            for shard in self.fsdp.fsdp_params
        ]

    @property
    def gathers_bytes(self) -> bool:
        """True where a gather's row has several types: FSDP then gives it as uint8."""
        return len(self.gather_dtypes) > 1

    @property
    def row_sizes(self) -> list[int]:
        """Elements of each shard in a gather's row: values, or bytes where it has several types."""
        if not self.gathers_bytes:
            return self.shard_sizes
        return [
            size * dtype.itemsize
            for size, dtype in zip(self.shard_sizes, self._gathered_in, strict=True)
        ]

    def gather_parts(self) -> list["GatherPart"]:
        """Return where each type lies in a gather's row of several types."""
        spans: dict[torch.dtype, list[tuple[int, int]]] = {}
        position = 0
        for size, dtype in zip(self.row_sizes, self._gathered_in, strict=True):
            end = position + size
            if size:
                spans.setdefault(dtype, []).append((position, end))
            position = end
        return [GatherPart(dtype, tuple(places)) for dtype, places in spans.items()]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The type that the gradients are reduced in."""
        return self._gradient_dtypes[0]

    @property
    def _trained(self) -> list[Any]:
        """torch's ``FSDPParam`` of each parameter that has gradients: adapters may have another
        type than the frozen weights beside them."""
        return [shard for shard in self.fsdp.fsdp_params if shard.sharded_param.requires_grad]

    @property
    def _gradient_dtypes(self) -> list[torch.dtype]:
        """The type of each trained parameter's gradient in a reduction."""
        dtypes = []
        for shard in self._trained:
            policy = shard.mp_policy
            computed_in = policy.param_dtype
            if hasattr(shard, "sharded_grad_dtype"):
                # From torch 2.15 on gradients are reduced in the type that they are kept in.
                computed_in = shard.sharded_grad_dtype
            dtypes.append(policy.reduce_dtype or computed_in or shard.sharded_param.dtype)
        return dtypes

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that have a shard each."""
        return self.fsdp.mesh_info.shard_process_group

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """Under HSDP, the ranks that hold the same shard; read before ``sum_replicas_by``."""
        info = self.fsdp.mesh_info
        return info.replicate_process_group if isinstance(info, HSDPMeshInfo) else None

    @property
    def mesh_dimensions(self) -> int:
        """Dimensions of the mesh that ``fully_shard`` was given: 1, or 2 for HSDP."""
        return self.fsdp.mesh_info.mesh.ndim

    @property
    def mesh_size(self) -> int:
        """Ranks in that mesh."""
        return self.fsdp.mesh_info.mesh.size()

    def shards(self) -> list[torch.Tensor]:
        """Return ``[n]`` of each type: what this rank gives to a gather, its shards end to end."""
        shards: dict[torch.dtype, list[torch.Tensor]] = {}
        for shard, dtype in zip(self.fsdp.fsdp_params, self._gathered_in, strict=True):
            shards.setdefault(dtype, []).append(shard._sharded_param_data.to(dtype))
        return [torch.cat(values) for values in shards.values()]

    def versions(self) -> list[tuple[int, int, int]]:
        """Numbers that differ where torch has counted a change of the weights."""
        return [
            (id(parameter), parameter._version, parameter._local_tensor._version)
            for parameter in self.parameters
        ]

    @property
    def sums_all_replicas(self) -> bool:
        """True where this backward pass sums over the replicas (``set_requires_all_reduce``)."""
        return self.fsdp.all_reduce_grads

    @property
    def all_reduce_hook(self) -> Callable[[torch.Tensor], None] | None:
        """The user's, from ``set_all_reduce_hook``; read before it is replaced (``Slots``)."""
        return self.fsdp._all_reduce_hook

    @property
    def divide_factor(self) -> float | None:
        """The divisor of the sum over all ranks, shards and replicas; None: the number of ranks."""
        return self.fsdp.gradient_divide_factor

    def refusal(self, lossless: bool, gathers: bool, memory: bool) -> str | None:
        """Return what of FSDP's settings is not covered, and the fix; None: nothing.

        Args:
            lossless: weights are gathered by a lossless codec.
            gathers: weights are gathered by a codec.
            memory: gradients are summed by a compressor with a memory.
        """
        reason = self._refused_setting()
        if reason is not None:
            return reason
        # Tensor subclasses of torchao bring a gather of their own, in fp8.
        is_fp8 = any(
            hasattr(shard._sharded_local_tensor, "fsdp_pre_all_gather")
            for shard in self.fsdp.fsdp_params
        )
        if gathers and is_fp8:
            return "gathers fp8; use gather='none'"
        other_dtypes = self.gather_dtypes - {torch.bfloat16, torch.float32}
        if lossless and other_dtypes:
            names = spelled_dtypes(other_dtypes)
            return (
                f"gathers {names}, and lossless shortens bf16 and fp32; use bf16, or gather='int8'"
            )
        # A memory adds to an iteration what another has left out, in the unit of then.
        if memory and torch.float16 in (*self._gradient_dtypes, *self.gather_dtypes):
            return (
                "has fp16 gradients, whose scale may change; use bf16, or no compressor with a "
                "memory"
            )
        return None

    def _refused_setting(self) -> str | None:
        """Return what is not covered with any compressor."""
        fsdp = self.fsdp
        if not isinstance(fsdp.mesh_info, FSDPMeshInfo):
            return "is replicated; use fully_shard()"
        if isinstance(fsdp.offload_policy, CPUOffloadPolicy):
            return "is offloaded to CPU; drop CPUOffloadPolicy"
        if isinstance(fsdp._all_gather_comm, AllGatherOfCompression):
            return "is attached already; attach() once"
        if type(fsdp._all_gather_comm) is not DefaultAllGather:
            return (
                "has an all-gather of its own; drop set_custom_all_gather() and "
                "set_allocate_memory_from_process_group_for_comm()"
            )
        if type(fsdp._reduce_scatter_comm) is not DefaultReduceScatter:
            return "has a reduce-scatter of its own; drop set_custom_reduce_scatter()"
        # From torch 2.15 on a parameter can have types of its own, and FSDP then packs the
        # gradients in another order than the parameters'.
        kept_in = {
            getattr(shard, "sharded_grad_dtype", None) or shard.sharded_param.dtype
            for shard in self._trained
        }
        if len(set(self._gradient_dtypes)) > 1 or len(kept_in) > 1:
            return (
                "has gradients of several types; give fully_shard() parameters of one type, and "
                "drop param_dtype_override_fn and grad_dtype"
            )
        return None


class AllGatherOfCompression(DefaultAllocMixin, AllGather):
    """An all-gather of ours, by which a group that has one is knshard."""


def spelled_dtypes(dtypes: set[torch.dtype]) -> str:
    """``float16`` or ``float16 and float64``."""
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def parameter_groups(model: torch.nn.Module) -> list[ParameterGroup]:
    """Return the groups of all modules of ``model`` under ``fully_shard``, at least one.

    Raises:
        CompressionConfigError: there is none, or this torch's FSDP2 is built in another way.
    """
    paths = {module: name for name, module in model.named_modules()}
    states = [module._get_fsdp_state() for module in paths if isinstance(module, FSDPModule)]
    groups = []
    for state in dict.fromkeys(states):  # modules that were wrapped together share one
        for fsdp in _groups_of(state):
            _check_names(fsdp)
            infos = [shard._module_info for shard in fsdp.fsdp_params]
            # a module that FSDP was given and that has been replaced since has no path
            names = [f"{paths.get(info.module, '')}.{info.param_name}".strip(".") for info in infos]
            groups.append(ParameterGroup(fsdp, tuple(names)))
    if not groups:
        raise CompressionConfigError(
            "attach() finds no parameters under FSDP2; call fully_shard() before it"
        )
    return groups


def _groups_of(state: Any) -> Sequence[Any]:
    """A module's groups: one up to torch 2.12, several from 2.13 on."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _check_names(fsdp: Any) -> None:
    """Refuse a torch whose groups or parameters lack a name that this file uses."""
    missing = [name for name in _GROUP_NAMES if not hasattr(fsdp, name)]
    for shard in fsdp.fsdp_params[:1]:
        missing += [name for name in _PARAMETER_NAMES if not hasattr(shard, name)]
    if missing:
        raise CompressionConfigError(
            f"attach(): FSDP2 of torch {torch.__version__} has no {', '.join(missing)}, which "
            f"compression uses as of torch {DEVELOPED_WITH}; install the versions of "
            "constraints.txt"
        )


class Slots:
    """The places of one group where FSDP calls what compression has put there.

    torch keeps one object a slot, and a later call of a public setter replaces it without a word:
    the sum over the replicas would be left out. So ``check`` looks at them at each pass that
    begins.
    """

    def __init__(
        self,
        group: ParameterGroup,
        gather: Any,
        reduce: Any,
        sum_replicas: Callable[[torch.Tensor], None] | None,
    ) -> None:
        """Put ours into the slots of a group.

        Args:
            group: the parameters.
            gather: an ``AllGather``.
            reduce: a ``ReduceScatter``.
            sum_replicas: under HSDP, sums this rank's row of the gradients over the replicas, in
                place.
        """
        self.group = group
        self._replaced: dict[str, tuple[Any, Any]] = {}
        """Name -> what is ours, and what was there before."""
        self._replace("_all_gather_comm", gather)
        self._replace("_reduce_scatter_comm", reduce)
        if sum_replicas is not None:
            # FSDP's own all-reduce would come before the hook. With a mesh of the shards' dimension
            # alone there is none.
            whole_mesh = group.fsdp.mesh_info
            shards_alone = FSDPMeshInfo(whole_mesh.mesh, whole_mesh.shard_mesh_dim)
            self._replace("mesh_info", shards_alone)
            if group.fsdp.post_forward_mesh_info is whole_mesh:
                self._replace("post_forward_mesh_info", shards_alone)
            self._replace("_all_reduce_hook", sum_replicas)

    def _replace(self, name: str, ours: Any) -> None:
        # By name, past the public setters: from torch 2.13 on they refuse a module with several
        # groups.
        self._replaced[name] = (ours, getattr(self.group.fsdp, name))
        setattr(self.group.fsdp, name, ours)

    def check(self) -> None:
        """Refuse a setter of FSDP's that has taken our place since ``attach``.

        Raises:
            CompressionConfigError: a slot holds something else.
        """
        for name, setter in _SETTERS.items():
            # Equal, not identical: a bound method is made anew each time it is read.
            if name in self._replaced and getattr(self.group.fsdp, name) != self._replaced[name][0]:
                raise CompressionConfigError(
                    f"{setter} of {self.group} has replaced what attach() had put there, and it "
                    f"would be left out; call {setter} before attach()"
                )

    def restore(self) -> None:
        """Give a group's slots back to FSDP, those that still hold ours."""
        for name, (ours, before) in self._replaced.items():
            if getattr(self.group.fsdp, name) == ours:
                setattr(self.group.fsdp, name, before)


_SETTERS = {
    "_all_gather_comm": "set_custom_all_gather()",
    "_reduce_scatter_comm": "set_custom_reduce_scatter()",
    "_all_reduce_hook": "set_all_reduce_hook()",
}
"""Slot -> the public method that sets it. ``set_allocate_memory_from_process_group_for_comm``
refuses by itself what is not torch's shard."""
