"""What tune finds, where launches find it; the clock is a function of the tuning."""

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources

from taco_kernels import __version__, tune
from taco_kernels.common import tuned
from taco_kernels.common.device import Device, Tuning, played
from taco_kernels.sdp4bit import GroupFormat
from taco_kernels.sdp4bit import launch as sdp4bit_launch
from taco_kernels.taco import CodecConfig, launch
from taco_kernels.taco.tuning import tuning_for
from tests.kernels.architectures import pretended

CONFIG = CodecConfig("int6")
GPU = Device(132, (9, 0), False, "A GPU")
OTHER = Tuning(4096, 8, 2, 3, 128)
SHIPPED = Tuning(8192, 4, 3, 2)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """No test sees a file of the user's."""
    monkeypatch.setenv(tuned.FILE, str(tmp_path / "tuning.json"))
    tuned.forget()
    yield tmp_path / "tuning.json"
    tuned.forget()


def encoded_on(device: Device, chunks: int = 1) -> tuple[dict, int]:
    """Compiler options and values of a tile of an encode there."""
    with pretended(90) as compiled, mock.patch.object(launch, "device_number", lambda index: device):
        launch.encode(torch.zeros(2**16, dtype=torch.bfloat16), CONFIG, chunks)
    [(source, options)] = compiled
    spec = next(value for value in source.constants.values() if hasattr(value, "PAYLOAD"))
    return options, spec.R.value * spec.G.value


def test_launches_take_what_the_file_says(file) -> None:
    shipped = tuning_for("encode", CONFIG, GPU)
    tuned.save(GPU, {f"encode {CONFIG}": (shipped, OTHER)}, set())
    options, tile = encoded_on(GPU)
    assert (tile, options["num_warps"], options["maxnreg"]) == (OTHER.tile, OTHER.warps, OTHER.registers)
    options, tile = encoded_on(GPU, chunks=32)  # tiles of several chunks are tiles of one
    assert (tile, options["num_warps"], options["maxnreg"]) == (OTHER.tile, OTHER.warps, OTHER.registers)
    options, tile = encoded_on(
        GPU, chunks=30
    )  # of chunks padded to whole groups a tile holds one, by the rule
    assert (tile, options["num_warps"], options["maxnreg"]) == (4096, shipped.warps, None)


def test_sdp4bit_takes_what_the_file_says() -> None:
    format, shipped = GroupFormat(8, 128, True), sdp4bit_launch.TUNING["sum_dequantize"]
    found = shipped._replace(tile=4096)
    tuned.save(GPU, {f"sum_dequantize {format} torch.float32": (shipped, found)}, set())
    tiles = [sdp4bit_launch._tiled("sum_dequantize", format, t, GPU) for t in (torch.float32, torch.bfloat16)]
    assert [(tuning.tile, tile.N.value) for tuning, tile in tiles] == [(4096, 128), (2048, 64)]


@pytest.mark.parametrize(
    "change",
    [
        dict(device=GPU._replace(name="Another GPU")),
        dict(device=GPU._replace(capability=(8, 9))),
        dict(version=("triton", "3.7.0")),
        dict(version=("taco_kernels", "0.0.1")),
        dict(text="{]"),
        dict(text="[]"),
    ],
    ids=["name", "capability", "triton", "package", "no JSON", "no table"],
)
def test_a_file_of_something_else_is_left_alone(change: dict, file, caplog, monkeypatch) -> None:
    shipped = tuning_for("encode", CONFIG, GPU)
    name = f"encode {CONFIG}"
    with monkeypatch.context() as patched:
        if "version" in change:
            module = {"triton": tuned.triton, "taco_kernels": tuned.taco_kernels}[change["version"][0]]
            patched.setattr(module, "__version__", change["version"][1])
        tuned.save(change.get("device", GPU), {name: (shipped, OTHER)}, set())
    file.write_text(change.get("text", file.read_text()))
    with caplog.at_level(logging.WARNING, logger="taco_kernels"):
        for _ in range(2):
            assert tuned.tuned(GPU, shipped, "encode", CONFIG) == shipped
    [record] = caplog.records
    assert "A GPU, sm_90" in record.getMessage() and "python -m taco_kernels.tune" in record.getMessage()


def test_a_setting_that_is_shipped_otherwise_by_now_is_run_as_shipped() -> None:
    tuned.save(GPU, {"encode x": (SHIPPED, OTHER)}, set())
    assert tuned.tuned(GPU, SHIPPED, "encode", "x") == OTHER
    assert tuned.tuned(GPU, SHIPPED._replace(stages=2), "encode", "x") == SHIPPED._replace(stages=2)


def test_machines_and_settings_lie_side_by_side_in_the_file(file) -> None:
    b200 = Device(148, (10, 0), False, "B200")
    tuned.save(b200, {"a": (SHIPPED, OTHER)}, {"a"})
    tuned.save(GPU, {"a": (SHIPPED, OTHER)}, {"a"})
    tuned.save(GPU, {"b": (SHIPPED, OTHER)}, {"a", "b"})  # found anew: as shipped is best
    machines = json.loads(file.read_text())
    assert {name.split(",")[0]: [*settings] for name, settings in machines.items()} == {
        "B200": ["a"],
        "A GPU": ["b"],
    }
    assert tuned.table(GPU) == {"b": (SHIPPED, OTHER)} and tuned.table(b200) == {"a": (SHIPPED, OTHER)}
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_without_a_name_there_is_no_file(file) -> None:
    """Of the interpreter, and of another architecture's part."""
    nobody = GPU._replace(name="")
    tuned.save(nobody, {"a": (SHIPPED, OTHER)}, set())
    assert tuned.table(nobody) == {}


def searched(cost: Callable[[Tuning], float], bits: Callable[[Tuning], int] = lambda tuning: 0):
    """What tune finds where a call takes ``cost`` and returns ``bits``; and what it says."""

    def call() -> torch.Tensor:
        return torch.tensor([bits(tuned.tuned(GPU, SHIPPED, "encode", "x"))])

    def clock(calls) -> float:
        calls[0]()
        return cost(tuned.tuned(GPU, SHIPPED, "encode", "x"))

    said: list[str] = []
    works = [tune.Work([call], True), tune.Work([call], False)]
    return tune.searched("encode x", SHIPPED, works, clock, said.append), said


def test_the_fastest_is_found_in_steps() -> None:
    found, said = searched(lambda tuning: 100 - 20 * (tuning.warps == 8) - 20 * (tuning.programs == 3))
    assert found.tuned == SHIPPED._replace(warps=8, programs=3) and not said
    assert (found.before, found.after) == ([100.0], [60.0])


def test_what_does_not_fit_is_left_out_and_said() -> None:
    def cost(tuning: Tuning) -> float:
        if tuning.tile > SHIPPED.tile:
            raise OutOfResources(300000, 232448, "shared memory")
        return 90 if tuning.stages == 2 else 100

    found, said = searched(cost)
    assert found.tuned == SHIPPED._replace(stages=2)
    assert said and all("(16384," in line and "Required: 300000" in line for line in said)


def test_other_bits_are_left_out_and_said() -> None:
    found, said = searched(
        lambda tuning: {4: 100, 8: 50, 2: 90}[tuning.warps] if tuning.warps in (2, 4, 8) else 100,
        bits=lambda tuning: int(tuning.warps == 8),
    )
    assert found.tuned.warps == 2 and any("other bits" in line for line in said)


def test_a_little_faster_or_faster_once_is_not_enough() -> None:
    assert searched(lambda tuning: 99 if tuning.warps == 8 else 100)[0].tuned == SHIPPED
    ticks = itertools.count()
    luck = searched(lambda tuning: 100 if tuning == SHIPPED or next(ticks) else 50)[0]
    assert luck.tuned == SHIPPED and next(ticks) > 2


def test_no_size_may_become_slower() -> None:
    assert tune.ratio([50, 103], [100, 100]) == float("inf")
    assert tune.ratio([50, 100], [100, 100]) == pytest.approx(0.5**0.5)


def test_what_is_tuned() -> None:
    def count(*words: str) -> int:
        return sum(1 for _ in tune.families(tune.parser().parse_args(words)))

    assert (
        count(),
        count("--codecs"),
        count("--codecs", "--formats", "int6", "int4", "--outliers", "off", "on"),
    ) == (5, 3, 4)


def test_another_architectures_part() -> None:
    assert played("89:tiles", (9, 0)) == played("89", (9, 0)) == played("sm_89", (9, 0)) == (8, 9)
    assert played("120", (9, 0)) == (12, 0)
    for wanted, own in (("hopper", (9, 0)), ("7", (9, 0)), ("89", (8, 0))):
        with pytest.raises(ValueError, match=f"TACO_KERNELS_AS_IF={wanted}"):
            played(wanted, own)


def test_the_version_is_the_packages() -> None:
    text = (Path(__file__).parents[2] / "taco_kernels" / "pyproject.toml").read_text()
    assert f'version = "{__version__}"' in text
