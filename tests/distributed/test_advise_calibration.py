"""The adviser's constants measured over gloo, and a prediction made of them."""

import json
from pathlib import Path

from tests.distributed.spawn import spawn


def calibrate_worker(rank: int, world_size: int, path: str) -> None:
    from megatron.compression.advise import calibrate

    for name in ("first", "second"):
        calibrate.worker(Path(path), name)


def test_calibration(capsys, tmp_path):
    from megatron.compression.advise.__main__ import main

    path = tmp_path / "here.json"
    spawn(calibrate_worker, 2, str(path))
    data = json.loads(path.read_text())
    assert list(data["links"]) == ["first", "second"]
    for link in data["links"].values():
        assert link["ranks"] == 2 and 0 <= link["overlap_loss"] <= 1
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
            assert all(sent > 0 and us > 0 for sent, us in link["curves"][operation])
    assert data["gemm_tflops"] > 0 and data["elementwise_gbps"] > 0
    assert all(cost > 0 for costs in data["codecs"].values() for cost in costs)
    assert data["host_layer_ms"] > 0 and data["host_exchange_ms"] > 0 and "host_fused_ms" not in data
    words = f"--model qwen2.5-0.5b --gpus 4 --intra second --calibration {path}"
    assert main(words.split()) == 0
    assert "0.5 B parameters on 4 GPUs" in capsys.readouterr().out
