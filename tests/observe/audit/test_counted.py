"""The optimizers' own count of updates against the loop's: too few and too many."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from mpbridge.observe.audit.counted import Updates


@pytest.mark.parametrize(
    ("steps", "found"),
    [(1, []), (0, ["optimizer 0: counted 0 updates, 2 were applied"]), (2, ["optimizer 0: counted 4 updates, 2 were applied"])],
    ids=["once", "never", "twice"],
)  # fmt: skip
def test_an_optimizer_that_steps_more_or_less_often_than_updates_are_applied_is_named(
    steps: int, found: list[str]
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    engine, updates = SimpleNamespace(optimizer=optimizer), Updates()
    for update in range(3):
        for _ in range(1 if update == 0 else steps):  # the first update starts the counts
            weight.grad = torch.ones(3)
            optimizer.step()
        updates.applied(engine)
    assert updates.faults(engine) == found
