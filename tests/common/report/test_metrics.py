"""Metric files: readable by any JSON parser, continued where a run continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpbridge.common.report.metrics import MetricsLog, read


def _write(folder: Path, steps: range, after: int = 0) -> Path:
    log = MetricsLog(folder, after=after)
    for step in steps:
        log.write({"iteration": step, "loss": 1.0 / step})
    log.close()
    log.close()
    return folder / "metrics.jsonl"


def test_non_finite_numbers_stay_legal_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write({"iteration": 1, "loss": float("nan"), "grad_norm": float("-inf"), "eval_loss": None})
    log.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda word: pytest.fail(f"bare {word}"))
    assert row == {"iteration": 1, "loss": "nan", "grad_norm": "-inf", "eval_loss": None}


def test_a_continued_run_drops_the_steps_it_does_again(tmp_path: Path) -> None:
    path = _write(tmp_path, range(1, 8))
    with path.open("a") as file:
        file.write('{"iteration": 8, "lo')
    _write(tmp_path, range(6, 9), after=5)
    assert [row["iteration"] for row in read(path)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 8))
    assert [row["iteration"] for row in read(_write(tmp_path, range(1, 3)))] == [1, 2]


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # TensorBoard's own default is a folder here
    log = MetricsLog(None, logger={"tensorboard": True})
    log.write({"iteration": 1, "loss": 2.0})
    log.close()
    assert log.path is None
    assert list(tmp_path.rglob("*")) == []


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    log = MetricsLog(tmp_path, logger={"tensorboard": True})
    for step in (1, 2, 3):
        log.write({"iteration": step, "loss": 0.5 * step, "applied": True}, board=step != 2)
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (3, 1.5)]


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"[1]", b'{"iteration": "x"}', b'{"iteration": null}', b'{"iter', b"[" * 100_000])  # fmt: skip
def test_a_run_goes_on_behind_a_damaged_line_and_keeps_the_others(
    tmp_path: Path, damage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        b'{"iteration": 1, "loss": 5.0}', damage, b'{"iteration": 2, "loss": 4.0}', b'{"iteration": 9, "loss": 1.0}',
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    log = MetricsLog(tmp_path, after=2)
    log.write({"iteration": 3, "loss": 3.0})
    log.close()
    assert [row["iteration"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert "1 of 4 lines cannot be read and are skipped" in capsys.readouterr().err
