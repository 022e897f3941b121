"""Shared by the live runs of scripts/evidence/witness_stacks.py: a small network, its batches, and one case of one stack."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from mpbridge.observe.witnessing.report import Witnessed
from mpbridge.observe.witnessing.witness import witness

VOCABULARY = 64
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One setup of one stack."""

    stack: str
    where: str
    """As in the table of precision settings by stack."""
    run: Callable[[], Witnessed]
    word: str = "bf16"
    several: bool = False
    """Whether it applies only with several processes."""
    ranks: int = 2
    """The minimum number of processes."""


class Net(torch.nn.Module):
    """A residual network with a cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = torch.nn.Embedding(VOCABULARY, 32)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(tokens)
        for layer in self.layers:
            hidden = hidden + functional.gelu(layer(hidden))
        return functional.cross_entropy(self.head(hidden).view(-1, VOCABULARY).float(), tokens.view(-1))


def tokens(seed: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(97 * seed + rank))


def together(value: Any) -> Any:
    """The first rank's value."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def checkout(name: str) -> Path:
    """A clone of another project. Raises ImportError if there is none."""
    place = Path(os.environ.get("MPBRIDGE_CHECKOUTS", "")) / name
    if not os.environ.get("MPBRIDGE_CHECKOUTS") or not place.is_dir():
        raise ImportError(f"no checkout of {name} (set MPBRIDGE_CHECKOUTS=FOLDER to the folder that contains {name})")
    return place


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def two_steps(model: Any, optimizer: torch.optim.Optimizer) -> Witnessed:
    """The witness's report on the second of two steps of a plain torch loop."""
    seen = witness(model, optimizer, at={2})
    for step in range(2):
        with seen.step():
            model(tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen.report


def lightning_module() -> Any:
    """The network as a LightningModule."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self)

    return Module()


def accelerated(accelerator: Any, model: Any, optimizer: Any) -> Witnessed:
    """Two steps of two micro-batches as in accelerate's documentation."""
    seen = witness(model, optimizer, at={2})
    for step in range(4):
        with seen.microbatch(lambda: accelerator.sync_gradients), accelerator.accumulate(model):
            accelerator.backward(model(tokens(step)))
            optimizer.step()
            optimizer.zero_grad()
    return seen.report
