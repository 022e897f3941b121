"""Converts files to .bin/.idx once: cached under a key of the content, finished atomically, with as many workers as are worthwhile.

A long preparation is divided into shares, each finished separately: after an interruption it continues with the remaining ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mpbridge.common.chatter import without_chatter
from mpbridge.common.errors import DataError
from mpbridge.common.files import ProgressCallback, folder_for, text_of
from mpbridge.common.locks import lock
from mpbridge.settings.huggingface.tokenizers import BYTE
from mpbridge.training.data.encode import RecordCounts, encode, merge
from mpbridge.training.data.look import no_text
from mpbridge.training.data.records import RecordRange, units
from mpbridge.training.data.sources import JSON_LINES, TABLES
from mpbridge.training.data.tokenizer import identity, tokenizer

FORMAT = "2"
"""Part of every key: increase it when the same files would be written differently."""
PIECE = 32 << 10
"""Approximate characters in a sequence; see `encode.pieces` and `encode.cut`."""
ONE_WORKER = 64 << 20
"""Bytes of input up to which starting processes (which import torch) costs more than it saves; also the size of a share."""


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
    workers: int | None = None,
    told: ProgressCallback = lambda done, total: None,
) -> Prepared:
    """The pairs for `files`, from the cache if the same content was prepared before.

    end: as for `tokenizer`. workers: processes; None: one for little input, else one per core up to 8. The output does not depend on it.
    Raises DataError when a file cannot be read, a worker fails, or no record is usable; leaves no half-written pair behind, only finished shares.
    """
    tok = tokenizer(tokenizer_name, end)
    home = cache / _key(files, tok, keys)
    if (home / "prepared.json").is_file():
        return _read(home, cached=True)
    with suppress(_Finished), _finished_or_nothing(home) as folder:
        work = _Work(name=tokenizer_name, end=end, keys=tuple(keys))
        tally = _encode_all(files, tok, work, folder, home, workers, told)
        (folder / "prepared.json").write_text(json.dumps(tally.as_data() | {"keys": list(keys)}, indent=2) + "\n")
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
        kind = b"lines" if path.suffix in JSON_LINES else path.suffix.encode() if path.suffix in TABLES else b"text"
        digest.update(content + kind)
    return digest.hexdigest()[:24]


def _read(home: Path, *, cached: bool) -> Prepared:
    facts = json.loads(text_of(home / "prepared.json"))
    if not facts["documents"]:
        raise DataError(no_text(facts["skipped"], facts["keys"]))
    keys = tuple(facts["keys"])
    pairs = tuple(str(home / key) for key in keys if (home / f"{key}.bin").stat().st_size)
    counts = {name: facts[name] for name in ("documents", "tokens", "skipped")}
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
        except OSError:
            # another process finished the same content first; its result is equivalent
            if not (home / "prepared.json").is_file():
                raise


class _Finished(Exception):
    """Another process has prepared the same content in the meantime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The instructions for each worker besides its share."""

    name: str
    end: str | int | None
    keys: tuple[str, ...]
    piece: int = PIECE

    @property
    def whole(self) -> bool:
        """Whether the tokens may depend on where a text is cut."""
        return self.name != BYTE


def _encode_all(
    files: Sequence[Path], tok: Any, work: _Work, folder: Path, home: Path, workers: int | None, told: ProgressCallback
) -> RecordCounts:
    todo = units(files)
    size = sum(unit.size for unit in todo)
    # a small corpus is cut finer, so that a split of one percent is not empty
    work = replace(work, piece=min(PIECE, max(1024, size // 200)))
    if workers is None:
        workers = 1 if size <= ONE_WORKER else min(8, os.cpu_count() or 1)
    # a long preparation is always divided the same way, so that any process can continue it
    most = ONE_WORKER if size > ONE_WORKER else max(1, size // max(1, 4 * workers))
    shares = list(_shares(todo, most))
    if len(shares) == 1 or (workers <= 1 and size <= ONE_WORKER):
        try:
            tally = encode(todo, tok, work.keys, folder, work.piece, whole=work.whole)
        except Exception as error:
            raise _failed("preprocessing failed", error) from error
        told(size, size)
        return tally
    parts = home.with_name(f".{home.name}.shares-{most}")
    with lock(parts / ".lock", wait=True):
        if (home / "prepared.json").is_file():
            raise _Finished  # by the process that was waited for
        try:
            tally = _encode_shares(shares, work, parts, workers, told)
        except BaseException:
            if not any(_done(parts / _share_name(number)) for number in range(len(shares))):
                shutil.rmtree(parts, ignore_errors=True)
            raise
        merge([parts / _share_name(number) for number in range(len(shares))], tok, work.keys, folder)
    shutil.rmtree(parts, ignore_errors=True)
    return tally


def _encode_shares(
    shares: Sequence[Sequence[RecordRange]], work: _Work, parts: Path, workers: int, told: ProgressCallback
) -> RecordCounts:
    """Every share in its own folder under `parts`; shares finished by an earlier attempt are reused."""
    sizes = [sum(unit.size for unit in share) for share in shares]
    done = [_done(parts / _share_name(number)) for number in range(len(shares))]
    ready = sum(size for size, tally in zip(sizes, done, strict=True) if tally is not None)
    told(ready, sum(sizes))
    left = [number for number, tally in enumerate(done) if tally is None]
    # spawn: a fork would inherit torch's threads and the process group's sockets
    processes = max(1, min(workers, len(left) or 1))
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=without_chatter) as pool:
        jobs = {pool.submit(_work, shares[number], work, parts / _share_name(number)): number for number in left}
        try:
            for job in as_completed(jobs):
                done[jobs[job]] = job.result()
                ready += sizes[jobs[job]]
                told(ready, sum(sizes))
        except BrokenProcessPool as error:
            raise DataError("a preprocessing worker died (killed, or out of memory); try fewer workers") from error
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if isinstance(error, Exception):
                raise _failed("a preprocessing worker failed", error) from error
            raise
    total = RecordCounts()
    for tally in done:
        assert tally is not None
        total += tally
    return total


def _failed(what: str, error: Exception) -> DataError:
    return error if isinstance(error, DataError) else DataError(f"{what}: {type(error).__name__}: {error}")


def _shares(work: Sequence[RecordRange], most: int) -> Iterator[list[RecordRange]]:
    """`work` in contiguous parts of about `most` bytes; at least one."""
    share: list[RecordRange] = []
    size = 0
    for unit in work:
        share.append(unit)
        size += unit.size
        if size >= most:
            yield share
            share, size = [], 0
    if share or not work:
        yield share


def _share_name(number: int) -> str:
    return f"share{number:06}"


def _done(share: Path) -> RecordCounts | None:
    """The tally of a share that was finished before."""
    try:
        return RecordCounts.of(json.loads(text_of(share / "done.json")))
    except (OSError, ValueError, KeyError):
        return None


def _work(share: Sequence[RecordRange], work: _Work, target: Path) -> RecordCounts:
    """Encodes one worker's share, which gets its final name once it is finished."""
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        tally = encode(share, tokenizer(work.name, work.end), work.keys, folder, work.piece, whole=work.whole)
        (folder / "done.json").write_text(json.dumps(tally.as_data()))
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tally
