"""Texts from files, record by record (of tables, a row group or a record batch at a time); an unusable record yields a reason instead of an exception."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpbridge.common.errors import DataError
from mpbridge.training.data.sources import JSON_LINES, NO_PYARROW, TABLES

CHUNK = 16 << 20
"""Bytes of a JSON-lines file that one worker processes at a time; small enough to distribute, large enough to keep overhead low."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Alone, one is legal in JSON but not in UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRange:
    """A piece of work: the records of `path` whose first byte lies in [start, end); of a table, its row groups or batches start to end."""

    path: Path
    start: int = 0
    end: int
    size: int
    """Approximate bytes of input."""


@dataclass(frozen=True, slots=True)
class Text:
    """One document of the output `key`."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Skip:
    """A record, or an element of one, that was skipped, and why."""

    key: str
    reason: str


def units(files: Sequence[Path]) -> list[RecordRange]:
    """The work for `files`, in an order that does not depend on the number of workers. Raises DataError for a damaged table and a JSON array."""
    work: list[RecordRange] = []
    for path in files:
        size = path.stat().st_size
        if path.suffix in TABLES:
            work += [RecordRange(path=path, start=n, end=n + 1, size=part) for n, part in enumerate(_table_parts(path))]
        elif path.suffix not in JSON_LINES:
            work.append(RecordRange(path=path, end=size, size=size))
        else:
            _refuse_array(path)
            starts = range(0, max(size, 1), CHUNK)
            ends = [min(start + CHUNK, size) for start in starts]
            work += [RecordRange(path=path, start=a, end=b, size=b - a) for a, b in zip(starts, ends, strict=True)]
    return work


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


def records(unit: RecordRange, keys: Sequence[str]) -> Iterator[Text | Skip]:
    """Every usable text of the unit and every reason to skip. A text file is one record, under the first key."""
    if unit.path.suffix in TABLES:
        for row in _table_rows(unit.path, unit.start, keys):
            for key in keys:
                yield from _values(key, row)
        return
    if unit.path.suffix not in JSON_LINES:
        yield from _usable(keys[0], unit.path.read_bytes())
        return
    for line in _lines(unit):
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            yield from (Skip(key, "not UTF-8") for key in keys)
        except (ValueError, RecursionError):
            reason = "not JSON" if line.strip() else "blank line"
            yield from (Skip(key, reason) for key in keys)
        else:
            for key in keys:
                yield from _values(key, row)


def _lines(unit: RecordRange) -> Iterator[bytes]:
    with unit.path.open("rb") as file:
        if unit.start:
            # a line that crosses the boundary belongs to the previous unit
            file.seek(unit.start - 1)
            file.readline()
        while file.tell() < unit.end and (line := file.readline()):
            yield line


def _values(key: str, row: Any) -> Iterator[Text | Skip]:
    if isinstance(row, dict):
        if key not in row:
            yield Skip(key, "key missing")
            return
        row = row[key]
    # a list holds several documents of one record
    for value in row if isinstance(row, list) else [row]:
        yield from _usable(key, value)


def _usable(key: str, value: Any) -> Iterator[Text | Skip]:
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8-sig")
        except UnicodeDecodeError:
            yield Skip(key, "not UTF-8")
            return
    if value is None:
        yield Skip(key, "null")
    elif not isinstance(value, str):
        yield Skip(key, "not text")
    elif not value.strip():
        yield Skip(key, "empty")
    elif not value.isascii() and _SURROGATE.search(value):
        yield Skip(key, "not UTF-8")
    else:
        yield Text(key, value)


def _table_parts(path: Path) -> list[int]:
    """Size in bytes of each row group (Parquet, uncompressed) or record batch (Arrow). Raises DataError."""
    with _opened(path) as table:
        if path.suffix == ".parquet":
            return [table.metadata.row_group(n).total_byte_size for n in range(table.num_row_groups)]
        return [batch.nbytes for batch in _batches(table)]


def _table_rows(path: Path, number: int, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of one part, with the existing ones of the columns `keys`. Raises DataError."""
    with _opened(path) as table:
        if path.suffix == ".parquet":
            columns = [key for key in keys if key in table.schema_arrow.names]
            found: Any = table.read_row_group(number, columns=columns)
        else:
            batch = next(batch for at, batch in enumerate(_batches(table)) if at == number)
            found = batch.select([key for key in keys if key in batch.schema.names])
        # a part without any of the columns still has its rows, each skipped with a reason
        yield from found.to_pylist() if found.num_columns else ({} for _ in range(found.num_rows))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A Parquet file, or the reader of an Arrow file in either of its two formats, mapped into memory, with pyarrow, which is installed with datasets."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"{path}: {NO_PYARROW}") from None
    try:
        if path.suffix == ".parquet":
            table: Any = parquet.ParquetFile(path, memory_map=True)
        else:
            try:
                table = arrow.ipc.open_stream(arrow.memory_map(str(path)))
            except arrow.ArrowInvalid:
                table = arrow.ipc.open_file(arrow.memory_map(str(path)))
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    try:
        yield table
    finally:
        if hasattr(table, "close"):
            table.close()


def _batches(table: Any) -> Iterator[Any]:
    count = getattr(table, "num_record_batches", None)
    if count is None:
        yield from table
    else:
        yield from (table.get_batch(number) for number in range(count))
