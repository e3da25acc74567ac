"""The tool that measures codecs on a run."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import codec_sweep

from megatron.compression.codecs import parse_codec

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """Two ranks' measures of one site."""
    parts = []
    for rank in range(2):
        sweep = codec_sweep.CodecSweep(4, codec_sweep.CODECS)
        x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(rank)).bfloat16()
        assert not sweep.due("fc2", "tp.forward", 3) and sweep.due("fc2", "tp.forward", 4)
        sweep.measure("fc2", "tp.forward", x, parse_codec("taco"))
        assert not sweep.due("fc2", "tp.forward", 4), "once a site and class of traffic"
        assert not sweep.tripped
        parts.append(sweep.squares())
    return codec_sweep.merge(parts)


def test_every_codec_is_measured(rows):
    table = {row["codec"]: row for row in codec_sweep.summary(rows)}
    assert list(table) == codec_sweep.CODECS
    assert table["int6:group=128"]["bits"] == 6.125
    # Gaussian values; the documentation's errors of one encoding
    assert table["taco:group=128"]["error"] == pytest.approx(0.0257, rel=0.03)
    assert table["int6:group=128"]["error"] == pytest.approx(0.0258, rel=0.03)
    assert table["int4:group=128"]["error"] == pytest.approx(0.106, rel=0.03)
    for name in ("int8", "int6", "int5", "int4"):
        errors = [table[f"{name}:group={group}"]["error"] for group in codec_sweep.GROUPS]
        assert errors == sorted(errors), "a smaller group has the smaller error"


def test_what_none_beats_is_marked(rows):
    table = codec_sweep.summary(rows)
    marked = codec_sweep.front(table)
    assert ("tp.forward", "int4:group=256") in marked and ("tp.forward", "int8:group=32") in marked
    assert ("tp.forward", "taco:group=128") not in marked, "int8 has less error in fewer bits"
    assert codec_sweep.report(table).count(" <\n") == len(marked)


def test_worst_site_and_mean():
    row = {"traffic": "tp.forward", "codec": "int4"}
    sites = [
        {**row, "site": "a", "error": 1.0, "signal": 100.0},
        {**row, "site": "b", "error": 49.0, "signal": 100.0},
    ]
    [one] = codec_sweep.summary(sites)
    assert (one["worst"], one["worst_site"]) == (0.7, "b") and one["error"] == pytest.approx(0.5)


def test_codecs_that_need_whole_messages_are_refused(capsys):
    with pytest.raises(SystemExit):
        codec_sweep.main(["--codecs", "tah-quant", "--", "--num-layers", "2"])
    assert "--codecs tah-quant: it encodes whole messages" in capsys.readouterr().err
