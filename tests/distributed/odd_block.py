"""A small block of a model for the tests of FSDP2 and of DDP."""

import torch
from torch import nn

WIDTH = 64
"""Values of a row."""


class Block(nn.Module):
    """Its odd sizes do not divide by the ranks; an MLP is what tagc compresses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 401), nn.GELU(), nn.Linear(401, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))
