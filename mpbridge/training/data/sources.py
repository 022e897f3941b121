"""Which files a corpus consists of: the built-in one, the user's text and JSON lines, or finished .bin/.idx pairs."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpbridge.common.errors import DataError
from mpbridge.common.shipped import install

JSON_LINES = (".jsonl", ".ndjson", ".json")
TEXT = (".txt", ".md", ".rst", ".py")
READ = (*TEXT, *JSON_LINES)
EXTRA = install("hf")
_NOT_PROSE = frozenset({"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data", "__pycache__"})
"""Parts of the standard library that are test data, generated tables or tools; some distributions omit them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Either files to be preprocessed or prefixes of finished .bin/.idx pairs; never both."""

    files: tuple[Path, ...] = ()
    prefixes: tuple[str, ...] = ()


def stdlib_files() -> tuple[Path, ...]:
    """The standard library's own sources, in an order that depends on their names only.

    The files are ordered by the hashes of their names, so that a split by position holds out a fair sample instead of the end of the alphabet.
    """
    import hashlib
    import sysconfig

    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for name in sys.stdlib_module_names:
        # _sysconfigdata and similar files describe the machine on which Python was built
        if name in _NOT_PROSE or name.startswith("_sysconfigdata"):
            continue
        found += [path for path in [root / f"{name}.py"] if path.is_file()]
        found += [path for path in (root / name).glob("**/*.py") if not _NOT_PROSE & set(path.relative_to(root).parts)]
    if not found:
        raise DataError(f"no sources of the standard library under {root}; provide a corpus: data.corpus=my.txt")

    def place(path: Path) -> bytes:
        return hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()

    return tuple(sorted(found, key=place))


def find(corpus: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Sources:
    """The files or prefixes that `corpus` refers to.

    'stdlib'; text and JSON lines; folders and globs of them; prefixes of .bin/.idx pairs.
    Raises DataError that names every other entry.
    """
    sources, faults = located(corpus)
    if faults:
        raise DataError("\n".join(["data.corpus cannot be used:", *(f"  - {fault}" for fault in faults)]))
    return sources


def located(corpus: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[Sources, list[str]]:
    """As `find`, but returns faults instead of raising an exception."""
    if corpus == "stdlib" or corpus == ["stdlib"]:
        return Sources(files=stdlib_files()), []
    given = [corpus] if isinstance(corpus, (str, os.PathLike)) else list(corpus)
    prefixes: list[str] = []
    files: list[Path] = []
    faults: list[str] = []
    for item in map(str, given):
        if (prefix := _prefix(item)) is not None:
            prefixes.append(prefix)
            continue
        try:
            files += _files(item)
        except DataError as error:
            faults.append(str(error))
    if prefixes and files:
        faults.append("finished .bin/.idx prefixes and files to be preprocessed are mixed; use only one kind")
    if not given:
        faults.append("it is empty")
    return Sources(files=tuple(files), prefixes=tuple(prefixes)), faults


def _files(item: str) -> list[Path]:
    """The files of one entry. Raises DataError."""
    path = Path(item).expanduser()
    if path.suffix in (".parquet", ".arrow") or item.startswith("hf:"):
        raise DataError(
            f"{item}: tables and data sets are not read; make JSON lines of it once: datasets.load_dataset(...).to_json('text.jsonl')"
        )
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(child for child in path.rglob("*") if child.suffix in READ and child.is_file())
        if not inside:
            raise DataError(f"{item}: a folder without {', '.join(READ)} files")
        return inside
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True)) if glob.has_magic(item) else []
    files = [child for child in found if child.is_file()]
    if not files:
        raise DataError(f"{item}: no such file, folder, glob or .bin/.idx prefix")
    return files


def _prefix(item: str) -> str | None:
    """`item` without .bin or .idx if both files of the pair exist; otherwise None."""
    stem = item.removesuffix(".bin").removesuffix(".idx")
    return stem if Path(f"{stem}.bin").is_file() and Path(f"{stem}.idx").is_file() else None
