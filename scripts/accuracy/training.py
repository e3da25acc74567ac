"""One run: a model trained under a setting, from scratch or from a checkpoint, and its losses."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from scripts.accuracy import layers
from scripts.accuracy.data_parallel import DataParallel
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.model import GPT
from scripts.accuracy.settings import Setting
from taco_kernels.common import ceil_div


@dataclass(frozen=True)
class Schedule:
    """AdamW with a warm-up and a cosine, one micro-batch a step."""

    steps: int = 1232
    batch: int = 32
    """Sequences of a step."""
    learning_rate: float = 6e-4
    """The highest one, after the warm-up."""
    minimum: float = 0.0
    """Learning rate at the end. Zero leaves the least noise in the final loss."""
    warmup: int = 100
    """Steps."""
    weight_decay: float = 0.1
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        # From 0 after the warm-up to 1 at the end.
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return self.minimum + (self.learning_rate - self.minimum) * cosine


class Corpus:
    """The tokens of a text on the device, as windows of sequence + 1.

    Args:
        data: paths of the tokenized text by split (train, valid), without .bin; vocabulary below
            65,500.
        sequence: tokens of a window, without the last target.
        device: where the tokens are.
        max_valid_tokens: how much of the validation text is used.
    """

    def __init__(
        self, data: dict[str, str], sequence: int, device: str, max_valid_tokens: int = 2_000_000
    ) -> None:
        tokens = {}
        for split in ("train", "valid"):
            # The .bin of an indexed dataset has its tokens one after the other, in 2 bytes each.
            ids = np.fromfile(f"{data[split]}.bin", np.uint16).astype(np.int32)
            tokens[split] = torch.from_numpy(ids).to(device)
        self.train = tokens["train"]
        self.valid = tokens["valid"]
        self.sequence = sequence
        # The last target of a window is the first token of the next.
        self.windows = (len(self.train) - 1) // sequence
        self.valid_windows = min(len(self.valid) - 1, max_valid_tokens) // sequence
        self._offsets = torch.arange(sequence + 1, device=device)

    def order(self, seed: int, count: int) -> np.ndarray:
        """Return ``count`` training windows: permutation after permutation, drawn from ``seed``."""
        generator = np.random.default_rng(seed)
        epochs = ceil_div(count, self.windows)
        permutations = [generator.permutation(self.windows) for _ in range(epochs)]
        return np.concatenate(permutations)[:count]

    def take(
        self, tokens: torch.Tensor, windows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, int64 [B, S], of windows [B]."""
        rows = tokens[windows[:, None] * self.sequence + self._offsets].long()
        return rows[:, :-1], rows[:, 1:]


class Trainer:
    """Holds a model and its optimizer; runs follow each other on them.

    Args:
        model: the model.
        corpus: the text.
        schedule: length and learning rates.
    """

    def __init__(self, model: GPT, corpus: Corpus, schedule: Schedule) -> None:
        self.model = model
        self.corpus = corpus
        self.schedule = schedule
        self.device = next(model.parameters()).device
        self.step = 0
        self.optimizer: torch.optim.AdamW | None = None

    def start(self, seed: int) -> None:
        """Begin from scratch."""
        self.model.initialise(seed)
        self.step = 0
        self._new_optimizer()

    def start_from(self, weights: dict[str, torch.Tensor]) -> None:
        """Begin with trained weights, by the names of the model's parameters, and a new
        optimizer."""
        self.model.load_state_dict(weights)
        self.step = 0
        self._new_optimizer()

    def _new_optimizer(self) -> None:
        # Matrices decay, biases and norms do not.
        matrices = []
        vectors = []
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                matrices.append(parameter)
            else:
                vectors.append(parameter)
        groups = [
            {"params": matrices, "weight_decay": self.schedule.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        # The fused optimizer is CUDA's.
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=fused)

    def save(self, path: Path) -> None:
        """Write weights, optimizer and step. The file appears when it is whole."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        # A job that is killed leaves no half of a checkpoint under its name.
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.rename(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of ``save``."""
        state = torch.load(path, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self._new_optimizer()
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def train(
        self, setting: Setting, steps: int, seed: int, save: dict[int, Path] | None = None
    ) -> dict:
        """Train under a setting.

        Args:
            setting: what is compressed, and how.
            steps: how many steps to train.
            seed: decides the order of the windows.
            save: checkpoints to write, by the step after which each is taken.

        Returns:
            losses (of the steps) and seconds_per_step.
        """
        assert not save or setting.weights == "none", "the fp32 weights would not be saved"
        schedule = self.schedule
        layers.attach(Exchange(setting))
        self.model.use(setting)
        windows = self.corpus.order(seed, schedule.steps * schedule.batch)
        order = torch.from_numpy(windows).to(self.device)
        ranks = DataParallel(setting, list(self.model.parameters()))
        losses = []
        began = time.perf_counter()
        for _ in range(steps):
            batch = order[self.step * schedule.batch : (self.step + 1) * schedule.batch]
            losses.append(self._train_step(ranks, batch))
            if save and self.step in save:
                self.save(save[self.step])
        # This waits for the device.
        rounded = [round(loss, 5) for loss in torch.stack(losses).tolist()]
        seconds = time.perf_counter() - began
        return {"losses": rounded, "seconds_per_step": round(seconds / steps, 5)}

    def run(
        self, setting: Setting, steps: int, seed: int, save: dict[int, Path] | None = None
    ) -> dict:
        """Train under a setting, and evaluate under it; the arguments are those of ``train``.

        Returns:
            losses (of the steps), valid (the validation loss), valid_tokens and seconds_per_step.
        """
        trained = self.train(setting, steps, seed, save)
        return {
            "losses": trained["losses"],
            "valid": self.evaluate(setting),
            "valid_tokens": self.batches * self.schedule.batch * self.corpus.sequence,
            "seconds_per_step": trained["seconds_per_step"],
        }

    def _train_step(self, ranks: DataParallel, windows: torch.Tensor) -> torch.Tensor:
        """Train one step on windows [B] and return its loss."""
        # torch's schedulers would have to be saved too; the rate depends on the step alone.
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(self.step)
        ids, targets = self.corpus.take(self.corpus.train, windows)
        loss = ranks.backward(self.model, ids, targets)
        torch.nn.utils.clip_grad_norm_(ranks.parameters, self.schedule.clip)
        ranks.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss

    @property
    def batches(self) -> int:
        """Return how many batches a validation has."""
        return max(1, self.corpus.valid_windows // self.schedule.batch)

    @torch.no_grad()
    def evaluate(self, setting: Setting) -> float:
        """Return the mean validation loss, in fp64, with exchanges as in training.

        The windows are the same whatever the run.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for losses in self._validation(setting):
            total += losses.double().mean()
        return round(float(total) / self.batches, 6)

    @torch.no_grad()
    def sequence_losses(self, setting: Setting) -> np.ndarray:
        """Return the mean loss of every validation window, fp64 [windows], as in ``evaluate``."""
        means = []
        for losses in self._validation(setting):
            means.append(losses.double().view(-1, self.corpus.sequence).mean(dim=1))
        return torch.cat(means).cpu().numpy()

    def _validation(self, setting: Setting) -> Iterator[torch.Tensor]:
        """Yield the tokens' losses of each batch of the validation windows."""
        layers.attach(Exchange(setting))
        self.model.use(setting)
        batch = self.schedule.batch
        for number in range(self.batches):
            windows = torch.arange(number * batch, (number + 1) * batch, device=self.device)
            ids, targets = self.corpus.take(self.corpus.valid, windows)
            yield self.model(ids, targets)


def use_deterministic_kernels() -> None:
    """Have torch choose deterministic kernels, flash attention among them; set before CUDA starts."""
    torch.use_deterministic_algorithms(True)
    # This costs time and changes no result here.
    torch.utils.deterministic.fill_uninitialized_memory = False
    if torch.cuda.is_available():
        # Of attention's kernels, flash attention is left.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
