"""How the commands end when what they are given, or where they write to, is not what they expect: one line and an exit code."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpbridge.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command.replace("mpbridge", f"{sys.executable} -m mpbridge")], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)  # fmt: skip


@pytest.mark.parametrize(
    ("redirection", "said"), [(">&-", "standard output is closed"), (">/dev/full", "No space left")]
)
def test_an_output_that_takes_nothing_is_one_line_and_not_success(redirection: str, said: str) -> None:
    done = shell(f"mpbridge list {redirection}")
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_log_folder_that_is_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "file"
    place.write_text("", encoding="utf-8")
    assert main(["train", "--config", "gpt_tiny", f"logger.log_dir={place}", "train.train_iters=1"]) == 2
    assert f"logger.log_dir={place}" in capsys.readouterr().err


def test_recommend_refuses_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--recipe", "nope"]) == 2
    assert "nope" in capsys.readouterr().err
    assert main(["recommend", "--recipe", "bf16"]) == 2
    assert "compares all recipes" in capsys.readouterr().err


def test_recommend_says_no_when_nothing_fits() -> None:
    assert main(["recommend", "--config", "deepseek_v3_671b", "--target", "h100", "--json"]) == 1


def test_a_depth_that_no_model_has_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "fp8_ds", "--layers", "1000000000000"]) == 2
    assert "at most 10000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[" * 200_000, "fp8: " + "[" * 5_000, "a: 1\n" * 800_000], ids=["deep", "less deep", "long"]
)
def test_a_file_that_is_no_configuration_is_refused_quickly(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "odd.yaml"
    place.write_text(text, encoding="utf-8")
    for arguments in (["show", str(place)], ["check", "--config", str(place)]):
        began = time.process_time()
        assert main(arguments) == 2
        assert time.process_time() - began < 4
        said = capsys.readouterr().err
        assert "odd.yaml" in said
        assert len(said) < 1000
