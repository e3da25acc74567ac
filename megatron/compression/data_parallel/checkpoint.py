"""Gradient state (error feedback) in checkpoints: saved by parameter, brought back at any data-parallel size.

Each rank saves a row for every parameter and slot: what it holds back of the sum over ranks; beside them, a
fingerprint of how its group cuts parameters into buckets and shards. A resume that cuts them alike takes back
its own rows, bit for bit. Otherwise (another data-parallel size, bucket size, padding, node size, ...) only
the sum over ranks matters: it is formed again, rescaled where gradients are averaged over another number of
ranks, and spread evenly over the ranks that compress the same values. Where the model is cut otherwise
(tensor parallelism, pipeline stages), or on one data-parallel rank, it is dropped. The log says which.
"""

import hashlib
import logging
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.compression.data_parallel.compressor import GradientBucket, GradientSync, ParameterSpan

logger = logging.getLogger(__name__)

KEY = "data_parallel_compression"
"""In the checkpoint's state dict: the state."""
MADE_BY = "data_parallel_compressor"
"""In the checkpoint's state dict: what the state is of, plain values."""

_PREFIX = "data-parallel compression: "

MODEL_PARALLEL = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers"),
    *("decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)
"""Flags that decide which part of which layer a rank's parameter is."""


def _shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Of the tensors in a checkpoint, by key. (megatron-core 0.19's own reader fails from torch 2.15 on.)"""
    metadata = _get_filesystem_reader(Path(path)).read_metadata().state_dict_metadata
    return {key: tuple(one.size) for key, one in metadata.items() if isinstance(one, TensorStorageMetadata)}


class GradientState:
    """Carries the state of all gradient syncs of this rank into checkpoints and back.

    Args:
        compressor: spec of what compresses gradients; None: nothing does.
        syncs: every bucket's, added as the model is attached.
        read_shapes: a checkpoint's path to the shapes of its tensors by key.
    """

    def __init__(
        self,
        args: Namespace,
        compressor: str | None,
        error_feedback: str,
        syncs: list[tuple[GradientSync, GradientBucket]],
        say: Callable[[str], None] = print,
        read_shapes: Callable[[str], dict[str, tuple[int, ...]]] = _shapes,
    ) -> None:
        self.args, self.syncs, self._say, self._read_shapes = args, syncs, say, read_shapes
        self._made_by = {"compression": compressor, "error_feedback": error_feedback}
        self._saved: Namespace | None = None
        self._saved_by: dict[str, Any] = {}
        self._path: str | None = None
        self._exact = False
        self._requested: dict[str, dict[str, torch.Tensor]] | None = None

    def add_to(self, state_dict: dict[str, Any], is_loading: bool) -> None:
        """Put what is to be saved, or where to load it to, into a checkpoint's state dict."""
        states = [sync.state() for sync, _ in self.syncs]
        if self.syncs and not is_loading:
            state_dict[MADE_BY] = {**self._made_by, "state": any(states)}
        if not any(states):
            if is_loading and self._saved_by.get("state"):
                if self._made_by["compression"] is None:
                    reason = "without --dp-compression"
                else:
                    reason = "without --dp-error-feedback" if self.syncs else "on one data-parallel rank"
                self._say(f"{_PREFIX}the checkpoint's error feedback is dropped: this run goes on {reason}")
            return
        if not is_loading:
            named, first = self._named(states), self.syncs[0][1]
            mark = first.gradients.new_ones(1, dtype=torch.uint8)
            named[self._layout()] = mark, first
            state_dict[KEY] = {
                name: _row(name, values.detach(), bucket, bucket.topology.rank, bucket.topology.world_size)
                for name, (values, bucket) in named.items()
            }
            return
        self._requested = None
        if (reason := self._why_fresh()) is not None:
            self._say(f"{_PREFIX}{reason}: what gradients have to make up for starts from zero")
            return
        held = self._read_shapes(self._path)
        self._exact = _key(self._layout(), self.syncs[0][1]) in held
        named = self._named(states)
        wanted = {
            name: _row(name, values, bucket, 0, self._saved_ranks(bucket))
            for name, (values, bucket) in named.items()
        }
        there = {name for name, row in wanted.items() if held.get(row.key) == tuple(row.global_shape)}
        if not there:
            self._say(f"{_PREFIX}the checkpoint holds no error feedback of this model: it starts from zero")
            return
        if missing := len(wanted) - len(there):
            # it was saved where nothing of the bucket was compressed, or the parameter is new
            logger.info("%s: error feedback of %d parameters is not in the checkpoint", KEY, missing)
        self._requested, state_dict[KEY] = {}, {}
        for name in sorted(there):
            values, bucket = named[name]
            ranks = self._saved_ranks(bucket)
            mine = range(bucket.topology.rank, ranks, bucket.topology.world_size)
            rows = {str(row): torch.zeros_like(values) for row in mine}
            self._requested[name] = rows
            state_dict[KEY][name] = {
                row: _row(name, tensor, bucket, int(row), ranks) for row, tensor in rows.items()
            }

    def loaded(self, state_dict: dict[str, Any] | None, path: str | None) -> None:
        """Called with every state dict that has been read, and its path; takes the state out of the last."""
        if state_dict is None:
            return
        if self._requested is None:
            if "args" in state_dict:
                self._saved, self._path = state_dict["args"], path
                self._saved_by = state_dict.get(MADE_BY, {})
            return
        if KEY not in state_dict and any(self._requested.values()):
            return
        rows = {name: dict(state_dict.get(KEY, {}).get(name, {})) for name in self._requested}
        for sync, bucket in self.syncs:
            slots = {}
            for slot in sync.state():
                flat = torch.zeros(bucket.numel, device=bucket.gradients.device)
                for name, part in split_by_parameter(flat, bucket.spans).items():
                    for row in rows.get(f"{slot}.{name}", {}).values():
                        part += row.view(-1).to(part.device)
                if not self._exact:
                    dist.all_reduce(flat, group=bucket.topology.group)
                    flat *= self._rescale(bucket) / sync.covering_ranks
                slots[slot] = flat
            sync.load_state(slots)
        self._requested = None
        if self._exact:
            line = "every rank took back its own"
        else:
            saved, ranks = self._saved_ranks(self.syncs[0][1]), self.syncs[0][1].topology.world_size
            line = f"the sum over the {saved} ranks that saved it was spread over {ranks} ranks"
            if saved == ranks:
                line += ", whose buckets or nodes are cut otherwise"
        before, now = self._saved_by["compression"], self._made_by["compression"]
        if before != now:
            line += f"; it was {before}'s, and what {now} does not compress was dropped"
        self._say(f"{_PREFIX}error feedback: {line}")

    def _named(self, states: list[dict[str, torch.Tensor]]) -> dict[str, tuple[torch.Tensor, GradientBucket]]:
        named = {}
        for (_, bucket), slots in zip(self.syncs, states, strict=True):
            for slot, flat in slots.items():
                for name, values in split_by_parameter(flat, bucket.spans).items():
                    named[f"{slot}.{name}"] = values, bucket
        return named

    def _layout(self) -> str:
        """A name for what decides which rank holds what: equal ones mean that ranks take back their own."""
        topology = self.syncs[0][1].topology
        buckets = [
            (bucket.numel, bucket.sharded, [(span.name, span.start, span.end) for span in bucket.spans])
            for _, bucket in self.syncs
        ]
        whole = repr((topology.nodes, topology.local, buckets))
        if any(bucket.experts for _, bucket in self.syncs):
            others = [bucket.topology for _, bucket in self.syncs if bucket.experts]
            whole += repr([(other.nodes, other.local) for other in others])
        return f"layout.{hashlib.sha256(whole.encode()).hexdigest()}"

    def _saved_ranks(self, bucket: GradientBucket) -> int:
        """Ranks of the bucket's kind of data-parallel group when the checkpoint was saved."""
        return _expert_ranks_of(self._saved) if bucket.experts else _ranks_of(self._saved)

    def _rescale(self, bucket: GradientBucket) -> float:
        """Sums are averaged over the ranks, unless the loss is already one a token."""
        if getattr(self.args, "calculate_per_token_loss", False):
            return 1.0
        return bucket.topology.world_size / self._saved_ranks(bucket)

    def _why_fresh(self) -> str | None:
        if self._saved is None:
            return "the checkpoint does not say how it was made"
        if all(self._saved_ranks(bucket) == 1 for _, bucket in self.syncs):
            return "the checkpoint was made on one data-parallel rank"
        before, now = str(self._saved_by.get("compression")), str(self._made_by["compression"])
        if before.partition(":")[0] != now.partition(":")[0]:
            return "the checkpoint was made with another --dp-compression"
        if not self._saved_by["state"]:
            return "the checkpoint was made without --dp-error-feedback"
        for name in MODEL_PARALLEL:
            # a pipeline layout is an object that is equal to itself alone
            if str(getattr(self._saved, name, None)) != str(getattr(self.args, name, None)):
                return f"the checkpoint was made at another --{name.replace('_', '-')}"
        return None


def _row(name: str, values: torch.Tensor, bucket: GradientBucket, row: int, rows: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(_key(name, bucket), values.view(1, -1), (0, row, rows))


def _key(name: str, bucket: GradientBucket) -> str:
    """A name in the checkpoint, of this rank's part of the model."""
    part = f"tp{parallel_state.get_tensor_model_parallel_rank()}"
    if bucket.experts:
        part = f"ep{parallel_state.get_expert_model_parallel_rank()}"
        part += f".tp{parallel_state.get_expert_tensor_parallel_rank()}"
    return f"{KEY}.pp{parallel_state.get_pipeline_model_parallel_rank()}.{part}.{name}"


def _ranks_of(args: Namespace) -> int:
    return args.data_parallel_size * getattr(args, "context_parallel_size", 1)


def _expert_ranks_of(args: Namespace) -> int:
    ranks = _ranks_of(args) * args.tensor_model_parallel_size
    return ranks // (args.expert_model_parallel_size * args.expert_tensor_parallel_size)


def split_by_parameter(flat: torch.Tensor, spans: Iterable[ParameterSpan]) -> dict[str, torch.Tensor]:
    """{parameter name: its part of ``flat`` [numel]}."""
    return {span.name: flat[span.start : span.end] for span in spans}
