"""Audits over a whole run: repeated, after resumes and changes of recipe, a stop in the middle, and what is kept of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.cli.main import main
from mpbridge.common.errors import AuditFailed
from mpbridge.training.base import Hook
from mpbridge.training.checkpoint import store
from mpbridge.training.loop import pretrain
from tests.observe.audit import faults
from tests.training.tiny import tiny_run


class Plant(Hook):
    """Plants a fault after a step."""

    def __init__(self, plant: Any, at: int) -> None:
        self.plant, self.at = plant, at

    def stepped(self, training: Any, result: Any) -> None:
        if training.counters.iteration == self.at:
            self.plant(training.engine)


def _sections(folder: Path, **train: Any) -> dict[str, Any]:
    return {
        "train": {"train_iters": 8, "eval_interval": None, "log_interval": 1} | train,
        "checkpoint": {"save": str(folder / "saved"), "save_interval": 2},
        "audit": {"every": 3},
        "logger": {"progress": False},
    }


def test_a_fault_in_mid_run_stops_it_behind_a_suspect_checkpoint_and_names_the_last_good_one(
    tmp_path: Path, capsys: Any, cli: Any
) -> None:
    with pytest.raises(AuditFailed, match=r"(?s)step 6: .*weights as read.*last good audit was after step 4.*"):
        pretrain(tiny_run(tmp_path, **_sections(tmp_path)), hooks=[Plant(faults.model_never_refreshed, 4)])
    kept = {entry.path.name: store.audit_of(entry.path) for entry in store.saved(tmp_path / "saved")}
    assert list(kept.values()) == ["suspect", "good", "good"], "newest first: steps 6, 4 and 2"
    good = store.last_good(tmp_path / "saved")
    assert good is not None
    assert good.path.name in capsys.readouterr().out + json.dumps(list(kept))
    history = json.loads((tmp_path / "run" / "precision.json").read_text())["audit"]["history"]
    assert [(one["step"], one["ok"]) for one in history if one["stage"] == "live"][-1] == (6, False)
    text = cli("audit", tmp_path / "run", code=1)
    assert "step      6  live    NOT as promised" in text
    assert "weights as read" in text


def test_an_invariant_that_breaks_between_audits_stops_the_run(tmp_path: Path) -> None:
    sections = _sections(tmp_path) | {"audit": {"every": 100}}
    moment = faults.cast_state("exp_avg", torch.bfloat16)
    with pytest.raises(AuditFailed, match=r"(?s)step 5: .*exp_avg"):
        pretrain(tiny_run(tmp_path, **sections), hooks=[Plant(moment, 4)], quiet=True)


def test_checkpoints_since_a_fault_that_only_an_observation_sees_are_suspect(tmp_path: Path) -> None:
    """Gradients are doubled behind step 3; the look before the checkpoint of step 4 cannot see it, the observation of step 6 does."""
    doubled = faults.change_gradients(lambda grad: grad * 2)
    said = r"(?s)step 6: .*gradients.*last good audit was after step 3; .* is step_00000002"
    with pytest.raises(AuditFailed, match=said):
        pretrain(tiny_run(tmp_path, **_sections(tmp_path)), hooks=[Plant(doubled, 3)], quiet=True)
    found = {entry.step: store.audit_of(entry.path) for entry in store.saved(tmp_path / "saved")}
    assert found == {2: "good", 4: "suspect", 6: "suspect"}
    for entry in store.saved(tmp_path / "saved"):
        store.check(entry.path)


def test_a_healthy_run_is_audited_on_time_and_every_checkpoint_of_it_is_good(tmp_path: Path, cli) -> None:
    pretrain(tiny_run(tmp_path, **_sections(tmp_path)), quiet=True)
    data = json.loads((tmp_path / "run" / "precision.json").read_text())["audit"]
    assert [(one["step"], one["reason"]) for one in data["history"]] == [
        (0, "before the first step"), (1, "first update"), (2, "checkpoint"), (3, "every 3 steps"), (4, "checkpoint"), (6, "every 3 steps"), (8, "checkpoint"),
    ]  # fmt: skip
    assert {store.audit_of(entry.path) for entry in store.saved(tmp_path / "saved")} == {"good"}
    said = json.loads(cli("audit", tmp_path / "run", "--json"))
    assert said["ok"]
    assert not any(one["changes"] for one in said["audits"])


def test_a_resumed_run_is_audited_at_once(tmp_path: Path) -> None:
    sections = _sections(tmp_path) | {"audit": {"every": 0}, "scheduler": {"lr_decay_iters": 20}}
    pretrain(tiny_run(tmp_path, **sections), quiet=True)
    sections["checkpoint"] = sections["checkpoint"] | {"load": str(tmp_path / "saved")}
    sections["train"] = sections["train"] | {"train_iters": 10}
    sections["scheduler"] = {"lr_decay_iters": 20}
    pretrain(tiny_run(tmp_path, **sections), quiet=True)
    history = json.loads((tmp_path / "run" / "precision.json").read_text())["audit"]["history"]
    moments = [(one["step"], one["reason"]) for one in history]
    assert (9, "resumed") in moments
    assert (1, "first update") in moments, "what was found before the resume is kept"


def test_a_folder_without_audits_is_one_clear_line(tmp_path: Path, cli) -> None:
    strange = {"step": 1, "ok": True, "facts": {}, "stage": [1]}
    for text in ("[" * 200000, '{"audit": {"history": []}}', json.dumps({"audit": {"history": [strange]}})):
        (tmp_path / "precision.json").write_text(text)
        assert "has no audits" in cli("audit", tmp_path, code=2)


def test_a_run_that_skips_every_step_is_no_success(tmp_path: Path, capsys: Any) -> None:
    run = tiny_run(tmp_path, "fp16_mixed", train={"train_iters": 4, "eval_interval": None}, logger={"progress": False})
    summary = pretrain(run)
    assert (summary.iterations, summary.applied) == (4, 0)
    assert "0 of 4 steps were applied" in capsys.readouterr().out


@pytest.mark.parametrize(("recipe", "steps", "code"), [("bf16_mixed", 0, 0), ("fp16_mixed", 4, 1)])
def test_no_step_that_was_asked_for_is_done_and_steps_that_were_all_skipped_are_not(tmp_path: Path, recipe: str, steps: int, code: int) -> None:  # fmt: skip
    """A run of no steps, like a resume at its end, has nothing left to do."""
    (tmp_path / "run.yaml").write_text(
        "model: {num_layers: 1, hidden_size: 64, num_attention_heads: 4, vocab_size: 384}\n"
        "data: {seq_length: 32}\nlogger: {progress: false}\noptimizer: {lr: 0.001}\n"
        "train: {micro_batch_size: 1, global_batch_size: 2, eval_iters: 0}\n"
    )
    words = ["train", "--recipe", recipe, "--config", str(tmp_path / "run.yaml"), f"train.train_iters={steps}"]
    assert main(words) == code
