"""Parameter updates as the optimizers themselves count them."""

from __future__ import annotations

from typing import Any

from mpbridge.backend.megatron.inside_optimizer import parts


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers inside megatron-core's wrappers (ChainedOptimizer, DistributedOptimizer ...), or the optimizer itself."""
    chained = parts(optimizer)
    if chained != [optimizer]:
        return [inner for one in chained for inner in inner_optimizers(one)]
    inner = getattr(optimizer, "optimizer", None)
    return inner_optimizers(inner) if inner is not None else [optimizer] if optimizer is not None else []


class Updates:
    """How many updates each inner optimizer counted, against how many were applied since it was first asked."""

    def __init__(self) -> None:
        self._applied = 0
        self._first: dict[int, tuple[int, int]] = {}
        """Optimizer index -> (applied, counted) when it first had a count."""

    def applied(self, engine: Any) -> None:
        """Records an applied update."""
        self._applied += 1
        for number, count in _counts(engine):
            self._first.setdefault(number, (self._applied, count))

    def faults(self, engine: Any) -> list[str]:
        """Optimizers whose own count of updates differs."""
        found = []
        for number, count in _counts(engine):
            applied, first = self._first.get(number, (self._applied, count))
            due, took = self._applied - applied, count - first
            if took != due:
                found.append(f"optimizer {number}: counted {took} updates, {due} were applied")
        return found


def _counts(engine: Any) -> list[tuple[int, int]]:
    """(index, count) of the inner optimizers that count: torch's per parameter, FusedAdam per group. A parameter without a gradient is skipped, so the largest
    count is the optimizer's."""
    found = []
    for number, inner in enumerate(inner_optimizers(engine.optimizer)):
        steps = [group["step"] for group in inner.param_groups if "step" in group]
        steps += [state["step"] for state in inner.state.values() if "step" in state]
        if steps:
            found.append((number, int(max(float(step) for step in steps))))
    return found
