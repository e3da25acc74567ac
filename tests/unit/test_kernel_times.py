"""Sums of kernel times and what they overlap."""

from scripts._kernel_times import covered, kind_of, summarise


def test_kinds() -> None:
    assert kind_of("ncclDevKernel_AllGather_RING_LL") == "communication"
    assert kind_of("two_shot_kernel") == "collective over symmetric memory"
    assert kind_of("decode_sum_encode_kernel") == "codec"
    assert kind_of("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT") == "GEMM"
    assert kind_of("vectorized_elementwise_kernel") == "other"


def test_union() -> None:
    assert covered([(5, 6), (0, 2), (1, 3)]) == 4


def test_what_hides_and_what_does_not() -> None:
    kernels = [("gemm", 0, 1000), ("nccl", 500, 3000), ("encode_kernel", 3500, 4000)]
    assert summarise(kernels) == {
        "GEMM": 1.0,
        "communication": 2.5,
        "codec": 0.5,
        "exposed communication": 2.0,
        "idle": 0.5,
        "all": 4.0,
    }
