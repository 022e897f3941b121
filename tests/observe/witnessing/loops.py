"""Training loops written by hand in plain torch and around megatron-core's objects, for tests of one and of two processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional

from mpbridge.observe.witnessing.witness import Witness, witness

VOCABULARY, WIDTH, LENGTH = 64, 32, 8
AUTOCAST = {"bf16": True, "params_dtype": "fp32", "autocast_enabled": True, "autocast_dtype": "bf16"}
"""What torch.autocast around an FP32 model is, as a config."""


class Tiny(torch.nn.Module):
    """A small residual network: enough of a transformer for every kind of operation but attention."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(tokens)
        for layer in self.layers:
            hidden = hidden + functional.gelu(layer(hidden))
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, batch: torch.Tensor, *, autocast: bool) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(batch)
        return functional.cross_entropy(logits.view(-1, VOCABULARY), batch.view(-1))


def train(
    model: Any,
    optimizer: Any,
    policy: Any = None,
    *,
    steps: int = 2,
    micro: int = 2,
    autocast: bool = False,
    clip: float = 0.0,
    unsync: Callable[[bool], Any] = lambda last: nullcontext(),
    between: Callable[[int], None] = lambda step: None,
    **how: Any,
) -> Witness:
    """Steps of a loop as people write it; every step but the first is observed. unsync(last): context of a micro-batch; between: before the update."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    seen = witness(model, optimizer, policy, at=range(2, 99), **how)
    for step in range(steps):
        with seen.step():
            for number in range(micro):
                with unsync(number == micro - 1):
                    loss = loss_of(model, tokens(100 * step + 10 * number + rank), autocast=autocast) / micro
                    loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            between(step)
            optimizer.step()
            optimizer.zero_grad()
    return seen


def adam(model: Any, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **how)
