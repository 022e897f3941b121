"""The schedule: megatron-core's own, in samples, ruled by train_iters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpbridge.common.errors import BadValue, Contradiction
from mpbridge.settings.training import scheduler_arguments, train_iters
from mpbridge.training.base import scheduler

BATCH = 8


def _run(*, train_iters: Any = 100, optimizer: dict[str, Any] | None = None, **plan: Any) -> Any:
    return SimpleNamespace(
        train={"train_iters": train_iters, "global_batch_size": BATCH},
        scheduler=plan,
        inputs={"optimizer": {"lr": 1e-3, "min_lr": 1e-4, "weight_decay": 0.1, **(optimizer or {})}},
    )


def _lrs(run: Any, steps: int) -> list[float]:
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])
    plan = scheduler(run, optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        plan.step(BATCH)
    return seen


def test_warms_up_then_decays_to_the_minimum_at_train_iters() -> None:
    lrs = _lrs(_run(lr_decay_style="cosine", lr_warmup_iters=10), 101)
    assert lrs[0] == 0.0
    assert lrs[5] == pytest.approx(5e-4)
    assert max(lrs) == lrs[10] == pytest.approx(1e-3)
    assert lrs[100] == pytest.approx(1e-4)


def test_weight_decay_reaches_the_parameter_groups() -> None:
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "wd_mult": 0.0}, {"lr": 0.0}])
    scheduler(_run(), optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]


def test_a_run_shorter_than_its_warm_up_is_no_error() -> None:
    assert _lrs(_run(train_iters=3, lr_warmup_iters=20), 3) == pytest.approx([0.0, 5e-5, 1e-4])


@pytest.mark.parametrize("wrong", [None, "200", -1, True])
def test_missing_or_wrong_train_iters_is_named(wrong: Any) -> None:
    with pytest.raises(BadValue, match=r"train\.train_iters"):
        train_iters(_run(train_iters=wrong).train)


def test_every_fault_of_the_schedule_is_named_at_once() -> None:
    wrong = {"lr_warmup_iters": 50, "lr_decay_iters": 40, "lr_decay_style": "WSD", "start_weight_decay": 0.3}
    run = _run(optimizer={"min_lr": 1.0}, **wrong)
    with pytest.raises(Contradiction) as error:
        scheduler_arguments(run)
    assert len(error.value.faults) == 4


def test_two_weight_decays_need_a_way_from_one_to_the_other() -> None:
    with pytest.raises(Contradiction, match="weight_decay_incr_style=linear or cosine"):
        scheduler_arguments(_run(start_weight_decay=0.0))
    assert scheduler_arguments(_run(start_weight_decay=0.0, weight_decay_incr_style="linear"))["start_wd"] == 0.0
