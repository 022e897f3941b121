"""The loop on the real megatron-core: files, hooks, skipped steps, streams, refusals; everything given back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.backend.engines.contract import StepResult
from mpbridge.backend.engines.parallel import stop_process_group
from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.report.metrics import read
from mpbridge.training import loop
from mpbridge.training.base import Hook, Training
from mpbridge.training.loop import pretrain
from tests.training.tiny import tiny, tiny_run

ROW = [
    "iteration", "consumed_samples", "loss", "lr", "grad_norm", "loss_scale", "applied", "skipped_steps",
    "nonfinite_steps", "step_seconds", "tokens_per_second", "model_flops_per_second",
]  # fmt: skip


class Recorder(Hook):
    """Writes down what it was told."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.results: list[StepResult] = []
        self.stop_at = stop_at

    def built(self, training: Training) -> None:
        self.calls.append("built")

    def started(self, training: Training) -> None:
        self.calls.append("started")

    def stepped(self, training: Training, result: StepResult) -> None:
        self.calls.append(f"step {training.counters.iteration}")
        self.results.append(result)
        if training.counters.iteration == self.stop_at:
            training.stop = "enough"

    def evaluated(self, training: Training, loss: float) -> None:
        self.calls.append(f"eval {training.counters.iteration}")

    def finished(self, training: Training) -> None:
        self.calls.append("finished")

    def closed(self) -> None:
        self.calls.append("closed")


def test_a_run_learns_and_leaves_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = pretrain(tiny_run(tmp_path, train={"train_iters": 40, "eval_interval": 20}))
    folder = tmp_path / "run"
    rows = read(folder / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["iteration"] for row in steps] == list(range(1, 41))
    assert set(ROW) == set(steps[0])
    assert tuple((row["iteration"], row["eval_loss"]) for row in rows if "eval_loss" in row) == summary.eval_losses
    assert [step for step, _ in summary.eval_losses] == [20, 40]
    assert steps[0]["loss"] > 5.0
    assert summary.last_loss is not None
    assert summary.eval_loss is not None
    assert summary.last_loss < 3.5
    assert summary.eval_loss < 3.5
    decided = json.loads((folder / "precision.json").read_text())
    assert decided["recipe"] == "bf16_mixed"
    written = {(write["target"], write["field"]) for write in decided["writes"]}
    assert written >= {("model", "bf16"), ("ddp", "grad_reduce_in_fp32")}
    assert json.loads((folder / "summary.json").read_text())["iterations"] == 40
    shown = capsys.readouterr().out
    for word in ("ddp.grad_reduce_in_fp32", "step 40/40", "loss scale", "tokens/s", "held-out loss", "summary"):
        assert word in shown


def test_hooks_are_told_everything_in_order(tmp_path: Path) -> None:
    hook = Recorder()
    pretrain(tiny_run(tmp_path), hooks=[hook], quiet=True)
    assert hook.calls == [
        "built", "started", "step 1", "step 2", "step 3", "eval 3", "step 4", "step 5", "step 6", "eval 6", "finished", "closed",
    ]  # fmt: skip


def test_a_hook_stops_the_run_behind_its_step(tmp_path: Path) -> None:
    hook = Recorder(stop_at=2)
    summary = pretrain(tiny_run(tmp_path), hooks=[hook], quiet=True)
    assert (summary.iterations, summary.stopped) == (2, "enough")
    assert hook.calls[-3:] == ["step 2", "finished", "closed"]


def test_a_hook_that_restores_counters_continues_the_run(tmp_path: Path) -> None:
    class Restore(Hook):
        def built(self, training: Training) -> None:
            training.counters.iteration, training.counters.consumed = 4, 16
            training.scheduler.step(16)

    whole, rest = Recorder(), Recorder()
    frozen: dict[str, Any] = {"optimizer": {"lr": 1e-12}, "train": {"audit": "warn"}}
    pretrain(tiny_run(tmp_path, **frozen), hooks=[whole], quiet=True)
    pretrain(tiny_run(tmp_path, **frozen), hooks=[Restore(), rest], quiet=True)
    # weights hardly move at this rate (the audit says so), so equal losses mean equal data
    after, before = ([result.loss for result in results] for results in (rest.results, whole.results[4:]))
    assert after == pytest.approx(before, abs=1e-5)
    assert [row["iteration"] for row in read(tmp_path / "run" / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_fp16_skips_its_overflowing_steps_counts_them_and_recovers(tmp_path: Path) -> None:
    hook = Recorder()
    run = tiny_run(tmp_path, "fp16_mixed", train={"train_iters": 60, "eval_interval": None})
    summary = pretrain(run, hooks=[hook], quiet=True)
    skipped = [result for result in hook.results if not result.applied]
    assert hook.results[0].loss_scale == 2.0**32
    assert summary.skipped == len(skipped) > 0
    assert hook.results[-1].applied
    assert hook.results[-1].loss_scale < 2.0**32
    assert summary.last_loss is not None
    assert summary.last_loss < hook.results[0].loss - 1.0
    # the schedule counts applied updates only
    applied = [result.lr for result in hook.results if result.applied]
    assert applied == sorted(set(applied), reverse=True)
    assert {result.lr for result in skipped} <= {applied[0], *applied}


def test_what_the_machine_cannot_run_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "build_engine", lambda run: pytest.fail("an engine was built"))
    monkeypatch.setattr(loop, "Feed", lambda *_: pytest.fail("data were read"))
    hook = Recorder()
    with pytest.raises(Refused, match=r"(?i)mxfp8"):
        pretrain(tiny_run(tmp_path, "bf16_with_mxfp8_mixed"), hooks=[hook], quiet=True)
    assert hook.calls == []


def test_a_stream_without_length_trains_for_train_iters(tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for start in range(10**6):
                yield {"tokens": torch.arange(start, start + 33) % 250}

        def __len__(self) -> int:
            pytest.fail("the length was asked for")

    summary = pretrain(tiny_run(tmp_path, train={"eval_interval": None}), dataset=Stream(), quiet=True)
    assert summary.iterations == 6
    assert summary.consumed_samples == 24


def test_everything_is_given_back_even_by_a_run_that_fails(tmp_path: Path) -> None:
    class Fails(Recorder):
        def stepped(self, training: Training, result: StepResult) -> None:
            raise RuntimeError("boom")

    hook, threads, available = Fails(), torch.get_num_threads(), torch.cuda.is_available
    stop_process_group()  # one that an earlier test of this process left would stay
    with pytest.raises(RuntimeError, match="boom"):
        pretrain(tiny_run(tmp_path, train={"threads": threads + 1, "deterministic": True}), hooks=[hook], quiet=True)
    assert hook.calls[-1] == "closed"
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.cuda.is_available is available
    assert not torch.distributed.is_initialized()


def test_a_summary_that_cannot_be_written_is_named_and_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mpbridge.training.base import Summary
    from mpbridge.training.loop import write_summary

    (tmp_path / "summary.json").mkdir()
    counted = {"iterations": 1, "skipped": 0, "nonfinite": 0, "consumed_samples": 1}
    write_summary(Summary(recipe="fp32", first_loss=1.0, last_loss=1.0, **counted), tmp_path)
    place = tmp_path / "summary.json"
    said = f"{place} cannot be written ({place} is a folder, expected a regular file: it is neither followed nor opened) and is incomplete"
    assert said in capsys.readouterr().err


def test_exit_interval_stops_the_run(tmp_path: Path) -> None:
    summary = pretrain(tiny_run(tmp_path, train={"exit_interval": 4}), quiet=True)
    assert summary.iterations == 4
    assert "exit_interval=4" in (summary.stopped or "")


def test_missing_train_iters_is_named_on_the_library_path(tmp_path: Path) -> None:
    run = tiny(tmp_path, train={"train_iters": None}).resolved(training=False)
    with pytest.raises(BadValue, match=r"train\.train_iters is missing"):
        pretrain(run, quiet=True)
