"""Audits in a run's precision.json, read back.

tests/golden/precision_ce54c4a.json: of three steps of configs/gpt_tiny.yaml at that commit, bf16_with_fp8_delayed_scaling_mixed emulated, three layers.
It keeps the two audits whole and no history.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mpbridge.cli.main import main
from mpbridge.common.report.history import PRECISION, read_history

OLD = Path(__file__).parents[2] / "golden" / "precision_ce54c4a.json"


def test_audits_of_an_earlier_commit_get_the_verdict_that_it_gave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(OLD, tmp_path / PRECISION)
    static, live = read_history(tmp_path)
    assert (static["stage"], static["ok"], live["stage"], live["ok"]) == ("static", True, "live", True)
    assert live["facts"]["exp_avg"] == ["fp32", "fp32", "ok"]
    assert main(["audit", str(tmp_path)]) == 0
    assert "as promised  (after the first update)" in capsys.readouterr().out


def test_what_such_an_audit_found_otherwise_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(OLD.read_text())
    live = data["audit"]["live"]
    live["ok"] = live["findings"][0]["ok"] = False
    (tmp_path / PRECISION).write_text(json.dumps(data))
    assert main(["audit", str(tmp_path)]) == 1
    assert "NOT as promised" in capsys.readouterr().out
