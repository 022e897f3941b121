"""Metric files: one JSON object per line, and TensorBoard where it is installed."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from mpbridge.files import opened_to_write
from mpbridge.report.console import warn


class MetricsLog:
    """Writes `folder`/metrics.jsonl, and TensorBoard events when asked; writes nothing on ranks where folder is None.

    after: the last finished step of the run that is continued. Later lines belong to steps that will be done again and are
    dropped; with 0 the file starts anew.
    """

    def __init__(self, folder: Path | None, *, tensorboard: bool = False, after: int = 0) -> None:
        self.path = folder / "metrics.jsonl" if folder else None
        self._file: IO[str] | None = None
        self._board: Any = None
        self.trouble: Callable[[str], None] = lambda text: None
        """Told why the file does not grow."""
        if self.path is None or folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(self.path, after)
        # the lines that stay are never missing from the disk: written beside, then put in place
        beside = self.path.with_name(f".metrics-{secrets.token_hex(4)}")
        try:
            with beside.open("x", encoding="utf-8") as stream:
                stream.writelines(kept)
            beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)
        self._file = opened_to_write(self.path, append=True)
        self._board = _board(folder, after) if tensorboard else None

    def write(self, values: Mapping[str, Any], *, board: bool = True) -> None:
        """One line. 'iteration' is TensorBoard's step; board=False leaves TensorBoard out. Non-finite numbers become 'nan', 'inf', '-inf'.

        A file that cannot grow calls `trouble` once; the lines that it did not take are said on stderr.
        """
        if self._file is None:
            return
        # JSON has no NaN; float() reads these words back
        plain = {
            key: value if not isinstance(value, float) or math.isfinite(value) else str(value)
            for key, value in values.items()
        }
        text = json.dumps(plain)
        if why := _appended(self._file.fileno(), text.encode() + b"\n"):
            warn(f"{self.path} cannot grow ({why}); the line that it lacks: {text}")
            self.trouble(f"{self.path} cannot grow ({why})")
        if self._board is not None and board:
            for key, value in values.items():
                if key != "iteration" and isinstance(value, (int, float)):
                    self._board.add_scalar(key, value, values.get("iteration"))

    def close(self) -> None:
        """Closes both; a second call does nothing."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        self._file = self._board = None


def _appended(handle: int, line: bytes) -> str:
    """'' when the file has the whole line, else why it has nothing of it."""
    before = os.fstat(handle).st_size
    try:
        if os.write(handle, line) == len(line):
            return ""
        os.ftruncate(handle, before)
    except OSError as error:
        return error.strerror or str(error)
    return "no room for a whole line"


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _lines_until(path: Path, after: int) -> list[str]:
    if not after or not path.is_file():
        return []
    return [json.dumps(row) + "\n" for row in read(path) if row.get("iteration", 0) <= after]


def _board(folder: Path, after: int) -> Any:
    """A TensorBoard writer, or None where the package is missing: the JSON lines hold the same."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # purge_step hides the events of steps that are done again
    return SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1 if after else None)
