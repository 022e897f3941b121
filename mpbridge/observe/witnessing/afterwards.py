"""Detects what a loop does to weights and moments between the optimizer's update and the end of the step."""

from __future__ import annotations

import torch

from mpbridge.numerics.observation.tensors import digest, is_narrow, local
from mpbridge.observe.audit.holdings import Held, holdings
from mpbridge.observe.audit.snapshot import Before, sampled
from mpbridge.observe.audit.weights import Weights
from mpbridge.observe.witnessing.loops import Loop

MOMENTS = ("exp_avg", "exp_avg_sq")


class Afterwards:
    """Digests of trained weights and moments right after an update, for comparison with those at the end of the step."""

    def __init__(self, loop: Loop) -> None:
        self._digests = {
            (held.name, what): digest(tensor) for held in holdings(loop) for what, tensor in _states(held).items()
        }
        self._samples = {held.name: sampled(held.trained) for held in holdings(loop) if held.trained is not None}

    def into(self, seen: Weights, loop: Loop, before: Before) -> None:
        """Adds to `seen` the tensors restored to their state before the update, and FP32 states rounded since. Other changes (a loop that
        normalizes its weights) are allowed."""
        for held in holdings(loop):
            states = _states(held)
            gone = [role for role in MOMENTS if (held.name, role) in self._digests and role not in states]
            seen.emptied += [f"{held.name} ({role})" for role in gone]
            for what, tensor in states.items():
                now = digest(tensor)
                if now == self._digests.get((held.name, what), now):
                    continue
                if what == "weights" and held.name in seen.moved and self._is_back(held.name, tensor, before):
                    seen.moved.remove(held.name)
                    seen.undone.append(held.name)
                elif what in MOMENTS and not bool(tensor.any()):
                    seen.emptied.append(f"{held.name} ({what})")
                elif is_narrow(tensor):
                    seen.coarse.append(f"{held.name} ({what}, rounded after the update)")

    def _is_back(self, name: str, now: torch.Tensor, before: Before) -> bool:
        """Whether the sampled elements, which the update changed, are what they were before it."""
        old = before.samples.get(name)
        return old is not None and not torch.equal(self._samples[name], old) and torch.equal(sampled(now), old)


def _states(held: Held) -> dict[str, torch.Tensor]:
    trained = held.trained
    found = {} if trained is None else {"weights": trained}
    stored = {role: held.state.get(role) for role in MOMENTS}
    return found | {role: local(one) for role, one in stored.items() if isinstance(one, torch.Tensor)}
