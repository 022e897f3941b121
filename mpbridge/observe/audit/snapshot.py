"""The state that an update starts from, kept for the audit after it and for the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mpbridge.numerics.observation.tensors import digest, has_more_bits_than_bf16, is_narrow, local, positions
from mpbridge.observe.audit.holdings import Held, holdings
from mpbridge.observe.audit.orthogonal import matrices_before
from mpbridge.observe.audit.replay import Start, changed, start_of, undeclared
from mpbridge.observe.audit.replicas import Key, digests, states_before


class Before:
    """What an update is compared with: a digest of everything that it changes, and a sample of its values."""

    def __init__(
        self,
        engine: Any,
        since: Before | None = None,
        scheduler: Any = None,
        left: Mapping[str, tuple[float, Start]] | None = None,
    ) -> None:
        """since: the same before the last observed update, if every update from then on still holds. scheduler: megatron-core's, which sets the rates.
        left: what the step before left."""
        self.digests: dict[str, int] = {}
        self.samples: dict[str, torch.Tensor] = {}
        self.moments: dict[str, torch.Tensor] = {}
        """Parameter -> sample of its FP32 second moment."""
        self.after: dict[str, torch.Tensor] = {}
        """Parameter that the observed update moved -> the same sample after it."""
        self.moments_after: dict[str, torch.Tensor] = {}
        self.steps: dict[str, float] = {}
        """Parameter -> number of updates that its optimizer counts."""
        self.steps_after: dict[str, float] = {}
        self.zeros: set[str] = set()
        """Parameters whose gradient in the observed step was zero."""
        self.stale: tuple[list[str], list[str]] = [], []
        """Parameters that the forward pass did not read as their main weights: rounded, and quantized."""
        self.compared = 0, 0
        """The number that it was compared with, of both kinds."""
        self.since = since
        self.starts: dict[str, Start] = {}
        """Parameter -> what its step begins with, where that can be replayed."""
        self.rates: dict[str, float] = {}
        """Parameter -> the rate of its group before the step; a schedule may set the next step's rate before the audit looks."""
        self.decays: dict[str, float] = {}
        """Parameter -> the weight decay of its group before the step, likewise."""
        foreign = bool(getattr(engine, "foreign", False))
        self.turn: int = 0 if since is None else since.turn + 1
        """Observed updates before this one."""
        self.whole = {} if foreign else matrices_before(engine, self.turn)
        """Matrix that Muon trains -> this rank's rows of it."""
        self.fixed: dict[str, int] = {} if foreign else digests(engine) if since is None else since.fixed
        """Frozen parameter -> digest when the run was first observed."""
        self.states: dict[Key, int] = {} if foreign else states_before(engine)
        """Digests of the states that other ranks have too: one that differs by a bit may be equal again after an update, or not."""
        self.draws = draws_of(engine)
        """The step behind the random bytes of an emulation."""
        self.coarse: list[str] = []
        """FP32 moments that were rounded since the last observed update: all sampled elements have 10 or fewer mantissa bits."""
        self.undeclared = [] if foreign else undeclared(engine, scheduler)
        for held in holdings(engine):
            trained = held.trained
            if trained is not None:
                self.digests[held.name] = digest(trained)
                self.samples[held.name] = sampled(trained)
                self.moments |= _second(held)
                self.steps[held.name] = _step(held)
            if held.group is not None and "lr" in held.group:
                self.rates[held.name] = float(held.group["lr"])
                self.decays[held.name] = float(held.group.get("weight_decay") or 0.0)
            start = None if foreign else start_of(held)
            if start is not None:
                self.starts[held.name] = start
                # after anything that replaces states, they may come from a recipe with narrow ones
                self.coarse += [] if since is None else _rounded(held, start)
        # where the optimizer counts other updates, steps ran that nobody told of
        now = counted(self.steps)
        seen = {name: start for name, (count, start) in (left or {}).items() if count == now.get(name)}
        self.between = changed(seen, self.starts)

    def read(self, seen: Any) -> None:
        """Records what the forward pass before the update read (an audit.weights.Weights)."""
        self.stale, self.compared = (seen.unequal, seen.misread), (seen.compared, seen.quantized)

    def note(self, held: Held, trained: torch.Tensor) -> None:
        """Records what the observed update made of a parameter that it moved."""
        self.after[held.name] = sampled(trained)
        self.moments_after |= _second(held)
        self.steps_after[held.name] = _step(held)

    def is_put_back(self, name: str) -> bool:
        """Whether the sampled values that the last observed update changed are what they were before it. Several must be: one may come back by itself."""
        last = self.since
        if last is None or name not in last.after or name not in last.samples:
            return False
        changed = last.after[name] != last.samples[name]
        return int(changed.sum()) >= 4 and torch.equal(self.samples[name], last.samples[name])

    def is_emptied(self, name: str) -> bool:
        """Whether the second moment is less than the last observed update left of it: no update makes it smaller than beta2 times what it was."""
        last = self.since
        if last is None or name not in last.moments_after:
            return False
        then, now = last.moments_after[name], self.moments.get(name)
        if now is None or not bool(now.any()):
            return int((then != 0).sum()) >= 4
        updates = self.steps.get(name, 0.0) - last.steps_after.get(name, 0.0)
        if updates < 0 or not last.steps_after.get(name) or name not in self.starts:
            return False  # the optimizer does not say how often it changed them
        least = then * self.starts[name].settings.betas[1] ** updates * (1 - _LOST) - _UNDERFLOW
        return bool((now < least).any())


def starts(engine: Any) -> dict[str, tuple[float, Start]]:
    """(number of updates, what the next one begins with) of every parameter whose update can be replayed."""
    found = {held.name: (_step(held), start_of(held)) for held in holdings(engine)}
    steps = counted({name: count for name, (count, _) in found.items()})
    return {name: (steps[name], start) for name, (_, start) in found.items() if start is not None}


def counted(steps: Mapping[str, float]) -> dict[str, float]:
    """Parameter -> number of its updates. Muon counts none: it steps as often as the optimizer beside it."""
    most = max(steps.values(), default=0.0)
    return {name: count or most for name, count in steps.items()}


def draws_of(engine: Any) -> int | None:
    """The step from which an emulation draws its random bytes; None without one."""
    found = getattr(getattr(engine, "emulation", None), "randomness", None)
    return None if found is None else int(found.step)


def _rounded(held: Held, start: Start) -> list[str]:
    """Moments in FP32 whose samples all have so few bits that something rounded them: an update leaves more, unless 1 - beta is a power of two."""
    found = []
    for (role, values), beta in zip(start.moments.items(), start.settings.betas, strict=False):
        stored = local(held.state[role])
        shows = stored.dtype is torch.float32 and has_more_bits_than_bf16(1.0 - beta)
        if shows and is_narrow(values.float(), enough=_FEW):
            found.append(f"{held.name} ({role}, before the update)")
    return found


_FEW = 16
"""Nonzero sampled elements that prove a moment rounded: by chance one in 2**(13 x 16)."""
_LOST = 1e-3
"""Share of a second moment that its roundings may lose between two audits, at most some hundreds of updates."""
_UNDERFLOW = 2.0**-125
"""Below FP32's normal range moments may be flushed to zero."""


def _step(held: Held) -> float:
    """Number of updates that the optimizer counts for a parameter."""
    return float(held.state.get("step", (held.group or {}).get("step", 0)) or 0)


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a flat tensor at `values.positions`."""
    return tensor[positions(tensor.numel()).to(tensor.device)].clone()


def _second(held: Held) -> dict[str, torch.Tensor]:
    stored = held.state.get("exp_avg_sq")
    if stored is None or stored.dtype is not torch.float32:
        return {}  # narrow moments may underflow
    flat = local(stored).detach().reshape(-1)
    return {held.name: sampled(flat)}
