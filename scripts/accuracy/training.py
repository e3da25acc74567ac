"""One run: a model trained under a setting, from scratch or from a checkpoint, and its losses."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from scripts.accuracy import layers
from scripts.accuracy.data_parallel import DataParallel
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.model import GPT
from scripts.accuracy.settings import Setting


@dataclass(frozen=True)
class Schedule:
    """AdamW with a warm-up and a cosine, one micro-batch a step."""

    steps: int = 1232
    batch: int = 32
    """Sequences a step."""
    learning_rate: float = 6e-4
    minimum: float = 0.0
    """Learning rate at the end; none leaves the least noise in the final loss."""
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return self.minimum + (self.learning_rate - self.minimum) * cosine


class Corpus:
    """Tokens of all parts, ids below 65,500, on the device, as windows of sequence + 1."""

    def __init__(
        self, data: dict[str, str], sequence: int, device: str, max_valid_tokens: int = 2_000_000
    ) -> None:
        tokens = {}
        for split in ("train", "valid"):  # the tokens of an indexed dataset, one after the other
            ids = np.fromfile(f"{data[split]}.bin", np.uint16).astype(np.int32)
            tokens[split] = torch.from_numpy(ids).to(device)
        self.train, self.valid = tokens.values()
        self.sequence = sequence
        self.windows = (len(self.train) - 1) // sequence
        self.valid_windows = min(len(self.valid) - 1, max_valid_tokens) // sequence
        self._offsets = torch.arange(sequence + 1, device=device)

    def order(self, seed: int, count: int) -> np.ndarray:
        """``count`` training windows: permutation after permutation, drawn from ``seed``."""
        generator = np.random.default_rng(seed)
        rounds = -(-count // self.windows)
        return np.concatenate([generator.permutation(self.windows) for _ in range(rounds)])[:count]

    def take(
        self, tokens: torch.Tensor, windows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets [B, S], int64."""
        rows = tokens[windows[:, None] * self.sequence + self._offsets].long()
        return rows[:, :-1], rows[:, 1:]


class Trainer:
    """Holds the model and its optimizer; runs follow each other on them."""

    def __init__(self, model: GPT, corpus: Corpus, schedule: Schedule) -> None:
        self.model, self.corpus, self.schedule = model, corpus, schedule
        self.device = next(model.parameters()).device
        self.step = 0
        self.optimizer: torch.optim.AdamW | None = None

    def start(self, seed: int) -> None:
        """From scratch."""
        self.model.initialise(seed)
        self.step = 0
        self._new_optimizer()

    def _new_optimizer(self) -> None:
        parameters = list(self.model.parameters())
        decay = {
            "params": [p for p in parameters if p.dim() > 1],
            "weight_decay": self.schedule.weight_decay,
        }
        groups = [decay, {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}]
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=fused)

    def save(self, path: Path) -> None:
        """Weights, optimizer and step; the file appears whole."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        state = {"model": model, "optimizer": optimizer, "step": self.step}
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.rename(path)

    def load(self, path: Path) -> None:
        """Continue from ``save``."""
        state = torch.load(path, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self._new_optimizer()
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def run(
        self, setting: Setting, steps: int, seed: int, save: dict[int, Path] | None = None
    ) -> dict:
        """Train ``steps`` steps under a setting and evaluate: losses of the steps, validation loss. ``save``:
        checkpoints to write, by the step at which they are taken."""
        model, schedule, corpus = self.model, self.schedule, self.corpus
        layers.attach(Exchange(setting))
        model.use(setting)
        order = torch.from_numpy(corpus.order(seed, schedule.steps * schedule.batch)).to(
            self.device
        )
        parameters = list(model.parameters())
        ranks = DataParallel(setting, parameters)
        assert not save or setting.weights == "none", "the fp32 weights would not be saved"
        losses, began = [], time.perf_counter()
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = schedule.rate(self.step)
            window = order[self.step * schedule.batch : (self.step + 1) * schedule.batch]
            losses.append(ranks.backward(model, *corpus.take(corpus.train, window)))
            torch.nn.utils.clip_grad_norm_(parameters, schedule.clip)
            ranks.step(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            if save and self.step in save:
                self.save(save[self.step])
        losses = [round(value, 5) for value in torch.stack(losses).tolist()]
        seconds = time.perf_counter() - began
        return {
            "losses": losses,
            "valid": self.evaluate(setting),
            "valid_tokens": self.batches * schedule.batch * corpus.sequence,
            "seconds_per_step": round(seconds / steps, 5),
        }

    @property
    def batches(self) -> int:
        """Of validation."""
        return max(1, self.corpus.valid_windows // self.schedule.batch)

    @torch.no_grad()
    def evaluate(self, setting: Setting) -> float:
        """Mean validation loss, exchanges as in training: of the same windows whatever the run, in fp64."""
        model, corpus, batch = self.model, self.corpus, self.schedule.batch
        layers.attach(Exchange(setting))
        model.use(setting)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i in range(self.batches):
            window = torch.arange(i * batch, (i + 1) * batch, device=self.device)
            total += model(*corpus.take(corpus.valid, window)).double().mean()
        return round(float(total) / self.batches, 6)


def use_deterministic_kernels() -> None:
    """Have torch choose deterministic kernels, flash attention among them; set before CUDA starts."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = (
        False  # costs time, changes no result here
    )
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
