"""The loop by which tiles of packed values learn what comes before them: the kernels' own, on the CPU."""

import random
import threading
import time

import pytest
import torch

from tests.kernels.interpreter import output_interpreted, speed_up

pytest.importorskip("triton")
import triton
import triton.language as tl

from taco_kernels.bitmap_sparse.look_back import COUNTED, REACHED, look_back

pytestmark = pytest.mark.slow


@triton.jit
def sum_before(status, found, tile, SIZE: tl.constexpr):
    """look_back as a kernel."""
    tl.store(found, look_back(status, tile, tl.arange(0, SIZE), SIZE))


def test_look_back() -> None:
    """Over tiles that know less or more, and over some that know nothing yet."""
    assert output_interpreted(__file__) == "60 sums"


def main() -> None:
    """64 tiles at a time, while another thread fills in what it waits for."""
    speed_up()
    generator, sums = random.Random(0), 0
    for tiles in (1, 2, 63, 64, 65, 300):
        for late in range(10):
            words, total = [], 0
            for _ in range(tiles):
                count = generator.randrange(2**29 if tiles < 3 else 8192)
                total += count
                reached = generator.random() < (0.5, 0.02, 0.0)[late % 3]
                words.append(total << 2 | REACHED.value if reached else count << 2 | COUNTED.value)
            status = torch.tensor(words)
            unknown = generator.sample(range(tiles), min(late, tiles))
            status[unknown] = 0
            found = torch.full((1,), -1)
            arguments = (status, found, tiles, 64)
            waiting = threading.Thread(target=sum_before[(1,)], args=arguments, daemon=True)
            waiting.start()
            for tile in unknown:
                time.sleep(0.002)
                status[tile] = words[tile]
            waiting.join(60)
            assert found.item() == total, (tiles, late)
            sums += 1
    print(sums, "sums")


if __name__ == "__main__":
    main()
