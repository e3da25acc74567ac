"""The few configurations that are compiled on a GPU hold every pair of choices."""

from itertools import combinations, product

from taco_kernels.taco import FORMATS, GROUP_SIZES, SCALES
from tests.gpu.codec_cases import DTYPES, OPERATIONS, case_of


def test_every_pair_of_choices_occurs() -> None:
    rows = []
    for format, group_size in product(FORMATS, GROUP_SIZES):
        case = case_of(format, group_size)
        for operation in case.operations:
            config = case.config
            rows.append((format, group_size, config.scales, case.dtype, operation))
    assert SCALES == ("dual", "single", "signed")  # the last has cases of its own
    choices = (FORMATS, GROUP_SIZES, SCALES[:2], DTYPES, OPERATIONS)
    for a, b in combinations(range(len(choices)), 2):
        wanted = set(product(choices[a], choices[b]))
        assert {(row[a], row[b]) for row in rows} == wanted, (a, b, wanted - {(r[a], r[b]) for r in rows})
