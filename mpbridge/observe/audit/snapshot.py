"""The state that an update starts from, kept for the audit after it and for the next one."""

from __future__ import annotations

from typing import Any

import torch

from mpbridge.numerics.observation.tensors import digest, local, positions
from mpbridge.observe.audit.holdings import Held, holdings


class Before:
    """What an update is compared with: a digest of everything that it changes, and a sample of its values."""

    def __init__(self, engine: Any, since: Before | None = None) -> None:
        """since: the same before the last observed update, if every update from then on still holds."""
        self.digests: dict[str, int] = {}
        self.samples: dict[str, torch.Tensor] = {}
        self.moments: dict[str, torch.Tensor] = {}
        """Parameter -> sample of its FP32 second moment."""
        self.after: dict[str, torch.Tensor] = {}
        """Parameter that the observed update moved -> the same sample after it."""
        self.moments_after: dict[str, torch.Tensor] = {}
        self.zeros: set[str] = set()
        """Parameters whose gradient in the observed step was zero."""
        self.stale: tuple[list[str], list[str]] = [], []
        """Parameters that the forward pass did not read as their main weights: rounded, and quantized."""
        self.since = since
        for held in holdings(engine):
            trained = held.trained
            if trained is not None:
                self.digests[held.name] = digest(trained)
                self.samples[held.name] = sampled(trained)
                self.moments |= _second(held)

    def read(self, seen: Any) -> None:
        """Records what the forward pass before the update read (an audit.weights.Weights)."""
        self.stale = seen.unequal, seen.misread

    def note(self, held: Held, trained: torch.Tensor) -> None:
        """Records what the observed update made of a parameter that it moved."""
        self.after[held.name] = sampled(trained)
        self.moments_after |= _second(held)

    def was_zero(self, name: str) -> bool:
        """Whether the gradient was zero in the last observed update too: a block that starts at zero has one after it."""
        return self.since is not None and name in self.since.zeros

    def is_put_back(self, name: str) -> bool:
        """Whether the sampled values that the last observed update changed are what they were before it. Several must be: one may come back by itself."""
        last = self.since
        if last is None or name not in last.after or name not in last.samples:
            return False
        changed = last.after[name] != last.samples[name]
        return int(changed.sum()) >= 4 and torch.equal(self.samples[name], last.samples[name])

    def is_emptied(self, name: str) -> bool:
        """Whether the second moment that the last observed update left has become zero."""
        last = self.since
        if last is None or name not in last.moments_after:
            return False
        now = self.moments.get(name)
        return int((last.moments_after[name] != 0).sum()) >= 4 and (now is None or not bool(now.any()))


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a flat tensor at `values.positions`."""
    return tensor[positions(tensor.numel()).to(tensor.device)].clone()


def _second(held: Held) -> dict[str, torch.Tensor]:
    stored = held.state.get("exp_avg_sq")
    if stored is None or stored.dtype is not torch.float32:
        return {}  # narrow moments may underflow
    flat = local(stored).detach().reshape(-1)
    return {held.name: sampled(flat)}
