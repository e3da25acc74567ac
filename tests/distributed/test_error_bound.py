"""The error bound among ranks: decisions, what a half-compressed layer computes, and a run that resumes."""

import torch

from megatron.compression.codecs import parse_codec
from megatron.compression.communication.meter import ErrorMeter
from tests.distributed.launch import go_back_to, pretrain, tiny_flags
from tests.distributed.spawn import spawn
from tests.distributed.test_tensor_parallel_layers import _layer, _run
from tests.distributed.tiny_gpt import start_model_parallel

SITE = ("a", "tp.forward")
OTHER = ("b", "tp.forward")


def decide(rank: int) -> dict:
    """Rank 0's values suit the codec, the other rank's do not; site b suits it on both."""
    torch.manual_seed(rank)
    bound = ErrorMeter(0.05)
    bound.measure(
        *SITE, torch.randn(8, 128), parse_codec("taco:format=int4" if rank else "taco:format=int8")
    )
    bound.measure(*OTHER, torch.randn(8, 128), parse_codec("taco:format=int8"))
    bound.decide(torch.distributed.group.WORLD)
    return bound.tripped


def layers_worker(rank: int, world_size: int) -> dict:
    """One channel of a layer uncompressed: what depends on it alone is megatron-core's, bit for bit."""
    start_model_parallel(world_size)
    exact = {
        ("column", "tp.forward"): ("output", "weight.grad"),
        ("column", "tp.backward"): ("x.grad",),
        ("row", "tp.forward"): ("output",),
        ("row", "tp.backward"): ("x.grad", "weight.grad"),
        ("embedding", "tp.forward"): ("output",),
        ("embedding", "tp.backward"): ("weight.grad",),
    }
    for (kind, channel), unchanged in exact.items():
        core = _run(
            kind, True, _layer(kind, True, False, world_size, "none", rank), rank, world_size
        )
        layer = _layer(kind, True, True, world_size, "taco", rank, error_bound=0.05)
        layer.site.run.policy.meter.tripped[kind, channel] = 1.0
        guarded = _run(kind, True, layer, rank, world_size)
        for name in core:
            same = torch.equal(core[name], guarded[name])
            assert (name in unchanged or "bias" in name) == same, (kind, channel, name)
        rows = [
            row
            for row in layer.site.run.ledger.rows()
            if not row["operation"].startswith("instead")
        ]
        kinds = {row["kind"] for row in rows if row["traffic"] == channel}
        # The column layer's backward gathers the forward's payload once more, which stays compressed.
        both = (kind, channel) == ("column", "tp.backward")
        assert kinds == ({"guarded", "compressed"} if both else {"guarded"})
        assert any(row["kind"] == "compressed" for row in rows if row["traffic"] != channel)
    return decide(rank)


def uneven_worker(rank: int, world_size: int) -> dict:
    """Rank 1 measures one of the sites, and in a second interval none."""
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
    """As replicas do whose sequences are too short for --compression-min-mb."""
    for decisions in spawn(uneven_worker, 2, timeout=30):
        assert decisions == {"first": {OTHER}, "second": {SITE}}


def test_decisions_and_half_compressed_layers() -> None:
    """Ranks decide by the measure of all; with sequence parallelism each direction is decided by itself."""
    first, second = spawn(layers_worker, 2)
    assert first == second and list(first) == [SITE]


def test_guarded_run_and_its_resume(tmp_path) -> None:
    """TP 2, PP 2: gradients in int4 pass the bound, are said and sent uncompressed; a resume goes on so."""
    saved = tmp_path / "checkpoints"
    flags = [
        *tiny_flags(train_iters="6", log_interval="2"),
        *(
            "--tensor-model-parallel-size",
            "2",
            "--sequence-parallel",
            "--pipeline-model-parallel-size",
            "2",
        ),
        *("--tp-compression", "taco:format=int8", "taco:format=int4", "--compression-min-mb", "0"),
        *("--compression-error-bound", "0.05"),
        *("--save", str(saved), "--save-interval", "4"),
    ]
    complete = pretrain(*flags, ranks=4)
    lines = [
        line
        for line in complete.output.splitlines()
        if "past --compression-error-bound 0.05" in line
    ]
    # qkv, projection, fc1 and fc2 of two layers, the output layer, and the embedding's learned positions.
    assert len(lines) == 10 and all(
        "tp.backward has a relative error of 0.1" in line for line in lines
    )
    assert all(line.endswith("it goes uncompressed after iteration 2") for line in lines)
    assert len({line.split()[1] for line in lines}) == 10
    for rank in complete.ranks:
        scattered = [row for row in rank.ledger if row["operation"] == "reduce_scatter"]
        calls = {(row["traffic"], row["kind"]) for row in scattered}
        assert ("tp.backward", "guarded") in calls and ("tp.forward", "guarded") not in calls
    go_back_to(4, saved)
    resumed = pretrain(*flags, "--load", str(saved), ranks=4)
    assert resumed.output.count("uncompressed as when the checkpoint was saved") == 1
    assert "past --compression-error-bound" not in resumed.output
    assert resumed.losses == {iteration: complete.losses[iteration] for iteration in (5, 6)}
    assert resumed.parameters == complete.parameters
