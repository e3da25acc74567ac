"""The choice of TAH-Quant's high units under Triton's CPU interpreter, on keys that make it hard."""

from tests.kernels.interpreter import output_interpreted


def test_chooses_the_largest_of_equal_ones_the_first() -> None:
    assert output_interpreted(__file__) == "78 choices"


def main() -> None:
    """Clusters, ties, zeros and numbers of every size, in one step and in several."""
    import numpy as np
    import torch

    from taco_kernels.tah_quant.select import choose_kernel
    from tests.kernels.interpreter import speed_up

    speed_up()
    random = np.random.default_rng(0)
    kinds = {
        "alike": lambda n: random.normal(9, 0.5, n),
        "clusters": lambda n: np.where(random.random(n) < 0.5, random.normal(1e-30, 1e-33, n), 9.0),
        "ties": lambda n: random.integers(0, 5, n),
        "zeros": np.zeros,
        "of every size": lambda n: random.standard_normal(n) * 10.0 ** random.integers(-30, 30, n),
    }
    choices = 0
    sizes = [(32, 32), (100, 32), (256, 256)]
    for name, make, population, held in [(k, f, *size) for k, f in kinds.items() for size in sizes] + [
        (name, kinds[name], 40_000, 8192) for name in ("alike", "ties", "of every size")
    ]:
        shares = (0, 1, population // 3, population - 1, population)
        for high in shares if population < 1000 else (population * 4 // 5,):
            numbers = make(population).astype(np.float32)
            bits = np.where(numbers == 0, np.float32(0), numbers).view(np.int32)
            keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            steps, words = -(-population // held), -(-population // 32)
            widths, slots = torch.zeros(words, dtype=torch.int32), torch.empty(population, dtype=torch.int32)
            choose_kernel[(1,)](
                torch.from_numpy(keys),
                torch.zeros(1),
                widths,
                slots,
                slots,
                slots,
                (population, 1, high, population, high),
                population,
                N=held,
                STEPS=steps,
                FUSED=False,
                BY_TOKEN=True,
                P=0,
            )
            expected = np.zeros(population, dtype=bool)
            expected[np.argsort(-keys.astype(np.int64), kind="stable")[:high]] = True
            found = slots.numpy()
            assert ((found >= 0) == expected).all(), (name, population, high)
            assert (found[expected] == np.arange(high)).all(), (name, population, high)
            flags = np.unpackbits(widths.numpy().view(np.uint8), bitorder="little")[:population]
            assert (flags == expected).all(), (name, population, high)
            choices += 1
    print(choices, "choices")


if __name__ == "__main__":
    main()
