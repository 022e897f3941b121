"""State of delayed scaling: amax histories and scales of many tensors, updated together as Transformer Engine's fused kernel does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpbridge.common.errors import CheckpointError
from mpbridge.numerics.scales import delayed_scale, magnitude
from mpbridge.precision.policy import Quant


def updated(
    history: torch.Tensor, scale: torch.Tensor, last: torch.Tensor, algo: str, largest: float, margin: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(history [length, tensors], scale [tensors]) after an interval with the amaxes `last`: rolled and renewed; a tensor with amax 0 keeps both.

    Source: `common/recipe/delayed_scaling.cu` of Transformer Engine (the fused kernel).
    """
    moved = last != 0
    rolled = torch.roll(history, -1, 0)
    rolled[-1] = last
    # the kernel reduces before it clears row 0, so a history of one still sees the last amax
    amax = last if algo == "most_recent" else magnitude(rolled).amax(0)
    rolled[0] = 0
    renewed = delayed_scale(torch.where(moved, amax, torch.zeros_like(amax)), scale, largest, margin)
    return torch.where(moved, rolled, history), renewed


class AmaxTable:
    """Scale and amax history of a fixed list of tensors that share a format.

    history: [length, tensors] fp32, in which row 0 collects the running interval's amax. scale: [tensors] fp32, 1 at the start.
    """

    def __init__(self, names: Sequence[str], quant: Quant, largest: float, device: torch.device) -> None:
        self.names, self.quant, self.largest = tuple(names), quant, largest
        self.scale = torch.ones(len(self.names), device=device)
        self.history = torch.zeros(quant.amax_history, len(self.names), device=device)

    def observe(self, index: int, amax: torch.Tensor) -> None:
        """Adds an fp32 scalar amax to the running interval."""
        slot = self.history[0, index]
        torch.fmax(slot, amax, out=slot)

    def update(self, group: Any = None) -> None:
        """Ends an interval: max over `group` (a process group, or None), roll, new scales; a tensor with amax 0 keeps history and scale."""
        last = self.history[0].clone()
        if group is not None and torch.distributed.get_world_size(group) > 1:
            torch.distributed.all_reduce(last, op=torch.distributed.ReduceOp.MAX, group=group)
        self.history, self.scale = updated(
            self.history, self.scale, last, self.quant.amax_algo, self.largest, self.quant.margin
        )

    def state(self) -> dict[str, torch.Tensor]:
        """name -> [1 + length] fp32: the scale, then the history."""
        return {name: torch.cat([self.scale[i : i + 1], self.history[:, i]]) for i, name in enumerate(self.names)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads the result of `state`; raises CheckpointError that lists all missing names and all tensors with another history length."""
        length = 1 + self.history.shape[0]
        missing = [name for name in self.names if name not in state]
        odd = [
            f"{name}: {tuple(state[name].shape)}"
            for name in self.names
            if name in state and tuple(state[name].shape) != (length,)
        ]
        if missing or odd:
            faults = ([f"missing: {', '.join(missing)}"] if missing else []) + (
                [f"expected shape ({length},): {'; '.join(odd)}"] if odd else []
            )
            raise CheckpointError(
                "delayed scaling's state does not fit this model: "
                + "; ".join(faults)
                + " (start with a fresh state instead)"
            )
        for i, name in enumerate(self.names):
            self.scale[i], self.history[:, i] = state[name][0], state[name][1:]
