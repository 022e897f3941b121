"""Prose, tables and JSON for standard output. rich is imported only in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.common.prose import printable, prose
from mpbridge.common.tables import Column, Table, table

if TYPE_CHECKING:
    from mpbridge.common.pages.document import Page

SCHEMAS = Path(__file__).parent / "schemas"
"""One JSON schema per verb that has `--json` (`scripts/generate/make_schemas.py`)."""
SCHEMA_VERSION = 1


def on_terminal() -> bool:
    """Whether stdout is a TTY."""
    return sys.stdout.isatty()


def answer(args: argparse.Namespace, data: Mapping[str, Any], show: Callable[[], object]) -> None:
    """Prints a verb's answer: its record under --json, in the form of its schema, otherwise what `show` prints."""
    if args.json:
        print(json.dumps(answer_of(data), indent=2, default=str, allow_nan=False))
    else:
        show()


@contextlib.contextmanager
def paged(args: argparse.Namespace, page: Callable[[], Page], *, gap: str = "\n") -> Iterator[None]:
    """Prints a verb's answer in its body, then writes `page` to --out, if that was given. Raises BadValue before the body if it cannot be written there."""
    from mpbridge.common.pages.document import writable, write

    if args.out is not None:
        writable(args.out)
    yield
    if args.out is not None:
        sys.stdout.flush()  # print the answer first, in case the page cannot be written
        write(args.out, page().html())
        if not args.json:
            print_line(f"{gap}page: {args.out}")


def record(thing: Any, *names: str, **more: Any) -> dict[str, Any]:
    """These attributes of a thing by their names, then more."""
    return {name: getattr(thing, name) for name in names} | more


def answer_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` as it is printed, with the version of its form; numbers that JSON lacks are "nan", "inf" and "-inf", as in metrics.jsonl."""
    answer: dict[str, Any] = _finite({"schema_version": SCHEMA_VERSION} | dict(data))
    return answer


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else str(data)
    if isinstance(data, Mapping):
        return {name: _finite(value) for name, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, (list, tuple)) else data


def columns_here() -> int | None:
    """Maximum width of a line; None if unknown (a pipe, a file)."""
    return shutil.get_terminal_size().columns if on_terminal() or "COLUMNS" in os.environ else None


def print_line(*texts: str, indent: str = "") -> None:
    """Prints prose, each text on lines of its own, wrapped to the width if it is known; a command, settings or a path in it stay in one piece.

    Without texts an empty line.
    """
    for text in texts or ("",):
        print(prose(text, columns_here(), indent=indent))


def print_whole(text: str) -> None:
    """Prints lines that are copied or read by a program, such as commands, settings, YAML or a plot: never wrapped."""
    print(printable(text))


def print_table(columns: Sequence[str | Column], rows: Iterable[Sequence[Any]], *, title: str = "") -> None:
    """Prints rows under their headings. Lines keep to the width if it is known (a terminal, COLUMNS)."""
    show_table(table(title, columns, rows, whole=[name for name in columns[:-1] if isinstance(name, str)]))


def show_table(shown: Table) -> None:
    """Prints a table: rich's in a terminal, plain lines elsewhere."""
    width = columns_here()
    if on_terminal() and width is not None and shown.filled().fits(width):
        from rich.console import Console

        Console(highlight=False).print(shown)
        return
    for line in shown.lines(width):
        print(line)
