"""Packs files into .bin/.idx once: cached under a key of the content, finished atomically, in one process; and the figures of such a pair."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpbridge.common.errors import DataError
from mpbridge.common.files import ProgressCallback, folder_for, text_of
from mpbridge.settings.huggingface.tokenizers import BYTE
from mpbridge.training.data.look import Skip, lengths_of, no_text, records
from mpbridge.training.data.sources import identity, is_json_lines, tokenizer

FORMAT = "2"
"""Part of every key: increase it when the same files would be written differently."""
PIECE = 32 << 10
"""Approximate characters in a sequence; see `pieces` and `cut`."""
LONGEST = 64 << 20
"""Maximum characters of a document that is tokenized whole: its tokens, and a library's data about each, are in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Finished .bin/.idx pairs and what went into them."""

    prefixes: tuple[str, ...]
    """Pairs with at least one document."""
    documents: int
    tokens: int
    skipped: dict[str, int]
    """Skipped records, by reason."""
    folder: Path
    """Contains one pair per key, including empty ones."""
    keys: tuple[str, ...]
    cached: bool = False
    """Whether an earlier run had already written the same, so that nothing was done."""

    def line(self) -> str:
        """One line for the terminal."""
        left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        note = f"; skipped {sum(self.skipped.values())} records ({left_out})" if left_out else ""
        return f"{self.documents:,} document{'' if self.documents == 1 else 's'}, {self.tokens:,} tokens{note}"


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder for prepared data: `given`, else mpbridge/ under the user's cache folder. `prepare` creates it."""
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpbridge"


def prepare(
    files: Sequence[Path],
    *,
    cache: Path,
    tokenizer_name: str = "byte",
    end: str | int | None = None,
    keys: Sequence[str] = ("text",),
    told: ProgressCallback = lambda done, total: None,
) -> Prepared:
    """The pairs for `files`, from the cache if the same content was prepared before.

    end: as for `tokenizer`. Raises DataError when a file cannot be read, the tokenizer fails, or no record is usable; leaves nothing half-written behind.
    """
    tok = tokenizer(tokenizer_name, end)
    home = cache / _key(files, tok, keys)
    if (home / "prepared.json").is_file():
        return _read(home, cached=True)
    with _finished_or_nothing(home) as folder:
        try:
            facts = _encode(files, tok, keys, folder, told, whole=tokenizer_name != BYTE)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"packing failed: {type(error).__name__}: {error}") from error
        (folder / "prepared.json").write_text(json.dumps(facts, indent=2) + "\n")
    return _read(home, cached=False)


def write_pairs(prepared: Prepared, prefix: Path) -> None:
    """Copies the pairs to `prefix`_<key>_document.bin and .idx; each appears complete or not at all, the index last."""
    names = [(f"{key}{end}", f"{prefix.name}_{key}_document{end}") for key in prepared.keys for end in (".bin", ".idx")]
    with folder_for(prefix.parent):
        for source, name in names:
            part = prefix.with_name(f".{name}.{os.getpid()}")
            try:
                shutil.copyfile(prepared.folder / source, part)
                part.replace(prefix.with_name(name))
            finally:
                part.unlink(missing_ok=True)


def _key(files: Sequence[Path], tok: Any, keys: Sequence[str]) -> str:
    digest = hashlib.sha256(repr((FORMAT, PIECE, identity(tok), tuple(keys))).encode())
    for path in files:
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        kind = b"lines" if is_json_lines(path) else b"text"
        digest.update(content + kind)
    return digest.hexdigest()[:24]


def _read(home: Path, *, cached: bool) -> Prepared:
    try:
        facts = json.loads(text_of(home / "prepared.json"))
        keys = tuple(facts["keys"])
        pairs = tuple(str(home / key) for key in keys if (home / f"{key}.bin").stat().st_size)
        counts = {name: facts[name] for name in ("documents", "tokens", "skipped")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{home} is damaged ({error}); delete that folder, and the text is packed again") from error
    if not facts["documents"]:
        raise DataError(no_text(facts["skipped"], facts["keys"]))
    return Prepared(prefixes=pairs, folder=home, keys=keys, cached=cached, **counts)


@contextmanager
def _finished_or_nothing(home: Path) -> Iterator[Path]:
    """A folder beside `home` that becomes `home` in one rename, or is removed if the body fails."""
    folder, cache = home.with_name(f".{home.name}.{uuid.uuid4().hex[:8]}"), home.parent
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_for(cache))
            folder.mkdir()
        except OSError as error:
            text = (
                f"cannot write the data cache {cache} ({error.strerror}); name another folder with data.cache_dir=..."
            )
            raise DataError(text) from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder
        try:
            folder.rename(home)
        except OSError as error:
            # another process finished the same content first; its result is equivalent
            if not (home / "prepared.json").is_file():
                raise DataError(
                    f"{home} is damaged ({error.strerror}); delete that folder, and the text is packed again"
                ) from error


def _encode(
    files: Sequence[Path], tok: Any, keys: Sequence[str], folder: Path, told: ProgressCallback, *, whole: bool
) -> dict[str, Any]:
    """Writes `folder`/<key>.bin and .idx for every key, empty ones too; returns what prepared.json says.

    whole: a document is tokenized in one go, as required by all tokenizers but bytes; one above `LONGEST` is a DataError.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    total, done = sum(path.stat().st_size for path in files), 0
    # a small corpus is cut finer, so that a split of one percent is not empty
    piece = min(PIECE, max(1024, total // 200))
    dtype = DType.optimal_dtype(tok.vocab_size)  # uint16 up to 65,536 tokens, else int32
    writers = {key: IndexedDatasetBuilder(str(folder / f"{key}.bin"), dtype=dtype) for key in keys}
    documents, tokens, skipped = 0, 0, Counter[str]()
    try:
        line_end = tok.tokenize("\n")[-1:] if whole else None
        for path in files:
            for found in records(path, keys):
                told(done + found.read, total)
                if isinstance(found, Skip):
                    skipped[found.reason] += 1
                    continue
                if whole and len(found.text) > LONGEST:
                    raise DataError(
                        f"{path}: a document of {len(found.text):,} characters; a tokenizer reads a document whole, and {LONGEST:,} is the maximum: "
                        "divide it (split -C 32M --additional-suffix=.txt FILE part-), or convert it to JSON lines"
                    )
                parts = _tokens(found.text, tok, piece, line_end)
                if found.text and not any(len(part) for part in parts):
                    skipped["no token for any of it"] += 1
                    continue
                parts = parts or [[]]
                parts[-1] = [*parts[-1], tok.eod]
                documents += 1
                tokens += sum(map(len, parts))
                writers[found.key].add_document(
                    np.concatenate([np.asarray(part, dtype=dtype) for part in parts]), list(map(len, parts))
                )
            done += path.stat().st_size
    finally:
        for key, writer in writers.items():
            writer.finalize(str(folder / f"{key}.idx"))
    told(total, total)
    return {"documents": documents, "tokens": tokens, "skipped": dict(skipped), "keys": list(keys)}


def pieces(text: str, size: int) -> Iterator[str]:
    """`text` in pieces of about `size` characters, cut after line ends if there are any.

    GPTDataset splits into train and validation by whole sequences: one long file must not be a single one.
    """
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = text.rfind("\n", start + size // 2, end) + 1 or end
        yield text[start:end]
        start = end


def cut(tokens: Sequence[int], most: int, line_end: Sequence[int]) -> Iterator[Sequence[int]]:
    """`tokens` in parts of at most `most`, cut after a token of `line_end` if the second half of a part has one.

    A text is tokenized whole and its tokens are cut: SentencePiece's dummy prefix, or a whitespace rule, would produce other tokens where the text is cut.
    """
    start = 0
    while start < len(tokens):
        end = start + most
        if end < len(tokens):
            ends = (place for place in range(end, start + most // 2, -1) if tokens[place - 1] in line_end)
            end = next(ends, end)
        yield tokens[start:end]
        start = end


def _tokens(text: str, tok: Any, piece: int, line_end: Sequence[int] | None) -> list[Sequence[int]]:
    """The tokens of a document, in sequences of about `piece` characters. line_end: None for bytes, which are the same wherever the text is cut."""
    if line_end is None:
        return [tok.tokenize(part) for part in pieces(text, piece)]
    found = tok.tokenize(text)
    most = max(1, -(-len(found) * piece // len(text)))
    return list(cut(found, most, line_end))


SHOWN = 24
"""Number of first tokens among the figures of a pair."""
_STEP = 1 << 24


def pair(prefix: str) -> dict[str, Any]:
    """The figures of a pair: bytes of its .bin, tokens in its shortest, median and longest sequence ...; reads all of it once. Raises DataError."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    lengths = lengths_of(
        prefix
    )  # the library maps any file without checking it, and cannot release one that it could not read
    try:
        index: Any = IndexedDataset(prefix, multimodal=False)
        documents, kind = len(index.document_indices) - 1, np.dtype(index.index.dtype)
        file = Path(f"{prefix}.bin")
        tokens = np.memmap(file, dtype=kind, mode="r") if file.stat().st_size else np.empty(0, dtype=kind)
    except Exception as error:
        raise DataError(f"{prefix}.bin/.idx cannot be read: {type(error).__name__}: {error}") from error
    largest = max((int(tokens[at : at + _STEP].max()) for at in range(0, len(tokens), _STEP)), default=0)
    return {
        "prefix": prefix, "documents": documents, "sequences": len(lengths), "tokens": len(tokens), "dtype": kind.name,
        "bytes": file.stat().st_size, "shortest": int(lengths.min()) if len(lengths) else 0,
        "median": int(np.median(lengths)) if len(lengths) else 0, "longest": int(lengths.max(initial=0)),
        "largest_token": largest, "first": [int(token) for token in tokens[:SHOWN]],
    }  # fmt: skip
