"""A run's lines: metrics.jsonl and the trackers that it requests, and events.jsonl for every event other than a step."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from mpbridge.common.files import lines_of, opened_to_write
from mpbridge.common.report.console import rank, warn
from mpbridge.common.report.trackers import TrackedRun, TrackerThread, names_of, numbers

EVENTS = "events.jsonl"
"""File in the run's folder: one JSON object for every event."""


class MetricsLog:
    """Writes `folder`/metrics.jsonl, and to the trackers that `logger` requests; writes nothing on ranks where folder is None.

    logger: the run's logger section. recipe: the run's, for the trackers' names. after: the last finished step of the run being continued; later lines
    belong to steps that will be repeated and are dropped; 0 starts a new file. Raises UnknownName for an unknown tracker."""

    def __init__(
        self, folder: Path | None, *, logger: Mapping[str, Any] | None = None, recipe: str = "", after: int = 0
    ) -> None:
        section: Mapping[str, Any] = logger or {}
        names = names_of(section)
        self.path = folder / "metrics.jsonl" if folder else None
        self._file: IO[str] | None = None
        self._trackers: list[TrackerThread] = []
        self.trouble: Callable[[str], None] = lambda text: None
        """Called with the reason when the file cannot be written."""
        if self.path is None or folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(self.path, after)
        # the kept lines are always on disk: they are written to a temporary file, which then replaces the old one
        beside = self.path.with_name(f".metrics-{secrets.token_hex(4)}")
        try:
            with beside.open("x", encoding="utf-8") as stream:
                stream.writelines(kept)
            beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)
        self._file = opened_to_write(self.path, append=True)
        place = TrackedRun(folder, section, recipe=recipe, after=after)
        self._trackers = [TrackerThread(name, place) for name in names]

    def write(self, values: Mapping[str, Any], *, board: bool = True) -> None:
        """Writes one line. 'iteration' is the trackers' step; board=False skips the trackers. Non-finite numbers become 'nan', 'inf', '-inf'.

        A write error calls `trouble` once; the lines that could not be written are printed on stderr."""
        if self._file is None:
            return
        text = _json(values)
        if why := _appended(self._file.fileno(), text.encode() + b"\n"):
            warn(f"{self.path} cannot be written ({why}); the missing line: {text}")
            self.trouble(f"{self.path} cannot be written ({why})")
        if board:
            self.track(values)

    def track(self, values: Mapping[str, Any]) -> None:
        """Writes to the trackers only; 'iteration' is the step."""
        if self._trackers and (plain := numbers(values)):
            for tracker in self._trackers:
                tracker.log(int(values["iteration"]), plain)

    def close(self) -> None:
        """Closes the file and the trackers; a second call does nothing."""
        if self._file is not None:
            self._file.close()
        for tracker in self._trackers:
            tracker.close()
        self._file, self._trackers = None, []


def _json(values: Mapping[str, Any]) -> str:
    """A line's text; JSON has no NaN, and float() parses the words for it."""
    odd = {name: str(one) for name, one in values.items() if isinstance(one, float) and not math.isfinite(one)}
    return json.dumps({**values, **odd})


def _appended(handle: int, line: bytes) -> str:
    """Appends the line completely or not at all; returns '' on success, otherwise the reason."""
    before = os.fstat(handle).st_size
    try:
        if os.write(handle, line) == len(line):
            return ""
        os.ftruncate(handle, before)
    except OSError as error:
        return error.strerror or str(error)
    return "no room for a whole line"


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; invalid lines, such as one truncated by a crash, are skipped."""
    return [row for row in _rows(path) if row is not None]


def _rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each line's object; None for a line that is not a step's."""
    for line in lines_of(path):
        try:
            row = json.loads(line)
            known = isinstance(row, dict) and isinstance(row.get("iteration", 0), int)
        except (ValueError, RecursionError):
            known = False
        yield row if known else None


def _lines_until(path: Path, after: int) -> Iterator[str]:
    """The lines of steps up to `after`, one at a time: a long run's file need not fit into memory."""
    if not after or not path.is_file():
        return
    lost = count = 0
    for row in _rows(path):
        count += 1
        lost += row is None
        if row is not None and row.get("iteration", 0) <= after:
            yield json.dumps(row) + "\n"
    if lost:
        warn(f"{path}: {lost} of {count} lines cannot be read and are skipped; the run continues after the others")


def record(training: Any, event: str, text: str, *, say: bool = True, **facts: Any) -> None:
    """Prints `text` and adds it to the run's events; non-finite numbers are written as words. A write error is reported on stderr."""
    if say:
        training.say(text)
    folder = training.run.logger.get("log_dir")
    if folder and rank() == 0:
        line = _json({"iteration": training.counters.iteration, "event": event, "text": text} | facts)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with opened_to_write(Path(folder) / EVENTS, append=True) as stream:
                stream.write(line + "\n")
        except OSError as error:
            warn(f"{Path(folder) / EVENTS} cannot be written ({error.strerror}); the missing line: {line}")
