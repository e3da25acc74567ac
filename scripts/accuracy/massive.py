#!/usr/bin/env python
"""How far the largest values of what is sent stand out, by site, channel and token, in a trained model.

    python -m scripts.accuracy.massive --work-dir /var/tmp/accuracy [--size 111m-massive]

Reads the checkpoints that ``run`` left in --work-dir and sends one batch through each. Of every site the
layer with the largest value is shown: that value over the median of the same exchange, the channel and the
token position where it stands, the largest value on first tokens and on all others over the same median, and
the norm of the loudest channel and of the loudest position over that of the middle one.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.compression.report.render import table
from scripts.accuracy import layers, run
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.settings import setting_of

COLUMNS = (
    *("checkpoint", "site", "layer", "largest / median", "channel", "position", "first tokens", "others"),
    *("loudest channel", "loudest position"),
)


class Survey(Exchange):
    """Sends nothing compressed and looks at all partial sums.

    Args:
        layers: of the model, by which exchanges are told apart: they come in a fixed order.
        sequence: tokens of a sequence.
    """

    def __init__(self, layers: int, sequence: int) -> None:
        super().__init__(setting_of("none"))
        self.sequence = sequence
        forward = [(site, layer) for layer in range(layers) for site in ("projection", "fc2")]
        backward = [(site, layer) for layer in reversed(range(layers)) for site in ("fc1", "qkv")]
        self.sites = [("embedding", 0), *forward, ("output", layers), *backward]
        self.found: dict[str, list] = {}
        """By site, the row of the layer with the largest value."""

    def reduce(self, partials: torch.Tensor, direction: str, whole: bool = False) -> torch.Tensor:
        """See ``Exchange``."""
        site, layer = self.sites[self.number]
        row = [layer, *self._measure(partials.abs().float())]
        name = f"{site}, {direction}"
        self.found[name] = max(row, self.found.get(name, row), key=lambda found: found[1])
        return super().reduce(partials, direction, whole)

    def _measure(self, size: torch.Tensor) -> list:
        """A row without the layer, of the sizes [W, T, h]."""
        channels, tokens = size.shape[2], size.amax(dim=2)  # [W, T]
        middle = size[size > 0].median()
        at = int(size.argmax())
        by_position = tokens.view(len(size), -1, self.sequence).amax(dim=(0, 1))
        energy = size.square().sum(dim=0).view(-1, self.sequence, channels)
        loudest = [
            norms.max() / norms.median() for norms in (energy.sum((0, 1)).sqrt(), energy.sum((0, 2)).sqrt())
        ]
        largest = (size.max(), by_position[0], by_position[1:].max())
        top, first, others = (float(value / middle) for value in largest)
        place = [at % channels, at // channels % (size.shape[1]) % self.sequence]
        return [top, *place, first, others, *map(float, loudest)]


def survey(worker: run.Worker) -> list[list]:
    """Rows of the table, of the uncompressed checkpoints of the first seed."""
    rows = []
    for path in sorted((worker.args.work_dir / "checkpoints").glob("*-0.pt")):
        trainer = worker.trainer
        trainer.load(path)
        looker = Survey(worker.config.layers, worker.config.sequence)
        layers.attach(looker)
        worker.model.use(setting_of("none"))
        window = torch.arange(worker.schedule.batch, device=worker.device)
        worker.model(*trainer.corpus.take(trainer.corpus.valid, window)).mean().backward()
        trainer.optimizer.zero_grad(set_to_none=True)
        rows += [[path.stem.removesuffix("-0"), site, *row] for site, row in looker.found.items()]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="of scripts.accuracy.run")
    parser.add_argument("--size", default="111m", help="as there")
    own = parser.parse_args(argv)
    args = run.parse(["--work-dir", str(own.work_dir), "--size", own.size, "--worker", "0"])
    args.deadline = float("inf")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic, as in training
    worker = run.Worker(args, [])
    worker.wait_for_corpus()
    rows = [
        [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in survey(worker)
    ]
    print(*table(COLUMNS, *rows), sep="\n")


if __name__ == "__main__":
    main()
