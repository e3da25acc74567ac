"""tune on this GPU: what it finds is in the file, as fast as shipped at least, and changes no bit."""

import pytest
import torch

pytest.importorskip("triton")

from taco_kernels import tune
from taco_kernels.benchmarks.timing import microseconds
from taco_kernels.common import tuned
from taco_kernels.common.device import device_number
from taco_kernels.taco import CodecConfig, decode, decode_sum, decode_sum_encode, encode

CONFIG = CodecConfig("int6", scales="signed")
OPERATIONS = {"encode", "decode", "decode_sum", "decode_sum_encode"}


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """Another file than the user's."""
    monkeypatch.setenv(tuned.FILE, str(tmp_path / "tuning.json"))
    monkeypatch.delenv("TACO_KERNELS_AS_IF", raising=False)
    device_number.cache_clear()
    tuned.forget()
    yield
    device_number.cache_clear()
    tuned.forget()


def calls(x: torch.Tensor) -> dict:
    """The four operations; what they return does not depend on what they are called after."""
    wires = encode(x, CONFIG).repeat(4, 1)
    return {
        "encode": lambda: encode(x, CONFIG),
        "decode": lambda: decode(wires[:1], CONFIG, x.shape, x.dtype),
        "decode_sum": lambda: decode_sum(wires, CONFIG, x.shape, x.dtype),
        "decode_sum_encode": lambda: decode_sum_encode(wires, CONFIG, x.numel()),
    }


def results(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Bytes."""
    return {name: call().view(-1).view(torch.uint8) for name, call in calls(x).items()}


def times(x: torch.Tensor) -> dict[str, float]:
    """Microseconds."""
    return {name: min(microseconds([call] * 4) for _ in range(3)) for name, call in calls(x).items()}


def test_nothing_gets_slower_and_no_bit_changes(monkeypatch) -> None:
    neighbours = tuned.candidates
    monkeypatch.setattr(tune, "candidates", lambda tuning: neighbours(tuning)[2::3])  # each is compiled
    options = tune.parser().parse_args(["--formats", "int6", "--codecs", "--mib", "4", "32"])
    found = list(tune.tune(options))
    assert {row.setting.split()[0] for row in found} == OPERATIONS and len(found) == 4
    kept = {row.setting: (row.shipped, row.tuned) for row in found if row.tuned != row.shipped}
    assert tuned.table(device_number(torch.cuda.current_device())) == kept
    assert all(tune.ratio(row.after, row.before) <= 1 for row in found)
    x = torch.randn(2**24 + 24, device="cuda").bfloat16()
    with tuned.trying({}):
        expected = results(x)
        shipped = times(x)
    for name, result in results(x).items():
        assert torch.equal(result, expected[name]), name
    for name, us in times(x).items():
        assert us < 1.03 * shipped[name], (name, found)


def test_launches_read_the_file() -> None:
    """An entry made by hand is taken, and gives the shipped one's bits."""
    x = torch.randn(2**20 + 24, device="cuda").bfloat16()
    with tuned.trying({}) as asked:
        expected = results(x)
        settings = dict(asked)
    other = {
        name: (shipped, shipped._replace(programs=shipped.programs and 1))
        for name, shipped in settings.items()
    }
    device = device_number(torch.cuda.current_device())
    tuned.save(device, other, set())
    assert len(tuned.table(device)) == 4
    for name, result in results(x).items():
        assert torch.equal(result, expected[name]), name
