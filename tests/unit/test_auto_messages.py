"""--compression auto: the messages that an iteration is made of, and what of them holds it up."""

from argparse import Namespace

import pytest
import torch

from megatron.compression.auto.messages import OVERLAP_LOSS, workload
from tests.unit.megatron_args import experts, megatron


class TestIteration:
    def test_exposed_communication_is_what_was_measured(self):
        """TP 4, docs/results/iterations.md, 120.7 ms of GEMMs: 128 sums of 4.14 ms in pcie add 499 ms, of
        0.357 ms on NVLink 22.5."""
        work = workload(megatron(), 0, 4 * 0.1207 * 1e15, 1e15)
        forward, backward = work.messages
        assert forward.count == backward.count == 4 * 17 and forward.nbytes == 2**26
        for sums, measured, off in ((0.5301, 0.4987, 0.02), (0.0457, 0.0225, 0.12)):
            seconds = sums / 136
            exposed = forward.exposed(seconds) + backward.exposed(seconds)
            assert exposed == pytest.approx(measured, rel=off)
        times = dict.fromkeys(work.messages, 0.5301 / 136)
        whole = work.seconds(times)
        assert whole == pytest.approx(0.7022, rel=0.06)

    def test_messages_of_each_dimension(self):
        """Counts of an iteration: sequence parallelism, buckets, 1F1B's exchanges."""

        def counts(parameters: int = 0, **changes) -> dict[str, float]:
            work = workload(megatron(**changes), parameters, 1e12, 1e12)
            return {f"{one.traffic} {one.operation}": one.count for one in work.messages}

        assert counts(sequence_parallel=True) == {
            "tp.forward reduce_scatter": 68,
            "tp.forward all_gather": 68,
            "tp.backward reduce_scatter": 68,
            "tp.backward all_gather": 136,
        }
        alone = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        stages = {
            **alone,
            "pipeline_model_parallel_size": 2,
            "micro_batch_size": 1,
            "global_batch_size": 16,
        }
        # the first message, 15 exchanges, the last: a half of it for each direction
        assert counts(**stages) == {"pp.forward exchange": 8.5, "pp.backward exchange": 8.5}
        replicas = {**alone, "data_parallel_size": 4, "use_distributed_optimizer": True}
        assert counts(3 * 2**26, **replicas) == {"dp.gradient gradients": 3, "dp.weight weights": 3}
        assert counts(3 * 2**26, **alone) == {}
        replicas |= {"num_distributed_optimizer_instances": 4}
        assert counts(3 * 2**26, **replicas) == {"dp.outer outer": 3}, "an instance is one rank"
        replicas |= {"num_distributed_optimizer_instances": 2}
        outer = workload(megatron(**replicas), 2**26, 1e12, 1e12).messages[1]
        assert (outer.traffic, outer.nbytes, outer.sent_as(True)) == (
            "dp.outer",
            4 * 2**25,
            "all_reduce",
        )

    def test_overlapped_buckets_leave_the_last_one(self):
        settings = dict(
            tensor_model_parallel_size=1, data_parallel_size=4, overlap_grad_reduce=True
        )
        (message,) = workload(
            megatron(**settings, ddp_bucket_size=2**22), 2**24, 4e15, 1e15
        ).messages
        assert message.dtype == torch.float32 and message.count == 4 and message.exposed_count == 1
        # a micro-batch of 1.6 s computation, of which 2/3 are the backward's: they hide 4 buckets of 0.2
        assert message.exposed(0.2) == pytest.approx(0.2 + OVERLAP_LOSS * 0.6), "the last"
        waited = 1.6 - 1.6 * 2 / 3
        assert message.exposed(0.4) == pytest.approx(waited + OVERLAP_LOSS * (1.6 - waited))


class TestTokens:
    def sent(self, parallelism: str, args: Namespace) -> dict[str, tuple]:
        """Shape and count of each message of a dimension, in order."""
        messages = workload(args, 0, 1e12, 1e12).messages
        found = [one for one in messages if one.dimension == parallelism]
        return {f"{one.traffic} {one.operation}": (one.shape, one.count) for one in found}

    def test_four_legs_of_a_layer(self):
        """8192 tokens of a micro-batch, each twice; 1 micro-batch, 8 layers."""
        rows, sixteen = (16384, 4096), {"ep.forward all_to_all", "ep.backward all_to_all"}
        assert self.sent("expert_parallel", experts()) == dict.fromkeys(sixteen, (rows, 16))
        half = experts(moe_layer_freq=[0, 1] * 4, recompute_granularity="full", moe_latent_size=512)
        assert self.sent("expert_parallel", half) == {
            "ep.forward all_to_all": ((16384, 512), 16),
            "ep.backward all_to_all": ((16384, 512), 8),
        }
        assert not self.sent("expert_parallel", experts(expert_model_parallel_size=1))

    def test_another_micro_batch_overlaps(self):
        """Of 8 layers, 4 micro-batches in 8 s: a quarter second a layer, two thirds of it backward."""
        args = experts(overlap_moe_expert_parallel_comm=True, global_batch_size=64)
        messages = workload(args, 0, 20e12, 1e12).messages
        found = [one for one in messages if one.dimension == "expert_parallel"]
        assert [one.count for one in found] == [64, 64]
        assert [one.overlap for one in found] == pytest.approx([0.25 / 3, 0.25 / 6])
        assert [one.exposed_count for one in found] == [16, 16], "of one micro-batch each"

    def test_ranks_that_share_an_expert(self):
        """TP 2 with sequence parallelism: a rank has half of the tokens; a layer's MLP sends nothing else."""
        tensor = dict(
            tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=2
        )
        args = experts(
            **tensor, data_parallel_size=2, expert_model_parallel_size=2, global_batch_size=8
        )
        assert self.sent("expert_parallel", args)["ep.forward all_to_all"] == ((8192, 4096), 16)
        sent = self.sent("tensor_parallel", args)
        assert (
            sent["tp.forward gather_tokens"] == sent["tp.backward sum_tokens"] == ((16384, 4096), 8)
        )
        assert sent["tp.forward reduce_scatter"] == ((2048, 4, 4096), 9), (
            "attention, and the embedding"
        )
        args.moe_shared_expert_intermediate_size = 1024
        assert self.sent("tensor_parallel", args)["tp.forward reduce_scatter"][1] == 17

    def test_keys_and_values(self):
        """32 heads of 128 in 8 groups: of a sequence of 2048, TP 4 x CP 2. Attention is run again, too."""
        heads = dict(
            num_attention_heads=32, num_query_groups=8, group_query_attention=True, kv_channels=128
        )
        args = megatron(
            **heads, context_parallel_size=2, multi_latent_attention=False, recompute_modules=None
        )
        kept = (2048, 4, 2 * 128 * 2)
        assert self.sent("context_parallel", args) == {
            "cp.forward all_gather": (kept, 32),
            "cp.backward reduce_scatter": (kept, 32),
        }
        args.recompute_granularity = "selective"
        assert self.sent("context_parallel", args)["cp.forward all_gather"] == (kept, 64)
        args.transformer_impl = "transformer_engine"
        assert not self.sent("context_parallel", args)
