"""`mpbridge plot`: whatever damage a metrics file has, what is whole is drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mpbridge.cli.main import main
from mpbridge.common.errors import BadValue
from mpbridge.common.report.curves import picture, read_curves, terminal
from mpbridge.common.report.metrics import MetricsLog


def run(folder: Path, losses: list[float], tail: str = "") -> Path:
    folder.mkdir()
    rows = [
        {"iteration": i, "loss": loss if loss == loss else "nan", "grad_norm": 1.0 / i, "loss_scale": 1.0, "tokens_per_second": 10.0 * i}
        for i, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def test_two_runs_are_drawn_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path / "a", [4.0, 3.0, 2.0])
    second = run(tmp_path / "b", [4.0, float("nan")], '{"iteration": 3, "lo')
    assert main(["plot", str(first), str(second)]) == 0
    out, err = capsys.readouterr()
    assert (first / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "a: loss, nats per token" in out
    assert "b: loss, nats per token (1 of 2 steps not finite)" in out
    assert "loss scale" not in out, "it is 1 throughout"
    assert err == "b: metrics.jsonl, line 3: truncated, skipped\n"


def test_runs_of_one_name_are_told_apart_and_this_folder_has_one(
    tmp_path: Path, cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        run(tmp_path / place / "run", [4.0, 3.0])
    monkeypatch.chdir(tmp_path / "one" / "run")
    assert cli("plot . --no-picture").startswith("run: loss")
    assert "../../two/run: loss, nats per token" in cli("plot . ../../two/run --no-picture")
    assert "is a folder, expected a file" in cli("plot . --out", tmp_path, code=2)  # checked before anything is drawn


def test_without_matplotlib_only_the_picture_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(run(tmp_path / "a", [4.0, 3.0]))]) == 0
    out, err = capsys.readouterr()
    assert "loss, nats per token" in out
    assert "pip install -e '.[plot]'" in err


@pytest.mark.parametrize(("given", "said"), [("nowhere", "No such file"), ("empty", "no readable step"), (".", "No such file")])  # fmt: skip
def test_what_is_no_run_is_refused(tmp_path: Path, given: str, said: str, cli) -> None:
    (tmp_path / "empty").write_text("nothing\n")
    assert said in cli("plot", tmp_path / given, code=2)


def test_a_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    lines = terminal([(1, 1.0), (2, 2.0), (3, 3.0)], width=6, height=3)
    assert lines[0] == "3 │⠀⠀⠀⠀⢀⠔"[:2] + "│" + lines[0][3:]
    filled = [[i for i, cell in enumerate(line.partition("│")[2]) if cell != "\u2800"] for line in lines[:3]]
    assert min(filled[2]) == 0
    assert max(filled[0]) == 5
    assert lines[3].split() == ["1", "3"]


def test_a_step_done_again_counts_as_it_was_done_last(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", [4.0, 3.0], '{"iteration": 2, "loss": 2.5}\n{"iteration": 2, "eval_loss": 3.5}\n')
    found = read_curves(folder)
    assert found.series("loss") == [(1, 4.0), (2, 2.5)]
    assert [row["eval_loss"] for row in found.evaluations] == [3.5]


def test_numbers_near_the_largest_are_drawn(tmp_path):
    rows = [{"iteration": 1, "loss": 1e308}, {"iteration": 2, "loss": -1e308}, {"iteration": 10**15, "loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = read_curves(tmp_path)
    assert terminal(curves.series("loss"))
    assert terminal([(1, 1e308), (2, 1e308)])
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"iteration": i, "loss": 1.7e308, "eval_loss": 1.7e308}) + "\n" for i in (1, 2)))  # fmt: skip
    picture([read_curves(tmp_path)], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_long_run_is_read_and_a_sparse_file_is_refused(tmp_path):
    line = json.dumps({"iteration": 1, "loss": 2.0, "pad": "x" * 1000}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(line * 80_000)  # 82 MB, more than a configuration may have
    assert read_curves(tmp_path).series("loss") == [(1, 2.0)]
    MetricsLog(tmp_path, after=1).close()
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 80_000
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(256 << 30)
    with pytest.raises(BadValue, match="a line of more than 1,048,576 bytes"):
        read_curves(tmp_path)
