"""Checkpoints with pickles: converted to data by an isolated process, then read like any other.

The process (converter_process.py) gets only two paths: no environment, no open files, no standard input, no framework; it may read the checkpoint and
write one folder, which Linux enforces where available (Landlock); and it ends with its parent.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from mpbridge.common.errors import CheckpointError
from mpbridge.common.files import opened
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.index import METADATA
from mpbridge.training.checkpoint.verdict import FILE

_ROOT = Path(__file__).resolve().parents[3]
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import mpbridge.training.checkpoint.converter_process as process; process.main()"


def is_foreign(path: Path) -> bool:
    """Whether a folder is a checkpoint in megatron-core's format that mpbridge did not write."""
    return not (path / store.MANIFEST).exists() and (path / METADATA).exists()


def needs_converting(path: Path) -> bool:
    """Whether a checkpoint must be converted before loading. Raises CheckpointError."""
    return is_foreign(path) or store.read_manifest(path)["schema"] == store.CONVERTIBLE


def converted(path: Path, room: Path) -> Path:
    """Converts the checkpoint in `path` to a sealed new folder in `room`. Raises CheckpointError naming the file that cannot be converted."""
    foreign = is_foreign(path)
    step = 0 if foreign else store.step_in(store.check(path), path)
    partial = store.begin(room, step)
    try:
        _run(path.resolve(), partial.resolve(), "foreign" if foreign else "ours")
        if not foreign:
            with opened(path / FILE) as stream, (partial / FILE).open("xb") as out:
                shutil.copyfileobj(stream, out)
        return store.seal(partial, step, foreign=foreign)
    except BaseException:
        store.discard(partial)
        raise


def _run(source: Path, out: Path, whose: str) -> None:
    command = [sys.executable, "-I", "-B", "-W", "ignore", "-c", _START, str(_ROOT), str(source), str(out), whose]
    with subprocess.Popen(
        command, env={}, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:  # fmt: skip
        try:
            _, said = process.communicate()
        except BaseException:
            process.kill()
            raise
    if code := process.returncode:
        text, ended = (
            said.decode(errors="replace").strip(),
            signal.Signals(-code).name if code < 0 else f"exit code {code}",
        )
        if code == 1 and text:
            raise CheckpointError(text.splitlines()[-1][:2000])
        # a process that was killed or failed unexpectedly has no message of its own
        raise CheckpointError(f"{source} cannot be converted: the conversion process ended with {ended} {text[-500:]}")
