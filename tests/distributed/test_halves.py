"""Interleaved halves of a micro-batch: what they compute, in fp64, and what they send."""

import gc
import time
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch

from tests.distributed.spawn import spawn, spawned
from tests.distributed.tiny_gpt import (
    FULL,
    QWEN,
    SEQUENCE,
    batch,
    build_tiny_gpt,
    replicated,
    run_with,
    start_model_parallel,
)
from tests.distributed.transport_audit import TransportAudit, total_of

SEQUENCES = 3  # halves of two and one
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
SP = dict(sequence_parallel=True)


def _again(*modules: str, **changes) -> dict:
    """Return settings of a ``TransformerConfig`` with which these modules are recomputed."""
    return dict(recompute_granularity="selective", recompute_modules=list(modules), **changes)


CASES: dict[str, tuple[dict, dict]] = {
    "uncompressed": ({"codec": "none"}, {}),
    "identity": ({"codec": "identity"}, dict(hidden_dropout=0.1)),
    "sequence parallel": ({"codec": "identity"}, dict(SP, hidden_dropout=0.1)),
    "recomputed": ({"codec": "identity"}, dict(FULL, hidden_dropout=0.1)),
    "recomputed in part": ({"codec": "identity", "layers": "0"}, dict(BLOCK, **SP)),
    "core attention recomputed": ({"codec": "identity"}, dict(recompute_granularity="selective")),
    "norms recomputed": ({"codec": "identity"}, _again("layernorm", hidden_dropout=0.1)),
    "norms recomputed, sequence parallel": ({"codec": "none"}, _again("layernorm", **SP)),
    "MLP recomputed": ({"codec": "identity"}, _again("mlp")),
    "MLP and norms recomputed, sequence parallel": (
        {"codec": "identity", "layers": "0"},
        _again("mlp", "layernorm", "core_attn", **SP, **QWEN),
    ),
    "llama": ({"codec": "identity"}, dict(QWEN, qk_layernorm=False)),
    "fp32 residual": ({"codec": "none"}, dict(fp32_residual_connection=True)),
    "fp32 residual of bf16, sequence parallel": (
        {"codec": "none"},
        dict(SP, fp32_residual_connection=True),
    ),
    "frozen": ({"codec": "none"}, SP),
    "lossless": ({"codec": "lossless", "layers": "0"}, {}),
    "lossless, sequence parallel": ({"codec": "lossless"}, SP),
    "uncompressed fp32": ({"codec": "none"}, {}),
    "uncompressed fp32, sequence parallel": ({"codec": "none"}, SP),
    "int6": ({"codec": "int6"}, {}),
    "int6, two codecs, sequence parallel": ({"codec": "int6/int8", "layers": "0"}, SP),
}
"""Settings of ``run_with`` and of the model; results are equal to rounding, or close if LOSSY."""
LOSSY = (
    "int6",
    "int6, two codecs, sequence parallel",
    "fp32 residual of bf16, sequence parallel",
)
DTYPES = {
    "lossless": torch.float32,
    "lossless, sequence parallel": torch.float32,
    "uncompressed fp32": torch.float32,
    "uncompressed fp32, sequence parallel": torch.float32,
    "fp32 residual": torch.float32,
    "fp32 residual of bf16, sequence parallel": torch.bfloat16,
}
"""Types of the parameters, where they are not fp64."""
SECOND_MASK = 5


def _train(rank: int, world_size: int, case: str, prepare, mask: bool = False) -> dict:
    """Run two micro-batches of a model.

    Args:
        rank: this rank.
        world_size: tensor-parallel size.
        case: of ``CASES``.
        prepare: changes the model before.
        mask: the second sequence does not see the token SECOND_MASK.

    Returns:
        Losses, gradients, random state and bytes.
    """
    from megatron.core import tensor_parallel

    settings, changes = CASES[case]
    evaluated = [SEQUENCES, 1]
    if "recompute_modules" in changes and prepare is not _in_halves:
        # megatron-core recomputes norms with Transformer Engine alone, and sends an MLP's sum again.
        changes = changes | {"recompute_granularity": None, "recompute_modules": None}
    elif "layernorm" in changes.get("recompute_modules", ()):
        evaluated = [SEQUENCES]  # single sequences are not halved
    dtype = DTYPES.get(case, torch.float64)
    run = run_with(**settings)
    model = build_tiny_gpt(rank, world_size, run, dtype, **changes)
    prepare(model)
    if case == "frozen":
        frozen = model.embedding, model.decoder.layers[0], model.decoder.layers[1].mlp.linear_fc1
        for module in frozen:
            module.requires_grad_(False)
    tensor_parallel.model_parallel_cuda_manual_seed(77, force_reset_rng=True)
    torch.manual_seed(5)
    audit = TransportAudit(world_size)
    losses = []
    for step in range(2):
        inputs = batch(step, rank, SEQUENCES)
        if mask:  # of the second sequence: nobody sees the token SECOND_MASK
            inputs["attention_mask"] = inputs["attention_mask"].repeat(SEQUENCES, 1, 1, 1)
            inputs["attention_mask"][1, :, SECOND_MASK + 1 :, SECOND_MASK] = True
        with audit if step == 0 else nullcontext():  # it takes a third of the time
            loss = _loss(model, inputs)
            loss.backward()
        losses.append(float(loss.detach()))
        assert step or total_of(run.ledger.rows()) == audit.sent
    with torch.no_grad():
        model.eval()
        losses += [float(_loss(model, batch(2, rank, sequences))) for sequences in evaluated]
    return {
        "losses": losses,
        "gradients": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        "replicated": set(replicated(model)),
        "random": torch.get_rng_state(),
        "sent": audit.sent,
        "kinds": {row["kind"] for row in run.ledger.rows()},
    }


def _loss(model: torch.nn.Module, inputs: dict) -> torch.Tensor:
    """Return a loss of this rank's part of the vocabulary, in the model's precision.

    Megatron's cross entropy is in fp32.
    """
    arguments = {name: value for name, value in inputs.items() if name != "labels"}
    return model(**arguments).square().sum()


def _in_halves(model: torch.nn.Module) -> None:
    from megatron.compression.tensor_parallel import halves_block

    halves_block.attach(model)


def _refused(rank: int, world_size: int) -> dict[str, str | None]:
    """Return the refusals of layers that halves would not compute rightly, by expected words."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron.compression.errors import CompressionConfigError
    from megatron.compression.tensor_parallel import halves_block

    subclass = type("OtherLayer", (TransformerLayer,), {})
    changes = {
        "is a OtherLayer": lambda layer: setattr(layer, "__class__", subclass),
        "has hooks": lambda layer: layer.register_forward_hook(lambda *_: None),
        "in a way of its own": lambda layer: setattr(layer, "mlp_bda", lambda *_: None),
        "has a Linear": lambda layer: setattr(layer, "mlp", torch.nn.Linear(1, 1)),
        "cross attention": lambda layer: setattr(
            layer, "pre_cross_attn_layernorm", torch.nn.LayerNorm(1)
        ),
    }

    lines: dict[str, str | None] = {}
    for words, change in changes.items():
        model = build_tiny_gpt(rank, world_size, run_with())
        change(model.decoder.layers[1])
        try:
            halves_block.attach(model)
        except CompressionConfigError as error:
            lines[words] = str(error)
    wrapper = torch.nn.Module()
    wrapper.config = model.config
    try:
        halves_block.attach(wrapper)
    except CompressionConfigError as error:
        lines["not NoneType"] = str(error)
    return lines


def _kept_alive(rank: int, world_size: int, prepare, changes: dict) -> list[int]:
    """Return the bytes of all tensors after each of three training steps.

    Python's search for reference cycles is off.

    Args:
        rank: this rank.
        world_size: tensor-parallel size.
        prepare: changes the model before.
        changes: of the model's config.
    """
    model = build_tiny_gpt(rank, world_size, run_with("identity"), hidden_dropout=0.1, **changes)
    prepare(model)
    actual = []
    gc.collect()
    gc.disable()
    try:
        for step in range(3):
            _loss(model, batch(step, rank, SEQUENCES)).backward()
            model.zero_grad(set_to_none=True)
            # gloo's thread may hold the last message a moment longer.
            deadline = time.monotonic() + 5
            bytes_held = _held_bytes()
            while actual and bytes_held > actual[-1] and time.monotonic() < deadline:
                time.sleep(0.05)
                bytes_held = _held_bytes()
            actual.append(bytes_held)
    finally:
        gc.enable()
    return actual


def _held_bytes() -> int:
    sizes = {}
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


DROPPED = {
    "as it is": {},
    "recomputed": FULL,
    "core attention recomputed": _again("core_attn"),
    "MLP recomputed": _again("mlp"),
}
"""Settings under which the same numbers are drawn at random."""


class Dropped(NamedTuple):
    """A training step with dropout."""

    loss: float
    gradients: dict[str, torch.Tensor]
    slope: float
    """Of the sum of all ranks' losses along a direction, by the gradients."""
    difference: float
    """The same, by losses at two points on that direction."""


def _dropped(rank: int, world_size: int, changes: dict, seed: int = 77) -> Dropped:
    """Train a step in halves, with dropout of attention's scores and of the blocks' outputs.

    Args:
        rank: this rank.
        world_size: tensor-parallel size.
        changes: of the model's config.
        seed: of the random numbers.
    """
    from megatron.core import tensor_parallel

    changes = dict(attention_dropout=0.2, hidden_dropout=0.1, **changes)
    model = build_tiny_gpt(rank, world_size, run_with("none"), torch.float64, **changes)
    _in_halves(model)

    def loss() -> torch.Tensor:
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        torch.manual_seed(seed)
        return _loss(model, batch(0, rank, SEQUENCES))

    first = loss()
    first.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # Along the parameters of which each rank has a part: their gradients are whole.
    sharded = gradients.keys() - replicated(model).keys()
    generator = torch.Generator().manual_seed(rank)
    parameters = dict(model.named_parameters())
    directions = {
        name: torch.randn(gradients[name].shape, generator=generator, dtype=torch.float64)
        for name in sorted(sharded)
    }
    slope = sum((gradients[name] * direction).sum() for name, direction in directions.items())
    step = 1e-6
    losses = []
    for sign in (1, -2):
        with torch.no_grad():
            for name, direction in directions.items():
                parameters[name] += sign * step * direction
            losses.append(loss())
    of_all_ranks = torch.stack([slope, (losses[0] - losses[1]) / (2 * step)])
    torch.distributed.all_reduce(of_all_ranks)
    return Dropped(float(first.detach()), gradients, *of_all_ranks.tolist())


def _worker(rank: int, world_size: int) -> dict:
    start_model_parallel(world_size)
    results = {
        case: [
            _train(rank, world_size, case, prepare) for prepare in (lambda model: None, _in_halves)
        ]
        for case in CASES
    }
    results["mask"] = [
        _train(rank, world_size, "uncompressed", prepare, mask=True)
        for prepare in (lambda model: None, _in_halves)
    ]
    results["dropped"] = {
        name: _dropped(rank, world_size, changes) for name, changes in DROPPED.items()
    }
    results["dropped again"] = _dropped(rank, world_size, {})
    results["dropped otherwise"] = _dropped(rank, world_size, {}, seed=78)
    results["dropped in parts"] = _dropped(rank, world_size, SP)
    results["refused"] = _refused(rank, world_size)
    results["kept alive"] = [
        _kept_alive(rank, world_size, _in_halves, changes) for changes in ({}, FULL)
    ]
    return results


results = spawned(_worker, 2)


def _compare(actual: dict, expected: dict, tolerance: float) -> None:
    assert actual["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(
            actual["gradients"][name] / scale,
            gradient / scale,
            rtol=0,
            atol=tolerance * (1 if tolerance < 1e-4 else 30),
            msg=name,
        )


@pytest.mark.parametrize("case", [*CASES, "mask"])
def test_halves_compute_what_the_whole_does(results: list[dict], case: str) -> None:
    """Losses and gradients, the random numbers that are drawn, and the bytes that are sent."""
    sides = [rank[case] for rank in results]
    for complete, halves in sides:
        single = DTYPES.get(case) is torch.float32
        del complete["losses"][len(halves["losses"]) :]
        _compare(halves, complete, 4e-3 if case in LOSSY else 2e-6 if single else 1e-12)
        assert torch.equal(halves["random"], complete["random"])
        assert halves["kinds"] - {"exact"} == complete["kinds"] - {"exact"}
        if case == "MLP and norms recomputed, sequence parallel":
            # The MLPs' inputs are gathered once more; their sums are not.
            assert (halves["sent"] - complete["sent"]).keys() == {"all_gather"}
            assert not complete["sent"] - halves["sent"]
        elif "lossless" not in case:  # whose payloads depend on the values
            assert halves["sent"] == complete["sent"]


@pytest.mark.parametrize("changes", ["", ", sequence parallel"])
def test_lossless_halves_have_the_bits_of_uncompressed_ones(
    results: list[dict], changes: str
) -> None:
    """Norms of both are torch's, and a sum of two ranks has one order."""
    for rank in results:
        _, expected = rank[f"uncompressed fp32{changes}"]
        _, actual = rank[f"lossless{changes}"]
        assert "compressed" in actual["kinds"]
        assert actual["losses"] == expected["losses"]
        for name, gradient in expected["gradients"].items():
            assert torch.equal(actual["gradients"][name], gradient), name


def test_dropout_can_be_repeated(results: list[dict]) -> None:
    """The same seed gives the same bits; another one gives another loss."""
    for rank in results:
        first, again = rank["dropped"]["as it is"], rank["dropped again"]
        assert again.loss == first.loss
        for name, gradient in first.gradients.items():
            assert torch.equal(again.gradients[name], gradient), name
        assert abs(rank["dropped otherwise"].loss / first.loss - 1) > 1e-3


@pytest.mark.parametrize("name", DROPPED)
def test_recomputation_drops_the_same_values(results: list[dict], name: str) -> None:
    for rank in results:
        expected, actual = rank["dropped"]["as it is"], rank["dropped"][name]
        assert actual.loss == pytest.approx(expected.loss, rel=1e-12)
        for parameter, gradient in expected.gradients.items():
            difference = (actual.gradients[parameter] - gradient).abs().max()
            assert difference <= 1e-12 * gradient.abs().max(), parameter


@pytest.mark.parametrize("name", [*DROPPED, "in parts"])
def test_gradients_are_of_the_values_that_were_dropped(results: list[dict], name: str) -> None:
    """With sequence parallelism (in parts), too: by losses at two points near by."""
    for rank in results:
        dropped = rank["dropped in parts"] if name == "in parts" else rank["dropped"][name]
        assert abs(dropped.slope) > 1e-2
        assert dropped.difference == pytest.approx(dropped.slope, rel=1e-5)


TRAINED = {"none": 1e-9, "int8": 4e-3}
"""Codec -> how far losses with halves may be from those without, relatively."""


def _losses_worker(rank: int, world_size: int, iterations: int) -> dict[str, list[list[float]]]:
    """Train in fp64; return by codec the losses without halves and with them."""
    start_model_parallel(world_size)
    results = {}
    for codec in TRAINED:
        sides = []
        for prepare in (lambda model: None, _in_halves):
            model = build_tiny_gpt(rank, world_size, run_with(codec), torch.float64, **SP)
            prepare(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=3e-6)
            losses = []
            for iteration in range(iterations):
                loss = _loss(model, batch(iteration, rank, SEQUENCES))
                loss.backward()
                for parameter in model.parameters():
                    # Norms and biases have seen this rank's tokens alone.
                    if getattr(parameter, "sequence_parallel", False):
                        torch.distributed.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            sides.append(losses)
        results[codec] = sides
    return results


@pytest.mark.parametrize("iterations", [5, pytest.param(100, marks=pytest.mark.thorough)], ids=str)
def test_trainings_have_the_losses_of_those_without_halves(iterations: int) -> None:
    """To the rounding of fp64 uncompressed, and to that of its codes with a codec."""
    for rank in spawn(_losses_worker, 2, iterations):
        for codec, (complete, halves) in rank.items():
            assert len(halves) == iterations
            assert complete[-1] < 0.99 * complete[0]
            assert halves == pytest.approx(complete, rel=TRAINED[codec])


CONTEXT = {
    "learned positions": (dict(), "learned_absolute"),
    "rotary positions, sequence parallel": (dict(QWEN, **SP), "rope"),
}
"""Changes of the model's config under context parallelism, and its positions."""


def _context_worker(rank: int, world_size: int) -> dict:
    """Train a step of a model of two tensor-parallel and two context-parallel ranks."""
    from megatron.core import parallel_state, tensor_parallel

    from megatron.compression.context_parallel.gather import chunks_of

    parallel_state.initialize_model_parallel(world_size // 2, context_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    chunks = torch.arange(SEQUENCE).chunk(4)
    tokens = torch.cat(
        [chunks[number] for number in chunks_of(parallel_state.get_context_parallel_rank(), 2)]
    )
    inputs = batch(0, rank, SEQUENCES)
    local = {name: inputs[name][:, tokens] for name in ("input_ids", "position_ids")}
    results = {}
    for name, (changes, positions) in CONTEXT.items():
        sides = []
        for prepare in (lambda model: None, _in_halves):
            run = run_with("identity")
            model = build_tiny_gpt(
                rank,
                world_size // 2,
                run,
                torch.float64,
                positions=positions,
                context_parallel_size=2,
                **changes,
            )
            prepare(model)
            loss = _loss(model, {**local, "attention_mask": None})
            loss.backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            sides.append({"losses": [float(loss.detach())], "gradients": gradients})
        results[name] = sides
    return results


context_results = spawned(_context_worker, 4)


@pytest.mark.parametrize("name", CONTEXT)
def test_halves_under_context_parallelism(context_results: list[dict], name: str) -> None:
    """Each half gathers its own keys and values, and the losses of the ranks differ."""
    for rank in context_results:
        complete, halves = rank[name]
        _compare(halves, complete, 1e-12)
    losses = {rank[name][1]["losses"][0] for rank in context_results}
    assert len(losses) == 4


def test_what_halves_would_leave_out_is_refused(results: list[dict]) -> None:
    """Layers whose modules are not all that they compute; on each rank alike."""
    for lines in (rank["refused"] for rank in results):
        for words, reason in lines.items():
            assert reason is not None and words in reason
    assert len(lines) == 6


def test_nothing_is_kept_behind_a_step(results: list[dict]) -> None:
    """Masks of dropout go with their backward, of lanes that hold each other too."""
    for by_case in (rank["kept alive"] for rank in results):
        for first, second, third in by_case:
            assert first >= second >= third, by_case


def test_replicas_agree(results: list[dict]) -> None:
    """The gradients of what ranks hold in common, bit for bit, whatever the codec."""
    first, second = results
    for case in (*CASES, "mask"):
        sides = [rank[case][1] for rank in (first, second)]
        if "sequence parallel" in case or case in ("recomputed in part", "frozen"):
            continue  # each rank has its part of these until they are finalised
        for name in sides[0]["gradients"].keys() & sides[0]["replicated"]:
            assert torch.equal(*(side["gradients"][name] for side in sides)), (case, name)
