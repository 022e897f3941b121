"""Parquet and Arrow files, a row group or a record batch at a time, read with pyarrow, which is installed with the library datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpbridge.common.errors import DataError
from mpbridge.training.data.sources import NO_PYARROW


def parts(path: Path) -> list[int]:
    """Size in bytes of each row group (Parquet, uncompressed) or record batch (Arrow). Raises DataError."""
    with _opened(path) as table:
        if path.suffix == ".parquet":
            return [table.metadata.row_group(n).total_byte_size for n in range(table.num_row_groups)]
        return [batch.nbytes for batch in _batches(table)]


def rows(path: Path, number: int, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
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


class _opened:
    """A Parquet file, or the reader of an Arrow file in either of its two formats, mapped into memory; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        try:
            import pyarrow as arrow
            import pyarrow.parquet as parquet
        except ImportError:
            raise DataError(f"{self.path}: {NO_PYARROW}") from None
        try:
            if self.path.suffix == ".parquet":
                self._table: Any = parquet.ParquetFile(self.path, memory_map=True)
                return self._table
            mapped = arrow.memory_map(str(self.path))
            try:
                self._table = arrow.ipc.open_stream(mapped)
            except arrow.ArrowInvalid:
                self._table = arrow.ipc.open_file(arrow.memory_map(str(self.path)))
            return self._table
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{self.path} cannot be read: {' '.join(str(error).split())}") from None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        close = getattr(self._table, "close", None)
        if close is not None:
            close()


def _batches(table: Any) -> Iterator[Any]:
    count = getattr(table, "num_record_batches", None)
    if count is None:
        yield from table
    else:
        yield from (table.get_batch(number) for number in range(count))
