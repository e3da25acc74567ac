"""Massive values apart, under Triton's CPU interpreter, against outliers.py: lists alike, codes nearly.

TRITON_INTERPRET must be set before triton is imported: the test runs this file as a program of its own.
"""

import pytest

from tests.kernels.interpreter import output_interpreted

pytestmark = pytest.mark.slow


def test_kernels_reproduce_the_reference() -> None:
    assert output_interpreted(__file__) == "9 cases"


def main() -> None:
    """A spread of configurations, numbers of massive values and ends of tensors."""
    import torch

    from taco_kernels.taco import CodecConfig, launch
    from tests.kernels.interpreter import speed_up
    from tests.kernels.wires.outliers import check_operations

    speed_up()
    for name, tuning in launch.TUNING.items():
        launch.TUNING[name] = tuning._replace(tile=2048)  # several tiles even here
    cases = 0
    for config, dtype, counts in (
        (CodecConfig("int6", 128, "signed", outliers=True), torch.bfloat16, (0, 1, 4)),
        (CodecConfig("int8", 32, "single", outliers=True), torch.float32, (2, 12)),
        (CodecConfig("fp8-e4m3", 128, "dual", outliers=True), torch.float16, (1, 12)),
        (CodecConfig("int4", 32, "signed", False, True), torch.float32, (12,)),
        (CodecConfig("int5", 512, "signed", outliers=True), torch.float32, (12,)),
    ):
        for count in counts:
            check_operations(launch, config, dtype, count, (3, 1000), seed=cases)
            cases += 1
    print(f"{cases} cases")


if __name__ == "__main__":
    main()
