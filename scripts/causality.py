#!/usr/bin/env python
"""What it is worth that a pipeline codec's statistics see later tokens.

    python scripts/causality.py --seeds 1 2 3 --iterations 400        # one GPU: some minutes

``normalize`` and TAH-Quant's choice of tokens take statistics over a whole message, so a token's decoded
value depends on tokens behind it. The first table says how much of the first half's values changes when the
second half is another sequence's. The second trains a small GPT on bytes of the Python library's sources,
with a codec at each stage boundary and exact gradients, and gives validation losses against the uncompressed
run of the same seed: with the codec as trained, with statistics of the message before (the past alone),
without a codec, and what another sequence's second half costs the first half's predictions, which is what the
future had told them.
"""

import argparse
import sys
import sysconfig
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron.compression.codecs import parse_codec
from taco_kernels.channel_norm.reference import inverse

CODECS = {
    "auto (int4, standardized)": "int4:group=32,normalize=standardize",
    "int4, no statistics": "int4:group=32,hadamard=off",
    "tah-quant": "tah-quant",
    "tah-quant, tile": "tah-quant:allocation=tile",
}
"""Of the first table."""


def round_trip(spec: str, x: Tensor) -> Tensor:
    """``x [b, s, h]`` as a stage receives it, as one message."""
    codec, message = parse_codec(spec), x.transpose(0, 1)[None]
    return codec.decode(codec.encode(message), message.shape[1:], x.dtype)[0].transpose(0, 1)


def standardized(x: Tensor, causal: bool, per_message: int) -> Tensor:
    """int4 of channels standardized over messages of some sequences of ``x [b, s, h]``; causal: with the
    statistics of the message before."""
    rows = x.float().unflatten(0, (-1, per_message)).flatten(1, 2)
    variance, center = torch.var_mean(rows, dim=1, keepdim=True, correction=0)
    sent = center.bfloat16().float()
    rms = (variance + (center - sent).square()).sqrt().bfloat16()
    if causal:
        sent, rms = sent.roll(1, 0), rms.roll(1, 0)
    z = round_trip("int4:group=32,hadamard=off", ((rows - sent) * inverse(rms)).view(x.shape))
    return (z.view(rows.shape) * rms.float() + sent).view(x.shape).to(x.dtype)


def tah_quant(x: Tensor, causal: bool, choice: str, ratio: float = 0.8) -> Tensor:
    """TAH-Quant of ``x [b, s, h]``, each sequence a message, with the wider codes for those tokens (or tiles,
    among 256) that have the largest entropy; causal: an entropy above the threshold of the sequence before;
    ``fifth``: for all but every fifth token."""
    high, low = (round_trip(f"tah-quant:ratio={one}", x) for one in (1, 0))
    if choice == "fifth":
        wide = (torch.arange(x.shape[1], device=x.device) % 5 != 4)[:, None].expand(x.shape)
        return torch.where(wide, high, low)
    tile = 64 if choice == "tile" else x.shape[2]
    values = x.float().abs().unflatten(-1, (-1, tile))
    total = values.sum(-1)
    entropy = total.log2() - (values * values.log2().clamp_min(-200)).sum(-1) / total
    population = 256 if choice == "tile" and x.shape[1] * x.shape[2] // tile % 256 == 0 else -1
    entropy = entropy.flatten(1).unflatten(1, (-1, population) if population > 0 else (1, -1))
    threshold = entropy.topk(int(ratio * entropy.shape[2]), dim=2).values[..., -1:]
    wide = entropy >= (threshold.roll(1, 0) if causal else threshold)
    return torch.where(wide.view(*x.shape[:2], -1).repeat_interleave(tile, -1), high, low)


Send = Callable[[Tensor, bool], Tensor]
"""(``x [b, s, h]``, whether its statistics are of the past alone) to what arrives."""


def settings(per_message: int) -> dict[str, tuple[Send | None, bool, bool]]:
    """By name: what is sent, whether it is trained with the past's statistics alone, whether it has any."""

    def normalized(x: Tensor, causal: bool) -> Tensor:
        return standardized(x, causal, per_message)

    return {
        "none": (None, False, False),
        "auto": (normalized, False, True),
        "auto, message before": (normalized, True, True),
        "int4 group 32, plain": (lambda x, _: round_trip("int4:group=32,hadamard=off", x), False, False),
        "int4 group 32, Hadamard": (lambda x, _: round_trip("int4:group=32", x), False, False),
        "tah-quant": (lambda x, causal: tah_quant(x, causal, "token"), False, True),
        "tah-quant, message before": (lambda x, causal: tah_quant(x, causal, "token"), True, True),
        "tah-quant, every fifth low": (lambda x, _: tah_quant(x, False, "fifth"), False, False),
        "tah-quant, tile": (lambda x, causal: tah_quant(x, causal, "tile"), False, True),
    }


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + self.out(y)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """Bytes ``[b, s]`` to logits; ``send`` is at each boundary of ``stages``, gradients pass it unchanged."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.words, self.places = (
            nn.Embedding(256, options.hidden),
            nn.Embedding(options.sequence, options.hidden),
        )
        self.blocks = nn.ModuleList(Block(options.hidden, options.heads) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(options.hidden), nn.Linear(options.hidden, 256)
        self.boundaries = {options.layers * i // options.stages for i in range(1, options.stages)}
        self.send: Send | None = None
        self.causal = False
        self.sent: list[Tensor] | None = None
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for number, block in enumerate(self.blocks):
            if number in self.boundaries:
                x = self._cross(x)
            x = block(x)
        return self.head(self.norm(x))

    def _cross(self, x: Tensor) -> Tensor:
        message = x.detach().bfloat16()
        if self.sent is not None:
            self.sent.append(message)
        if self.send is None:
            return x
        return x + (self.send(message, self.causal).to(x.dtype) - x).detach()


def corpus(device: torch.device) -> tuple[Tensor, Tensor]:
    """uint8 bytes for training and validation: every tenth file of Python's library is for the latter."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(root.rglob("*.py")) if not {"site-packages", "test", "encodings"} & {*p.parts}]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        parts[number % 10 == 9].append(path.read_bytes())
    return tuple(
        torch.frombuffer(bytearray(b"\0".join(part)), dtype=torch.uint8).to(device) for part in parts
    )


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """int64 ``[count, length]`` from random places."""
    starts = torch.randint(len(text) - length, (count, 1), generator=generator).to(text.device)
    return text[starts + torch.arange(length, device=text.device)].long()


def token_losses(model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    """fp32 ``[b, s]``."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(ids)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(ids.shape)


def train(options: argparse.Namespace, seed: int, send: Send | None, causal: bool, text: Tensor) -> GPT:
    """The same weights and batches for a seed, whatever is sent."""
    torch.manual_seed(seed)
    model = GPT(options).to(text.device)
    model.send, model.causal = send, causal
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=text.is_cuda
    )
    warmup = max(1, options.iterations // 10)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        options.lr,
        options.iterations + 1,
        pct_start=warmup / options.iterations,
        cycle_momentum=False,
    )
    for _ in range(options.iterations):
        batch = windows(text, options.batch, options.sequence + 1, generator)
        token_losses(model, batch[:, :-1], batch[:, 1:]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def evaluate(
    model: GPT, options: argparse.Namespace, text: Tensor, uses_statistics: bool
) -> dict[str, float]:
    """Mean losses on the same windows for all; see the module's docstring."""
    generator = torch.Generator().manual_seed(0)
    send, causal, half = model.send, model.causal, options.sequence // 2
    sums: dict[str, list[float]] = {"trained": [], "past": [], "without": [], "future": []}
    for _ in range(options.evaluations):
        batch = windows(text, options.batch, options.sequence + 1, generator)
        ids, targets = batch[:, :-1], batch[:, 1:]
        exact = token_losses(model, ids, targets)
        sums["trained"].append(float(exact.mean()))
        if send is not None:
            foreign = torch.cat([ids[:, :half], ids[:, half:].roll(1, 0)], dim=1)
            changed = token_losses(model, foreign, targets)[:, :half] - exact[:, :half]
            sums["future"].append(float(changed.mean()))
            model.send = None
            sums["without"].append(float(token_losses(model, ids, targets).mean()))
            model.send = send
        if uses_statistics:
            model.causal = True
            sums["past"].append(float(token_losses(model, ids, targets).mean()))
            model.causal = causal
    return {name: mean(values) for name, values in sums.items() if values}


@torch.no_grad()
def changed_values(model: GPT, options: argparse.Namespace, text: Tensor) -> list[str]:
    """The first table, on what the first boundary of a trained model sends, a sequence a message."""
    batch = windows(text, 9, options.sequence, torch.Generator().manual_seed(5))
    model.send, model.sent = None, []
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        model(batch)
    x, model.sent = model.sent[0], None
    half = options.sequence // 2
    lines = ["| codec | values changed | by, relative | rounding error, relative |", "|---|---|---|---|"]
    for name, spec in CODECS.items():
        rows = []
        for own, other in pairwise(x):
            foreign = torch.cat([own[:half], other[half:]])
            a, b = (round_trip(spec, one[None])[0, :half].float() for one in (own, foreign))
            first = own[:half].float()
            size = (first - first.mean(0)).norm()
            rows.append([(a != b).float().mean(), (a - b).norm() / size, (a - first).norm() / size])
        shares = torch.tensor(rows).mean(0).tolist()
        lines.append(f"| {name} | {shares[0]:.1%} | {shares[1]:.4f} | {shares[2]:.4f} |")
    return lines


def check_simulation(options: argparse.Namespace, device: torch.device) -> None:
    """What is trained with here is what the codecs do."""
    x = torch.randn(3, options.sequence, options.hidden, generator=torch.Generator().manual_seed(1))
    x = (x * 3 + 1).bfloat16().to(device)
    for one in x.split(1):
        for found, spec in (
            (standardized(one, False, 1), CODECS["auto (int4, standardized)"]),
            (tah_quant(one, False, "token"), "tah-quant"),
            (tah_quant(one, False, "tile"), "tah-quant:allocation=tile"),
        ):
            expected = round_trip(spec, one)
            same = (found - expected).abs() <= 2**-7 * expected.abs() + 1e-3
            assert same.float().mean() > 0.98, f"{spec}: {same.float().mean()}"


def main() -> None:
    """Train everything and print the tables."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=400 if gpu else 150)
    parser.add_argument("--settings", nargs="+", choices=list(settings(1)), default=list(settings(1)))
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of a message")
    for name, on_gpu, on_cpu in (
        ("layers", 8, 4),
        ("stages", 4, 4),
        ("hidden", 384, 64),
        ("heads", 6, 2),
        ("sequence", 256, 64),
        ("batch", 64, 16),
        ("evaluations", 24, 24),
    ):
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu)
    parser.add_argument("--lr", type=float, default=1e-3 if gpu else 3e-3)
    options = parser.parse_args()
    device = torch.device("cuda" if gpu else "cpu")
    text, validation = corpus(device)
    check_simulation(options, device)
    baseline = {}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in options.settings}
    for seed in options.seeds:
        for name in ["none", *(one for one in options.settings if one != "none")]:
            send, causal, uses_statistics = settings(options.micro_batch)[name]
            start = time.perf_counter()
            model = train(options, seed, send, causal, text)
            losses = evaluate(model, options, validation, uses_statistics)
            print(f"{name}, seed {seed}: {losses} in {time.perf_counter() - start:.1f} s", flush=True)
            if name == "none":
                baseline[seed] = losses["trained"]
                first_table = changed_values(model, options, validation)
                print(*first_table, sep="\n", flush=True)
            else:
                rows[name].append(
                    {
                        key: value if key == "future" else value - baseline[seed]
                        for key, value in losses.items()
                    }
                )
    print(f"\n{options}\n", *first_table, sep="\n")
    print(f"\nValidation loss uncompressed: {mean(baseline.values()):.4f}; differences to it, % (range):\n")
    print("| trained with | codec on | past's statistics | without codec | first half, another future |")
    print("|---|---|---|---|---|")
    unit = 100 / mean(baseline.values())
    for name, found in rows.items():
        cells = [name]
        for key in ("trained", "past", "without", "future"):
            values = [unit * one[key] for one in found if key in one]
            cells.append(f"{mean(values):+.3f} ({min(values):+.3f} to {max(values):+.3f})" if values else "")
        if found:
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
