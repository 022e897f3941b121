"""Progress: lines at intervals, a bar where there is a terminal, silence on other ranks."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from mpbridge.common.report.console import console
from mpbridge.common.report.progress import ProgressLine
from mpbridge.common.tables import table


def _shown(*, terminal: bool, bar: bool = True, redraws: bool | None = None) -> str:
    redraws = terminal if redraws is None else redraws
    out = Console(file=io.StringIO(), force_terminal=terminal, force_interactive=redraws, width=150, highlight=False)
    with ProgressLine(out, total=25, interval=10, bar=bar) as progress:
        for step in range(1, 26):
            progress.step(step, f"loss {step}.0")
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_a_log_file_gets_the_first_last_and_every_tenth_step() -> None:
    assert _shown(terminal=False).splitlines() == [f"step {step:>2}/25  loss {step}.0" for step in (1, 10, 20, 25)]


def test_a_terminal_gets_a_bar_too_unless_it_is_switched_off() -> None:
    assert _shown(terminal=True).count("25/25") > 1 == _shown(terminal=True, bar=False).count("25/25")
    assert "step 20/25" in _shown(terminal=True)
    assert "step 20/25" in _shown(terminal=True, bar=False)


def test_a_terminal_that_redraws_nothing_or_only_claims_to_redraw_gets_the_lines_of_a_log_file() -> None:
    lines = _shown(terminal=False)
    assert lines == _shown(terminal=True, redraws=False)
    # TTY_INTERACTIVE=1 makes a pipe interactive for rich
    assert lines == _shown(terminal=False, redraws=True)


RUN = """
from mpbridge.common.report.console import console
from mpbridge.common.report.progress import ProgressLine

with ProgressLine(console(), total=20, interval=10) as progress:
    for step in range(1, 21):
        progress.step(step, f"loss {step}.0")
    print("a library's own line")
"""


def test_in_a_real_terminal_it_ends_and_lets_others_print() -> None:
    ours, theirs = os.openpty()
    told = {name: text for name, text in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    subprocess.run([sys.executable, "-c", RUN], stdout=theirs, env=told, check=True, timeout=60)
    os.close(theirs)
    text = os.read(ours, 65536).decode()
    for line in ("step 10/20  loss 10.0", "step 20/20  loss 20.0", "a library's own line"):
        assert text.count(line) == 1, text


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine(console(speaks=False), total=2, interval=1) as progress:
        progress.step(1, "loss")
        progress.say("something")
    assert capsys.readouterr().out == ""


def test_a_log_file_is_wide_enough_for_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "word " * 22
    console().print(table("summary", ("", ""), [("label", long)]))
    assert long.strip() in capsys.readouterr().out
