"""Texts from files, record by record; an unusable record yields a reason instead of an exception."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpbridge.common.errors import DataError
from mpbridge.training.data.sources import JSON_LINES

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Alone, one is legal in JSON but not in UTF-8."""


@dataclass(frozen=True, slots=True)
class Text:
    """One document of the output `key`."""

    key: str
    text: str
    read: int = 0
    """Bytes of the file up to its end."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A record, or an element of one, that was skipped, and why."""

    key: str
    reason: str
    read: int = 0


def records(path: Path, keys: Sequence[str]) -> Iterator[Text | Skip]:
    """Every usable text of the file and every reason to skip. A text file is one record, under the first key. Raises DataError for a JSON array."""
    if path.suffix not in JSON_LINES:
        content = path.read_bytes()
        yield from _usable(keys[0], content, len(content))
        return
    _refuse_array(path)
    read = 0
    with path.open("rb") as file:
        for line in file:
            read += len(line)
            try:
                row = json.loads(line)
            except UnicodeDecodeError:
                yield from (Skip(key, "not UTF-8", read) for key in keys)
            except (ValueError, RecursionError):
                reason = "not JSON" if line.strip() else "blank line"
                yield from (Skip(key, reason, read) for key in keys)
            else:
                for key in keys:
                    yield from _values(key, row, read)


def _refuse_array(path: Path) -> None:
    """Raises DataError for one JSON array over many lines, or of objects: read by lines, its records would be lost."""
    try:
        with path.open("rb") as file:
            begin = file.read(4096)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if re.match(rb"(\xef\xbb\xbf)?\s*\[(\s*\{|[ \t\r]*\n)", begin):
        raise DataError(
            f"{path} is one JSON array, expected JSON lines with one record per line: jq -c '.[]' {path} > {path.stem}.jsonl"
        )


def _values(key: str, row: Any, read: int) -> Iterator[Text | Skip]:
    if isinstance(row, dict):
        if key not in row:
            yield Skip(key, "key missing", read)
            return
        row = row[key]
    # a list holds several documents of one record
    for value in row if isinstance(row, list) else [row]:
        yield from _usable(key, value, read)


def _usable(key: str, value: Any, read: int) -> Iterator[Text | Skip]:
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8-sig")
        except UnicodeDecodeError:
            yield Skip(key, "not UTF-8", read)
            return
    if value is None:
        yield Skip(key, "null", read)
    elif not isinstance(value, str):
        yield Skip(key, "not text", read)
    elif not value.strip():
        yield Skip(key, "empty", read)
    elif not value.isascii() and _SURROGATE.search(value):
        yield Skip(key, "not UTF-8", read)
    else:
        yield Text(key, value, read)
