"""Which files a corpus is made of: the built-in one, the user's text and JSON lines, or finished .bin/.idx pairs."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpbridge.errors import DataError

JSON_LINES = (".jsonl", ".ndjson", ".json")
TEXT = (".txt", ".md", ".rst", ".py")
_NOT_PROSE = frozenset({"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data", "__pycache__"})
"""Parts of the standard library that are test data, generated tables or tools; some distributions leave them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Either files to be preprocessed or prefixes of .bin/.idx pairs that are ready; never both."""

    files: tuple[Path, ...] = ()
    prefixes: tuple[str, ...] = ()


def stdlib_files() -> tuple[Path, ...]:
    """The standard library's own sources, in an order that depends on their names only.

    The order is that of the names' hashes: a split by position then holds out a fair sample instead of the end of the alphabet.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for name in sys.stdlib_module_names:
        # _sysconfigdata and similar files describe the machine that Python was built on
        if name in _NOT_PROSE or name.startswith("_sysconfigdata"):
            continue
        found += [path for path in [root / f"{name}.py"] if path.is_file()]
        found += [path for path in (root / name).glob("**/*.py") if not _NOT_PROSE & set(path.relative_to(root).parts)]
    if not found:
        raise DataError(
            f"no sources of the standard library under {root}; give a corpus of your own: data.corpus=my.txt"
        )

    def place(path: Path) -> bytes:
        return hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()

    return tuple(sorted(found, key=place))


def find(corpus: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Sources:
    """The files or prefixes that `corpus` stands for: 'stdlib', paths of text or JSON-lines files, folders, .bin/.idx prefixes.

    Raises DataError that names every path which is none of these.
    """
    if corpus == "stdlib":
        return Sources(files=stdlib_files())
    given = [corpus] if isinstance(corpus, (str, os.PathLike)) else list(corpus)
    prefixes = tuple(prefix for item in given if (prefix := _prefix(str(item))))
    files: list[Path] = []
    faults: list[str] = []
    for item in given:
        path = Path(item).expanduser()
        if path.is_dir():
            inside = sorted(
                child for child in path.rglob("*") if child.suffix in (*TEXT, *JSON_LINES) and child.is_file()
            )
            files += inside
            faults += [] if inside else [f"{item}: a folder without {', '.join((*TEXT, *JSON_LINES))} files"]
        elif path.is_file() and not _prefix(str(item)):
            files.append(path)
        elif not _prefix(str(item)):
            faults.append(f"{item}: no such file, folder or .bin/.idx prefix")
    if prefixes and files:
        faults.append("finished .bin/.idx prefixes and files to be preprocessed are mixed; give one kind")
    if not given:
        faults.append("it is empty")
    if faults:
        raise DataError("\n".join(["data.corpus cannot be used:", *(f"  - {fault}" for fault in faults)]))
    return Sources(files=tuple(files), prefixes=prefixes)


def _prefix(item: str) -> str | None:
    """`item` without .bin or .idx where both files of the pair exist."""
    stem = item.removesuffix(".bin").removesuffix(".idx")
    return stem if Path(f"{stem}.bin").is_file() and Path(f"{stem}.idx").is_file() else None
