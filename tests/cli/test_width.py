"""Output keeps to the width of the terminal, prose as well as tables; what is copied (commands, settings, paths) stays in one piece."""

from __future__ import annotations

import ast
import io
import json
import subprocess
from pathlib import Path

import pytest

import mpbridge.cli
from mpbridge.cli.main import main, verbs
from mpbridge.cli.text import print_line
from mpbridge.common.errors import BadValue
from mpbridge.common.prose import prose
from mpbridge.common.report.console import console, tell

RUN = ["--config", "llama3_8b", "--target", "h100"]
LONG_ARGS = "--bf16 --fp8-format hybrid --fp8-recipe delayed --num-layers 2 --moe-router-dtype fp32"
VERBS = [
    ["--help"], ["help", "--all"], ["list"], ["words"], ["words", "bf16"], ["doctor", "--target", "h100"], ["doctor", "--machines"],
    ["show", "nvfp4"], ["show", "fp8_mlp_only", "--layers", "12"], ["compare", "bf16_mixed", "fp8_cs"],
    ["plan"], ["plan", "--recipe", "fp8_cs", "--explain", "ddp.grad_reduce_in_fp32=false"],
    ["check", *RUN], ["check", "--recipe", "fp16_mixed", "train.train_iters=12"], ["check", "--rules"],
    ["memory", *RUN], ["memory", "--config", "llama3_8b", "--stages"], ["estimate", *RUN],
    ["recommend", "--config", "gpt_tiny", "--target", "h100"], ["layouts", *RUN, "--world-size", "8", "--most", "1"],
    ["export", "fp8_mlp_only", "--to", "deepspeed"], ["import", "--args", LONG_ARGS, "--from", "megatron-lm"],
    ["init", "first"], ["plot", "run", "--no-picture"], ["diagnose", "run", "--against", "run"], ["report", "run"], ["audit", "run"],
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run whose gradient norm jumps and whose audit found a fault; the terminal has 60 columns."""
    run = tmp_path / "run"
    run.mkdir()
    steps = [{"iteration": n, "loss": 12345.678 / n, "grad_norm": 1.5 if n < 7 else 1e4} for n in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    fact = ["main weights, rounded, in the dtype of the recipe", "others than those (decoder.layers.1.mlp.linear_fc1)", "NO"]  # fmt: skip
    one = {"recipe": "bf16_mixed", "step": 3, "stage": "live", "ok": False, "reason": "every 3 steps", "facts": {"weights moved": ["yes", "yes", "ok"], "weights as read": fact}, "faults": ["weights as read: " + " ".join(fact)]}  # fmt: skip
    (run / "precision.json").write_text(json.dumps({"audit": {"history": [one]}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    return tmp_path


def wide(text: str) -> list[str]:
    """Lines of more than 60 characters that could have been wrapped."""
    long = [line.strip() for line in text.splitlines() if len(line) > 60]
    return [line for line in long if " " in line.removesuffix(" \\")]


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
@pytest.mark.usefixtures("folder")
def test_prose_and_tables_keep_to_sixty_columns(words: list[str], cli) -> None:
    out = cli(*words, code=(0, 1))
    assert wide(out) == []
    assert len(out.splitlines()) > 5


@pytest.mark.usefixtures("folder")
def test_help_keeps_to_sixty_columns(cli) -> None:
    for verb in verbs():
        found = [line for line in wide(cli("help", verb)) if not line.startswith("mpbridge completion fish >")]
        assert (verb, found) == (verb, [])


def test_verbs_print_through_the_functions_that_know_the_width() -> None:
    found = []
    for path in Path(next(iter(mpbridge.cli.__path__))).glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.name not in ("text.py", "init.py") else ast.parse("")
        found += [f"{path.name}:{node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "print"]  # fmt: skip
    assert found == []


def test_a_rehearsals_verdicts_are_printed_as_prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpbridge.training.rehearse import rehearsal

    given: dict[str, object] = {}

    def rehearse(*parts: object, **more: object) -> None:
        given.update(more)
        raise BadValue("not now")

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    assert main(["rehearse", "--config", "gpt_tiny", "--out", str(tmp_path / "out")]) == 2
    assert given["say"] is print_line


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Where it can be reached by this machine: mpbridge data inspect --tokenizer gpt2 (fetches it once), or a folder",
         ["Where it can be reached by this machine:", "mpbridge data inspect --tokenizer gpt2 (fetches", "it once), or a folder"]),
        ("  the nearest that fits: train.micro_batch_size=1 model.tensor_model_parallel_size=2, as far as is known",
         ["  the nearest that fits:", "    train.micro_batch_size=1 \\", "      model.tensor_model_parallel_size=2,", "    as far as is known"]),
        ("to resume: the same command, which mpbridge checks before it starts, with pip install -e '.[hf]' if needed",
         ["to resume: the same command, which", "mpbridge checks before it starts, with", "pip install -e '.[hf]' if needed"]),
        ("all that stops it, told by `mpbridge check`. See configs/base.yaml for its settings",
         ["all that stops it, told by `mpbridge check`. See", "configs/base.yaml for its settings"]),
        ("submit this now by mpbridge launch --nodes 8 -- train, then wait for all of it",
         ["submit this now by", "mpbridge launch --nodes 8 -- train, then wait", "for all of it"]),
        ("first\n  second line\n", ["first", "  second line", ""]),
    ],
    ids=["command", "settings", "prose about mpbridge", "end of a sentence", "end of options", "lines"],
)  # fmt: skip
def test_what_is_copied_stays_in_one_piece_or_continues_with_a_backslash(text: str, lines: list[str]) -> None:
    assert prose(text, 48).split("\n") == lines
    assert prose(text, None) == text


@pytest.mark.parametrize("width", [20, 60, 90])
def test_settings_of_several_lines_mean_the_same_to_a_shell(width: int) -> None:
    words = ["mpbridge", "check", "--args", "'--bf16 --num-layers 2'", "parallel.tensor_model_parallel_size=1", "'model.pipeline_model_parallel_layout=Et|(tt|)*6mL'", "ddp.overlap_grad_reduce=true"]  # fmt: skip
    shown = prose(" ".join(words), width)
    assert shown.count(" \\\n") == shown.count("\n") >= 1
    heard = subprocess.run(["bash", "-c", f"printf '%s\n' {shown}"], capture_output=True, text=True, check=True).stdout
    assert heard.splitlines() == [word.strip("'") for word in words]


def test_a_runs_output_wraps_on_a_terminal_and_not_in_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "stopped after step 3902 (SIGUSR1); to resume: the same command with checkpoint.load=run/checkpoints [as it is]"
    )
    monkeypatch.setenv("COLUMNS", "60")
    tell(console(), text)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 60
    monkeypatch.delenv("COLUMNS")
    tell(console(), text)
    assert capsys.readouterr().out == f"{text}\n"


def test_a_closed_stderr_does_not_put_an_error_into_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", None)
    assert main(["check", "--json", "--config", "nope"]) == 2
    assert out.getvalue() == ""
