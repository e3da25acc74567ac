"""The few configurations that are compiled on a GPU hold every pair of choices."""

from itertools import combinations, product

from taco_kernels.taco import FORMATS, GROUP_SIZES, SCALES
from tests.gpu.codec_cases import DTYPES, OPERATIONS, case_of, roundings


def test_every_pair_of_choices_occurs() -> None:
    rows = []
    for format, group_size in product(FORMATS, GROUP_SIZES):
        case = case_of(format, group_size)
        for operation in case.operations:
            config = case.config
            rows.append((format, group_size, config.scales, config.rounding, case.dtype, operation))
    assert SCALES == ("dual", "single", "signed")  # the last has cases of its own
    choices = (FORMATS, GROUP_SIZES, SCALES[:2], roundings("int8"), DTYPES, OPERATIONS)
    for a, b in combinations(range(len(choices)), 2):
        wanted = {
            (x, y)
            for x, y in product(choices[a], choices[b])
            if not (a == 0 and b == 3 and y not in roundings(x))
        }
        assert {(row[a], row[b]) for row in rows} == wanted, (a, b, wanted - {(r[a], r[b]) for r in rows})
