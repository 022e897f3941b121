"""A resume that reads its corpus in another order than the run before says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpbridge.training import checkpointer as keep
from mpbridge.training.loop import pretrain
from tests.training.tiny import tiny

REST = {"scheduler": {"lr_decay_iters": 10000}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("order")
    own = {"train": {"eval_interval": None, "exit_interval": 3}, "checkpoint": {"save": str(place / "kept")}}
    pretrain(tiny(place, **own, **REST).resolved(), quiet=True)
    return place


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        pytest.param({}, False, id="the same"),
        pytest.param({"train": {"train_iters": 12}}, False, id="longer, within one epoch"),
        pytest.param({"train": {"train_iters": 4000}}, True, id="longer, by an epoch"),
        pytest.param({"train": {"seed": 8}}, True, id="another seed"),
        pytest.param({"data": {"split": "80,20"}}, True, id="another split"),
    ],
)
def test_another_order_of_the_samples_is_said(
    saved: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], said: bool
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(keep.Checkpointer, "started", lambda self, training: lines.append(self._message))
    own = {"train": {"eval_interval": None, "exit_interval": 4} | changed.get("train", {})}
    pretrain(tiny(saved, checkpoint={"load": str(saved / "kept")}, **REST, **(changed | own)).resolved(), quiet=True)
    assert ("the order of training samples differs" in lines[0]) == said
