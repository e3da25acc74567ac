"""The error bound among ranks: decisions, layers compressed in part, and a run that resumes."""

import functools

import pytest
import torch

from megatron.compression.codecs import parse_codec
from megatron.compression.communication.meter import ErrorMeter
from tests.distributed.launch import Run, go_back_to, pretrain, tiny_flags
from tests.distributed.spawn import spawn
from tests.distributed.test_tensor_parallel_layers import _layer, _run
from tests.distributed.tiny_gpt import start_model_parallel

SITE = ("a", "tp.forward")
OTHER = ("b", "tp.forward")


def decide(rank: int) -> dict:
    """Return the sites past the bound: rank 1's codec is too coarse for site a alone."""
    torch.manual_seed(rank)
    fine = parse_codec("taco:format=int8")
    coarse = parse_codec("taco:format=int4")
    bound = ErrorMeter(0.05)
    bound.measure(*SITE, torch.randn(8, 128), coarse if rank == 1 else fine)
    bound.measure(*OTHER, torch.randn(8, 128), fine)
    bound.decide(torch.distributed.group.WORLD)
    return bound.tripped


EXACT = {
    ("column", "tp.forward"): ("output", "weight.grad"),
    ("column", "tp.backward"): ("x.grad",),
    ("row", "tp.forward"): ("output",),
    ("row", "tp.backward"): ("x.grad", "weight.grad"),
    ("embedding", "tp.forward"): ("output",),
    ("embedding", "tp.backward"): ("weight.grad",),
}
"""What depends on one direction of a layer alone, with sequence parallelism."""


def layers_worker(rank: int, world_size: int) -> dict:
    """Run each layer with one direction past the bound, and decide among the ranks.

    Returns:
        By layer and direction: the tensors with megatron-core's bits, and the kinds of each
        traffic class; and the decision.
    """
    start_model_parallel(world_size)
    results = {}
    for kind, channel in EXACT:
        core_layer = _layer(kind, True, False, world_size, "none", rank)
        core = _run(kind, True, core_layer, rank, world_size)
        layer = _layer(kind, True, True, world_size, "taco", rank, error_bound=0.05)
        layer.site.run.policy.meter.tripped[kind, channel] = 1.0
        guarded = _run(kind, True, layer, rank, world_size)
        kinds = {}
        for row in layer.site.run.ledger.rows():
            if not row["operation"].startswith("instead"):
                kinds.setdefault(row["traffic"], set()).add(row["kind"])
        equal = {name: torch.equal(core[name], guarded[name]) for name in core}
        results[kind, channel] = {"equal": equal, "kinds": kinds}
    results["decision"] = decide(rank)
    return results


@functools.cache
def layers_results() -> list[dict]:
    """Return the results of ``layers_worker`` by rank."""
    return spawn(layers_worker, 2)


@pytest.mark.parametrize(("kind", "channel"), EXACT)
def test_direction_past_the_bound_has_megatron_cores_bits(kind: str, channel: str) -> None:
    """The other direction is compressed, and has not; biases depend on no message."""
    for rank in layers_results():
        for name, is_equal in rank[kind, channel]["equal"].items():
            expected = name in EXACT[kind, channel] or "bias" in name
            assert is_equal == expected, name


@pytest.mark.parametrize(("kind", "channel"), EXACT)
def test_direction_past_the_bound_alone_is_guarded(kind: str, channel: str) -> None:
    expected = {"guarded"}
    if (kind, channel) == ("column", "tp.backward"):
        # Its backward pass gathers the forward's payload once more, which stays compressed.
        expected.add("compressed")
    for rank in layers_results():
        kinds = dict(rank[kind, channel]["kinds"])
        assert kinds.pop(channel) == expected
        assert any("compressed" in other_kinds for other_kinds in kinds.values())


def uneven_worker(rank: int, world_size: int) -> dict:
    """Return the decisions where rank 1 measures one of the sites, and then none."""
    meter = ErrorMeter(0.05)
    coarse = parse_codec("taco:format=int4")
    meter.measure(*SITE, torch.ones(8, 128), parse_codec("identity"))
    if rank == 0:
        meter.measure(*OTHER, torch.randn(8, 128), coarse)
    first = set(meter.decide(torch.distributed.group.WORLD))
    if rank == 0:
        meter.measure(*SITE, torch.randn(8, 128), coarse)
    return {"first": first, "second": set(meter.decide(torch.distributed.group.WORLD))}


def test_ranks_that_measure_different_sites_decide_alike() -> None:
    """Replicas do whose sequences are too short for --compression-min-mb."""
    for decisions in spawn(uneven_worker, 2, timeout=30):
        assert decisions == {"first": {OTHER}, "second": {SITE}}


def test_ranks_decide_by_the_measure_of_all() -> None:
    first, second = layers_results()
    assert first["decision"] == second["decision"]
    assert list(first["decision"]) == [SITE]


class TestGuardedRun:
    """TP 2 x PP 2 whose gradients in int4 pass the bound, and a resume of it."""

    BOUND = "past --compression-error-bound"
    FLAGS = """--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
        --tp-compression taco:format=int8 taco:format=int4 --compression-min-mb 0
        --compression-error-bound 0.05 --save-interval 4"""

    @pytest.fixture(scope="class")
    def runs(self, tmp_path_factory) -> tuple[Run, Run]:
        """The uninterrupted run, and the resumed one."""
        saved = tmp_path_factory.mktemp("guarded") / "checkpoints"
        tiny = tiny_flags(train_iters="6", log_interval="2")
        flags = [*tiny, *self.FLAGS.split(), "--save", str(saved)]
        complete = pretrain(*flags, ranks=4)
        go_back_to(4, saved)
        return complete, pretrain(*flags, "--load", str(saved), ranks=4)

    def test_every_layer_past_the_bound_is_named_once(self, runs: tuple[Run, Run]) -> None:
        lines = [line for line in runs[0].output.splitlines() if f"{self.BOUND} 0.05" in line]
        # qkv, projection, fc1 and fc2 of two layers, the output layer, and the embedding's
        # learned positions
        assert len(lines) == 10
        assert len({line.split()[1] for line in lines}) == 10
        for line in lines:
            assert "tp.backward has a relative error of 0.1" in line
            assert line.endswith("it goes uncompressed after iteration 2")

    def test_gradients_alone_are_guarded(self, runs: tuple[Run, Run]) -> None:
        for rank in runs[0].ranks:
            scattered = [row for row in rank.ledger if row["operation"] == "reduce_scatter"]
            kinds = {(row["traffic"], row["kind"]) for row in scattered}
            assert ("tp.backward", "guarded") in kinds
            assert ("tp.forward", "guarded") not in kinds

    def test_resume_names_the_layers_as_saved(self, runs: tuple[Run, Run]) -> None:
        _, resumed = runs
        assert resumed.output.count("uncompressed as when the checkpoint was saved") == 1
        assert self.BOUND not in resumed.output

    def test_resume_trains_to_the_same_bits(self, runs: tuple[Run, Run]) -> None:
        complete, resumed = runs
        losses = complete.losses
        assert resumed.losses == {iteration: losses[iteration] for iteration in (5, 6)}
        assert resumed.parameters == complete.parameters
