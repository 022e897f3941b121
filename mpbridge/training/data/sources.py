"""What a data section names: the files of its corpus (the built-in one, the user's text and JSON lines, or finished .bin/.idx pairs), and its tokenizer (megatron-core's 'byte', a
tokenizer.json through the library tokenizers, or a user's function)."""

from __future__ import annotations

import functools
import glob
import hashlib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpbridge.common.errors import DataError, MpbridgeError
from mpbridge.common.shipped import install
from mpbridge.settings.huggingface.tokenizers import (
    BYTE,
    BYTE_VOCABULARY,
    FILE,
    LIBRARY,
    TokenizerFiles,
    is_factory,
    is_repository,
    tokenizer_files,
)

JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Ends of names, in any case (`is_json_lines`)."""
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


def is_json_lines(path: Path) -> bool:
    """Whether a file has a record on every line; any other is one text."""
    return path.suffix.lower() in JSON_LINES


def stdlib_files() -> tuple[Path, ...]:
    """The standard library's own sources, in an order that depends on their names only.

    The files are ordered by the hashes of their names, so that a split by position holds out a fair sample instead of the end of the alphabet.
    """
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


_found_once = functools.cache(stdlib_files)
"""The folder stays as it is while Python runs; to look through it takes a tenth of a second."""


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
        return Sources(files=_found_once()), []
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
    path = Path(item).expanduser()
    if path.suffix in (".parquet", ".arrow") or item.startswith("hf:"):
        raise DataError(
            f"{item}: tables and data sets are not read; make JSON lines of it once: datasets.load_dataset(...).to_json('text.jsonl')"
        )
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(child for child in path.rglob("*") if child.suffix.lower() in READ and child.is_file())
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


FETCHED = [FILE, "tokenizer_config.json", "special_tokens_map.json", "config.json"]
"""Files of a repository that make up a tokenizer; none of them is code."""


class FileTokenizer:
    """A tokenizer from files with the interface of megatron-core's GPTDataset: nothing is added, truncated or padded, and special tokens in a text are text."""

    def __init__(self, files: TokenizerFiles) -> None:
        from tokenizers import Tokenizer

        self._made = Tokenizer.from_file(str(files.file))
        self._made.no_truncation()
        self._made.no_padding()
        self._made.encode_special_tokens = True
        self.end_line, self.eod, self.vocab_size = files.end_line(), files.end, files.size
        if files.pad is not None:
            # megatron-core's GPTDataset pads with it and masks its loss; without the attribute it uses an id that no token has
            self.pad = files.pad
        with files.file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        self.unique_identifiers = {"library": LIBRARY, "sha256": digest}

    def tokenize(self, text: str) -> list[int]:
        """The text's tokens."""
        found: list[int] = self._made.encode(text, add_special_tokens=False).ids
        return found


def tokenizer(name: str = BYTE, end: str | int | None = None, *, code: bool = True) -> Any:
    """The tokenizer called `name`: 'byte', a local folder or file, a repository in the Hugging Face cache, or 'package.module:function'.

    end: the end-of-text token or its id, instead of the files' own. code: False refuses functions, for names that a file gave. The result has
    `tokenize(text) -> list[int]`, `eod`, `vocab_size` and `unique_identifiers`. Raises DataError.
    """
    if name == BYTE:
        return _bytes(end)
    if is_factory(name):
        if not code:
            raise DataError(
                f"data.tokenizer={name!r} is a function that a file names, and files do not run code: if you trust it, name it yourself (data.tokenizer={name})"
            )
        module, _, function = name.partition(":")
        try:
            return getattr(importlib.import_module(module), function)()
        except Exception as error:
            raise DataError(f"data.tokenizer={name!r} could not be created: {type(error).__name__}: {error}") from error
    try:
        files = tokenizer_files(name, end)
    except MpbridgeError as error:
        raise DataError(str(error)) from None
    if files.end is None:
        raise DataError(files.without_end())
    try:
        return FileTokenizer(files)
    except ImportError:
        raise DataError(f"data.tokenizer={name!r} needs the package {LIBRARY}: {EXTRA}") from None
    except Exception as error:
        raise DataError(f"data.tokenizer={name!r}: {LIBRARY} cannot use {files.file}: {error}") from error


def _bytes(end: str | int | None) -> Any:
    from megatron.core.tokenizers import MegatronTokenizer

    if end is not None:
        raise DataError(f"data.end_of_text={end!r}: with data.tokenizer=byte it is 256")
    # the library's default end of document is 0, which is also a byte
    special = {"_eos_id": 256, "_pad_id": 257, "_bos_id": 258, "vocab_size": BYTE_VOCABULARY}
    return MegatronTokenizer.from_pretrained(metadata_path={"library": "byte-level"}, **special)


def fetch(name: str) -> None:
    """Downloads a repository's tokenizer into the Hugging Face cache, if `name` is a repository without a local copy. Raises DataError."""
    if name == BYTE or is_factory(name):
        return
    try:
        tokenizer_files(name)
        return
    except MpbridgeError as error:
        if not is_repository(name) or "no such file or folder here" not in str(error):
            raise DataError(str(error)) from None
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise DataError(
            f"data.tokenizer={name!r} is not on this machine, and downloading it needs the package huggingface_hub: {EXTRA}"
        ) from None
    try:
        snapshot_download(name, allow_patterns=FETCHED)
    except Exception as error:
        kind = type(error).__name__
        said = _REFUSED.get(kind) or f"{kind}: {' '.join(str(error).split())[:120]}"
        raise DataError(
            f"data.tokenizer={name!r} is not on this machine and could not be downloaded ({said}): give a local folder, the id OWNER/NAME of a repository, or {BYTE!r}"
        ) from None


_REFUSED = {
    "RepositoryNotFoundError": "the hub has no such repository, or a private one: HF_TOKEN=...",
    "GatedRepoError": "its terms must be accepted on the hub: then HF_TOKEN=...",
    "LocalEntryNotFoundError": "the hub cannot be reached",
}
"""What huggingface_hub raises -> what it means; its own words fill a page."""


def identity(tok: Any) -> str:
    """A text that changes whenever `tok` may encode differently; part of the cache's key."""
    facts = getattr(tok, "unique_identifiers", None) or {"class": type(tok).__qualname__}
    facts = {**facts, "eod": tok.eod, "vocab_size": tok.vocab_size}
    return repr(sorted((str(key), str(value)) for key, value in facts.items()))
