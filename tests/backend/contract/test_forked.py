"""What tests run in processes of their own hides nothing: exit codes, what a failing rank says, leftovers (tests/forked.py)."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.forked import codes, forked, python, ranks, said


def where() -> None:
    print(os.environ.get("MPBRIDGE_TEST"), os.getcwd())


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_process_has_the_variables_and_the_folder_of_the_test_that_starts_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPBRIDGE_TEST", name)
    monkeypatch.chdir(tmp_path)
    with forked(where) as process:
        assert process.wait() == 0, process.text
    assert process.text == f"{name} {tmp_path}\n"


def one_fails() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the cause")
    time.sleep(800)


def test_a_rank_that_fails_ends_its_job_and_is_heard() -> None:
    began = time.monotonic()
    with ranks(2, one_fails) as job:
        assert codes(job) == [-15, 1]
        assert "ValueError: the cause" in said(job)
    assert time.monotonic() - began < 400  # the other one sleeps on


def test_ranks_that_go_on_are_heard(tmp_path: Path) -> None:
    with forked(where) as first:  # behind it the server has loaded what it loads
        assert first.wait() == 0
    (tmp_path / "script.py").write_text(
        "import os, time\nprint('rank', os.environ['RANK'], flush=True)\ntime.sleep(300)"
    )
    with pytest.raises(AssertionError, match=r"still running after 5 s: rank 0\n+rank 1"):
        python([str(tmp_path / "script.py")], size=2, timeout=5)


CODES = {"pass": 0, "raise SystemExit(3)": 3, "raise SystemExit('words')": 1, "1 / 0": 1}
CODES |= {"import os; os._exit(7)": 7, "import os; os.abort()": -6}


@pytest.mark.parametrize(("script", "code"), CODES.items())
def test_an_exit_code_is_that_of_an_interpreter(script: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    assert python([str(tmp_path / "script.py")]).returncode == code


def with_a_child() -> None:
    print(subprocess.Popen(["sleep", "300"]).pid, flush=True)


def test_what_a_process_started_ends_with_it() -> None:
    with forked(with_a_child) as process:
        assert process.wait() == 0, process.text
    child = Path(f"/proc/{process.text.strip()}")
    stop = time.monotonic() + 60
    while child.exists() and "(zombie)" not in (child / "status").read_text():
        assert time.monotonic() < stop
        time.sleep(0.02)
