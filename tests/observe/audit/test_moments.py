"""The moments at which a run is audited, beyond the first update and every so many steps, and what becomes of its checkpoints then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.common.errors import AuditFailed
from mpbridge.training.base import Hook
from mpbridge.training.checkpoint import store
from mpbridge.training.loop import pretrain
from tests.forked import codes, ranks, said
from tests.observe.audit import faults
from tests.observe.audit.test_whole_runs import Plant
from tests.training.test_faults import Poison
from tests.training.tiny import tiny_run

QUIET = {"progress": False}
SHORT = {"eval_interval": None, "log_interval": 1}


def audited(folder: Path) -> list[tuple[int, str]]:
    """(step, reason) of the audits that a whole step was observed for."""
    history = json.loads((folder / "run" / "precision.json").read_text())["audit"]["history"]
    return [(one["step"], one["reason"]) for one in history if "weights moved" in one["facts"]]


def test_the_first_step_after_a_rollback_is_audited(tmp_path: Path) -> None:
    train, kept = (
        SHORT | {"train_iters": 5, "nonfinite": "rollback 1"},
        {"save": str(tmp_path / "saved"), "save_interval": 2},
    )
    run = tiny_run(tmp_path, train=train, checkpoint=kept, audit={"every": 0}, logger=QUIET)
    pretrain(run, hooks=[Poison(4)], quiet=True)
    assert audited(tmp_path) == [(1, "first update"), (3, "rolled back")]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [(row["iteration"], row["lr"]) for row in rows if "lr" in row]
    # at a rate of 0, where the schedule ends, no update proves anything
    assert rates[4] == rates[2], "the same step at the same rate as the first time"


STAGES = [{"recipe": "fp32", "until": 2}, {"recipe": "bf16_mixed"}]


def test_the_first_step_of_a_new_stage_is_audited(tmp_path: Path) -> None:
    pretrain(tiny_run(tmp_path, STAGES, train=SHORT | {"train_iters": 4}, audit={"every": 0}, logger=QUIET), quiet=True)
    assert audited(tmp_path) == [(1, "first update"), (3, "recipe bf16_mixed")]


class _Ties(Hook):
    """Every main weight in BF16 and a remainder lies halfway between two BF16 numbers."""

    def stepped(self, training: Any, result: Any) -> None:
        if training.counters.iteration == 2:
            found = [state["master_param"] for state in faults.states(training.engine)]
            assert {one.dtype for one in found} == {torch.int16}
            for one in found:
                one.fill_(-32768)


def test_a_stage_rounds_the_weights_of_the_one_before_by_its_own_rule(tmp_path: Path) -> None:
    """Remainders round ties away from zero, a cast of FP32 main weights to the even neighbour."""
    stages = [{"recipe": "bf16_mixed_bf16_moments", "until": 2}, {"recipe": "bf16_mixed"}]
    sections: dict[str, Any] = {"train": SHORT | {"train_iters": 3}, "audit": {"every": 0}, "logger": QUIET}
    run = tiny_run(tmp_path, stages, ddp={"use_distributed_optimizer": True}, **sections)
    assert pretrain(run, hooks=[_Ties()], quiet=True).iterations == 3


def test_the_first_step_of_a_stage_that_a_resume_begins_with_is_audited(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": SHORT | {"train_iters": 4, "exit_interval": 2},
        "checkpoint": {"save": str(tmp_path / "saved"), "load": str(tmp_path / "saved")},
        "audit": {"every": 0},
        "logger": QUIET,
    }
    pretrain(tiny_run(tmp_path, STAGES, **sections), quiet=True)
    pretrain(tiny_run(tmp_path, STAGES, **sections), quiet=True)
    assert audited(tmp_path) == [(1, "first update"), (3, "resumed")]


def test_keep_last_keeps_the_last_good_checkpoint_and_a_resume_goes_on_from_it(tmp_path: Path) -> None:
    kept = {"save": str(tmp_path / "saved"), "load": str(tmp_path / "saved"), "save_interval": 2, "keep_last": 1}
    train = SHORT | {"train_iters": 8}
    sections: dict[str, Any] = {"train": train, "checkpoint": kept, "audit": {"every": 3}, "logger": QUIET}
    with pytest.raises(AuditFailed, match=r"(?s)step 6: .*weights as read"):
        pretrain(tiny_run(tmp_path, **sections), hooks=[Plant(faults.model_never_refreshed, 4)], quiet=True)
    left = [(entry.step, store.audit_of(entry.path)) for entry in store.saved(tmp_path / "saved")]
    assert left == [(6, "suspect"), (4, "good")]
    summary = pretrain(tiny_run(tmp_path, **sections), quiet=True)
    assert str(summary.notes["resumed from"]).endswith("step_00000004")
    assert summary.iterations == 8


# --- replicas --------------------------------------------------------------------------------------------------------------------------------
class _Drift(Hook):
    """Rank 1's parameters and main weights move away from rank 0's, alike in themselves, at one moment."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def built(self, training: Any) -> None:
        self._at(training, "before the start")

    def stepping(self, training: Any) -> None:
        if training.counters.iteration == 0:
            self._at(training, "before the first update")
        if training.counters.iteration == 2:
            self._at(training, "before an audit")

    def _at(self, training: Any, moment: str) -> None:
        from tests.observe.audit.two_rank_faults import _drift, _on_rank_1

        if moment == self.moment:
            _on_rank_1(_drift)(training.engine)


MOMENTS = {"before the start": 0, "before the first update": 1, "before an audit": 3}
"""When rank 1 drifts -> the step that the run ends after."""


def _rank(folder: Path) -> None:
    import torch.distributed as dist

    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group
    from tests.training.tiny import tiny

    start_process_group(False)
    seen = {}
    for moment in MOMENTS:
        logger = QUIET | {"log_dir": str(folder / moment)}
        made = tiny(folder, train=SHORT | {"train_iters": 4}, audit={"every": 3}, logger=logger)
        try:
            pretrain(made.resolved(dist.get_world_size()), hooks=[_Drift(moment)], quiet=True)
            text = "no fault was named"
        except AuditFailed as error:
            text = str(error)
        if dist.get_rank() == 0:
            history = json.loads((folder / moment / "precision.json").read_text())["audit"]["history"]
            seen[moment] = {"text": text, "last": [history[-1]["step"], history[-1]["reason"]]}
    if dist.get_rank() == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    stop_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{moment: what two processes said}."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "text.txt").write_text("".join(f"line {n} says {n * n}\n" for n in range(4000)))
    with ranks(2, _rank, folder) as started:
        assert not any(codes(started, 400)), said(started)
    found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return found


@pytest.mark.parametrize("moment", MOMENTS)
def test_replicas_are_compared(two: dict[str, Any], moment: str) -> None:
    assert "replicas: promised equal on every rank, found different" in two[moment]["text"]
    assert two[moment]["last"][0] == MOMENTS[moment]
