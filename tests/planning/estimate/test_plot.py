"""`estimate --plot`: the picture exists, and its bars add up to what the tables say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mpbridge.cli.main import main

RUN = ["--config", "configs/gpt_125m.yaml", "--recipe", "bf16_with_fp8_current_scaling_mixed", "--target", "h100"]


Said = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: Patch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])


def test_the_picture_holds_the_steps_and_the_memory(tmp_path: Path, monkeypatch: Patch, cli) -> None:
    import mpbridge.cli.estimate as bars

    seen: list[Any] = []
    draw = bars.stacked_bars
    monkeypatch.setattr(bars, "stacked_bars", lambda path, panels: (seen.extend(panels), draw(path, panels)))
    said = json.loads(cli("estimate", *RUN, "--json", "--plot", tmp_path / "x.png"))
    held = json.loads(cli("memory", *RUN, "--json"))
    time, memory = seen
    assert sum(time.bars[said["recipe"]].values()) == pytest.approx(said["seconds"])
    assert sum(time.bars["bf16_mixed"].values()) == pytest.approx(said["reference"]["seconds"])
    beside = sum(part["bytes"] for part in held["beside"])
    wanted = held["states"] + held["estimates"]["activations"] + beside
    assert sum(memory.bars[said["recipe"]].values()) * 2**30 == pytest.approx(wanted)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path, capsys: Said) -> None:
    where = str(tmp_path / "no" / "x.png")
    assert main(["estimate", *RUN, "--plot", where]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"--plot {where}: folder {tmp_path / 'no'} does not exist")


def test_without_matplotlib_only_the_picture_is_missing(tmp_path: Path, monkeypatch: Patch, capsys: Said) -> None:
    cure = "pip install -e '.[plot]' in a checkout of mpbridge"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["estimate", *RUN, "--plot", str(tmp_path / "x.png")]) == 0
    out, err = capsys.readouterr()
    assert "where the time goes" in out
    assert err.startswith(f"no picture: matplotlib is not installed ({cure})")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_picture_without_room_costs_the_picture_only(capsys: Said) -> None:
    assert main(["estimate", *RUN, "--plot", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert "where the time goes" in out
    assert "/dev/full cannot be written" in err
