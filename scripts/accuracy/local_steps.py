#!/usr/bin/env python
"""Measure what local steps between data centres cost in loss: the data centres are simulated on one
device.

    python -m scripts.accuracy.local_steps --work-dir W --seeds 0 --data-centres 2 4 --steps-a-round 10 30 100

The uncompressed run of a seed, which steps synchronously, leaves a checkpoint before its last part.
From there each setting trains on the same tokens: the data centres share each batch, take local
steps with their own AdamW, and exchange differences of weights in rounds
(megatron.compression.local_steps.outer_optimizer). What is validated is the anchor. A setting is

    2x30:int4                   2 data centres, 30 local steps a round, int4 with its memory
    2x30:none                   the same, differences in fp32
    2x30:int4:lr=1,momentum=0   another outer optimizer

Results are a JSON line for each run in W/local-steps-SEED.jsonl. A later call does what is missing,
and each call prints the table.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.compression.codecs import parse_codec
from megatron.compression.local_steps.config import LocalStepsConfig
from megatron.compression.local_steps.outer_optimizer import OuterOptimizer
from megatron.compression.report.render import table
from scripts.accuracy import layers
from scripts.accuracy.data_parallel import DataParallel
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.results import BASE, estimate, load
from scripts.accuracy.run import SIZES, claim, prepare, sizes
from scripts.accuracy.settings import setting_of
from scripts.accuracy.training import Trainer

LOCAL = 300
"""Steps of the last part, a multiple of the usual numbers of local steps."""
_NAME = re.compile(r"(\d+)x(\d+):([^:]+(?::(?!lr=)[^:]+)?)(?::lr=([\d.]+),momentum=([\d.]+))?")


@dataclass(frozen=True)
class Setting:
    """One setting of local steps."""

    name: str
    data_centres: int
    steps: int
    """Local steps a round."""
    codec: str
    learning_rate: float
    momentum: float


def parse_setting(name: str) -> Setting:
    """Return the setting of a name.

    Raises:
        SystemExit: it is none.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        sys.exit(f"error: {name}: give settings such as 2x30:int4 or 2x30:int4:lr=1,momentum=0")
    data_centres, steps, codec, rate, momentum = match.groups()
    # A codec that does not exist ends the script now, and not after the hours of other settings.
    if codec != "none":
        parse_codec(codec)
    learning_rate = LocalStepsConfig.learning_rate
    outer_momentum = LocalStepsConfig.momentum
    # A name has both of them, or neither.
    if rate is not None:
        learning_rate = float(rate)
        outer_momentum = float(momentum)
    return Setting(name, int(data_centres), int(steps), codec, learning_rate, outer_momentum)


class DataCentre:
    """One simulated data centre: its weights, its inner optimizer and its part of the outer one.

    Args:
        trainer: whose model and checkpoint it begins with.
        setting: of the run.
        state: a checkpoint of the trainer's.
    """

    def __init__(self, trainer: Trainer, setting: Setting, state: dict[str, Any]) -> None:
        self.trainer = trainer
        trainer._new_optimizer()
        self.inner = trainer.optimizer
        # A copy: the data centres' moments go ways of their own.
        self.inner.load_state_dict(state["optimizer"])
        self.parameters = list(trainer.model.parameters())
        self.weights = flatten(self.parameters)
        codec = None
        if setting.codec != "none":
            codec = parse_codec(setting.codec)
        self.outer = OuterOptimizer(
            self.weights,
            codec,
            setting.learning_rate,
            setting.momentum,
            setting.data_centres,
            [(0, len(self.weights))],
        )

    def train(self, step: int, batches: Iterator[torch.Tensor]) -> list[torch.Tensor]:
        """Take local steps on batches of windows, from a step of the schedule on; return the
        losses."""
        # The data centres share one model on the device, and take turns with it.
        copy_into(self.weights, self.parameters)
        self.trainer.optimizer = self.inner
        self.trainer.step = step
        ranks = DataParallel(setting_of(BASE), self.parameters)
        losses = [self.trainer._train_step(ranks, batch) for batch in batches]
        self.weights = flatten(self.parameters)
        return losses


def exchange(centres: Sequence[DataCentre]) -> None:
    """Let data centres exchange their differences, and continue from the anchor."""
    values = len(centres[0].weights)
    # The same messages as between real data centres, so that their rounding is in the result.
    if len(centres) == 2:
        payloads = torch.stack([centre.outer.encode(centre.weights, 0) for centre in centres])
        for centre in centres:
            centre.outer.step(payloads, 0, values)
    else:
        pieces = torch.stack([centre.outer.encode_pieces(centre.weights, 0) for centre in centres])
        # Data centre c sums piece c of each.
        sums = [
            centre.outer.encode_sum(pieces[:, number], 0, values)
            for number, centre in enumerate(centres)
        ]
        for centre in centres:
            centre.outer.step_sums(torch.stack(sums), 0, values)
    # All have decoded the same payloads, so their anchors have the same bits.
    for centre in centres:
        centre.weights.copy_(centre.outer.anchor)


@torch.no_grad()
def flatten(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all values one after the other, fp32."""
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


@torch.no_grad()
def copy_into(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
    """Put what ``flatten`` returned back into parameters."""
    pieces = flat.split([parameter.numel() for parameter in parameters])
    views = [piece.view_as(value) for piece, value in zip(pieces, parameters, strict=True)]
    torch._foreach_copy_(list(parameters), views)


def run_setting(trainer: Trainer, setting: Setting, checkpoint: Path, seed: int) -> dict[str, Any]:
    """Train the last part of a run under a setting, and validate the anchor.

    Args:
        trainer: the model, the text and the schedule.
        setting: what is exchanged, and when.
        checkpoint: where the part begins.
        seed: decides the order of the windows.

    Returns:
        valid (the anchor's validation loss), loss (the mean of the last tenth of the training
        losses), and seconds_per_step.
    """
    schedule = trainer.schedule
    # Inside a data centre nothing is compressed.
    uncompressed = setting_of(BASE)
    layers.attach(Exchange(uncompressed))
    trainer.model.use(uncompressed)
    state = torch.load(checkpoint, map_location=trainer.device)
    trainer.load(checkpoint)
    first = trainer.step
    windows = trainer.corpus.order(seed, schedule.steps * schedule.batch)
    order = torch.from_numpy(windows).to(trainer.device).view(schedule.steps, schedule.batch)
    centres = [DataCentre(trainer, setting, state) for _ in range(setting.data_centres)]
    losses: list[torch.Tensor] = []
    began = time.perf_counter()
    for begin in range(first, schedule.steps, setting.steps):
        batches = order[begin : begin + setting.steps]
        # Each data centre has its share of every batch; one after the other they take the round.
        shares = batches.chunk(setting.data_centres, dim=1)
        for centre, share in zip(centres, shares, strict=True):
            losses += centre.train(begin, iter(share))
        exchange(centres)
    copy_into(centres[0].outer.anchor, centres[0].parameters)
    # To the host once: the clock is read when everything has been computed.
    last = torch.stack(losses[-len(losses) // 10 :]).mean().item()
    seconds = time.perf_counter() - began
    return {
        "valid": trainer.evaluate(setting_of(BASE)),
        "loss": round(last, 5),
        "seconds_per_step": round(seconds / (schedule.steps - first), 5),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="folder of corpus, checkpoints and results")
    add("--size", choices=SIZES, default="111m", help="the model (default: 111m)")
    add("--steps", type=int, default=1232, help="steps of a whole run (default: 1232)")
    add(
        "--local",
        type=int,
        default=LOCAL,
        help=f"steps of the last part, which has local steps (default: {LOCAL})",
    )
    add("--seeds", type=int, nargs="+", default=[0, 1], help="(default: 0 1)")
    add("--data-centres", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    add("--steps-a-round", type=int, nargs="+", default=[10, 30, 100], help="(default: 10 30 100)")
    add("--codecs", nargs="+", default=["int4", "none"], help="(default: int4 none)")
    add("--settings", nargs="+", default=[], help="further settings, by name")
    add("--minutes", type=float, default=8.0, help="start no run that would end later (default: 8)")
    add("--corpus-mb", type=float, default=250, help="text, 10^6 bytes (default: 250)")
    args = parser.parse_args(argv)
    args.work_dir = args.work_dir.resolve()
    return args


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """Return the settings of a command line; those that are compared follow each other."""
    names = [
        f"{data_centres}x{steps}:{codec}"
        for data_centres in args.data_centres
        for steps in args.steps_a_round
        for codec in args.codecs
    ]
    return [parse_setting(name) for name in [*names, *args.settings]]


def tables(records: Sequence[dict[str, Any]]) -> str:
    """Return markdown: a row for each setting, against the synchronous run, and against fp32
    differences of the same rounds."""
    valid = {(record["setting"], record["seed"]): record["valid"] for record in records}
    header = ["data centres x local steps", "differences", "above synchronous, %", "by seed"]
    header.append("above fp32 differences, %")
    rows = [header]
    for name in dict.fromkeys(record["setting"] for record in records):
        if name == BASE:
            continue
        rounds, codec, *optimizer = name.split(":")
        exact = ":".join([rounds, "none", *optimizer])
        above = _above(valid, name, BASE)
        if not above:
            continue
        shown_codec = "fp32"
        against_exact = ""
        if codec != "none":
            shown_codec = codec
            # Rounds without a codec may not have been trained.
            above_exact = _above(valid, name, exact)
            if above_exact:
                against_exact = estimate(above_exact)[0]
        label = " ".join([rounds.replace("x", " x "), *optimizer])
        by_seed = ", ".join(f"{value:+.3f}" for value in above)
        rows.append([label, shown_codec, estimate(above)[0], by_seed, against_exact])
    return "\n".join(table(*rows))


def _above(valid: dict[tuple[str, int], float], name: str, base: str) -> list[float]:
    """Return by how many percent losses of a setting lie above those of another, of each seed that
    both were trained with.

    Args:
        valid: validation losses by setting and seed.
        name: the setting.
        base: the other one.
    """
    seeds = sorted({seed for _, seed in valid})
    return [
        100 * (valid[name, seed] / valid[base, seed] - 1)
        for seed in seeds
        if (name, seed) in valid and (base, seed) in valid
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Do the runs that are missing while there is time, and print the table."""
    from scripts.accuracy.model import GPT
    from scripts.accuracy.training import Corpus, use_deterministic_kernels

    args = parse(argv)
    settings = settings_of(args)
    deadline = time.time() + 60 * args.minutes
    args.work_dir.mkdir(parents=True, exist_ok=True)
    claim(args)
    data = prepare(args)
    use_deterministic_kernels()
    config, schedule = sizes(args)
    for setting in settings:
        if schedule.batch % setting.data_centres:
            sys.exit(f"error: {setting.name}: {schedule.batch} sequences a step cannot be shared")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(config, compile_blocks=device == "cuda").to(device)
    max_valid_tokens = 2048 if args.size == "tiny" else 2_000_000
    trainer = Trainer(model, Corpus(data, config.sequence, device, max_valid_tokens), schedule)
    for seed in args.seeds:
        run_seed(args, trainer, settings, seed, deadline)
    print(tables(load(sorted(args.work_dir.glob("local-steps-*.jsonl")))))


def run_seed(
    args: argparse.Namespace,
    trainer: Trainer,
    settings: Sequence[Setting],
    seed: int,
    deadline: float,
) -> None:
    """Do what is missing of a seed while there is time.

    Args:
        args: the command line.
        trainer: the model, the text and the schedule.
        settings: what is trained.
        seed: decides first weights and the order of the windows.
        deadline: seconds since the epoch.
    """
    file = args.work_dir / f"local-steps-{seed}.jsonl"
    checkpoint = args.work_dir / "checkpoints" / f"local-{seed}.pt"
    checkpoint.parent.mkdir(exist_ok=True)
    done = {record["id"] for record in load([file] if file.exists() else [])}
    slowest = 0.0

    def note(name: str, result: dict[str, Any]) -> None:
        record = {"id": f"{name}/{seed}", "setting": name, "seed": seed, "size": args.size}
        with file.open("a") as stream:
            stream.write(json.dumps(record | result) + "\n")
        print(f"{name} seed {seed}: {result}", flush=True)

    if f"{BASE}/{seed}" not in done:
        trainer.start(seed)
        result = trainer.run(
            setting_of(BASE), args.steps, seed, {args.steps - args.local: checkpoint}
        )
        del result["losses"]
        note(BASE, result)
    for setting in settings:
        if f"{setting.name}/{seed}" in done:
            continue
        if time.time() + 1.3 * slowest > deadline:
            print(f"no time for {setting.name}: start again for it", flush=True)
            continue
        began = time.time()
        note(setting.name, run_setting(trainer, setting, checkpoint, seed))
        slowest = max(slowest, time.time() - began)


if __name__ == "__main__":
    main()
