#!/usr/bin/env python
"""The codecs' error on the tensors of a real model: by site, direction, hop and stage of training.

    python -m scripts.accuracy.errors --work-dir /var/tmp/accuracy --out errors.jsonl

takes the checkpoints that ``run`` left there; its campaign does the same for seed 0. One batch goes forward
and backward uncompressed; what every exchange would send is encoded by each codec on the side. See
``measure`` for the quantities.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.accuracy import layers
from scripts.accuracy.exchange import Exchange, reduce_once, rounding_key, send
from scripts.accuracy.model import GPT, ModelConfig
from scripts.accuracy.settings import BITS, PAPER, Setting, parse_codec
from scripts.accuracy.training import Corpus
from taco_kernels import CodecConfig, Stream

CODECS = (
    PAPER,
    "fp8-e4m3:128:dual:plain",
    "fp8-tensor",
    "fp8-e4m3:128:dual:stochastic",
    *(f"int{bits}:128:single" for bits in BITS),
    *(f"int{bits}:128:signed" for bits in BITS),
    *(f"int{bits}:128:single:dither" for bits in BITS),
)
DRAWS = 4
BINS = 61
RANGE = 6.0


def site_names(blocks: int) -> dict[str, list[str]]:
    """Names of the exchanges of a pass with sequence parallelism, in their order."""
    forward, backward = ["embedding reduce"], ["output reduce"]
    for i in range(blocks):
        forward += [f"{i} qkv gather", f"{i} projection reduce", f"{i} fc1 gather", f"{i} fc2 reduce"]
    for i in reversed(range(blocks)):
        backward += [f"{i} fc2 gather", f"{i} fc1 reduce", f"{i} projection gather", f"{i} qkv reduce"]
    return {"forward": [*forward, "output gather"], "backward": [*backward, "embedding gather"]}


def shared_part(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean over the tokens of x [T, h], and the share of x's energy that it makes up."""
    mean = x.mean(dim=0)
    return mean, len(x) * mean.square().sum() / x.square().sum().clamp(min=1e-30)


def measure(error: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an error [T, h] of a signal x [T, h] is like, fp32 scalars.

    error: relative, L2. own_error: relative to what is left of x without its mean over the tokens.
    common: T |mean error|^2 / mean |error|^2 over tokens; 1 for errors that are independent between tokens,
    T for the same error everywhere. gain: <error, x> / <x, x>; own_gain: the same without the means.
    """
    own = x - x.mean(dim=0)
    energy, own_energy = x.square().sum().clamp(min=1e-30), own.square().sum().clamp(min=1e-30)
    error_energy = error.square().sum()
    return {
        "error": (error_energy / energy).sqrt(),
        "own_error": (error_energy / own_energy).sqrt(),
        "common": len(x) ** 2 * error.mean(dim=0).square().sum() / error_energy.clamp(min=1e-30),
        "gain": (error * x).sum() / energy,
        "own_gain": (error * own).sum() / own_energy,
    }


def bias_share(draws: list[torch.Tensor]) -> torch.Tensor:
    """Share of the error's energy that repeats when the rounding is drawn again (1 for nearest).

    Unbiased from n draws: (n |mean|^2 - mean |error|^2) / ((n - 1) mean |error|^2).
    """
    n = len(draws)
    energy = sum(draw.square().sum() for draw in draws) / n
    mean = sum(draws) / n
    return (n * mean.square().sum() - energy) / ((n - 1) * energy.clamp(min=1e-30))


class Probe(Exchange):
    """Uncompressed exchanges with sequence parallelism that measure what codecs would do.

    Args:
        codecs: as strings.
        world_size: simulated ranks.
        blocks: of the model.
        histograms: sites whose distributions are kept.
    """

    def __init__(
        self, codecs: Sequence[str], world_size: int, blocks: int, histograms: Sequence[str] = ()
    ) -> None:
        super().__init__(Setting("probe", sequence_parallel=True, world_size=world_size))
        self.probed = {name: parse_codec(name) for name in codecs}
        self.names, self.keep = site_names(blocks), set(histograms)
        self.rows: list[dict] = []
        self.signals: list[dict] = []
        self.counts = {"forward": 0, "backward": 0}

    def reduce(self, partials: torch.Tensor, direction: str, whole: bool = False) -> torch.Tensor:
        """See Exchange; measures hop 1 (the partial sums) and hop 2 (their sum)."""
        total = partials.sum(dim=0, dtype=torch.float32)
        self._signal(direction, total)
        for name, codec in self.probed.items():
            once = [reduce_once(partials, codec, key, torch.float32) - total for key in self._keys(codec)]
            self._row(direction, 1, name, once, total)
            self._hop2(direction, name, codec, total)
        self.counts[direction] += 1
        return super().reduce(partials, direction, whole)

    def gather(self, x: torch.Tensor, direction: str) -> torch.Tensor:
        """See Exchange; measures the one encoding."""
        signal = x.float()
        self._signal(direction, signal)
        for name, codec in self.probed.items():
            self._hop2(direction, name, codec, signal)
        self.counts[direction] += 1
        return super().gather(x, direction)

    def _hop2(self, direction: str, name: str, codec, x: torch.Tensor) -> None:
        keys = [Stream(key, self.world_size) for key in self._keys(codec)]
        self._row(direction, 2, name, [send(x, codec, key, torch.float32) - x for key in keys], x)
        mean = x.mean(dim=0).bfloat16().float()
        own = x - mean
        free = [send(own, codec, key, torch.float32) - own for key in keys]
        self._row(direction, 2, f"{name} without mean", free, x)

    def _keys(self, codec) -> list[int]:
        random = isinstance(codec, CodecConfig) and codec.rounding != "nearest"
        return [rounding_key(1, self.number, i) for i in range(DRAWS if random else 1)]

    def _signal(self, direction: str, x: torch.Tensor) -> None:
        row = {"site": self.counts[direction], "direction": direction}
        row |= {"rms": x.square().mean().sqrt(), "shared": shared_part(x)[1]}
        row["kurtosis"] = x.pow(4).mean() / x.square().mean().square().clamp(min=1e-30)
        name = self.names[direction][self.counts[direction]]
        if f"{direction} {name}" in self.keep:
            parts = {"signal": x, "own": x - x.mean(dim=0)}
            row["histograms"] = {part: histogram(value) for part, value in parts.items()}
        self.signals.append(row)

    def _row(self, direction: str, hop: int, name: str, errors: list[torch.Tensor], x) -> None:
        row = {"site": self.counts[direction], "direction": direction, "hop": hop, "codec": name}
        row |= measure(errors[0], x)
        row["bias"] = bias_share(errors) if len(errors) > 1 else torch.ones(())
        self.rows.append(row)


def histogram(x: torch.Tensor) -> torch.Tensor:
    """Counts of x / rms in BINS bins from -RANGE to RANGE, the outermost open."""
    scaled = (x / x.square().mean().sqrt().clamp(min=1e-30)).clamp(-RANGE, RANGE)
    place = ((scaled + RANGE) * (BINS / (2 * RANGE))).long().clamp(0, BINS - 1)
    return torch.stack([(place == i).sum() for i in range(BINS)])


def probe(
    model: GPT,
    ids: torch.Tensor,
    targets: torch.Tensor,
    codecs: Sequence[str] = CODECS,
    world_size: int = 4,
    histograms: Sequence[str] = (),
) -> dict[str, list]:
    """One pass of a batch: rows of ``measure`` (under ``columns``) by exchange and codec, and the signals.

    The model's gradients are dropped.
    """
    exchange = Probe(codecs, world_size, model.config.layers, histograms)
    bound = list(layers._bound)
    layers.bind(exchange)
    gathered = model.sequence_parallel
    model.use_sequence_parallelism(True)
    exchange.start(0)
    model(ids, targets).mean().backward()
    model.zero_grad(set_to_none=True)
    model.use_sequence_parallelism(gathered)
    layers._bound[:] = bound
    for row in [*exchange.rows, *exchange.signals]:
        row["site"] = exchange.names[row["direction"]][row["site"]]
    rows = [_plain(row) for row in exchange.rows]
    return {
        "columns": list(rows[0]),
        "rows": [list(row.values()) for row in rows],
        "signals": [_plain(row) for row in exchange.signals],
    }


def _plain(value):
    """Tensors to numbers of five digits, for JSON."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def default_histograms(blocks: int) -> list[str]:
    """Sites of a first, a middle and the last block, both directions."""
    chosen = sorted({0, blocks // 2, blocks - 1})
    forward = [f"forward {i} {site}" for i in chosen for site in ("fc2 reduce", "fc1 gather")]
    return forward + [f"backward {i} fc1 reduce" for i in chosen]


def errors_at(
    checkpoint: Path | None,
    config: ModelConfig,
    corpus: Corpus,
    device: str,
    codecs: Sequence[str] = CODECS,
    world_size: int = 4,
    batch: int = 16,
) -> dict[str, list]:
    """``probe`` with the weights of a checkpoint (None: those of seed 0 at the start), on validation text.

    Args:
        batch: sequences.
    """
    model = GPT(config).to(device)
    if checkpoint is None:
        model.initialise(0)
    else:
        model.load_state_dict(torch.load(checkpoint, map_location=device)["model"])
    tokens = corpus.take(corpus.valid, torch.arange(batch, device=device))
    return probe(model, *tokens, codecs, world_size, default_histograms(config.layers))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="that of scripts.accuracy.run")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write, a line a checkpoint")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), help="as in settings.py")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="sequences")
    parser.add_argument("--size", choices=("111m", "tiny"), default="111m")
    args = parser.parse_args(argv)
    from scripts.accuracy.run import sizes

    args.steps = 1
    config, _ = sizes(args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = Corpus(args.work_dir / "corpus", config.sequence, device)
    with args.out.open("w") as stream:
        for path in [None, *sorted((args.work_dir / "checkpoints").glob("*.pt"))]:
            found = errors_at(path, config, corpus, device, args.codecs, args.world_size, args.batch)
            name = path.stem if path else "initial-0"
            record = {"id": f"errors/{name}", "kind": "errors", "start": path and name, "errors": found}
            stream.write(json.dumps(record) + "\n")
            print(f"{name}: {len(found['rows'])} rows", flush=True)


if __name__ == "__main__":
    main()
