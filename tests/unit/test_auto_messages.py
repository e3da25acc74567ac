"""--compression auto: the messages that an iteration is made of, and what of them holds it up."""

from argparse import Namespace

import pytest
import torch

from megatron.compression.auto.messages import OVERLAP_LOSS, workload
from tests.unit.megatron_args import experts, megatron

NVLINK_AND_PCIE = pytest.mark.parametrize(
    ("sums", "added", "off"),
    [(0.5301, 0.4987, 0.02), (0.0457, 0.0225, 0.12)],
    ids=["pcie", "nvlink"],
)
"""Seconds of an iteration's 128 sums by themselves, seconds that they add, relative tolerance.

Measured at TP 4 with 120.7 ms of GEMMs (docs/results/iterations.md): a sum takes 4.14 ms over PCIe
and 0.357 ms over NVLink."""


class TestIteration:
    @pytest.fixture
    def measured(self):
        """The messages and the computation of an iteration of the run that was measured."""
        return workload(megatron(), 0, 4 * 0.1207 * 1e15, 1e15)

    def test_a_layer_sums_twice_forward_and_backward(self, measured):
        """There are 4 micro-batches; 8 layers sum twice in each direction, the embedding once."""
        forward, backward = measured.messages
        assert forward.count == backward.count == 4 * 17
        assert forward.nbytes == 2**26

    @NVLINK_AND_PCIE
    def test_exposed_communication_is_what_was_measured(self, measured, sums, added, off):
        forward, backward = measured.messages
        seconds = sums / 136
        exposed = forward.exposed(seconds) + backward.exposed(seconds)
        assert exposed == pytest.approx(added, rel=off)

    def test_an_iteration_takes_what_was_measured(self, measured):
        times = dict.fromkeys(measured.messages, 0.5301 / 136)
        assert measured.seconds(times) == pytest.approx(0.7022, rel=0.06)


ONE_RANK = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
REPLICAS = {**ONE_RANK, "data_parallel_size": 4, "use_distributed_optimizer": True}
THREE_BUCKETS = 3 * 2**26
"""Parameters that fill three buckets."""


def counts(parameters: int = 0, **changes) -> dict[str, float]:
    """Return how often an iteration sends each message, by traffic and operation."""
    work = workload(megatron(**changes), parameters, 1e12, 1e12)
    return {f"{message.traffic} {message.operation}": message.count for message in work.messages}


class TestCounts:
    def test_sequence_parallelism(self):
        """The backward gathers twice: the gradient, and the input again for the weight's."""
        assert counts(sequence_parallel=True) == {
            "tp.forward reduce_scatter": 68,
            "tp.forward all_gather": 68,
            "tp.backward reduce_scatter": 68,
            "tp.backward all_gather": 136,
        }

    def test_full_recomputation_sends_the_forward_messages_twice(self):
        once = counts()
        again = counts(recompute_granularity="full")
        assert again["tp.forward all_reduce"] == 2 * once["tp.forward all_reduce"] > 0
        assert again["tp.backward all_reduce"] == once["tp.backward all_reduce"]

    def test_stages(self):
        """1F1B sends the first message, 15 exchanges and the last: half of it in each direction."""
        two_stages = {
            **ONE_RANK,
            "pipeline_model_parallel_size": 2,
            "micro_batch_size": 1,
            "global_batch_size": 16,
        }
        assert counts(**two_stages) == {"pp.forward exchange": 8.5, "pp.backward exchange": 8.5}

    def test_each_bucket_is_sent_once(self):
        assert counts(THREE_BUCKETS, **REPLICAS) == {
            "dp.gradient gradients": 3,
            "dp.weight weights": 3,
        }

    def test_one_rank_sends_nothing(self):
        assert counts(THREE_BUCKETS, **ONE_RANK) == {}

    def test_instances_of_one_rank_send_between_instances_only(self):
        instances = {"num_distributed_optimizer_instances": 4}
        assert counts(THREE_BUCKETS, **REPLICAS, **instances) == {"dp.outer outer": 3}

    def test_instances_of_two_ranks_sum_their_shards(self):
        """A shard is half of the parameters, with 4 bytes of a gradient each."""
        args = megatron(**REPLICAS, num_distributed_optimizer_instances=2)
        outer = workload(args, 2**26, 1e12, 1e12).messages[1]
        assert outer.traffic == "dp.outer"
        assert outer.nbytes == 4 * 2**25
        assert outer.sent_as(True) == "all_reduce"


class TestOverlappedBuckets:
    # The rank's one micro-batch computes for 1.6 s, of which two thirds are the backward's: they
    # hide 4 buckets of 0.2 s but for the last one.
    @pytest.fixture
    def message(self):
        settings = {
            "tensor_model_parallel_size": 1,
            "data_parallel_size": 4,
            "overlap_grad_reduce": True,
            "ddp_bucket_size": 2**22,
        }
        (message,) = workload(megatron(**settings), 2**24, 4e15, 1e15).messages
        return message

    def test_one_of_four_buckets_has_nothing_behind_it(self, message):
        assert message.dtype == torch.float32
        assert message.count == 4
        assert message.exposed_count == 1

    def test_the_last_bucket_is_exposed(self, message):
        assert message.exposed(0.2) == pytest.approx(0.2 + OVERLAP_LOSS * 0.6)

    def test_buckets_longer_than_the_backward_are_waited_for(self, message):
        waited = 1.6 - 1.6 * 2 / 3
        assert message.exposed(0.4) == pytest.approx(waited + OVERLAP_LOSS * (1.6 - waited))


def sent(dimension: str, args: Namespace) -> dict[str, tuple[tuple[int, ...], float]]:
    """Return shape and count of each message of a dimension, by traffic and operation."""
    result = {}
    for message in workload(args, 0, 1e12, 1e12).messages:
        if message.dimension == dimension:
            result[f"{message.traffic} {message.operation}"] = (message.shape, message.count)
    return result


class TestExperts:
    # A micro-batch has 4 x 2048 = 8192 tokens, each for 2 experts: 16384 rows. With EP 4 and DP 4
    # an iteration has one micro-batch.

    def test_four_legs_of_a_layer(self):
        """There and back, in 8 layers and both directions."""
        rows = (16384, 4096)
        assert sent("expert_parallel", experts()) == {
            "ep.forward all_to_all": (rows, 16),
            "ep.backward all_to_all": (rows, 16),
        }

    def test_recomputed_layers_send_again_forward(self):
        """Every second layer has experts, with 512 channels where they send."""
        args = experts(moe_layer_freq=[0, 1] * 4, recompute_granularity="full", moe_latent_size=512)
        assert sent("expert_parallel", args) == {
            "ep.forward all_to_all": ((16384, 512), 16),
            "ep.backward all_to_all": ((16384, 512), 8),
        }

    def test_experts_of_one_rank_send_nothing(self):
        assert not sent("expert_parallel", experts(expert_model_parallel_size=1))

    def test_another_micro_batch_overlaps(self):
        """4 micro-batches of 8 layers take 8 s: a quarter second a layer, two thirds backward.

        A message of one direction overlaps the other micro-batch's other direction.
        """
        args = experts(overlap_moe_expert_parallel_comm=True, global_batch_size=64)
        messages = [
            message
            for message in workload(args, 0, 20e12, 1e12).messages
            if message.dimension == "expert_parallel"
        ]
        assert [message.count for message in messages] == [64, 64]
        assert [message.overlap for message in messages] == pytest.approx([0.25 / 3, 0.25 / 6])
        exposed = [message.exposed_count for message in messages]
        assert exposed == [16, 16], "of one micro-batch each"


class TestSharedExperts:
    """TP 2 with sequence parallelism, where two ranks share an expert: each has half the tokens."""

    @pytest.fixture
    def args(self) -> Namespace:
        return experts(
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            expert_tensor_parallel_size=2,
            data_parallel_size=2,
            expert_model_parallel_size=2,
            global_batch_size=8,
        )

    def test_a_rank_sends_half_of_the_tokens(self, args):
        legs = sent("expert_parallel", args)
        assert legs["ep.forward all_to_all"] == ((8192, 4096), 16)

    def test_ranks_of_an_expert_gather_and_sum_its_tokens(self, args):
        messages = sent("tensor_parallel", args)
        assert messages["tp.forward gather_tokens"] == ((16384, 4096), 8)
        assert messages["tp.backward sum_tokens"] == ((16384, 4096), 8)

    def test_only_attention_and_the_embedding_sum_otherwise(self, args):
        messages = sent("tensor_parallel", args)
        assert messages["tp.forward reduce_scatter"] == ((2048, 4, 4096), 8 + 1)

    def test_a_shared_expert_sums_as_an_mlp_does(self, args):
        args.moe_shared_expert_intermediate_size = 1024
        _, count = sent("tensor_parallel", args)["tp.forward reduce_scatter"]
        assert count == 8 + 8 + 1


class TestKeysAndValues:
    """32 heads of 128 in 8 groups, a sequence of 2048, TP 4 x CP 2: 2 groups of K and V a rank."""

    SHAPE = (2048, 4, 2 * 128 * 2)

    @pytest.fixture
    def args(self) -> Namespace:
        return megatron(
            num_attention_heads=32,
            num_query_groups=8,
            group_query_attention=True,
            kv_channels=128,
            context_parallel_size=2,
            multi_latent_attention=False,
            recompute_modules=None,
        )

    def test_each_layer_gathers_them(self, args):
        """4 micro-batches of 8 layers."""
        assert sent("context_parallel", args) == {
            "cp.forward all_gather": (self.SHAPE, 32),
            "cp.backward reduce_scatter": (self.SHAPE, 32),
        }

    def test_recomputed_attention_gathers_again(self, args):
        args.recompute_granularity = "selective"
        assert sent("context_parallel", args)["cp.forward all_gather"] == (self.SHAPE, 64)

    def test_transformer_engine_sends_them_by_itself(self, args):
        args.transformer_impl = "transformer_engine"
        assert not sent("context_parallel", args)
