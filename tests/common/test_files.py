"""Somebody's files are opened by the bounded readers of common/files.py and by nobody else."""

from __future__ import annotations

import ast
import base64
import contextlib
import fcntl
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

import mpbridge
from mpbridge.common import safe_unpickler
from mpbridge.common.errors import CheckpointError, MpbridgeError
from mpbridge.common.files import LIMITS, Locked, bytes_of, lines_of, lock, text_of

ROOT = Path(mpbridge.__file__).parent
OTHERS = {
    "common/versions.py": "installed packages' own files", "common/pages/document.py": "this package's own files",
    "common/probe.py": "installed packages' own files", "common/files.py": "this package's own files",
    "observe/audit/findings.py": "what this run's audits wrote", "te_cpu/cuda_answers.py": "the kernel's /proc",
    "te_cpu/rank_server.py": "the gate of its own world", "te_cpu/ranks.py": "what its own ranks wrote",
    "training/checkpoint/store.py": "a digest, by blocks",
    "training/data/look.py": "corpora, whose size is the user's, and an index of fixed width",
    "training/data/prepare.py": "a digest, by blocks", "training/data/sources.py": "a digest, by blocks",
}  # fmt: skip
"""File -> why it may open files by itself."""


def reads(file: Path) -> list[int]:
    """Lines that open a file for reading without the readers."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if name not in ("open", "read_text", "read_bytes"):
            continue
        text, owner = ast.unparse(node), ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
        writes = any(mode in text for mode in ("'w", "'x", "'a"))
        method = isinstance(called, ast.Attribute) and name in ("read_text", "read_bytes")
        if method or (name == "open" and not writes and owner != "os"):
            found.append(node.lineno)
    return found


def test_nobody_else_opens_a_file_for_reading() -> None:
    places = {file.relative_to(ROOT).as_posix(): reads(file) for file in ROOT.rglob("*.py")}
    assert {name: lines for name, lines in places.items() if lines and name not in OTHERS} == {}
    assert [name for name in OTHERS if not places.get(name)] == [], "an exception that is no longer needed"


@pytest.mark.parametrize("kind", ["configuration", "note"])
def test_a_file_above_its_limit_is_refused_with_its_size(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "large"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: it costs nothing
    for read in (text_of, bytes_of):
        with pytest.raises(OSError, match=f"more than {LIMITS[kind].size:,} bytes"):
            read(file, kind=kind)
    with pytest.raises(OSError, match="a line of more than"):
        list(lines_of(file))
    file.write_text("one\ntwo")
    assert text_of(file, kind=kind) == "one\ntwo"
    assert list(lines_of(file)) == ["one\n", "two"]


# found by scripts/evidence/fuzz_readers.py
@pytest.mark.parametrize("data", [b"\x90\x02\xff\xff}q\xff}\x00X\x01\x00\x00\x00a", b"u.", b"t.", b"e."])
def test_a_pickle_without_a_mark_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        safe_unpickler.read(data, safe_unpickler.any_call)


FUZZED = [json.loads(line) for line in (ROOT.parent / "tests/golden/fuzzed.jsonl").read_text().splitlines()]
"""Inputs that scripts/evidence/fuzz_readers.py kept because each reached code that the others do not."""


@pytest.mark.parametrize("name", sorted({row["reader"] for row in FUZZED}))
def test_a_reader_accepts_or_refuses_what_the_fuzzer_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT.parent / "scripts/evidence"))
    script = importlib.import_module("fuzz_readers")
    reader, file = script.reader_of(name), tmp_path / script.READERS[name][0]
    for row in FUZZED:
        if row["reader"] == name:
            file.write_bytes(base64.b64decode(row["bytes"]))
            with contextlib.suppress(MpbridgeError):
                reader(file)


ANOTHER = "import pathlib, sys; from mpbridge.common.files import lock; lock(pathlib.Path(sys.argv[1]), wait=False)"


def test_a_lock_is_granted_once_in_a_process_too_and_stays_locked_for_others(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "lock"
    (tmp_path / "other").symlink_to(file.parent)
    with lock(file, wait=False) as held:
        held.write("the first\n")
        held.flush()
        for again in (file, tmp_path / "other" / "lock"):
            with pytest.raises(Locked, match="the first"):
                lock(again, wait=False)
        other = subprocess.run([sys.executable, "-c", ANOTHER, str(file)], capture_output=True, text=True, timeout=120)
        assert "Locked: the first" in other.stderr
        lock(tmp_path / "another", wait=False).close()
    lock(file, wait=False).close()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        lock(file, wait=False)  # dropped without being closed
        gc.collect()
    lock(file, wait=False).close()


def test_a_thread_waits_for_the_lock_of_another(tmp_path: Path) -> None:
    done = threading.Event()

    def waits() -> None:
        with lock(tmp_path / "lock", wait=True):
            done.set()

    with lock(tmp_path / "lock", wait=True):
        thread = threading.Thread(target=waits)
        thread.start()
        assert not done.wait(0.5)
    assert done.wait(60)
    thread.join()


def test_a_thread_does_not_wait_for_itself(tmp_path: Path) -> None:
    with lock(tmp_path / "lock", wait=True) as held:
        held.write("the first\n")
        with pytest.raises(Locked, match="the first"):
            lock(tmp_path / "lock", wait=True)
    lock(tmp_path / "lock", wait=True).close()


def test_a_lock_on_a_file_that_its_holder_removes_is_taken_on_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, own = tmp_path / "folder" / "lock", fcntl.lockf

    def removed_meanwhile(*args: Any) -> None:
        monkeypatch.setattr(fcntl, "lockf", own)
        own(*args)
        file.unlink()
        file.parent.rmdir()

    monkeypatch.setattr(fcntl, "lockf", removed_meanwhile)
    with lock(file, wait=False) as held:
        held.write("the second")
        held.flush()
        assert file.read_text() == "the second"


@pytest.mark.parametrize("wait", [True, False])
def test_a_lock_where_inode_numbers_change_is_refused_with_the_cause(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)  # in place of a file system that numbers files anew
    with pytest.raises(OSError, match=r"inode number differs .* another file system.*lock"):
        lock(tmp_path / "lock", wait=wait)


def test_an_interrupt_while_waiting_for_another_process_leaves_nothing_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt) as kept:  # with its traceback, as a notebook keeps it
            lock(tmp_path / "lock", wait=True)
    lock(tmp_path / "lock", wait=False).close()
    assert kept.traceback


FORKED = """
import os, pathlib, sys
from mpbridge.common.files import lock
path, (read, write) = pathlib.Path(sys.argv[1]), os.pipe()
held = lock(path, wait=False)
if (child := os.fork()) == 0:
    os.read(read, 1)
    lock(path, wait=False)
    os._exit(7)
held.close()
os.write(write, b"1")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_holds_none_of_its_parents_locks(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, str(tmp_path / "lock")], timeout=120)
    assert done.returncode == 7
