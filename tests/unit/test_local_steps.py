"""Local steps between data centres: schedule, outer optimizer, samples and settings, in one
process."""

import itertools
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron.compression import LocalStepsConfig, parse_codec
from megatron.compression.errors import SettingError, spelled
from megatron.compression.flags import resolve
from megatron.compression.local_steps.outer_optimizer import OuterOptimizer
from megatron.compression.local_steps.rounds import digest
from megatron.compression.local_steps.samples import take_share, use_own_folders
from megatron.compression.local_steps.schedule import Schedule, fragment_bounds
from megatron.compression.names import FLAG_NAMES
from tests.unit.megatron_args import parsed

VALUES = 1000
TWO = ("--data-centres", "2", "--data-centre-rank", "0", "--outer-address", "host:29400")


class TestSchedule:
    def test_one_fragment_is_sent_and_applied_after_each_h_iterations(self) -> None:
        schedule = Schedule(steps=3)
        sent = [iteration for iteration in range(10) if schedule.starting(iteration)]
        assert sent == [3, 6, 9]
        assert all(schedule.starting(i) == schedule.ending(i) for i in range(10))

    def test_fragments_take_turns_and_are_applied_later(self) -> None:
        """The drawing of the module."""
        schedule = Schedule(steps=6, fragments=2, delay=1)
        sent = {i: schedule.starting(i) for i in range(14) if schedule.starting(i)}
        applied = {i: schedule.ending(i) for i in range(14) if schedule.ending(i)}
        assert sent == {3: [0], 6: [1], 9: [0], 12: [1]}
        assert applied == {4: [0], 7: [1], 10: [0], 13: [1]}

    def test_every_fragment_has_one_turn_in_h_iterations(self) -> None:
        schedule = Schedule(steps=7, fragments=5)
        turns = [fragment for i in range(7, 14) for fragment in schedule.starting(i)]
        assert sorted(turns) == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("tail", [0, 10, 60, 100])
    def test_fragments_cover_a_vector_and_keep_its_tail_in_one(self, tail: int) -> None:
        bounds = fragment_bounds(100, 4, tail)
        assert bounds[0][0] == 0 and bounds[-1][1] == 100
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(bounds))
        assert bounds[-1][0] <= 100 - tail


def exchange(outers: list[OuterOptimizer], weights: list[torch.Tensor]) -> None:
    """Let data centres with these weights exchange their differences, and move their anchors."""
    if len(outers) == 2:
        payloads = torch.stack([o.encode(w, 0) for o, w in zip(outers, weights, strict=True)])
        for outer in outers:
            outer.step(payloads, 0, VALUES)
        return
    pieces = [o.encode_pieces(w, 0) for o, w in zip(outers, weights, strict=True)]
    # Data centre c gets row c of each.
    sums = [
        outer.encode_sum(torch.stack([rows[number] for rows in pieces]), 0, VALUES)
        for number, outer in enumerate(outers)
    ]
    for outer in outers:
        outer.step_sums(torch.stack(sums), 0, VALUES)


def rounds(
    codec, data_centres: int, learning_rate: float, momentum: float, count: int = 3
) -> tuple[list[OuterOptimizer], torch.optim.SGD, torch.nn.Parameter]:
    """Run rounds of made-up local steps: the outer optimizers, and torch's own on exact sums."""
    generator = torch.Generator().manual_seed(1)
    initial = torch.randn(VALUES, generator=generator)
    outers = [
        OuterOptimizer(initial, codec, learning_rate, momentum, data_centres, [(0, VALUES)])
        for _ in range(data_centres)
    ]
    reference = torch.nn.Parameter(initial.clone())
    sgd = torch.optim.SGD([reference], learning_rate, momentum, nesterov=momentum > 0)
    for _ in range(count):
        moved = [0.01 * torch.randn(VALUES, generator=generator) for _ in outers]
        weights = [outer.anchor - move for outer, move in zip(outers, moved, strict=True)]
        exchange(outers, weights)
        # In the order of the data centres, then scaled: the sum that each of them forms.
        total = reference.detach() - weights[0]
        for local in weights[1:]:
            total = total + (reference.detach() - local)
        reference.grad = total * (1 / data_centres)
        sgd.step()
    return outers, sgd, reference


class TestOuterOptimizer:
    @pytest.mark.parametrize("data_centres", [2, 3, 7])
    def test_in_fp32_it_is_torchs_sgd_with_nesterov_momentum(self, data_centres: int) -> None:
        outers, _, reference = rounds(None, data_centres, 0.7, 0.9)
        for outer in outers:
            assert torch.equal(outer.anchor, reference.detach())

    def test_rate_1_without_momentum_averages_the_weights(self) -> None:
        outers, _, reference = rounds(None, 2, 1.0, 0.0)
        assert torch.equal(outers[0].anchor, reference.detach())

        anchor = torch.randn(VALUES, dtype=torch.float32)
        outer = OuterOptimizer(anchor, None, 1.0, 0.0)
        weights = [anchor + 0.01 * torch.randn(VALUES) for _ in range(2)]
        outer.step(torch.stack([outer.encode(local, 0) for local in weights]), 0, VALUES)
        torch.testing.assert_close(outer.anchor, (weights[0] + weights[1]) / 2)

    @pytest.mark.parametrize("spec", ["int4", "int8", "sdp4bit:intra=4"])
    def test_all_data_centres_have_the_same_anchor(self, spec: str) -> None:
        outers, _, _ = rounds(parse_codec(spec), 3, 0.7, 0.9)
        for outer in outers[1:]:
            assert torch.equal(outer.anchor, outers[0].anchor)
            assert torch.equal(outer.velocity, outers[0].velocity)
            assert not torch.equal(outer.residual, outers[0].residual)

    def test_the_memory_keeps_all_that_encodings_lose(self) -> None:
        """Rate 1 without momentum: what was sent and what is remembered add up to what was moved."""
        codec = parse_codec("int4")
        anchor = torch.randn(VALUES)
        outer = OuterOptimizer(anchor, codec, 1.0, 0.0)
        moved = torch.zeros(VALUES)
        for _ in range(5):
            step = 0.01 * torch.randn(VALUES)
            moved += step
            payload = outer.encode(outer.anchor - step, 0)
            outer.step(payload[None], 0, VALUES)
        lost = anchor - moved - outer.anchor
        torch.testing.assert_close(lost, -outer.residual, atol=1e-5, rtol=0)
        assert outer.residual.abs().max() > 1e-4, "four bits lose something"

    def test_sums_of_pieces_keep_what_they_lose_as_well(self) -> None:
        """Three data centres: the mean of what they moved is in the anchor and in the memories."""
        codec = parse_codec("int4")
        anchor = torch.randn(VALUES)
        outers = [OuterOptimizer(anchor, codec, 1.0, 0.0, 3, [(0, VALUES)]) for _ in range(3)]
        moved = torch.zeros(VALUES)
        for _ in range(5):
            steps = [0.01 * torch.randn(VALUES) for _ in outers]
            moved += sum(steps) / 3
            exchange(outers, [o.anchor - s for o, s in zip(outers, steps, strict=True)])
        kept = sum(outer.residual for outer in outers) / 3
        kept += torch.cat([outer.sum_residuals[0] for outer in outers])[:VALUES]
        torch.testing.assert_close(anchor - moved - outers[0].anchor, -kept, atol=1e-5, rtol=0)

    def test_a_fragment_leaves_the_others_alone(self) -> None:
        anchor = torch.randn(VALUES)
        outer = OuterOptimizer(anchor, parse_codec("int8"), 0.7, 0.9)
        payload = outer.encode(anchor[200:700] - 0.1, 200)
        outer.step(torch.stack([payload, payload]), 200, 700)
        changed = outer.anchor != anchor
        assert changed[200:700].all() and not changed[:200].any() and not changed[700:].any()

    def test_a_difference_that_is_not_finite_shows(self) -> None:
        outer = OuterOptimizer(torch.zeros(VALUES), parse_codec("int4"), 0.7, 0.9)
        weights = torch.zeros(VALUES)
        weights[3] = float("nan")
        outer.step(outer.encode(weights, 0)[None], 0, VALUES)
        assert not outer.anchor.isfinite().all()


def test_a_digest_sees_a_bit_and_an_exchange_of_places() -> None:
    vector = torch.randn(VALUES)
    other = vector.clone()
    other[5] = torch.nextafter(other[5], torch.tensor(10.0))
    swapped = vector[torch.tensor([1, 0, *range(2, VALUES)])]
    assert digest(vector) == digest(vector.clone())
    assert len({digest(vector), digest(other), digest(swapped)}) == 3


def test_data_centres_share_the_samples_of_one_large_data_parallel_group() -> None:
    """Two data centres of two ranks read what four ranks would."""
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    def indices(rank: int, ranks: int, consumed: int, data_centre: int | None) -> list:
        sampler = MegatronPretrainingSampler(96, consumed, 2, rank, ranks)
        if data_centre is not None:
            take_share(SimpleNamespace(batch_sampler=sampler), 2, data_centre)
        return list(sampler)

    large = [indices(rank, 4, 16, None) for rank in range(4)]
    # Each data centre counts its own samples alone.
    shares = [indices(rank, 2, 8, number) for number in range(2) for rank in range(2)]
    assert shares == large


class TestFolders:
    def arguments(self, folder, number: int = 1) -> Namespace:
        return Namespace(
            data_centres=2, data_centre_rank=number, save=str(folder), load=str(folder)
        )

    def test_each_data_centre_saves_in_a_folder_of_its_own(self, tmp_path) -> None:
        args = self.arguments(tmp_path)
        use_own_folders(args)
        use_own_folders(args)
        assert args.save == str(tmp_path / "data_centre_1")
        assert args.load == str(tmp_path), "no data centre has saved there"

    def test_one_without_a_folder_loads_that_of_data_centre_0(self, tmp_path) -> None:
        for number in range(2):
            folder = tmp_path / f"data_centre_{number}"
            folder.mkdir()
            (folder / "latest_checkpointed_iteration.txt").write_text("4")
        loaded = []
        for number in range(3):
            args = self.arguments(tmp_path, number)
            use_own_folders(args)
            loaded.append(args.load)
        names = ["data_centre_0", "data_centre_1", "data_centre_0"]
        assert loaded == [str(tmp_path / name) for name in names]

    def test_one_data_centre_keeps_its_folders(self, tmp_path) -> None:
        args = self.arguments(tmp_path)
        args.data_centres = 1
        use_own_folders(args)
        assert args.save == args.load == str(tmp_path)


class TestSettings:
    def test_defaults_are_the_papers(self) -> None:
        config = LocalStepsConfig(data_centres=2, data_centre=0, address="a:1")
        assert (config.steps, config.learning_rate, config.momentum) == (100, 0.7, 0.9)
        assert config.codec.name == "int4"
        assert config.local_share == 0.0
        overlapped = LocalStepsConfig(data_centres=2, data_centre=0, address="a:1", delay=2)
        assert overlapped.local_share == 0.5

    @pytest.mark.parametrize(
        ("flags", "line"),
        [
            (("--local-steps", "10"), "--local-steps 10 given, but nothing uses it"),
            (("--data-centres", "2"), "--data-centre-rank must be a number from 0 to 1"),
            ((*TWO[:4],), "--outer-address must be HOST:PORT"),
            ((*TWO, "--outer-compression", "lossless"), "differences are fp32"),
            ((*TWO, "--outer-compression", "tah-quant"), "needs tokens and channels"),
            ((*TWO, "--local-steps", "4", "--outer-delay", "4"), "--outer-delay 4 must be below 4"),
            ((*TWO, "--local-steps", "4", "--outer-fragments", "5"), "must be in 1 to 4"),
            ((*TWO, "--outer-lr", "0"), "--outer-lr 0.0 must be above 0"),
        ],
    )
    def test_impossible_settings_are_refused_by_their_flag(self, flags, line: str) -> None:
        with pytest.raises(SettingError) as refused, spelled(FLAG_NAMES):
            resolve(parsed(*flags, use_distributed_optimizer=True))
        assert line in str(refused.value)

    @pytest.mark.parametrize(
        ("megatron", "line"),
        [
            ({}, "add --use-distributed-optimizer"),
            ({"num_distributed_optimizer_instances": 2}, "once an instance"),
            ({"async_save": True}, "--async-save"),
            (
                {"overlap_param_gather_with_optimizer_step": True},
                "--overlap-param-gather-with-optimizer-step gathers weights before a round",
            ),
            ({"moe_router_enable_expert_bias": True}, "--moe-router-enable-expert-bias"),
            ({"distributed_timeout_minutes": 5}, "--outer-timeout-minutes 5 is not below"),
            ({"dataloader_type": "cyclic"}, "use single"),
            (
                dict(
                    mtp_num_layers=1,
                    pipeline_model_parallel_size=2,
                    untie_embeddings_and_output_weights=False,
                ),
                "add --untie-embeddings-and-output-weights",
            ),
            ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 keeps no fp32 masters"),
        ],
    )
    def test_arguments_of_megatron_that_do_not_fit_are_refused(self, megatron, line) -> None:
        if megatron:
            megatron = {"use_distributed_optimizer": True, **megatron}
        with pytest.raises(SettingError) as refused:
            resolve(parsed(*TWO, **megatron))
        assert line in str(refused.value)

    def test_the_log_says_what_a_round_is(self) -> None:
        args = parsed(*TWO, use_distributed_optimizer=True, global_batch_size=8, train_iters=150)
        first, batch, rest = resolve(args).local_steps.lines(args)
        assert "data centre 0 of 2: 100 iterations a round, differences in int4" in first
        assert "16 in all data centres" in batch
        assert "the last 50 end in no round" in rest
